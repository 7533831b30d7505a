"""A model folder ready to answer: which path computes it, batches without padding, budgets named at run time.

    engine = Engine.load("runs/mine", dtype="bf16")
    engine.predict(["one text", "another"], budget=0.25).labels

The compiled kernels are used where they are installed and torch where not; `Engine.note` is one line that says which
and why. Neither transformers nor, on a compiled path, torch is imported.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from budgetformer import flops
from budgetformer.config import BATCH_TOKENS, DTYPES, MULTI_LABEL, PATHS
from budgetformer.engine import native
from budgetformer.engine.budgets import allocate, check_margin, margins, shares, split
from budgetformer.engine.packed import Output, Packed, Path
from budgetformer.engine.saved import Saved, read_saved
from budgetformer.engine.tokenizer import FolderTokenizer
from budgetformer.engine.twin_path import TwinPath
from budgetformer.engine.weights import Weights, read_weights
from budgetformer.errors import UsageError
from budgetformer.tokens import Tokens, longest_input, tokenise

WINDOW = 2048  # texts of a stream that are tokenised together

Budget = float | Sequence[float] | np.ndarray | None


@dataclass(frozen=True, eq=False)
class Answers:
    """What an engine says about texts, in their order.

    names: the classes. probabilities: float32 (text, class), of each class by itself in a multi-label model. output:
    the logits, gates and wishes behind them. truncated: bool (text,), tokens were cut off.
    """

    names: list[str]
    probabilities: np.ndarray
    output: Output
    truncated: np.ndarray

    def __len__(self) -> int:
        return len(self.probabilities)

    @property
    def labels(self) -> list[str]:
        """The most probable class of each text."""
        return [self.names[i] for i in self.probabilities.argmax(1)]

    @property
    def head_share(self) -> np.ndarray:
        """The share of all heads that ran for each text: float64 (text,); above 1 where it was answered twice."""
        return self.output.gates.mean((1, 2))


@dataclass(eq=False)
class Engine:
    """A loaded model. `budget` and `margin` are used where a call names none; None is what the model learned.

    A learned budget differs from text to text. A text whose two best probabilities lie closer than the margin is
    answered again with every unit on; a budget that is named has no margin unless one is named beside it. note: which
    path runs, in one line, and why when it is not the one asked for. batch_tokens: tokens computed together; peak
    memory follows it, not the number of texts.
    """

    weights: Weights
    path: Path
    tokenizer: FolderTokenizer
    max_length: int
    note: str
    batch_tokens: int = BATCH_TOKENS
    budget: Budget = None
    margin: float | None = None
    saved: Saved = field(default_factory=Saved)
    folder: FilePath | None = None

    @classmethod
    def load(
        cls,
        folder: str | FilePath,
        *,
        dtype: str = "auto",
        path: str = "auto",
        threads: int | None = None,
        max_length: int | None = None,
        batch_tokens: int = BATCH_TOKENS,
        budget: Budget = None,
        margin: float | None = None,
    ) -> "Engine":
        """Load a model folder.

        dtype: fp32, bf16, int8, or auto (what the folder was converted to, else fp32). A type that this processor or
        path lacks falls back to fp32, with a line in `note`. path: one of `PATHS`; auto takes the best. threads: None
        is one for each physical core this process may use.

        Raises:
            ModelFolderError: incomplete, damaged or hostile, or made by a newer version.
            UsageError: a path that this processor lacks, or an option outside its range.
        """
        if dtype not in ("auto", *DTYPES):
            raise UsageError(f"dtype is {dtype!r}; choose auto, {', '.join(DTYPES)}")
        if path not in PATHS:
            raise UsageError(f"path is {path!r}; choose {', '.join(PATHS)}")
        if batch_tokens < 1:
            raise UsageError(f"batch_tokens is {batch_tokens}; give 1 or more")
        weights = read_weights(folder)
        saved = read_saved(folder)
        tokenizer = FolderTokenizer.load(folder)
        chosen, note = choose(weights, saved.dtype or "fp32" if dtype == "auto" else dtype, path, threads)
        longest = longest_input(weights.encoder, tokenizer, max_length)
        return cls(weights, chosen, tokenizer, longest, note, batch_tokens, budget, margin, saved, FilePath(folder))

    @property
    def labels(self) -> list[str]:
        """The names of the classes in the model's order."""
        return self.weights.labels

    @property
    def multi_label(self) -> bool:
        """Whether a text may have several labels, or none."""
        return self.weights.problem_type == MULTI_LABEL

    # ------------------------------------------------------------------ from text

    def predict(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        *,
        budget: Budget = None,
        margin: float | None = None,
    ) -> Answers:
        """Classify texts, or pairs of texts; for input without an end there is `stream`.

        budget: a share of the units in (0, 1], or one for each text; margin: in [0, 1]; None is the engine's own.

        Raises:
            UsageError: a budget outside (0, 1] or a margin outside [0, 1], a text without a token, or not as many
                pairs as texts.
            TypeError: a text is no string, or no valid Unicode.
        """
        tokens = tokenise(self.tokenizer, texts, pairs, max_length=self.max_length)
        return self.answer(tokens, budget=budget, margin=margin)

    def stream(
        self, texts: Iterable[str], *, budget: float | None = None, margin: float | None = None
    ) -> Iterator[Answers]:
        """Classify texts as they come, a window at a time and in order; memory does not grow with their number."""
        source = iter(texts)
        while window := list(islice(source, WINDOW)):
            yield self.predict(window, budget=budget, margin=margin)

    def answer(self, tokens: Sequence[Tokens], *, budget: Budget = None, margin: float | None = None) -> Answers:
        """Classify tokenised texts. Raises as `predict` does."""
        output = self.forward(tokens, budget=budget, margin=margin)
        return Answers(
            self.labels,
            probabilities(output.logits, self.multi_label),
            output,
            np.array([one.truncated for one in tokens], bool),
        )

    # ------------------------------------------------------------------ from tokens

    def forward(
        self, tokens: Sequence[Tokens], *, budget: Budget = None, margin: float | None = None, progress: Any = None
    ) -> Output:
        """The output for tokenised texts, in their order, computed in batches of at most `batch_tokens` tokens.

        Without padding nothing is gained from texts of like length, so batches keep the order. Unsure texts are
        collected from all batches and answered again together. progress: called with the number of texts done.
        """
        named, closer = self._policy(budget, margin)
        share = None if named is None else shares(named, len(tokens))
        output = self._in_batches(tokens, share, progress)
        if closer > 0:
            sure = margins(probabilities(output.logits, self.multi_label), self.multi_label)
            again = np.flatnonzero((sure < closer) & (share is None or share < 1))
            second = self._in_batches([tokens[i] for i in again.tolist()], np.ones(len(again)), None)
            output.answered_again(again, second)
        return output

    def _policy(self, budget: Budget, margin: float | None) -> tuple[Budget, float]:
        """The budget of first answers (None: as learned), and the margin under which there is a second."""
        if budget is None:
            budget, margin = self.budget, self.margin if margin is None else margin
        if margin is None:
            margin = self.weights.budget.cascade if budget is None and self.weights.budget.routes else 0.0
        return budget, check_margin(margin)

    def _in_batches(self, tokens: Sequence[Tokens], share: np.ndarray | None, progress: Any) -> Output:
        outputs = []
        for first, last in self.batches(tokens):
            part = None if share is None else share[first:last]
            outputs.append(self.run(Packed.of(tokens[first:last]), budget=part))
            if progress is not None:
                progress(last - first)
        if not outputs:
            return self.run(Packed.of([]))
        blocks = [output.blocks for output in outputs if output.blocks is not None]
        return Output(
            np.concatenate([output.logits for output in outputs]),
            np.concatenate([output.gates for output in outputs]),
            np.concatenate([output.wanted for output in outputs]),
            blocks=np.concatenate(blocks) if blocks else None,
        )

    def run(
        self,
        batch: Packed,
        *,
        budget: Budget = None,
        counts: np.ndarray | None = None,
        gates: np.ndarray | None = None,
        block_counts: np.ndarray | None = None,
        blocks: np.ndarray | None = None,
        need_hidden: bool = False,
    ) -> Output:
        """One packed batch, token ids to logits, computed at once; the units as in `Path.run`.

        A named budget is spent over heads and, where they have one, feed-forward blocks, as training spent its own.
        """
        if budget is not None:
            if any(given is not None for given in (counts, gates, block_counts, blocks)):
                raise UsageError("budget was given beside counts, gates or blocks: name one of them")
            counts, block_counts = self._counts(shares(budget, len(batch)), batch.lengths)
        return self.path.run(
            batch, counts=counts, gates=gates, block_counts=block_counts, blocks=blocks, need_hidden=need_hidden
        )

    def _counts(self, budget: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Heads and blocks per input and layer that a named budget buys: the twin of `Encoder.counts`."""
        e, routing, tensors = self.weights.encoder, self.weights.budget, self.weights.tensors
        if routing.blocks == 1:
            return allocate(budget, tensors["profile"], e.num_heads, routing.min_units), None
        learned = np.array([tensors["profile"].mean(), tensors["block_profile"].mean()])
        share = split(budget, learned, np.stack(flops.layer(tokens, e), axis=1))
        return (
            allocate(share[:, 0], tensors["profile"], e.num_heads, routing.min_units),
            allocate(share[:, 1], tensors["block_profile"], routing.blocks, routing.min_units),
        )

    def batches(self, tokens: Sequence[Tokens]) -> Iterator[tuple[int, int]]:
        """First place and the place after the last of each batch: at most `batch_tokens` tokens, or one long text."""
        first = held = 0
        for place, one in enumerate(tokens):
            if place > first and held + len(one) > self.batch_tokens:
                yield first, place
                first, held = place, 0
            held += len(one)
        if first < len(tokens):
            yield first, len(tokens)


def probabilities(logits: np.ndarray, multi_label: bool) -> np.ndarray:
    """Probabilities (text, class): of each class by itself in a multi-label model, else over the classes."""
    if multi_label:
        return 1 / (1 + np.exp(-logits.clip(-80, 80)))
    e = np.exp(logits - logits.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def choose(weights: Weights, dtype: str, path: str = "auto", threads: int | None = None) -> tuple[Path, str]:
    """The path that computes `weights` in `dtype`, and one line that says which it is and why.

    Raises:
        UsageError: a path that is named and not to be had here.
    """
    threads = physical_cores() if threads is None else threads
    reasons: list[str] = []
    try:
        native.library()
    except native.NoLibrary as error:
        if path not in ("auto", "torch"):
            raise UsageError(f"path is {path!r}; {error}") from error
        if path == "auto":
            reasons.append(str(error))
        path = "torch"
    if path == "torch":
        if dtype == "int8":
            reasons.append("int8 needs the compiled kernels, so fp32 is used")
            dtype = "fp32"
        from budgetformer.engine.torch_path import TorchPath

        def made(of: Weights) -> Path:
            return TorchPath(of, dtype, threads=threads)
    else:
        name = path if path != "auto" else next((p for p in native.paths() if native.has(p, dtype)), native.paths()[0])
        if name in native.paths() and not native.has(name, dtype):
            reasons.append(f"{dtype} needs instructions that {name} does not have, so fp32 is used")
            dtype = "fp32"

        def made(of: Weights) -> Path:
            return native.NativePath(of, dtype, name, threads=threads)

    chosen = made(weights)
    if weights.twin is not None:
        chosen = TwinPath(chosen, made(weights.twin), weights)
    note = f"engine: {chosen.name}, {chosen.dtype}, {threads} thread{'s' * (threads > 1)}"
    return chosen, note + "".join(f"; {reason}" for reason in reasons)


def physical_cores() -> int:
    """Physical cores that this process may use: hyper-threads share the arithmetic, so they count once."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in allowed:
        try:
            siblings = FilePath(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            siblings = str(cpu)
        cores.add(siblings)
    return max(1, min(len(cores), _quota()))


def _quota() -> int:
    """Whole processors that a container's limit allows."""
    try:
        limit, period = FilePath("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, round(int(limit) / int(period)))
    except (OSError, ValueError):
        return 1 << 30
