"""The engine's path on torch: packed tokens, and of heads and feed-forward blocks only those that an input chose.

Slower than compiled kernels, and everywhere torch runs. The routers are the core's own.

Legend: T tokens of all inputs, B inputs, H heads, D width of one head, W width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from budgetformer.encoder import ACTIVATIONS
from budgetformer.engine.packed import Call, Output, Packed, checked, left
from budgetformer.engine.weights import Weights
from budgetformer.errors import UsageError
from budgetformer.router import Router, Routing
from budgetformer.schedule import Schedule

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Above this share of units that run, computing them all at once is faster than set by set, and as right: what was
# computed in vain is set to zero.
DENSE = 0.8


@dataclass(frozen=True)
class _Norm:
    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True)
class _Sublayer:
    """A sum over units: `into` (parts * units * size, W) is what they read, `out` (W, units * size) what they say."""

    into: Tensor
    into_bias: Tensor
    out: Tensor
    out_bias: Tensor
    parts: int  # attention has three, one below the other: query, key, value

    @property
    def finite(self) -> bool:
        """Whether a unit times zero is zero."""
        return all(bool(t.isfinite().all()) for t in (self.into, self.into_bias, self.out))

    def of(self, units: np.ndarray, size: int) -> "_Sublayer":
        """The rows and columns of some units alone."""
        rows = torch.from_numpy((units[:, None] * size + np.arange(size)).reshape(-1))
        whole = self.out.shape[1]
        every = torch.cat([rows + part * whole for part in range(self.parts)])
        into, into_bias = self.into.index_select(0, every), self.into_bias.index_select(0, every)
        return _Sublayer(into, into_bias, self.out.index_select(1, rows), self.out_bias, self.parts)


@dataclass(frozen=True)
class _Layer:
    router: Router
    block_router: Router | None
    attention: _Sublayer
    attention_norm: _Norm
    feed_forward: _Sublayer
    feed_forward_norm: _Norm
    finite: tuple[bool, bool]

    def heads(self, chosen: np.ndarray) -> np.ndarray:
        """Of gates (B, H), those of the heads that are left."""
        return chosen if self.router.kept is None else chosen[:, self.router.kept]

    def blocks(self, chosen: np.ndarray) -> np.ndarray:
        """Of gates (B, blocks), those of the blocks that are left."""
        kept = None if self.block_router is None else self.block_router.kept
        return chosen if kept is None else chosen[:, kept]


@dataclass(frozen=True)
class _Batch:
    """Where the inputs lie: tokens of each, the place of its first one."""

    lengths: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, lengths: np.ndarray) -> "_Batch":
        return cls(lengths, np.cumsum(lengths) - lengths)

    def tokens(self, inputs: list[int]) -> Tensor:
        """The places of the tokens of some inputs."""
        spans = [np.arange(self.starts[i], self.starts[i] + self.lengths[i]) for i in inputs]
        return torch.from_numpy(np.concatenate(spans).astype(np.int64))

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Neighbours of equal length: place of the first token, how many inputs, tokens of each."""
        start = 0
        for length, group in groupby(self.lengths.tolist()):
            count = len(list(group))
            yield start, count, length
            start += count * length


# What one sublayer computes for some tokens: (x, batch, weights, off) -> (T, W). `off` (T, units): set to zero.
_Run = Callable[[Tensor, _Batch, _Sublayer, Tensor | None], Tensor]


class TorchPath:
    """A model ready to run; see `budgetformer.engine.packed.Path`.

    dtype: "fp32", or "bf16" for the large products alone; norms, residuals, routers and classifier stay in fp32.
    threads: for torch, while `run` is at work; None leaves its own choice.

    Raises:
        UsageError: another dtype, or fewer than 1 threads.
    """

    name = "torch"

    def __init__(self, weights: Weights, dtype: str = "fp32", threads: int | None = None):
        if dtype not in DTYPES:
            raise UsageError(f"dtype={dtype!r}: the torch path computes in {' or '.join(DTYPES)}; choose one of them")
        if threads is not None and threads < 1:
            raise UsageError(f"threads={threads}: must be 1 or more")
        self.dtype = dtype
        self.weights = weights
        self.threads = threads
        self._kind = DTYPES[dtype]
        self._activation = ACTIVATIONS[weights.encoder.activation]
        self._explore = Schedule(budget=weights.budget).settled
        self._tensors = {name: _tensor(array) for name, array in weights.tensors.items()}
        self._embeddings_norm = self._norm("embeddings.norm")
        self._last_norm = self._norm("norm") if weights.encoder.norm == "pre" else None
        self._layers = [self._layer(i) for i in range(weights.encoder.num_layers)]

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
        """The answers for a batch; see `budgetformer.engine.packed.Path.run`.

        Raises:
            UsageError: from `checked`.
        """
        config = self.weights.encoder
        given = {"counts": counts, "gates": gates, "block_counts": block_counts, "blocks": blocks}
        call = checked(batch, config, units=self.weights.budget.blocks, **given)
        if len(batch) == 0:
            return self._nothing(need_hidden)
        before = torch.get_num_threads()
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        try:
            with torch.inference_mode():
                return self._run(call, need_hidden)
        finally:
            if self.threads is not None:
                torch.set_num_threads(before)

    def _run(self, call: Call, need_hidden: bool) -> Output:
        config, counts, gates, on = self.weights.encoder, call.counts, call.gates, call.blocks
        places = _Batch.of(np.diff(call.offsets))
        shape = (len(places.lengths), config.num_layers, config.num_heads)
        if gates is None and counts is None and not self.weights.budget.routes:
            gates = np.tile(left(config.kept_heads, *shape[1:]).astype(np.uint8), (shape[0], 1, 1))
        units = self.weights.budget.blocks
        routed = units > 1 and on is None and (self.weights.budget.routes or call.block_counts is not None)
        ran = on
        if units > 1 and on is None:  # overwritten where routers decide
            ran = np.tile(left(config.kept_blocks, shape[1], units).astype(np.uint8), (shape[0], 1, 1))
        chosen = np.zeros(shape, np.uint8) if gates is None else gates
        wanted = chosen.mean(2, dtype=np.float32)
        x = self._embed(call, places)
        for i, layer in enumerate(self._layers):
            inner = layer.attention_norm(x) if config.norm == "pre" else x
            if gates is None:
                routing = self._route(layer.router, inner, places, None if counts is None else counts[:, i])
                chosen[:, i], wanted[:, i] = routing.chosen.numpy(), routing.share.numpy()
            x = x + self._sum(inner, places, layer.attention, layer.heads(chosen[:, i]), layer.finite[0], self._attend)
            x = x if config.norm == "pre" else layer.attention_norm(x)
            inner = layer.feed_forward_norm(x) if config.norm == "pre" else x
            if routed and layer.block_router is not None and ran is not None:
                count = None if call.block_counts is None else call.block_counts[:, i]
                ran[:, i] = self._route(layer.block_router, inner, places, count).chosen.numpy()
            running = np.ones((shape[0], 1), np.uint8) if ran is None else layer.blocks(ran[:, i])
            x = x + self._sum(inner, places, layer.feed_forward, running, layer.finite[1], self._feed_forward)
            x = x if config.norm == "pre" else layer.feed_forward_norm(x)
        x = x if self._last_norm is None else self._last_norm(x)
        return Output(self._classify(x, places).numpy(), chosen, wanted, x.numpy() if need_hidden else None, ran)

    def _route(self, router: Router, x: Tensor, places: _Batch, counts: np.ndarray | None) -> Routing:
        count = None if counts is None else torch.from_numpy(counts.astype(np.int64))
        # The router's own step after its pooling, which knows padded batches only.
        return router._route(_pool(x, places, self.weights.budget.view), self._explore, count)

    def _embed(self, batch: Call, places: _Batch) -> Tensor:
        config, tensors = self.weights.encoder, self._tensors
        positions = np.arange(len(batch.ids)) - np.repeat(places.starts, places.lengths) + config.position_offset
        x = tensors["embeddings.word.weight"][_index(batch.ids)]
        x = x + tensors["embeddings.position.weight"][_index(positions)]
        if config.token_types:
            table = tensors["embeddings.token_type.weight"]
            x = x + (table[0] if batch.types is None else table[_index(batch.types)])
        x = self._embeddings_norm(x)
        if "embeddings.projection.weight" in tensors:
            x = F.linear(x, tensors["embeddings.projection.weight"], tensors["embeddings.projection.bias"])
        return x

    def _classify(self, x: Tensor, places: _Batch) -> Tensor:
        tensors, hidden = self._tensors, self.weights.head_hidden
        pooled = _pool(x, places, "mean") if self.weights.pooling == "mean" else x[_index(places.starts)]
        if hidden is not None:
            dense = F.linear(pooled, tensors["classifier.dense.weight"], tensors["classifier.dense.bias"])
            pooled = ACTIVATIONS[hidden](dense)
        return F.linear(pooled, tensors["classifier.out.weight"], tensors["classifier.out.bias"])

    def _sum(self, x: Tensor, places: _Batch, sublayer: _Sublayer, on: np.ndarray, finite: bool, run: _Run) -> Tensor:
        """The sum over each input's units, (T, W); inputs with the same units go together. on: uint8 (B, units)."""
        units = on.shape[1]
        size = sublayer.out.shape[1] // units
        groups: dict[bytes, list[int]] = {}
        for i, row in enumerate(on):
            groups.setdefault(row.tobytes(), []).append(i)
        if len(groups) == 1:
            return self._one_set(x, places, sublayer, on[0], size, run)
        running = float(places.lengths @ on.sum(1, dtype=np.int64)) / (len(x) * units)
        if running > DENSE and finite:
            return run(x, places, sublayer, torch.from_numpy(np.repeat(on == 0, places.lengths, axis=0)))
        out = torch.empty_like(x)
        for members in groups.values():
            rows = places.tokens(members)
            some = _Batch.of(places.lengths[members])
            out.index_copy_(0, rows, self._one_set(x.index_select(0, rows), some, sublayer, on[members[0]], size, run))
        return out

    def _one_set(self, x: Tensor, places: _Batch, sublayer: _Sublayer, on: np.ndarray, size: int, run: _Run) -> Tensor:
        if not on.any():
            return sublayer.out_bias.float().expand(len(x), -1)
        return run(x, places, sublayer if on.all() else sublayer.of(on.nonzero()[0], size), None)

    def _attend(self, x: Tensor, places: _Batch, sublayer: _Sublayer, off: Tensor | None) -> Tensor:
        D = self.weights.encoder.head_size
        qkv = F.linear(x.to(self._kind), sublayer.into, sublayer.into_bias).view(len(x), 3, -1, D)
        context = qkv.new_empty(len(x), qkv.shape[2], D)
        for start, count, length in places.runs():
            span = slice(start, start + count * length)
            q, k, v = qkv[span].view(count, length, 3, -1, D).permute(2, 0, 3, 1, 4)
            done = F.scaled_dot_product_attention(q, k, v)  # (count, heads, length, D)
            context[span].view(count, length, -1, D).copy_(done.transpose(1, 2))
        if off is not None:
            context.masked_fill_(off[:, :, None], 0.0)
        return F.linear(context.flatten(1), sublayer.out, sublayer.out_bias).float()

    def _feed_forward(self, x: Tensor, places: _Batch, sublayer: _Sublayer, off: Tensor | None) -> Tensor:
        del places
        inner = self._activation(F.linear(x.to(self._kind), sublayer.into, sublayer.into_bias))
        if off is not None:
            inner.view(len(x), off.shape[1], -1).masked_fill_(off[:, :, None], 0.0)
        return F.linear(inner, sublayer.out, sublayer.out_bias).float()

    def _nothing(self, need_hidden: bool) -> Output:
        config = self.weights.encoder
        return Output(
            np.zeros((0, len(self.weights.labels)), np.float32),
            np.zeros((0, config.num_layers, config.num_heads), np.uint8),
            np.zeros((0, config.num_layers), np.float32),
            np.zeros((0, config.hidden_size), np.float32) if need_hidden else None,
            np.zeros((0, config.num_layers, units), np.uint8) if (units := self.weights.budget.blocks) > 1 else None,
        )

    def _norm(self, name: str) -> _Norm:
        return _Norm(self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"], self.weights.encoder.norm_eps)

    def _layer(self, i: int) -> _Layer:
        prefix = f"layers.{i}."
        config, tensors = self.weights.encoder, self._tensors

        def sublayer(into: str, into_bias: str, out: str, parts: int) -> _Sublayer:
            names = (into, into_bias, f"{out}.weight", f"{out}.bias")
            a, b, c, d = (tensors[prefix + name].to(self._kind) for name in names)
            return _Sublayer(a, b, c, d, parts)

        def router(place: str, units: int, kept: Sequence[Sequence[int]] | None) -> Router:
            made = Router(config.hidden_size, units, self.weights.budget)
            state = {name.removeprefix(place): tensor for name, tensor in tensors.items() if name.startswith(place)}
            made.load_state_dict(state, assign=True)
            made.kept = None if kept is None else list(kept[i])
            return made.eval()

        blocks = self.weights.budget.blocks
        attention = sublayer("attention.in_proj_weight", "attention.in_proj_bias", "attention.out_proj", 3)
        feed_forward = sublayer("feed_forward.up.weight", "feed_forward.up.bias", "feed_forward.down", 1)
        return _Layer(
            router(f"{prefix}attention.router.", config.num_heads, config.kept_heads),
            router(f"{prefix}feed_forward.router.", blocks, config.kept_blocks) if blocks > 1 else None,
            attention,
            self._norm(f"{prefix}attention_norm"),
            feed_forward,
            self._norm(f"{prefix}feed_forward_norm"),
            (attention.finite, feed_forward.finite),
        )


def _tensor(array: np.ndarray) -> Tensor:
    """The array's own memory where torch takes it; only an array that is not to be written to is copied."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _index(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))


def _pool(x: Tensor, places: _Batch, view: str) -> Tensor:
    """One vector per input over its tokens, as `router.pool` has it for padded batches: (B, W), or (B, 2 W)."""
    lengths = _index(places.lengths)
    owners = _index(np.repeat(np.arange(len(places.lengths)), places.lengths))
    mean = x.new_zeros(len(lengths), x.shape[1]).index_add_(0, owners, x) / lengths[:, None]
    if view == "mean":
        return mean
    if view == "mean+first":
        return torch.cat([mean, x[_index(places.starts)]], dim=-1)
    return torch.cat([mean, torch.segment_reduce(x, "max", lengths=lengths, unsafe=True)], dim=-1)
