"""What goes into an engine's path and what comes out: batches without padding, answers, and the paths' common face.

The inputs of a batch lie one after the other; offsets say where each begins. So no path computes, or has to mask, a
token that is not there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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

    logits: float32 (batch, labels). gates: uint8 (batch, layer, head), 1 where a head ran. wanted: float32 (batch,
    layer), the share of heads that each layer's controller asked for, 1.0 where no router ran. hidden: float32
    (tokens, width), the last hidden states in the order of `Packed.ids`; None unless they were asked for.
    """

    logits: np.ndarray
    gates: np.ndarray
    wanted: np.ndarray
    hidden: np.ndarray | None = None


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
        blocks: np.ndarray | None = None,
        need_hidden: bool = False,
    ) -> Output:
        """The answers for a batch, in its order.

        counts: int32 (batch, layer), heads per input and layer as a named budget gives them (`budgets.allocate`); the
        scorer chooses which. gates: uint8 (batch, layer, head), the heads themselves, no router is asked. Both None:
        the routers decide, or, for a model whose `budget.routes` is False, all heads run. blocks: uint8 (batch, layer,
        block), which of the equal blocks of feed-forward neurons run; None runs all.
        """
        ...


def check_call(
    batch: Packed,
    encoder: EncoderConfig,
    *,
    counts: np.ndarray | None = None,
    gates: np.ndarray | None = None,
    blocks: np.ndarray | None = None,
) -> None:
    """Refuse what `Path.run` cannot compute; kernels look up and index without asking again.

    Raises:
        UsageError: an input has no token or more than the model has positions; shapes that do not fit the batch and
            the model; both counts and gates; blocks that do not divide the feed-forward neurons.
        IndexError: an id or a type that the model's tables do not have.
    """
    if batch.offsets[0] != 0 or batch.offsets[-1] != len(batch.ids) or (batch.lengths < 1).any():
        raise UsageError("offsets must rise from 0 to the number of tokens, by at least one token for each input")
    longest = int(batch.lengths.max(initial=0))
    if longest > encoder.max_positions:
        raise UsageError(
            f"an input has {longest} tokens, the model has {encoder.max_positions} positions: "
            f"truncate to {encoder.max_positions}"
        )
    _check_ids(batch.ids, encoder.vocab_size, "id")
    if batch.types is not None:
        _check_shape("types", batch.types, batch.ids.shape)
        if encoder.token_types:
            _check_ids(batch.types, encoder.token_types, "type")
    if counts is not None and gates is not None:
        raise UsageError("counts and gates were both given: name how many heads run, or which, not both")
    layers = (len(batch), encoder.num_layers)
    if counts is not None:
        _check_shape("counts", counts, layers)
    if gates is not None:
        _check_shape("gates", gates, (*layers, encoder.num_heads))
    if blocks is not None:
        _check_shape("blocks", blocks, (*layers, blocks.shape[-1] if blocks.ndim else 0))
        if blocks.shape[-1] == 0 or encoder.intermediate_size % blocks.shape[-1]:
            raise UsageError(
                f"{blocks.shape[-1]} blocks do not divide the {encoder.intermediate_size} feed-forward neurons"
            )


def _check_shape(name: str, given: np.ndarray, shape: tuple[int, ...]) -> None:
    if given.shape != shape:
        raise UsageError(f"{name} has the shape {given.shape}: it must be {shape}")


def _check_ids(ids: np.ndarray, size: int, name: str) -> None:
    lowest, highest = int(ids.min(initial=0)), int(ids.max(initial=0))
    if lowest < 0 or highest >= size:
        raise IndexError(
            f"token {name} {lowest if lowest < 0 else highest}: the model knows {name}s from 0 to {size - 1}"
        )


def _joined(parts: Sequence[Sequence[int]]) -> np.ndarray:
    if not parts:
        return np.zeros(0, np.int32)
    return np.concatenate([np.asarray(part, np.int32) for part in parts])
