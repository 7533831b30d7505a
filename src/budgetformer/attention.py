"""A drop-in for `torch.nn.MultiheadAttention` that runs only the heads an input needs.

Two paths compute the same function. The *masked* path runs every head and multiplies by the gates: it carries
gradients to the router, so training takes it. The *dispatch* path runs head by head, each over just the inputs that
chose it: not a row of the other heads' weights is read. `reference.py` is what both are compared with.

Legend: N batch, L query tokens, S key tokens, E width, H heads, D width of one head.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from budgetformer.config import BudgetConfig
from budgetformer.errors import UsageError
from budgetformer.router import Router, Routing, allocate, forced
from budgetformer.schedule import Exploration, Schedule


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

    def additive(self, dtype: torch.dtype, rows: Tensor | None = None, head: int | None = None) -> Tensor | None:
        """One bias for scaled dot-product attention, for chosen inputs and one head, or for all."""
        bias, keep = self.bias, self.keep
        if bias is not None and head is not None:
            bias = bias[:, head : head + 1] if bias.shape[1] > 1 else bias
        if rows is not None:
            bias = bias[rows] if bias is not None and len(bias) > 1 else bias
            keep = keep[rows] if keep is not None else None
        if keep is None:
            return None if bias is None else bias.to(dtype)
        hidden = torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill(~keep, -math.inf)[:, None, None]
        return hidden if bias is None else hidden + bias.to(dtype)


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
            routing = forced(gates.to(query.dtype))
        else:
            if budget is not None:
                count = self._count(budget, query)
            explore = explore or Schedule(budget=self.budget_config).settled
            routing = self.router(query, query_keep, explore=explore, count=count)
        learning = self.training or torch.is_grad_enabled()
        if learning or bool(routing.chosen.all()):
            output, weights = self._masked(query, key, value, mask, routing.gates, need_weights)
        else:
            output, weights = self._dispatch(query, key, value, mask, routing.gates, need_weights)
        return Attention(output, weights, routing)

    def _count(self, budget: float | Tensor, query: Tensor) -> Tensor:
        shares = check_budget(budget, len(query), query.device)
        return allocate(shares, shares.new_ones(1), self.num_heads, self.budget_config.min_units)[:, 0]

    def _projections(self) -> tuple[list[Tensor], list[Tensor | None]]:
        weights: list[Tensor]
        if self.packed:
            weights = [*self.in_proj_weight.chunk(3)]
        else:
            weights = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        biases: list[Tensor | None] = [None, None, None]
        if self.in_proj_bias is not None:
            biases = [*self.in_proj_bias.chunk(3)]
        return weights, biases

    def _extend(self, k: Tensor, v: Tensor, bias: Tensor | None, heads: slice):
        """The extra key that `add_bias_kv` and `add_zero_attn` ask for, visible to every query. k, v: (N, h, S, D)."""
        N, h, _, D = k.shape
        extra = 0
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.view(1, -1, 1, D)[:, heads].expand(N, h, 1, D)], dim=2)
            v = torch.cat([v, self.bias_v.view(1, -1, 1, D)[:, heads].expand(N, h, 1, D)], dim=2)
            extra += 1
        if self.add_zero_attn:
            k = torch.cat([k, k.new_zeros(N, h, 1, D)], dim=2)
            v = torch.cat([v, v.new_zeros(N, h, 1, D)], dim=2)
            extra += 1
        if bias is not None and extra:
            bias = F.pad(bias, (0, extra))
        return k, v, bias

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, need_weights: bool):
        """Scaled dot-product attention over (N, h, tokens, D)."""
        dropout = self.dropout if self.training else 0.0
        if not need_weights:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout), None
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        weights = torch.softmax(scores if bias is None else scores + bias, dim=-1)
        # A query that may see nothing answers 0, as scaled_dot_product_attention does, not NaN.
        weights = F.dropout(torch.nan_to_num(weights), dropout)
        return weights @ v, weights

    def _masked(self, query: Tensor, key: Tensor, value: Tensor, mask: _Mask, gates: Tensor, need_weights: bool):
        """Every head runs; its output is multiplied by its gate. Differentiable in the gates."""
        N, L, E = query.shape
        H, D = self.num_heads, self.head_dim
        if query is key and key is value and self.packed:
            q, k, v = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        else:
            weights, biases = self._projections()
            q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        q, k, v = (t.reshape(N, -1, H, D).transpose(1, 2) for t in (q, k, v))
        k, v, bias = self._extend(k, v, mask.additive(q.dtype), slice(None))
        context, weights = self._attention(q, k, v, bias, need_weights)
        context = context * gates[:, :, None, None].to(context.dtype)
        if weights is not None:
            weights = weights * (gates != 0).to(weights.dtype)[:, :, None, None]
        return F.linear(context.transpose(1, 2).reshape(N, L, E), self.out_proj.weight, self.out_proj.bias), weights

    def _dispatch(self, query: Tensor, key: Tensor, value: Tensor, mask: _Mask, gates: Tensor, need_weights: bool):
        """Head by head, over the inputs that chose it. What was not chosen is neither read nor computed."""
        N, L, E = query.shape
        D = self.head_dim
        itself = query is key and key is value
        (wq, wk, wv), (bq, bk, bv) = self._projections()
        output = query.new_zeros(N, L, E) if self.out_proj.bias is None else self.out_proj.bias.expand(N, L, E).clone()
        all_weights = None
        for h, picked in enumerate((gates != 0).T):
            rows = picked.nonzero()[:, 0]
            if len(rows) == 0:
                continue
            part = slice(h * D, (h + 1) * D)

            if itself:
                joint = torch.cat([wq[part], wk[part], wv[part]])
                joint_bias = torch.cat([b[part] for b in (bq, bk, bv) if b is not None]) if bq is not None else None
                q, k, v = F.linear(query[rows], joint, joint_bias)[:, None].chunk(3, dim=-1)
            else:
                parts = ((query, wq, bq), (key, wk, bk), (value, wv, bv))
                q, k, v = (F.linear(x[rows], w[part], None if b is None else b[part])[:, None] for x, w, b in parts)
            k, v, bias = self._extend(k, v, mask.additive(q.dtype, rows, h), slice(h, h + 1))
            context, weights = self._attention(q, k, v, bias, need_weights)
            context = context[:, 0] * gates[rows, h, None, None].to(context.dtype)
            output.index_add_(0, rows, F.linear(context, self.out_proj.weight[:, part]).to(output.dtype))
            if weights is not None:
                if all_weights is None:
                    all_weights = weights.new_zeros(N, self.num_heads, *weights.shape[2:])
                all_weights[rows, h] = weights[:, 0]
        if need_weights and all_weights is None:
            extra = int(self.bias_k is not None) + int(self.add_zero_attn)
            all_weights = query.new_zeros(N, self.num_heads, L, key.shape[1] + extra)
        return output, all_weights


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
