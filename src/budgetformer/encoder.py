"""The encoder: embeddings, layers of budgeted attention and feed-forward, pooling, classifier. Pure PyTorch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from budgetformer import flops
from budgetformer.attention import BudgetedMultiheadAttention, check_budget
from budgetformer.config import BudgetConfig, EncoderConfig
from budgetformer.errors import UsageError
from budgetformer.router import Router, Routing, allocate, forced, pool, shares_of
from budgetformer.schedule import Exploration, Schedule
from budgetformer.skipping import by_unit, lowered, may_skip, of_units, plan

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


@dataclass(frozen=True)
class EncoderOutput:
    """hidden: (batch, token, width). routings: of the heads, one per layer; block_routings: of the feed-forward blocks,
    one per layer, or none where they have no budget. all_hidden, all_weights: per layer, when asked for.
    """

    hidden: Float[Tensor, "batch token width"]
    routings: tuple[Routing, ...]
    block_routings: tuple[Routing, ...] = ()
    all_hidden: tuple[Tensor, ...] | None = None
    all_weights: tuple[Tensor, ...] | None = None


class Embeddings(nn.Module):
    """Words, learned absolute positions and token types, normed; projected where ELECTRA's are narrower."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        width = config.embedding_size or config.hidden_size
        self.config = config
        self.word = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        self.position = nn.Embedding(config.max_positions + config.position_offset, width)
        self.token_type = nn.Embedding(config.token_types, width) if config.token_types else None
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.projection = nn.Linear(width, config.hidden_size) if width != config.hidden_size else None

    def forward(
        self,
        input_ids: Int[Tensor, "batch token"] | Float[Tensor, "batch token narrow"],
        keep: Bool[Tensor, "batch token"],
        token_types: Int[Tensor, "batch token"] | None = None,
    ) -> Float[Tensor, "batch token width"]:
        """Positions count real tokens only, so padding on either side changes nothing. Word vectors of the caller's own
        may take the place of ids.
        """
        if input_ids.shape[1] > self.config.max_positions and int(keep.sum(1).max()) > self.config.max_positions:
            raise UsageError(
                f"an input has {int(keep.sum(1).max())} tokens, the model has {self.config.max_positions} positions: "
                f"truncate to {self.config.max_positions}"
            )
        positions = (keep.long().cumsum(1) - 1).clamp_min(0) + self.config.position_offset
        words = input_ids if input_ids.is_floating_point() else self.word(input_ids)
        x = words + self.position(positions)
        if self.token_type is not None:
            types = torch.zeros_like(positions) if token_types is None else token_types
            x = x + self.token_type(types)
        x = self.dropout(self.norm(x))
        return x if self.projection is None else self.projection(x)


class FeedForward(nn.Module):
    """`sum_j g_j(x) act(x W1_j + b1_j) W2_j + b2`: a sum over blocks of neurons, as attention is a sum over heads.

    With a budget of blocks a router chooses each input's; block j is neurons `j * size` to `(j + 1) * size`.
    """

    def __init__(self, config: EncoderConfig, budget: BudgetConfig | None = None):
        super().__init__()
        budget = budget or BudgetConfig()
        budget.check_blocks(config.intermediate_size)
        self.blocks = budget.blocks
        self.router = Router(config.hidden_size, self.blocks, budget) if self.blocks > 1 else None
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.activation]

    @torch.no_grad()
    def cut(self, kept: Sequence[int]) -> None:
        """Remove all blocks but `kept` for good; routings still speak of all, those that are gone never run."""
        if self.router is None or kept[-1] >= self.blocks:
            raise UsageError(f"kept_blocks names block {kept[-1]}: this layer has {self.blocks} with a budget")
        size = self.up.out_features // self.blocks
        rows = torch.tensor([block * size + i for block in kept for i in range(size)])
        self.up.weight, self.up.bias = nn.Parameter(self.up.weight[rows]), nn.Parameter(self.up.bias[rows])
        self.down.weight = nn.Parameter(self.down.weight[:, rows])
        self.up.out_features = self.down.in_features = len(rows)
        self.router.kept = list(kept)

    def forward(
        self,
        x: Float[Tensor, "batch token width"],
        keep: Bool[Tensor, "batch token"] | None = None,
        *,
        explore: Exploration | None = None,
        count: Tensor | None = None,
        gates: Tensor | None = None,
    ) -> tuple[Float[Tensor, "batch token width"], Routing | None]:
        """Same shape out, and the routing of the blocks where they have a budget. count, gates: as for heads."""
        if gates is not None:
            routing = forced(gates.to(x.dtype) if self.router is None else self.router.left(gates.to(x.dtype)))
        elif self.router is not None and keep is not None and explore is not None:
            routing = self.router(x, keep, explore=explore, count=count)
        else:
            return self.down(self.activation(self.up(x))), None
        left = routing.gates
        if self.router is not None and self.router.kept is not None:
            left = left[:, self.router.kept]
        if may_skip(left, explore if gates is None else None):
            return self._skipping(x, left), routing
        return self.down(self._gated(self.up(x), left)), routing

    def _gated(self, inner: Tensor, gates: Tensor) -> Tensor:
        """Blocks of neurons, activated and multiplied by their gates (batch, block): the masked path."""
        inner = self.activation(inner).unflatten(-1, (gates.shape[1], -1))
        return (inner * gates[:, None, :, None].to(inner.dtype)).flatten(-2)

    def _skipping(self, x: Tensor, gates: Tensor) -> Tensor:
        """What was not chosen is neither read nor computed; see `skipping`."""
        blocks, todo = gates.shape[1], plan(gates)
        if len(todo.common) == blocks:
            return self.down(self._gated(self.up(x), gates))
        (low,) = lowered(x)
        weights = [(self.up.weight, 0), (self.up.bias, 0), (self.down.weight, 1)]
        gates = gates * (gates != 0)
        output = self.down.bias.expand(*x.shape[:2], -1)
        if todo.common:
            up, bias, down = lowered(*(of_units(t, todo.common, blocks, dim) for t, dim in weights))
            output = output + F.linear(self._gated(F.linear(low, up, bias), gates[:, todo.common]), down)
        if todo.in_pairs:
            whole = zip(lowered(*(t for t, _ in weights)), weights, strict=True)
            up, bias, down = (t.unflatten(dim, (blocks, -1)).unbind(dim) for t, (_, dim) in whole)
            inner = self.activation(by_unit(low.index_select(0, todo.row), todo.counts, up, bias))
            inner = inner * gates[todo.row, todo.unit][:, None, None].to(inner.dtype)
            output = output.index_add(0, todo.row, by_unit(inner, todo.counts, down).to(output.dtype))
        return output.to(low.dtype)


class EncoderLayer(nn.Module):
    """Attention and feed-forward, each with a residual and a norm after (post, BERT) or before (pre) it."""

    def __init__(self, config: EncoderConfig, budget: BudgetConfig):
        super().__init__()
        self.pre = config.norm == "pre"
        self.attention = BudgetedMultiheadAttention(
            config.hidden_size,
            config.num_heads,
            dropout=config.attention_dropout,
            batch_first=True,
            budget_config=budget,
        )
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.feed_forward = FeedForward(config, budget)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Float[Tensor, "batch token width"],
        keep: Bool[Tensor, "batch token"],
        *,
        explore: Exploration,
        count: Tensor | None = None,
        gates: Tensor | None = None,
        block_count: Tensor | None = None,
        blocks: Tensor | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Routing, Routing | None, Tensor | None]:
        """Output, the routing of the heads, that of the blocks, and the attention's weights when asked for."""
        inner = self.attention_norm(x) if self.pre else x
        done = self.attention.attend(
            inner, keep=keep, need_weights=need_weights, count=count, gates=gates, explore=explore
        )
        x = x + self.dropout(done.output)
        x = x if self.pre else self.attention_norm(x)
        inner = self.feed_forward_norm(x) if self.pre else x
        ran, block_routing = self.feed_forward(inner, keep, explore=explore, count=block_count, gates=blocks)
        x = x + self.dropout(ran)
        return x if self.pre else self.feed_forward_norm(x), done.routing, block_routing, done.weights


class Encoder(nn.Module):
    """Token ids to hidden states, with a routing per layer."""

    profile: Tensor
    block_profile: Tensor

    def __init__(
        self,
        config: EncoderConfig,
        budget: BudgetConfig | None = None,
        layer_class: type[EncoderLayer] = EncoderLayer,
        *,
        embeds: bool = True,
    ):
        """embeds: False for layers that read what another encoder has embedded."""
        super().__init__()
        self.config = config
        self.budget = budget or BudgetConfig()
        if embeds:
            self.embeddings = Embeddings(config)
        layers = [layer_class(config, self.budget) for _ in range(config.num_layers)]
        for i, layer in enumerate(layers):
            if config.kept_heads is not None:
                layer.attention.cut(config.kept_heads[i])
            if config.kept_blocks is not None:
                layer.feed_forward.cut(config.kept_blocks[i])
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps) if config.norm == "pre" else None
        # Each layer's mean share in training: how a budget named at run time is spread over the layers.
        self.register_buffer("profile", torch.ones(config.num_layers))
        if self.budget.blocks > 1:
            self.register_buffer("block_profile", torch.ones(config.num_layers))

    def forward(
        self,
        input_ids: Int[Tensor, "batch token"] | Float[Tensor, "batch token narrow"],
        keep: Bool[Tensor, "batch token"] | None = None,
        token_types: Int[Tensor, "batch token"] | None = None,
        *,
        explore: Exploration | None = None,
        budget: float | Tensor | None = None,
        gates: Tensor | None = None,
        blocks: Tensor | None = None,
        need_weights: bool = False,
        need_hidden: bool = False,
    ) -> EncoderOutput:
        """Encode a batch.

        budget: None spends what was learned; a share, or one per input, spends exactly that (over all layers
        together, and over the feed-forward blocks where they have a budget). gates (batch, layer, head) and blocks
        (batch, layer, block): the units themselves. An encoder that does not embed is given what is embedded already
        in place of ids.
        """
        keep = input_ids.new_ones(input_ids.shape[:2], dtype=torch.bool) if keep is None else keep
        explore = explore or Schedule(budget=self.budget).settled
        count = block_count = None
        if budget is not None:
            count, block_count = self.counts(check_budget(budget, len(input_ids), input_ids.device), keep.sum(1))
        x = self.embeddings(input_ids, keep, token_types) if hasattr(self, "embeddings") else input_ids
        routings, block_routings, hidden, weights = [], [], [x], []
        for i, layer in enumerate(self.layers):
            x, routing, block_routing, layer_weights = layer(
                x,
                keep,
                explore=explore,
                count=None if count is None else count[:, i],
                gates=None if gates is None else gates[:, i],
                block_count=None if block_count is None else block_count[:, i],
                blocks=None if blocks is None else blocks[:, i],
                need_weights=need_weights,
            )
            routings.append(routing)
            if block_routing is not None:
                block_routings.append(block_routing)
            hidden.append(x)
            weights.append(layer_weights)
        x = x if self.norm is None else self.norm(x)
        return EncoderOutput(
            x,
            tuple(routings),
            tuple(block_routings),
            tuple(hidden) if need_hidden else None,
            tuple(weights) if need_weights else None,
        )

    def counts(self, budget: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Heads and blocks per input and layer, (batch, layer) each, that a named budget (batch,) buys."""
        heads, lowest, blocks = self.config.num_heads, self.budget.min_units, self.budget.blocks
        if blocks == 1:
            return allocate(budget, self.profile, heads, lowest), None
        learned = torch.stack([self.profile.mean(), self.block_profile.mean()])
        share = shares_of(budget, learned, torch.stack(flops.layer(tokens, self.config), dim=1))
        return (
            allocate(share[:, 0], self.profile, heads, lowest),
            allocate(share[:, 1], self.block_profile, blocks, lowest),
        )


class Classifier(nn.Module):
    """Pooled hidden state to logits. `hidden` adds the dense layer that fine-tuned BERT-family heads have."""

    def __init__(
        self, width: int, labels: int, *, pooling: str = "mean", hidden: str | None = None, dropout: float = 0.1
    ):
        super().__init__()
        self.pooling = pooling
        self.dense = nn.Linear(width, width) if hidden else None
        self.activation = ACTIVATIONS[hidden] if hidden else None
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(width, labels)

    def pool(self, x: Float[Tensor, "batch token width"], keep: Bool[Tensor, "batch token"]) -> Tensor:
        """The mean over real tokens, or the first real token: (batch, width)."""
        return pool(x, keep) if self.pooling == "mean" else pool(x, keep, "mean+first")[:, x.shape[-1] :]

    def forward(self, x: Float[Tensor, "batch token width"], keep: Bool[Tensor, "batch token"]) -> Tensor:
        """Logits (batch, labels)."""
        pooled = self.pool(x, keep)
        if self.dense is not None and self.activation is not None:
            pooled = self.activation(self.dense(self.dropout(pooled)))
        return self.out(self.dropout(pooled))


class Twin(nn.Module):
    """The dense twin of a budgeted model: its layers and classifier, on the budgeted model's own embeddings."""

    def __init__(self, config: EncoderConfig, classifier: Classifier):
        super().__init__()
        whole = replace(config, kept_heads=None, kept_blocks=None)  # what the budgeted model lost, the twin has
        self.encoder = Encoder(whole, embeds=False)
        self.classifier = classifier

    def forward(
        self, x: Float[Tensor, "batch token width"], keep: Bool[Tensor, "batch token"], **options: Any
    ) -> tuple[EncoderOutput, Float[Tensor, "batch labels"]]:
        """What it says of embedded tokens; `options` as for `Encoder.forward`, which name every unit."""
        out = self.encoder(x, keep, **options)
        return out, self.classifier(out.hidden, keep)

    @torch.no_grad()
    def copy_from(self, encoder: Encoder, classifier: Classifier) -> None:
        """Take over the weights of a dense model of the same sizes; its routers, which never ran, are left behind."""
        for mine, theirs in ((self.encoder, encoder), (self.classifier, classifier)):
            given = theirs.state_dict()
            for name, tensor in mine.state_dict().items():
                if ".router." not in name:
                    tensor.copy_(given[name])
