"""The Hugging Face skin: two models that Auto classes, pipelines and Trainer know."""

import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    initialization,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.trainer_callback import TrainerCallback
from transformers.utils.generic import ModelOutput

from budgetformer import flops, losses
from budgetformer.attention import BudgetedMultiheadAttention, check_budget
from budgetformer.config import MULTI_LABEL
from budgetformer.encoder import Classifier, Encoder, EncoderLayer, EncoderOutput, Twin
from budgetformer.errors import UsageError
from budgetformer.hf_config import BudgetFormerConfig
from budgetformer.router import Router, Routing, margins
from budgetformer.schedule import Schedule

GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, fill every part of [0, 1) evenly


@dataclass
class BudgetFormerOutput(ModelOutput):
    """Output of both models.

    loss: total. logits (batch, labels). gates (batch, layer, head): how often a head ran, 0 or 1, and once more for an
    input that was answered again (`BudgetConfig.cascade`). blocks (batch, layer, block): the same of feed-forward
    blocks; None where they have no budget. wanted (batch, layer): the share of heads that each budget controller asked
    for. head_share (batch,): the share that ran. loss_parts: the loss by name.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    gates: Tensor | None = None
    blocks: Tensor | None = None
    wanted: Tensor | None = None
    head_share: Tensor | None = None
    loss_parts: dict[str, Tensor] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class BudgetFormerPreTrainedModel(PreTrainedModel):
    """Weights, files and gradient checkpointing, shared by both models."""

    config: BudgetFormerConfig
    config_class = BudgetFormerConfig
    base_model_prefix = "budgetformer"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["BudgetFormerLayer"]  # noqa: RUF012
    # The loss is a mean over the batch, so Trainer need not hand over the number of items.
    accepts_loss_kwargs = False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # torch's initialisers are guarded by the loader: what came from a checkpoint stays.
        std = self.config.initializer_range
        if isinstance(module, BudgetedMultiheadAttention):
            nn.init.normal_(module.in_proj_weight, std=std)
            nn.init.zeros_(module.in_proj_bias)
        elif isinstance(module, Encoder):
            nn.init.ones_(module.profile)
            if module.budget.blocks > 1:
                nn.init.ones_(module.block_profile)
        elif isinstance(module, BudgetFormerForSequenceClassification):
            nn.init.zeros_(module.multiplier)
            nn.init.zeros_(module.overspent)
        else:
            super()._init_weights(module)

    def _set_gradient_checkpointing(self, *args: Any, gradient_checkpointing_func: Any = None, **kwargs: Any) -> None:
        # Reentrant checkpointing keeps the gradient of tensors alone: routers, whose decisions a layer hands on beside
        # its states, would learn without the price of the budget, and nothing would tell.
        options = dict(getattr(gradient_checkpointing_func, "keywords", {}))
        if options.get("use_reentrant"):
            warnings.warn(
                "use_reentrant=True would take the budget's gradient from the routers; it is off", stacklevel=3
            )
            gradient_checkpointing_func = partial(checkpoint, **(options | {"use_reentrant": False}))
        if gradient_checkpointing_func is not None:
            kwargs["gradient_checkpointing_func"] = gradient_checkpointing_func
        super()._set_gradient_checkpointing(*args, **kwargs)

    @initialization.guard_torch_init_functions()
    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Routers start with all heads on, also those that a checkpoint of a dense encoder has no weights for."""
        super().initialize_weights()
        # Not from `_init_weights`: the loader passes over modules without tensors of their own, as routers are.
        for module in self.modules():
            if isinstance(module, Router):
                module.reset_parameters()


class BudgetFormerLayer(GradientCheckpointingLayer, EncoderLayer):
    """A layer that transformers can run again instead of keeping what it computed."""


class BudgetFormerModel(BudgetFormerPreTrainedModel):
    """The encoder without a classifier, and without a twin, whose answers are all that is wanted of it."""

    _keys_to_ignore_on_load_unexpected = [r"^twin\."]  # noqa: RUF012

    def __init__(self, config: BudgetFormerConfig):
        super().__init__(config)
        self.encoder = Encoder(config.encoder_config, config.budget_config, BudgetFormerLayer)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The table of word embeddings."""
        return self.encoder.embeddings.word

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the table of word embeddings."""
        self.encoder.embeddings.word = value  # pyright: ignore[reportAttributeAccessIssue]

    def encode(self, input_ids: Tensor, keep: Tensor, token_type_ids: Tensor | None, **options: Any) -> EncoderOutput:
        """The core encoder's output."""
        return self.encoder(input_ids, keep, token_type_ids, **options)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        budget: float | Tensor | None = None,
        gates: Tensor | None = None,
        blocks: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> BudgetFormerOutput | tuple:
        """Hidden states; `budget` as in `Encoder.forward`. inputs_embeds: as in `inputs_of`."""
        input_ids = inputs_of(input_ids, inputs_embeds)
        out = self.encode(
            input_ids,
            keep_of(input_ids, attention_mask),
            token_type_ids,
            budget=budget,
            gates=gates,
            blocks=blocks,
            need_weights=_flag(output_attentions, self.config.output_attentions),
            need_hidden=_flag(output_hidden_states, self.config.output_hidden_states),
        )
        output = BudgetFormerOutput(last_hidden_state=out.hidden, **_routing_fields(out))
        return output if _flag(return_dict, self.config.return_dict) else output.to_tuple()


class BudgetFormerForSequenceClassification(BudgetFormerPreTrainedModel):
    """Encoder, pooling, classifier, and the losses that teach it to hold a budget."""

    multiplier: Tensor
    overspent: Tensor

    def __init__(self, config: BudgetFormerConfig):
        super().__init__(config)
        self.num_labels = int(config.num_labels or 0)
        self.budgetformer = BudgetFormerModel(config)
        self.classifier = self._new_classifier()
        self.twin = None
        if config.budget_config.second == "twin":
            self.twin = Twin(config.encoder_config, self._new_classifier())
        # Saved with the weights, so that a resumed run goes on where it stopped.
        self.register_buffer("multiplier", torch.zeros(()))
        self.register_buffer("overspent", torch.zeros(()))
        # Training progress in [0, 1], set by BudgetSchedule; 1 is exploitation.
        self.progress = 1.0
        # Training steps so far, which say whose turn it is (`BudgetConfig.levels`); set by BudgetSchedule too.
        self.turn = 0
        self.post_init()

    def _new_classifier(self) -> Classifier:
        config = self.config
        return Classifier(
            config.hidden_size,
            self.num_labels,
            pooling=config.pooling,
            hidden=config.head_hidden,
            dropout=config.classifier_dropout,
        )

    def train(self, mode: bool = True) -> "BudgetFormerForSequenceClassification":
        """As of any module; but a twin does not learn, nor do the embeddings that it reads too."""
        if mode and self.twin is not None:
            self.twin.requires_grad_(False)
            self.budgetformer.encoder.embeddings.requires_grad_(False)
        return super().train(mode)

    def keep_twin(self, dense: "BudgetFormerForSequenceClassification") -> None:
        """Where `BudgetConfig.second` says that the twin gives second answers: this is the twin."""
        if self.twin is not None:
            self.twin.copy_from(dense.budgetformer.encoder, dense.classifier)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        teacher_logits: Tensor | None = None,
        sample_weight: Tensor | None = None,
        *,
        budget: float | Tensor | None = None,
        gates: Tensor | None = None,
        blocks: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> BudgetFormerOutput | tuple:
        """Classify a batch.

        labels: (batch,) class numbers, or (batch, labels) of 0 and 1. teacher_logits (batch, labels): the dense
        twin's answer, to be distilled. sample_weight (batch,): as in `losses.task`. budget, gates, blocks: as in
        `Encoder.forward`.
        """
        input_ids = inputs_of(input_ids, inputs_embeds)
        keep = keep_of(input_ids, attention_mask)
        budget_config = self.config.budget_config
        if budget is None and not budget_config.routes:
            every = self._everything(len(input_ids))
            gates = every["gates"] if gates is None else gates
            blocks = every.get("blocks") if blocks is None else blocks
        routed = gates is None and blocks is None and budget is None
        options: dict[str, Any] = {
            "need_weights": _flag(output_attentions, self.config.output_attentions),
            "need_hidden": _flag(output_hidden_states, self.config.output_hidden_states),
        }
        if self.training:
            options["explore"] = Schedule(budget=budget_config).at(self.progress)
        if routed and self.training:
            budget = self._next_level()
            routed = budget is None
        inputs = (input_ids, keep, token_type_ids)
        whole = self._of_twin(budget, keep) if gates is None and blocks is None else None
        again = None
        if whole is not None and len(whole) == len(keep):
            out, logits = self._every_unit(inputs, options)
        else:
            out = self.budgetformer.encode(*inputs, budget=budget, gates=gates, blocks=blocks, **options)
            logits = self.classifier(out.hidden, keep)
            if routed and not self.training and budget_config.cascade > 0:
                sure = margins(logits, multi_label=self.config.problem_type == MULTI_LABEL)
                whole = again = (sure < budget_config.cascade).nonzero()[:, 0]
            if whole is not None and len(whole):
                part = tuple(None if tensor is None else tensor[whole] for tensor in inputs)
                second, later = self._every_unit(part, options)
                out = _merged(out, second, whole, counted=again is None)
                logits = logits.index_copy(0, whole, later)
        parts = None
        if labels is not None:
            parts = self._losses(logits, labels, teacher_logits, sample_weight, out, keep, routed)
        output = BudgetFormerOutput(
            loss=None if parts is None else parts.total,
            logits=logits,
            loss_parts=None if parts is None else parts.detached(),
            **_routing_fields(out, again),
        )
        return output if _flag(return_dict, self.config.return_dict) else output.to_tuple()

    def _next_level(self) -> float | None:
        """The budget that this training step runs at; None is the learned one. By turns, so that each has its share of
        the steps, and all processes are at the same one.
        """
        config = self.config.budget_config
        point, self.turn = self.turn * GOLDEN % 1, self.turn + 1
        levels = () if config.whole == 0 else config.levels if self.twin is not None else (1.0, *config.levels)
        return next((level for i, level in enumerate(levels, start=1) if point < i * config.whole), None)

    def _of_twin(self, budget: float | Tensor | None, keep: Tensor) -> Tensor | None:
        """The places of the inputs whose named budget buys every unit, where those are the twin's to answer."""
        if self.twin is None or budget is None or self.training:
            return None
        named = check_budget(budget, len(keep), keep.device)
        heads, blocks = self.budgetformer.encoder.counts(named, keep.sum(1))
        whole = (heads == self.config.num_heads).all(1)
        if blocks is not None:
            whole &= (blocks == self.config.budget_config.blocks).all(1)
        return whole.nonzero()[:, 0]

    def _every_unit(self, inputs: tuple, options: dict[str, Any]) -> tuple[EncoderOutput, Tensor]:
        """What every unit says: encoding and logits, of the twin where the model has it."""
        input_ids, keep, types = inputs
        every = self._everything(len(input_ids))
        if self.twin is not None:
            return self.twin(self.budgetformer.encoder.embeddings(input_ids, keep, types), keep, **every, **options)
        out = self.budgetformer.encode(*inputs, **every, **options)
        return out, self.classifier(out.hidden, keep)

    def _everything(self, batch: int) -> dict[str, Tensor]:
        """Every unit on, as arguments of `encode`."""
        kinds = {"gates": self.config.num_heads, "blocks": self.config.budget_config.blocks}
        return {
            kind: torch.ones(batch, self.config.num_layers, units, device=self.device)
            for kind, units in kinds.items()
            if kind == "gates" or units > 1
        }

    def _losses(
        self,
        logits: Tensor,
        labels: Tensor,
        told: Tensor | None,
        sample_weight: Tensor | None,
        out: EncoderOutput,
        keep: Tensor,
        routed: bool,
    ) -> losses.LossParts:
        config, problem = self.config, self._problem(labels)
        weights = None if config.class_weights is None else logits.new_tensor(config.class_weights)
        logits = logits.float()
        smoothing = config.label_smoothing if self.training else 0.0
        task = losses.task(
            logits, labels, problem, class_weights=weights, label_smoothing=smoothing, sample_weight=sample_weight
        )
        if not self.training:
            return losses.LossParts(task=task)
        distilled = None
        if told is not None and config.distillation > 0:
            distilled = config.distillation * losses.distillation(
                logits, told.float(), problem, config.distillation_temperature, sample_weight=sample_weight
            )
            task = (1 - config.distillation) * task
        budget_config = config.budget_config
        parts = losses.LossParts(task=task, distillation=distilled)
        if not routed:
            return parts
        explore = Schedule(budget=budget_config).at(self.progress)
        if budget_config.loss == "paper":
            sign = -1.0 if self.progress < budget_config.explore_until else 1.0  # explore: spread out; exploit: decide
            return replace(
                parts,
                budget=losses.paper_hinge(out.routings, budget_config),
                entropy=sign * budget_config.entropy_weight * losses.entropy(out.routings, explore.tau),
            )
        heads, neurons = flops.layer(keep.sum(1), config.encoder_config)
        kinds = [(out.routings, heads)]
        if out.block_routings:
            kinds.append((out.block_routings, neurons))
        each, cost = losses.mean_cost(*kinds)
        # The last step's overspending, not this one's: multiplied by its own gradient it would also punish the variance
        # over inputs. Not a mean of many steps: that lags, and layers swing to all or nothing.
        price = self.multiplier + budget_config.stiffness * self.overspent
        budget = losses.lagrange(cost, explore.target, price)
        if budget_config.spread > 0 and told is not None:
            hard = losses.difficulty(told.float(), labels, problem)
            budget = budget - budget_config.spread * (hard * (each - each.mean())).mean()
        self._learn_budget(cost.detach(), explore.target, out)
        return replace(parts, budget=budget)

    @torch.no_grad()
    def _learn_budget(self, cost: Tensor, target: float, out: EncoderOutput) -> None:
        """Dual ascent on the multiplier, this step's overspending for the next, running means of layers' shares."""
        every = (*out.routings, *out.block_routings)
        shares = torch.stack([routing.chosen.float().mean() for routing in every])
        seen = torch.cat([cost.float()[None], shares])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(seen)
            seen /= torch.distributed.get_world_size()
        self.multiplier += self.config.budget_config.multiplier_rate * (seen[0] - target)
        self.overspent.copy_(seen[0] - target)
        layers, encoder = len(out.routings), self.budgetformer.encoder
        encoder.profile.lerp_(seen[1 : 1 + layers], 0.05)
        if out.block_routings:
            encoder.block_profile.lerp_(seen[1 + layers :], 0.05)

    def _problem(self, labels: Tensor) -> str:
        problem = self.config.problem_type
        if problem is None:
            problem = MULTI_LABEL if labels.is_floating_point() else "single_label_classification"
        return problem


class BudgetSchedule(TrainerCallback):
    """The one thing `transformers.Trainer` needs from us: tells the model how far training has come."""

    def on_step_begin(self, args, state, control, *, model: Any = None, **kwargs):
        """Progress is a function of the step alone, so a resumed run is on the same curve."""
        model.progress = state.global_step / max(1, state.max_steps)
        model.turn = state.global_step

    def on_train_end(self, args, state, control, *, model: Any = None, **kwargs):
        """After training the model is settled."""
        model.progress = 1.0


def inputs_of(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """Token ids (batch, token), or in their place a caller's own word vectors (batch, token, width of the table)."""
    if (input_ids is None) == (inputs_embeds is None):
        raise UsageError("input_ids and inputs_embeds: give one of them, and not both")
    return input_ids if inputs_embeds is None else inputs_embeds  # pyright: ignore[reportReturnType]


def keep_of(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Real tokens as True, (batch, token); a row without any is refused."""
    shape = input_ids.shape[:2]
    if attention_mask is None:
        return torch.ones(shape, dtype=torch.bool, device=input_ids.device)
    if attention_mask.shape != shape:
        raise UsageError(
            f"attention_mask has the shape {tuple(attention_mask.shape)}, input_ids {tuple(shape)}: they must be equal"
        )
    keep = attention_mask.bool()
    empty = (~keep.any(1)).nonzero()[:, 0]
    if len(empty):
        raise UsageError(f"attention_mask: row {int(empty[0])} has no real token; give every input at least one")
    return keep


def _flag(asked: bool | None, default: bool | None) -> bool:
    return bool(default if asked is None else asked)


def _merged(out: EncoderOutput, second: EncoderOutput, rows: Tensor, *, counted: bool) -> EncoderOutput:
    """The encoding with that of `rows` made anew. counted: their routings too, else those stay as of the first time."""

    def put(first: Tensor, later: Tensor) -> Tensor:
        return first.index_copy(0, rows, later.to(first.dtype))

    def merged(first: Any, later: Any) -> Any:
        return None if first is None else tuple(put(a, b) for a, b in zip(first, later, strict=True))

    def routed(first: tuple[Routing, ...], later: tuple[Routing, ...]) -> tuple[Routing, ...]:
        pairs = [(vars(a), vars(b)) for a, b in zip(first, later, strict=True)]
        return tuple(Routing(**{name: put(a[name], b[name]) for name in a}) for a, b in pairs)

    made = replace(
        out,
        hidden=put(out.hidden, second.hidden),
        all_hidden=merged(out.all_hidden, second.all_hidden),
        all_weights=merged(out.all_weights, second.all_weights),
    )
    if not counted:
        return made
    blocks = routed(out.block_routings, second.block_routings)
    return replace(made, routings=routed(out.routings, second.routings), block_routings=blocks)


def _routing_fields(out: EncoderOutput, again: Tensor | None = None) -> dict[str, Any]:
    """`again`: places of the inputs for which every unit ran once more."""

    def counted(routings: tuple[Routing, ...]) -> Tensor:
        ran = torch.stack([routing.chosen for routing in routings], dim=1).float()
        if again is not None:
            ran[again] += 1
        return ran

    gates = counted(out.routings)
    return {
        "gates": gates,
        "blocks": counted(out.block_routings) if out.block_routings else None,
        "wanted": torch.stack([routing.share for routing in out.routings], dim=1).detach(),
        "head_share": gates.mean((1, 2)),
        "hidden_states": out.all_hidden,
        "attentions": out.all_weights,
    }


AutoConfig.register("budgetformer", BudgetFormerConfig, exist_ok=True)
AutoModel.register(BudgetFormerConfig, BudgetFormerModel, exist_ok=True)
AutoModelForSequenceClassification.register(BudgetFormerConfig, BudgetFormerForSequenceClassification, exist_ok=True)
