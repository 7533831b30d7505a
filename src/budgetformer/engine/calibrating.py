"""The cheapest way of answering that still gives the full model's labels, with a promise that a sample can prove.

A way is a first answer (a named budget, or the learned one) and a margin: texts whose first answer is unsure are
answered again with every unit on. Its risk is the share of the texts to come that do not get the full model's label.
The promise is that of Learn then Test (Angelopoulos, Bates, Candes, Jordan, Lei 2021, arXiv 2110.01052): the chosen
way's risk is at most `1 - agree`, with probability at least `confidence` over the draw of the sample. It needs a sample
drawn at random from the texts to come (exchangeable with all of them), and nothing else: any model, any number of
texts, no asymptotics.

Why it holds. The margins of one first answer are tested from the safest to the cheapest, and the first that is not
accepted ends the sequence (fixed-sequence testing), so its tests share one level of error without a correction. Risk
falls as the margin grows, text by text, and so do the disagreements in a sample: the sequence ends where they become
too many (risk-controlling prediction sets: Bates, Angelopoulos, Lei, Malik, Jordan 2021, arXiv 2101.02703), and so no
grid of margins is needed. Each test is an exact binomial one. The first answers share `1 - confidence` in equal parts
(Bonferroni), so that all that is accepted keeps the promise at once, and the cheapest of it may be taken. Conformal
risk control (Angelopoulos, Bates, Fisch, Lei, Schuster 2022, arXiv 2208.02814) holds the risk in the mean over samples;
here the one sample at hand is to be relied on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np

from budgetformer.engine.budgets import margins
from budgetformer.engine.counting import counted
from budgetformer.engine.engine import Engine
from budgetformer.engine.saved import Calibrated, Way, write_saved
from budgetformer.engine.tuning import decided
from budgetformer.errors import UsageError
from budgetformer.tokens import Tokens, tokenise

BUDGETS = (0.1, 0.25, 0.5, 0.75)  # few: every one of them takes its part of the confidence


@dataclass(frozen=True, eq=False)
class First:
    """First answers to a sample, from one budget (None is the learned one).

    agrees: bool (text,), the full model gives the same label, or set of labels. sure: float64 (text,) in [0, 1], what a
    margin is compared with. operations: float64 (text,), counted, of the first answer alone.
    """

    budget: float | None
    agrees: np.ndarray
    sure: np.ndarray
    operations: np.ndarray


def calibrate(
    engine: Engine,
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    *,
    agree: float = 0.99,
    confidence: float = 0.95,
    budgets: Sequence[float] = BUDGETS,
    save: bool = True,
) -> Calibrated:
    """Choose the cheapest way of answering that keeps the promise, make it the engine's own, and keep it in the folder.

    texts: like those to come, and none that the model was trained on; no labels are needed. agree: the share of the
    texts to come, in (0, 1), that must get the full model's label. confidence: in (0, 1). budgets: first answers that
    are tried beside the learned one. Where nothing cheaper passes, the full model is the choice. What counts as cost is
    the work of the whole model: a second answer repeats feed-forward layers too where heads alone have a budget.

    Raises:
        UsageError: agree, confidence or a budget outside its range, or too few texts for the promise to be provable.
    """
    for name, value in (("agree", agree), ("confidence", confidence)):
        if not 0 < value < 1:
            raise UsageError(f"{name} is {value}: it must lie in (0, 1), the ends left out")
    learned = [None] if engine.weights.budget.routes else []
    tried = [*learned, *sorted(set(budgets) - {1.0})]
    if not tried:
        raise UsageError("budgets name nothing below 1, and the model learned none; give at least one share below 1")
    needed = fewest(len(tried), agree=agree, confidence=confidence)
    if len(texts) < needed:
        raise UsageError(
            f"{len(texts):,} texts cannot prove an agreement of {agree:g} with confidence {confidence:g}, even if all "
            f"of them agree; give at least {needed:,}"
        )
    tokens = tokenise(engine.tokenizer, texts, pairs, max_length=engine.max_length)
    (whole, *firsts), dense = answered(engine, tokens, tried)
    share = round(float(whole.operations.sum() / dense.sum()), 4)
    full = Way(budget=1.0, margin=0.0, again=0.0, disagreements=0, bound=1.0, flops_share=share)
    found = [full, *accepted(firsts, dense, agree=agree, confidence=confidence)]
    chosen = Calibrated(
        way=min(found, key=lambda way: way.flops_share),
        agree=agree,
        confidence=confidence,
        texts=len(texts),
        dtype=engine.path.dtype,
        path=engine.path.name,
        max_length=engine.max_length,
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        ways=tuple(found),
    )
    engine.budget, engine.margin = chosen.way.budget, chosen.way.margin
    engine.saved = replace(engine.saved, calibrated=chosen)
    if save and engine.folder is not None:
        write_saved(engine.folder, engine.saved)
    return chosen


def answered(
    engine: Engine, tokens: Sequence[Tokens], budgets: Sequence[float | None]
) -> tuple[list[First], np.ndarray]:
    """First answers of the full model and from each budget, in this order, and the dense model's operations (text,)."""
    named, plain, several = [1.0, *budgets], replace(engine, budget=None), engine.multi_label
    answers = [plain.answer(tokens, budget=budget, margin=0.0) for budget in named]
    said = [decided(one.output.logits, several).reshape(len(tokens), -1) for one in answers]
    lengths = np.array([len(one) for one in tokens])
    work = [counted(engine, lengths, one.output.gates, one.output.blocks) for one in answers]
    firsts = [
        First(named[i], (said[i] == said[0]).all(1), margins(answers[i].probabilities, several), work[i].total)
        for i in range(len(named))
    ]
    return firsts, work[0].total_dense


def accepted(firsts: Sequence[First], dense: np.ndarray, *, agree: float, confidence: float) -> list[Way]:
    """The cheapest way of each first answer that keeps the promise; all of them keep it at once.

    dense: float64 (text,), operations of the dense model, which are those of a second answer. A first answer whose
    texts would all have to be answered again is left out. The margin is the smallest one with few enough disagreements,
    which lie between two answers of the sample: just above the surest one that must not be kept.
    """
    each = (1 - confidence) / len(firsts)
    allowed = most(len(dense), agree=agree, error=each)
    if allowed < 0:
        return []
    found = []
    for first in firsts:
        wrong = np.sort(first.sure[~first.agrees])[::-1]
        margin = 0.0 if len(wrong) <= allowed else float(np.nextafter(wrong[allowed], 2.0))
        if margin > 1:
            continue
        again = first.sure < margin
        disagreements = int((~first.agrees & ~again).sum())
        found.append(
            Way(
                budget=first.budget,
                margin=margin,
                again=round(float(again.mean()), 4),
                disagreements=disagreements,
                bound=1 - largest_risk(disagreements, len(dense), error=each),
                flops_share=round(float((first.operations + again * dense).sum() / dense.sum()), 4),
            )
        )
    return found


def fewest(firsts: int, *, agree: float, confidence: float) -> int:
    """Texts that prove the promise if all of them agree: the smallest n, agree ** n <= (1 - confidence) / firsts."""
    return math.ceil(math.log((1 - confidence) / firsts) / math.log(agree))


def most(texts: int, *, agree: float, error: float) -> int:
    """The largest number of disagreements among `texts` that refutes a risk above `1 - agree`; -1 where none does.

    The exact binomial test: so few are seen with a probability of at most `error` where the risk is above `1 - agree`.
    """
    from scipy.special import bdtr  # here, because `predict` reads this package and needs none of it

    chances = bdtr(np.arange(texts), texts, 1 - agree)
    return int(np.searchsorted(chances, error, side="right")) - 1


def largest_risk(disagreements: int, texts: int, *, error: float) -> float:
    """The largest risk that so many disagreements do not refute: Clopper and Pearson's upper bound (1934)."""
    from scipy.special import bdtri

    return 1.0 if disagreements == texts else float(bdtri(disagreements, texts, error))
