"""Rows to answers with an engine: in batches without padding, in the order they came, an error for a bad row."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from budgetformer import flops
from budgetformer.engine.budgets import check_margin, shares
from budgetformer.engine.counting import counted
from budgetformer.engine.engine import Answers, Engine
from budgetformer.errors import BudgetFormerError, ModelFolderError, UsageError
from budgetformer.folder import check_model_folder
from budgetformer.tokens import Tokens, tokenise

if TYPE_CHECKING:
    from budgetformer.data import Rows
    from budgetformer.hf import BudgetFormerForSequenceClassification
    from budgetformer.report.picture import Inspection


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the model says about one row; everything but `id` is None when `error` says why there is no answer.

    label: the most probable class; of a multi-label model all classes at 0.5 and above, joined by the label separator.
    score: the probability of the most probable class. scores: that of every class, or of the `top` ones. heads_used:
    heads that ran. budget: their share of all heads; where feed-forward blocks have a budget too, the share of both's
    FLOPs. truncated: tokens were cut off.
    """

    id: str | None
    label: str | None = None
    score: float | None = None
    scores: dict[str, float] | None = None
    heads_used: int | None = None
    budget: float | None = None
    error: str | None = None
    truncated: bool = False

    def row(self) -> dict[str, Any]:
        """The answer as it is written."""
        names = ("id", "label", "score", "scores", "heads_used", "budget", "error")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """A loaded engine with how it is to be used. `budget` None: the share that the model learned, for each text.

    margin: texts whose two best probabilities lie closer are answered again with every unit on; None: as learned, and
    no text beside a named budget. Raises UsageError for a budget outside (0, 1] or a margin outside [0, 1].
    """

    engine: Engine
    budget: float | None = None
    margin: float | None = None
    label_separator: str = "|"
    top: int | None = None  # how many classes to give the scores of, the most probable first; None: all, in order

    def __post_init__(self) -> None:
        """Refuse here what would otherwise be an error of every row."""
        if self.budget is not None:
            shares(self.budget, 1)
        if self.margin is not None:
            check_margin(self.margin)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        budget: float | None = None,
        margin: float | None = None,
        label_separator: str = "|",
        top: int | None = None,
        **options: Any,
    ) -> "Predictor":
        """Load a model folder; options (dtype, path, threads, max_length, batch_tokens) and errors as `Engine.load`."""
        engine = Engine.load(folder, **options)
        return cls(engine=engine, budget=budget, margin=margin, label_separator=label_separator, top=top)

    def predict(self, rows: "Rows", *, first_number: int = 1) -> list[Answer]:
        """An answer for each row, in order. Rows are named by their id, or by their number where there are no ids."""
        ids = rows.ids or [str(number) for number in range(first_number, first_number + len(rows))]
        bad = iter(rows.bad)
        answers: dict[int, Answer] = {}
        wanted: list[int] = []
        for place, text in enumerate(rows.texts):
            if text is None:
                answers[place] = Answer(id=ids[place], error=next(bad).reason)
            else:
                wanted.append(place)
        texts = [rows.texts[place] or "" for place in wanted]
        pairs = None if rows.pairs is None else [rows.pairs[place] or "" for place in wanted]
        places: list[int] = []
        ready: list[Tokens] = []
        for place, tokens in zip(wanted, self._tokenise(texts, pairs), strict=True):
            if isinstance(tokens, str):
                answers[place] = Answer(id=ids[place], error=tokens)
            else:
                places.append(place)
                ready.append(tokens)
        for first, last in self.engine.batches(ready):
            for place, answer in zip(places[first:last], self._answer(ready[first:last]), strict=True):
                answers[place] = Answer(id=ids[place], **answer)
        return [answers[place] for place in range(len(rows))]

    def _tokenise(self, texts: Sequence[str], pairs: Sequence[str] | None) -> "list[Tokens | str]":
        """The tokens of each text, or what is wrong with it. No message of a tokenizer is passed on: it may quote."""
        try:
            tokens = tokenise(self.engine.tokenizer, texts, pairs, max_length=self.engine.max_length)
        except BudgetFormerError:
            raise
        except (TypeError, ValueError) as error:
            if len(texts) == 1:
                return [f"the tokenizer failed ({type(error).__name__}); is the text valid Unicode?"]
            each = range(len(texts))
            return [self._tokenise([texts[i]], None if pairs is None else [pairs[i]])[0] for i in each]
        return [item if len(item) else "the text has no tokens" for item in tokens]

    def _answer(self, batch: list[Tokens]) -> list[dict[str, Any]]:
        """The fields of each answer; when a batch fails its rows are tried one by one."""
        try:
            answers = self.engine.answer(batch, budget=self.budget, margin=self.margin)
        except (BudgetFormerError, RuntimeError, IndexError, MemoryError) as error:
            if len(batch) == 1:
                # Ours says what is wrong with the row; what other libraries say may quote it.
                reason = str(error) if isinstance(error, BudgetFormerError) else type(error).__name__
                return [{"error": f"the model failed ({reason})", "truncated": batch[0].truncated}]
            return [self._answer([tokens])[0] for tokens in batch]
        columns = (
            np.isfinite(answers.probabilities.sum(1)).tolist(),
            answers.probabilities,
            answers.output.gates.sum((1, 2)).tolist(),
            self._spent(batch, answers).round(4).tolist(),
            batch,
        )
        return [
            {**self._say(chances), "heads_used": heads, "budget": share, "truncated": tokens.truncated}
            if finite
            else {"error": "the model's answer is not a finite number", "truncated": tokens.truncated}
            for finite, chances, heads, share, tokens in zip(*columns, strict=True)
        ]

    def _spent(self, batch: list[Tokens], answers: Answers) -> np.ndarray:
        """The share of what has a budget: of the heads, or of the FLOPs of heads and feed-forward blocks."""
        output, budget = answers.output, self.engine.weights.budget
        if budget.blocks == 1:
            return answers.head_share
        done = counted(self.engine, np.array([len(one) for one in batch]), output.gates, output.blocks)
        ran, every = done.units(budget)
        return ran / every

    def _say(self, chances: np.ndarray) -> dict[str, Any]:
        """Label and scores from the probabilities (class,); chosen before they are rounded."""
        labels, best = self.engine.labels, int(chances.argmax())
        label = labels[best]
        if self.engine.multi_label:
            label = self.label_separator.join(labels[i] for i in (chances >= 0.5).nonzero()[0])
        shown = range(len(labels)) if self.top is None else np.argsort(-chances, kind="stable")[: self.top].tolist()
        rounded = chances.astype(np.float64).round(6).tolist()
        return {"label": label, "score": rounded[best], "scores": {labels[i]: rounded[i] for i in shown}}

    def inspect(self, text: str, pair: str | None = None) -> "Inspection":
        """What the model does with one text: budget and heads of every layer, and the probabilities.

        Raises:
            UsageError: the tokenizer cannot read the text.
        """
        from budgetformer.report.picture import Inspection

        (tokens,) = self._tokenise([text], None if pair is None else [pair])
        if isinstance(tokens, str):
            raise UsageError(f"text: {tokens}")
        answers = self.engine.answer([tokens], budget=self.budget, margin=self.margin)
        gates, blocks = answers.output.gates, answers.output.blocks
        done = counted(self.engine, np.array([len(tokens)]), gates, blocks)
        ran, every = done.units(self.engine.weights.budget)
        again = int(flops.again(gates, blocks)[0])
        named = self.budget if self.budget is not None else self.engine.budget
        return Inspection(
            text=text if pair is None else f"{text} | {pair}",
            tokens=len(tokens),
            labels=self.engine.labels,
            probabilities=answers.probabilities[0].tolist(),
            # A named budget is not the controllers' wish: then what each layer was given is its budget. So it is for
            # blocks, whose wish no path tells; it is the same but for rounding to whole units.
            wanted=(answers.output.wanted[0] if named is None else gates[0].mean(-1) - again).tolist(),
            gates=gates[0].tolist(),
            head_share=float(answers.head_share[0]),
            flops_share=float(done.total[0] / done.total_dense[0]),
            units_share=None if blocks is None else float(ran[0] / every[0]),
            blocks=None if blocks is None else blocks[0].tolist(),
            blocks_wanted=None if blocks is None else (blocks[0].mean(-1) - again).tolist(),
        )


def load_model(folder: str | Path) -> "tuple[BudgetFormerForSequenceClassification, Any]":
    """Model (in eval mode) and tokenizer of a folder, checked first; nothing is fetched.

    Raises:
        ModelFolderError: incomplete, damaged or hostile, or weights are missing for what `config.json` describes.
    """
    check_model_folder(folder)
    from transformers import AutoTokenizer

    from budgetformer.hf import BudgetFormerForSequenceClassification

    try:
        loaded: Any = BudgetFormerForSequenceClassification.from_pretrained(
            str(folder), local_files_only=True, use_safetensors=True, output_loading_info=True
        )
        model, report = loaded
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except BudgetFormerError as error:
        raise ModelFolderError(f"{folder}: {error}") from error
    except Exception as error:
        # What the loaders raise for a damaged folder is not promised anywhere, and long.
        first = (str(error).splitlines() or [""])[0][:200]
        raise ModelFolderError(
            f"{folder}: cannot be loaded ({type(error).__name__}: {first}); make it again"
        ) from error
    missing = sorted(report["missing_keys"])
    if any(name.startswith("classifier") for name in missing):
        raise ModelFolderError(f"{folder}: has no classifier; train one with: budgetformer train --model SOURCE")
    if missing:
        raise ModelFolderError(f"{folder}: model.safetensors lacks {missing[0]} ({len(missing)} in all); copy it again")
    return model.eval(), tokenizer
