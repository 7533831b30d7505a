"""The configuration of our models in transformers: what `config.json` holds, checked as it is read."""

from dataclasses import asdict
from typing import Any

from transformers import PreTrainedConfig

from budgetformer.config import BudgetConfig, EncoderConfig, known_fields
from budgetformer.errors import ModelFolderError, UsageError


class BudgetFormerConfig(PreTrainedConfig):
    """Sizes (fields of `EncoderConfig`), the budget (a `BudgetConfig` as a mapping), the classifier and its losses."""

    model_type = "budgetformer"
    __no_type_check__ = True  # a run-time checker knows the fields, but not the words that the base class takes
    keys_to_ignore_at_inference = [  # noqa: RUF012
        *("gates", "blocks", "wanted", "head_share", "loss_parts", "hidden_states", "attentions")
    ]
    attribute_map = {  # noqa: RUF012
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "max_position_embeddings": "max_positions",
        "type_vocab_size": "token_types",
        "hidden_act": "activation",
        "hidden_dropout_prob": "dropout",
        "layer_norm_eps": "norm_eps",
    }

    vocab_size: int = 30522
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    intermediate_size: int = 3072
    max_positions: int = 512
    position_offset: int = 0
    token_types: int = 2
    embedding_size: int | None = None
    pad_token_id: int | None = 0
    activation: str = "gelu"
    norm: str = "post"
    norm_eps: float = 1e-12
    dropout: float = 0.1
    attention_dropout: float = 0.1
    kept_heads: list | None = None  # of each layer, where others were cut for good
    kept_blocks: list | None = None
    initializer_range: float = 0.02
    budget: dict | None = None
    # classifier
    pooling: str = "mean"
    head_hidden: str | None = None  # activation of a dense layer before the logits; None: no such layer
    classifier_dropout: float = 0.1
    # losses
    class_weights: list | None = None
    label_smoothing: float = 0.0
    distillation: float = 0.0  # weight of the teacher's answer; the labels get the rest
    distillation_temperature: float = 2.0

    def __post_init__(self, **kwargs: Any):
        for key, value in kwargs.items():
            if key.lstrip("_").startswith(("attn_implementation", "experts_implementation")):
                refuse_implementation(key, value)
        # Valid or not constructed: all raise UsageError with name, value, rule.
        self.budget_config.check_blocks(self.encoder_config.intermediate_size)
        if self.pooling not in ("mean", "first"):
            raise UsageError(f"pooling={self.pooling!r}: choose mean or first")
        self.budget = asdict(self.budget_config)
        super().__post_init__(**kwargs)

    @property
    def encoder_config(self) -> EncoderConfig:
        """The sizes, as the core knows them."""
        return EncoderConfig(**known_fields(EncoderConfig, {**vars(self), "pad_token_id": self.pad_token_id or 0}))

    @property
    def budget_config(self) -> BudgetConfig:
        """The budget, as the core knows it."""
        return BudgetConfig(**(self.budget or {}))


def refuse_implementation(key: str, value: Any) -> None:
    """An attention implementation named in a config may point at code on a hub: only torch's own are let through."""
    if value not in (None, "eager", "sdpa"):
        raise ModelFolderError(f"config.json: {key}={value!r} is refused: only eager and sdpa may be named there")
