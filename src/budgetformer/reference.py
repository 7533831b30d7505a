"""The specification: budgeted attention as loops over inputs and heads, so plain that it is obviously right.

Slow on purpose, with no optimisation in it. Every fast path is compared with this file in the tests.
"""

import math

import torch
from torch import Tensor


def attention(
    query: Tensor,  # (batch, query token, width)
    key: Tensor,  # (batch, key token, key width)
    value: Tensor,  # (batch, key token, value width)
    *,
    gates: Tensor,  # (batch, head); 0 is off
    weight_q: Tensor,  # (width, width); rows h * head_size ... are head h's
    weight_k: Tensor,
    weight_v: Tensor,
    weight_o: Tensor,  # (width, width); columns h * head_size ... are head h's
    bias_q: Tensor | None = None,
    bias_k: Tensor | None = None,
    bias_v: Tensor | None = None,
    bias_o: Tensor | None = None,
    keep: Tensor | None = None,  # (batch, key token), True = real
    bias: Tensor | None = None,  # (batch, head, query token, key token), added to the scores
) -> Tensor:
    """`out(x) = sum_h g_h(x) * head_h(x) W_O^h + b_O`, one input, one head at a time: (batch, query token, width)."""
    heads = gates.shape[1]
    size = weight_q.shape[0] // heads
    outputs = []
    for i in range(len(query)):
        out = torch.zeros(query.shape[1], weight_o.shape[0], dtype=query.dtype)
        for h in range(heads):
            if gates[i, h] == 0:
                continue
            rows = slice(h * size, (h + 1) * size)
            q = query[i] @ weight_q[rows].T + (0 if bias_q is None else bias_q[rows])
            k = key[i] @ weight_k[rows].T + (0 if bias_k is None else bias_k[rows])
            v = value[i] @ weight_v[rows].T + (0 if bias_v is None else bias_v[rows])
            scores = q @ k.T / math.sqrt(size)
            if bias is not None:
                scores = scores + bias[i, h]
            if keep is not None:
                scores = scores.masked_fill(~keep[i], -math.inf)
            head = torch.softmax(scores, dim=-1) @ v
            out = out + gates[i, h] * (head @ weight_o[:, rows].T)
        outputs.append(out if bias_o is None else out + bias_o)
    return torch.stack(outputs)


def feed_forward(
    x: Tensor,  # (batch, token, width)
    *,
    gates: Tensor,  # (batch, block); 0 is off
    weight_in: Tensor,  # (inner, width); block j owns rows j * inner / blocks ...
    bias_in: Tensor,
    weight_out: Tensor,  # (width, inner)
    bias_out: Tensor,
    activation,
) -> Tensor:
    """`FFN(x) = sum_j g_j(x) act(x W1_j + b1_j) W2_j + b2`, one input and one block of neurons at a time."""
    blocks = gates.shape[1]
    size = len(weight_in) // blocks
    outputs = []
    for i in range(len(x)):
        out = torch.zeros_like(x[i])
        for j in range(blocks):
            if gates[i, j] != 0:
                rows = slice(j * size, (j + 1) * size)
                inner = activation(x[i] @ weight_in[rows].T + bias_in[rows])
                out = out + gates[i, j] * (inner @ weight_out[:, rows].T)
        outputs.append(out + bias_out)
    return torch.stack(outputs)
