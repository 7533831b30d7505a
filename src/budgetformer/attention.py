"""A drop-in for `torch.nn.MultiheadAttention` that runs only the heads an input needs.

Two paths compute the same function. The *masked* path runs every head and multiplies by the gates: while routers
explore, the task so teaches them what the heads that are off would be worth. The *skipping* path runs what was chosen
alone, in use and in the rest of training: not a row of a head's weights is read that no input chose (`skipping.py`).
`reference.py` is what both are compared with.

Legend: N batch, L query tokens, S key tokens, E width, H heads, D width of one head.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from budgetformer.config import BudgetConfig
from budgetformer.errors import UsageError
from budgetformer.router import Router, Routing, allocate, forced
from budgetformer.schedule import Exploration, Schedule
from budgetformer.skipping import by_unit, lowered, may_skip, of_units, plan

# What is projected, the weight, and the bias where there is one.
Product = tuple[Tensor, ...]


@dataclass(frozen=True)
class Attention:
    """What one call knows: output (N, L, E), weights (N, H, L, S) or None, and the routing behind it."""

    output: Tensor
    weights: Tensor | None
    routing: Routing


@dataclass(frozen=True)
class _Mask:
    """What may not be seen, in the two forms callers have: real keys (N, S), and a bias (N or 1, H or 1, L, S)."""

    keep: Tensor | None
    bias: Tensor | None

    def additive(self, dtype: torch.dtype) -> Tensor | None:
        """One bias for scaled dot-product attention, (N or 1, H or 1, L or 1, S)."""
        bias, keep = self.bias, self.keep
        if keep is None:
            return None if bias is None else bias.to(dtype)
        hidden = torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill(~keep, -math.inf)[:, None, None]
        return hidden if bias is None else hidden + bias.to(dtype)

    def of(self, heads: list[int]) -> "_Mask":
        """The mask of some heads alone."""
        bias = self.bias
        return _Mask(self.keep, bias if bias is None or bias.shape[1] == 1 else bias[:, heads])


class BudgetedMultiheadAttention(nn.MultiheadAttention):
    """Multi-head attention with a budget of heads per input: `out(x) = sum_h g_h(x) head_h(x) W_O^h + b_O`, g 0 or 1.

    Constructor words, state dict and call are those of `nn.MultiheadAttention`; `budget_config` and, in the call,
    `budget` are new. A state dict of `nn.MultiheadAttention` loads as it is: the router then keeps its start, all
    heads on, and the module equals its source.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device=None,
        dtype=None,
        *,
        budget_config: BudgetConfig | None = None,
    ):
        if embed_dim <= 0 or num_heads <= 0 or embed_dim % num_heads:
            raise UsageError(
                f"embed_dim={embed_dim}, num_heads={num_heads}: the heads must divide the width without a rest"
            )
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.budget_config = budget_config or BudgetConfig()
        self.router = Router(embed_dim, num_heads, self.budget_config).to(device=device, dtype=dtype)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        if not any(key.startswith(f"{prefix}router.") for key in state_dict):
            for key, tensor in self.router.state_dict(prefix=f"{prefix}router.").items():
                state_dict[key] = tensor
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    @torch.no_grad()
    def cut(self, kept: Sequence[int]) -> None:
        """Remove all heads but `kept` for good: their rows of W_Q, W_K, W_V, their columns of W_O.

        Routings, gates and weights still speak of all heads; those that are gone never run.
        """
        if not self.packed or self.bias_k is not None:
            raise UsageError("heads can be cut where query, key and value share a projection, without add_bias_kv")
        rows = torch.tensor([head * self.head_dim + i for head in kept for i in range(self.head_dim)])
        every = torch.cat([rows + part * self.embed_dim for part in range(3)])
        self.in_proj_weight = nn.Parameter(self.in_proj_weight[every])
        if self.in_proj_bias is not None:
            self.in_proj_bias = nn.Parameter(self.in_proj_bias[every])
        self.out_proj.weight = nn.Parameter(self.out_proj.weight[:, rows])
        self.out_proj.in_features = len(rows)
        self.router.kept = list(kept)

    def __setstate__(self, state):
        super().__setstate__(state)
        self._qkv_same_embed_dim = False

    def _reset_parameters(self) -> None:
        self._qkv_same_embed_dim = self.packed
        super()._reset_parameters()
        # torch's fused encoder layer reads this attribute; were it True, that layer would bypass `forward`, router
        # and all.
        self._qkv_same_embed_dim = False

    @property
    def packed(self) -> bool:
        """True when query, key and value share one projection matrix."""
        return self.in_proj_weight is not None

    # ------------------------------------------------------------------ the call of nn.MultiheadAttention

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        budget: float | Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As in `nn.MultiheadAttention`; `budget` names a share of heads (a number, or one per input).

        Weights of heads that did not run are zero; averaged weights are the mean over the heads that ran.
        """
        if is_causal and attn_mask is None:
            raise UsageError("is_causal=True is a hint about attn_mask: pass attn_mask as well")
        self._check_shapes(query, key, value)
        # Asked before the views below hide it: the router of self-attention pools over real tokens only.
        same_key, same_value = key is query, value is key
        single = query.dim() == 2
        if single:
            query, key, value = (t.unsqueeze(0 if self.batch_first else 1) for t in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        if not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        key = query if same_key else key
        value = key if same_value else value
        mask = self._door(query, key, key_padding_mask, attn_mask)
        done = self.attend(query, key, value, mask=mask, need_weights=need_weights, budget=budget)
        output, weights = done.output, done.weights
        if weights is not None and average_attn_weights:
            weights = weights.sum(1) / done.routing.chosen.sum(1).clamp_min(1)[:, None, None]
        output = output if self.batch_first else output.transpose(0, 1)
        if single:
            output = output.squeeze(0 if self.batch_first else 1)
            weights = None if weights is None else weights.squeeze(0)
        return output, weights

    def _check_shapes(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if query.is_nested or key.is_nested or value.is_nested:
            raise UsageError("nested tensors are not supported: pad them and pass key_padding_mask")
        if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
            raise AssertionError(
                f"query, key and value must all be 2-D (one input) or 3-D (a batch), not {query.dim()}-D, "
                f"{key.dim()}-D and {value.dim()}-D"
            )
        if query.shape[-1] != self.embed_dim:
            raise AssertionError(f"was expecting embedding dimension of {self.embed_dim}, but got {query.shape[-1]}")

    def _door(self, query: Tensor, key: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None) -> _Mask:
        """Turn nn.MultiheadAttention's masks (True = drop) into ours (True = a real token), once, here."""
        N, L, S = query.shape[0], query.shape[1], key.shape[1]
        bias = None
        if attn_mask is not None:
            if attn_mask.shape not in ((L, S), (N * self.num_heads, L, S)):
                raise UsageError(
                    f"attn_mask has the shape {tuple(attn_mask.shape)}: it must be {(L, S)} or "
                    f"{(N * self.num_heads, L, S)}"
                )
            bias = _additive(attn_mask, query.dtype)
            bias = bias[None, None] if bias.dim() == 2 else bias.view(N, self.num_heads, L, S)
        keep = None
        if key_padding_mask is not None:
            if key_padding_mask.shape != (N, S):
                raise UsageError(f"key_padding_mask has the shape {tuple(key_padding_mask.shape)}: it must be {(N, S)}")
            if key_padding_mask.dtype == torch.bool:
                keep = ~key_padding_mask
            else:  # a float mask: -inf is padding (the router must not see it either), the rest is added to the scores
                keep = ~key_padding_mask.isneginf()
                finite = key_padding_mask.masked_fill(~keep, 0.0).to(query.dtype)[:, None, None]
                bias = finite if bias is None else bias + finite
        return _Mask(keep, bias)

    # ------------------------------------------------------------------ the call of the encoder

    def attend(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: _Mask | None = None,
        keep: Tensor | None = None,
        query_keep: Tensor | None = None,
        need_weights: bool = False,
        budget: float | Tensor | None = None,
        count: Tensor | None = None,
        gates: Tensor | None = None,
        explore: Exploration | None = None,
    ) -> Attention:
        """Batch-first attention that returns its routing too.

        keep (N, S): real key tokens; for self-attention also the ones the router pools over. budget: share of heads,
        a number or (N,). count (N,): number of heads. gates (N, H): the heads themselves, no router asked.
        """
        key = query if key is None else key
        value = key if value is None else value
        mask = mask or _Mask(keep, None)
        if query_keep is None:
            itself = query is key
            query_keep = mask.keep if itself and mask.keep is not None else query.new_ones(query.shape[:2]).bool()
        if gates is not None:
            routing = forced(self.router.left(gates.to(query.dtype)))
        else:
            if budget is not None:
                count = self._count(budget, query)
            explore = explore or Schedule(budget=self.budget_config).settled
            routing = self.router(query, query_keep, explore=explore, count=count)
        left, kept = routing.gates, self.router.kept
        if kept is not None:
            left, mask = left[:, kept], mask.of(kept)
        run = self._skipping if may_skip(left, explore if gates is None else None) else self._masked
        output, weights = run(self._products(query, key, value), mask, left, need_weights)
        if kept is not None and weights is not None:
            places = torch.tensor(kept, device=weights.device)
            every = weights.new_zeros(len(weights), self.num_heads, *weights.shape[2:])
            weights = every.index_copy(1, places, weights)
        return Attention(output, weights, routing)

    def _count(self, budget: float | Tensor, query: Tensor) -> Tensor:
        shares = check_budget(budget, len(query), query.device)
        return allocate(shares, shares.new_ones(1), self.num_heads, self.budget_config.min_units)[:, 0]

    def _products(self, query: Tensor, key: Tensor, value: Tensor) -> list[Product]:
        """Self-attention is one product, of which queries, keys and values are thirds; else there are three."""
        sources, biases = (query, key, value), self.in_proj_bias
        if self.packed and query is key and key is value:
            return [(query, self.in_proj_weight) if biases is None else (query, self.in_proj_weight, biases)]
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = self.in_proj_weight.chunk(3) if self.packed else weights
        parts = (sources, weights) if biases is None else (sources, weights, biases.chunk(3))
        return list(zip(*parts, strict=True))

    def _split(self, projected: list[Tensor]) -> list[Tensor]:
        """Queries, keys and values, (N, heads, tokens, D) each, of what the products gave."""
        shape = (3 // len(projected), -1, self.head_dim)
        return [part for done in projected for part in done.unflatten(-1, shape).permute(2, 0, 3, 1, 4).unbind()]

    def _extend(self, k: Tensor, v: Tensor, bias: Tensor | None, heads: Tensor | list[int] | slice):
        """The extra key that `add_bias_kv` and `add_zero_attn` ask for, visible to every query. k, v: (N, h, S, D)."""
        N, h, _, D = k.shape
        extra = 0
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.view(-1, 1, D)[heads].expand(N, h, 1, D)], dim=2)
            v = torch.cat([v, self.bias_v.view(-1, 1, D)[heads].expand(N, h, 1, D)], dim=2)
            extra += 1
        if self.add_zero_attn:
            k = torch.cat([k, k.new_zeros(N, h, 1, D)], dim=2)
            v = torch.cat([v, v.new_zeros(N, h, 1, D)], dim=2)
            extra += 1
        if bias is not None and extra:
            bias = F.pad(bias, (0, extra))
        return k, v, bias

    def _attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        gates: Tensor,
        need_weights: bool,
        heads: Tensor | list[int] | slice,
    ) -> tuple[Tensor, Tensor | None]:
        """Scaled dot-product attention of `heads` over (N, h, tokens, D), times the gates (N, h)."""
        dropout = self.dropout if self.training else 0.0
        k, v, bias = self._extend(k, v, bias, heads)
        if need_weights:
            scores = (q * math.sqrt(1 / q.shape[-1])) @ k.transpose(-2, -1)  # rounded as in nn.MultiheadAttention
            weights = torch.softmax(scores if bias is None else scores + bias, dim=-1)
            # A query that may see nothing answers 0, as scaled_dot_product_attention does, not NaN.
            weights = F.dropout(torch.nan_to_num(weights), dropout)
            weights = weights * (gates != 0)[:, :, None, None]
            context = weights @ v
        else:
            context, weights = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout), None
        return context * gates[:, :, None, None].to(context.dtype), weights

    def _masked(
        self, products: list[Product], mask: _Mask, gates: Tensor, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Every head runs over every input; its output is multiplied by its gate."""
        q, k, v = self._split([F.linear(*product) for product in products])
        bias = mask.additive(q.dtype)
        context, weights = self._attention(q, k, v, bias, gates, need_weights, slice(None))
        return self.out_proj(context.transpose(1, 2).flatten(2)), weights

    def _skipping(
        self, products: list[Product], mask: _Mask, gates: Tensor, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """What was not chosen is neither read nor computed; see `skipping`."""
        (N, H), todo = gates.shape, plan(gates)
        if len(todo.common) == H:
            return self._masked(products, mask, gates, need_weights)
        gates = gates * (gates != 0)
        parts = 3 // len(products)
        inputs = [lowered(x)[0] for x, *_ in products]
        query, bias, found = inputs[0], mask.additive(inputs[0].dtype), []
        start = self.out_proj.weight.new_zeros(()) if self.out_proj.bias is None else self.out_proj.bias
        output = start.expand(*query.shape[:2], self.embed_dim)
        if todo.common:
            some = [[of_units(t, todo.common, H, parts=parts) for t in weights] for _, *weights in products]
            q, k, v = self._split([F.linear(x, *lowered(*own)) for x, own in zip(inputs, some, strict=True)])
            hidden = bias[:, todo.common] if bias is not None and bias.shape[1] > 1 else bias
            context, weights = self._attention(q, k, v, hidden, gates[:, todo.common], need_weights, todo.common)
            (out,) = lowered(of_units(self.out_proj.weight, todo.common, H, 1))
            output = output + F.linear(context.transpose(1, 2).flatten(2), out)
            found.append(((slice(None), todo.common), weights))
        if todo.in_pairs:
            row, unit = todo.row, todo.unit
            shape = (parts, H, -1)
            own = [[t.unflatten(0, shape).unbind(1) for t in lowered(*weights)] for _, *weights in products]
            some = [[[part.flatten(0, 1) for part in one] for one in weights] for weights in own]  # head by head
            projected = [
                by_unit(x.index_select(0, row), todo.counts, *weights) for x, weights in zip(inputs, some, strict=True)
            ]
            (out,) = lowered(self.out_proj.weight)
            out = out.unflatten(1, (H, -1)).unbind(1)
            q, k, v = (t.transpose(0, 1) for t in self._split(projected))  # as if the pairs were one input's heads
            hidden = None if bias is None else bias.expand(N, H, -1, -1)[row, unit][None]
            context, weights = self._attention(q, k, v, hidden, gates[row, unit][None], need_weights, unit)
            output = output.index_add(0, row, by_unit(context[0], todo.counts, out).to(output.dtype))
            found.append(((row, unit), None if weights is None else weights[0]))
        if need_weights:
            every = found[0][1].new_zeros(N, H, *found[0][1].shape[-2:])
            for place, weights in found:
                every[place] = weights
            return output.to(query.dtype), every
        return output.to(query.dtype), None


def check_budget(budget: float | Tensor, batch: int, device: torch.device) -> Tensor:
    """A named budget as (batch,) shares; UsageError unless every share lies in (0, 1]."""
    shares = torch.as_tensor(budget, dtype=torch.float64, device=device)
    if shares.dim() > 1 or (shares.dim() == 1 and len(shares) != batch):
        raise UsageError(f"budget has the shape {tuple(shares.shape)}: name one share, or one for each of {batch}")
    if not bool(((shares > 0) & (shares <= 1)).all()):
        raise UsageError(f"budget={budget}: every share of heads must lie in (0, 1]; 1 runs every head")
    return shares.expand(batch)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)
    return mask.to(dtype)
