"""What goes into an engine's path and what comes out: batches without padding, answers, and the paths' common face.

The inputs of a batch lie one after the other; offsets say where each begins. So no path computes, or has to mask, a
token that is not there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from budgetformer.config import EncoderConfig
from budgetformer.errors import UsageError
from budgetformer.tokens import Tokens


@dataclass(frozen=True, eq=False)
class Packed:
    """A batch without padding: input b is `ids[offsets[b]:offsets[b + 1]]`, and its positions count from 0.

    ids: int32 (tokens,), all inputs one after the other. offsets: int32 (batch + 1,), from 0 to the number of tokens.
    types: int32 (tokens,), token types; None where the tokenizer has none, which is type 0 for every token.
    """

    ids: np.ndarray
    offsets: np.ndarray
    types: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each input: int32 (batch,)."""
        return np.diff(self.offsets)

    def of_inputs(self, some: np.ndarray) -> "Packed":
        """Some of the inputs, in their order. some: bool (batch,)."""
        lengths = self.lengths
        tokens = np.repeat(some, lengths)
        offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths[some], dtype=np.int32)])
        return Packed(self.ids[tokens], offsets, None if self.types is None else self.types[tokens])

    @classmethod
    def of(cls, inputs: Sequence[Tokens]) -> "Packed":
        """The inputs in their order. Types are kept when any input has them; one without is all type 0.

        Raises:
            UsageError: an input has no token; there is nothing to pool then.
        """
        empty = [place for place, one in enumerate(inputs) if not len(one)]
        if empty:
            raise UsageError(f"input {empty[0]} has no token; give every input at least one")
        offsets = np.zeros(len(inputs) + 1, np.int32)
        np.cumsum([len(one) for one in inputs], out=offsets[1:])
        ids = _joined([one.ids for one in inputs])
        if all(one.types is None for one in inputs):
            return cls(ids, offsets)
        return cls(ids, offsets, _joined([[0] * len(one) if one.types is None else one.types for one in inputs]))


@dataclass(frozen=True, eq=False)
class Output:
    """What a path answers for a batch.

    logits: float32 (batch, labels). gates: uint8 (batch, layer, head), how often a head ran: 0 or 1, and once more for
    an input that was answered again. wanted: float32 (batch,
    layer), the share of heads that each layer's controller asked for; that of the heads that ran where no router was
    asked. blocks: uint8 (batch, layer, block), the same of feed-forward blocks; None where they are not chosen.
    hidden: float32 (tokens, width), the last hidden states in the order of `Packed.ids`; None unless asked for.
    """

    logits: np.ndarray
    gates: np.ndarray
    wanted: np.ndarray
    hidden: np.ndarray | None = None
    blocks: np.ndarray | None = None

    def answered_again(self, rows: np.ndarray, second: "Output") -> None:
        """Take the second answers of `rows`, in place, and count what ran for them."""
        self.logits[rows] = second.logits
        self.gates[rows] += second.gates
        if self.blocks is not None and second.blocks is not None:
            self.blocks[rows] += second.blocks


class Path(Protocol):
    """One way to compute a model: compiled kernels or torch. Every path gives the same answers, at its own speed.

    name: "avx512_bf16", "avx512", "avx2" or "plain" (compiled), or "torch". dtype: the numbers that the large
    products are computed in, "fp32", "bf16" or "int8". threads: how many compute; None is the library's own choice.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def dtype(self) -> str: ...  # noqa: D102

    @property
    def threads(self) -> int | None: ...  # noqa: D102

    def run(
        self,
        batch: Packed,
        *,
        counts: np.ndarray | None = None,
        gates: np.ndarray | None = None,
        block_counts: np.ndarray | None = None,
        blocks: np.ndarray | None = None,
        need_hidden: bool = False,
    ) -> Output:
        """The answers for a batch, in its order.

        counts: int32 (batch, layer), heads per input and layer as a named budget gives them (`budgets.allocate`); the
        scorer chooses which. gates: uint8 (batch, layer, head), the heads themselves, no router is asked. Both None:
        the routers decide, or, for a model whose `budget.routes` is False, all heads run. block_counts and blocks say
        the same of the feed-forward layers' blocks, (batch, layer) and (batch, layer, block); with both None routers
        decide where the model has them, else all run. A model without a budget of blocks takes blocks cut in any
        equal way; the kernels want a multiple of 32 neurons. A batch without inputs has an output without rows.

        Raises:
            UsageError: what `checked` refuses.
        """
        ...


@dataclass(frozen=True)
class Call:
    """The arrays of one call of `Path.run`, checked, in the types and order that kernels read."""

    ids: np.ndarray
    offsets: np.ndarray
    types: np.ndarray | None
    counts: np.ndarray | None
    gates: np.ndarray | None
    block_counts: np.ndarray | None
    blocks: np.ndarray | None


def checked(
    batch: Packed,
    encoder: EncoderConfig,
    *,
    units: int = 1,
    counts: np.ndarray | None = None,
    gates: np.ndarray | None = None,
    block_counts: np.ndarray | None = None,
    blocks: np.ndarray | None = None,
) -> Call:
    """Refuse what `Path.run` cannot compute; kernels look up and index without asking again.

    Types are dropped where the model has no table for them, as its training path does. units: blocks of a feed-forward
    layer that have a budget, 1 where they have none.

    Raises:
        UsageError: an input has no token or more than the model has positions; an id or a type that the model's tables
            do not have; arrays of another shape or kind; both counts and gates; blocks that do not divide the neurons.
    """
    ids, offsets = np.asarray(batch.ids), np.asarray(batch.offsets)
    if ids.ndim != 1 or offsets.ndim != 1 or len(offsets) < 1:
        raise UsageError("a batch is ids of the shape (tokens,) and offsets of the shape (batch + 1,)")
    _check_kind("offsets", offsets)
    steps = np.diff(offsets.astype(np.int64))
    if offsets[0] != 0 or offsets[-1] != len(ids) or (steps < 1).any():
        raise UsageError("offsets must rise from 0 to the number of tokens, by at least one token for each input")
    longest = int(steps.max(initial=0))
    if longest > encoder.max_positions:
        raise UsageError(
            f"an input has {longest} tokens, the model has {encoder.max_positions} positions: "
            f"truncate to {encoder.max_positions}"
        )
    _check_ids(ids, encoder.vocab_size, "id")
    types = None if batch.types is None or not encoder.token_types else np.asarray(batch.types)
    if types is not None:
        _check_shape("types", types, ids.shape)
        _check_ids(types, encoder.token_types, "type")
    if counts is not None and gates is not None:
        raise UsageError("counts and gates were both given: name how many heads run, or which, not both")
    layers = (len(steps), encoder.num_layers)
    if counts is not None:
        counts = np.asarray(counts)
        _check_shape("counts", counts, layers)
        _check_kind("counts", counts)
    if block_counts is not None:
        if units == 1:
            raise UsageError("block_counts were given: this model has no budget of feed-forward blocks")
        if blocks is not None:
            raise UsageError("block_counts and blocks were both given: name how many run, or which, not both")
        block_counts = np.asarray(block_counts)
        _check_shape("block_counts", block_counts, layers)
        _check_kind("block_counts", block_counts)
    # A gate is on or off: what is not 0 is on, whatever it would be as a byte.
    on = None if gates is None else np.not_equal(gates, 0)
    if on is not None:
        _check_shape("gates", on, (*layers, encoder.num_heads))
        on &= left(encoder.kept_heads, encoder.num_layers, encoder.num_heads)
    running = None if blocks is None else np.not_equal(blocks, 0)
    if running is not None:
        cut = running.shape[-1] if running.ndim else 0
        _check_shape("blocks", running, (*layers, cut))
        if units > 1 and cut != units:
            raise UsageError(f"blocks has {cut} blocks a layer, the model has {units}")
        running &= left(encoder.kept_blocks, encoder.num_layers, cut)
        if cut == 0 or encoder.intermediate_size % cut:
            raise UsageError(f"{cut} blocks do not divide the {encoder.intermediate_size} feed-forward neurons")
    return Call(
        ids=_as(ids, np.int32),
        offsets=_as(offsets, np.int32),
        types=None if types is None else _as(types, np.int32),
        counts=None if counts is None else _as(counts.clip(0, encoder.num_heads), np.int32),
        gates=None if on is None else _as(on, np.uint8),
        block_counts=None if block_counts is None else _as(block_counts.clip(0, units), np.int32),
        blocks=None if running is None else _as(running, np.uint8),
    )


def left(kept: Sequence[Sequence[int]] | None, layers: int, units: int) -> np.ndarray:
    """Which units are left, where others were cut for good: bool (layer, unit)."""
    if kept is None:
        return np.ones((layers, units), bool)
    return np.array([np.isin(np.arange(units), names) for names in kept])


def _as(array: np.ndarray, kind: Any) -> np.ndarray:
    return np.ascontiguousarray(array, kind)


def _check_shape(name: str, given: np.ndarray, shape: tuple[int, ...]) -> None:
    if given.shape != shape:
        raise UsageError(f"{name} has the shape {given.shape}: it must be {shape}")


def _check_kind(name: str, given: np.ndarray) -> None:
    if given.dtype.kind not in "iu":
        raise UsageError(f"{name} is {given.dtype}: it must be whole numbers")


def _check_ids(ids: np.ndarray, size: int, name: str) -> None:
    _check_kind(f"token {name}s", ids)
    lowest, highest = int(ids.min(initial=0)), int(ids.max(initial=0))
    if lowest < 0 or highest >= size:
        raise UsageError(
            f"token {name} {lowest if lowest < 0 else highest}: the model knows {name}s from 0 to {size - 1}"
        )


def _joined(parts: Sequence[Sequence[int]]) -> np.ndarray:
    if not parts:
        return np.zeros(0, np.int32)
    return np.concatenate([np.asarray(part, np.int32) for part in parts])
