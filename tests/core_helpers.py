"""What the tests of the core share: small honest models, poisoned heads, counted operations."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from budgetformer.attention import BudgetedMultiheadAttention
from budgetformer.config import BudgetConfig, EncoderConfig
from budgetformer.router import Router

LAYERS, HEADS, HEAD_SIZE, INNER, VOCABULARY, POSITIONS = 3, 7, 5, 53, 97, 31
WORDS = ("bank", "card", "lost", "money", "transfer", "where", "is", "my", "the", "blue", "never", "came", "why")


def encoder_config(**changes: Any) -> EncoderConfig:
    """Small and prime; no dropout."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HEADS * HEAD_SIZE,
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "intermediate_size": INNER,
        "max_positions": POSITIONS,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return EncoderConfig(**{**sizes, **changes})


def shake(module: nn.Module, scale: float = 0.3) -> nn.Module:
    """Noise on every parameter, so that no bias is 0, no norm is 1 and no two heads are alike."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)
    return module


def stir(module: nn.Module, bias: float = 0.0) -> nn.Module:
    """Routers that differ from input to input: the start, all heads on, would hide most faults."""
    with torch.no_grad():
        for router in [m for m in module.modules() if isinstance(m, Router)]:
            nn.init.normal_(router.scorer.weight)
            nn.init.normal_(router.controller[2].weight, std=1.5)  # pyright: ignore[reportArgumentType]
            nn.init.constant_(router.controller[2].bias, bias)  # pyright: ignore[reportArgumentType]
    return module


def poison(attention: BudgetedMultiheadAttention, head: int) -> None:
    """NaN in every weight of one head: its rows of W_Q, W_K, W_V and its columns of W_O."""
    width, size = attention.embed_dim, attention.head_dim
    with torch.no_grad():
        for part in range(3):
            rows = slice(part * width + head * size, part * width + (head + 1) * size)
            attention.in_proj_weight[rows] = float("nan")
            if attention.in_proj_bias is not None:
                attention.in_proj_bias[rows] = float("nan")
        attention.out_proj.weight[:, head * size : (head + 1) * size] = float("nan")


def flop_counter() -> FlopCounterMode:
    """torch's own counter of floating-point operations."""

    def attention(query, key, value, *args, out_shape=None, **kwargs) -> int:
        return sdpa_flop_count(query, key, value)

    # torch counts the attention kernels of a GPU by itself, but not the one of a CPU.
    extra = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention}
    return FlopCounterMode(display=False, custom_mapping=extra)


def counted(call: Callable[[], Any]) -> int:
    """Floating-point operations that torch saw in a call."""
    with torch.no_grad(), flop_counter() as counter:
        call()
    return int(counter.get_total_flops())


def ids_and_keep(lengths: list[int], tokens: int, side: str = "right") -> tuple[Tensor, Tensor]:
    """Random token ids (batch, tokens) with 0 for padding, and which are real."""
    ids = torch.zeros(len(lengths), tokens, dtype=torch.long)
    keep = torch.zeros(len(lengths), tokens, dtype=torch.bool)
    for row, length in enumerate(lengths):
        place = slice(0, length) if side == "right" else slice(tokens - length, tokens)
        ids[row, place] = torch.randint(1, VOCABULARY, (length,))
        keep[row, place] = True
    return ids, keep


def move_padding(ids: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """The same inputs with the padding on the left instead of on the right."""
    shift = (~keep).sum(1)
    rows = [torch.roll(row, int(s)) for row, s in zip(ids, shift, strict=True)]
    kept = [torch.roll(row, int(s)) for row, s in zip(keep, shift, strict=True)]
    return torch.stack(rows), torch.stack(kept)


def save_tokenizer(folder: Path, words: tuple[str, ...] = WORDS) -> None:
    """A word-level tokenizer as transformers keeps it."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", *words))}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    raw.normalizer = normalizers.Lowercase()
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(
        tokenizer_object=raw,
        model_max_length=POSITIONS,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **special,
    ).save_pretrained(folder)


def hf_config(budget: BudgetConfig | None = None, **changes: Any) -> Any:
    """A small configuration of the Hugging Face skin."""
    from dataclasses import asdict

    from budgetformer.hf import BudgetFormerConfig

    settings = {**asdict(encoder_config()), "classifier_dropout": 0.0, "num_labels": 5}
    return BudgetFormerConfig(**{**settings, "budget": asdict(budget or BudgetConfig()), **changes})
