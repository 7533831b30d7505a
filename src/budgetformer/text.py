"""Texts to token ids to batches: each input keeps its own length until it meets its batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from budgetformer.tokens import tokenise


@dataclass
class Encoded(Dataset):
    """Tokenised inputs, one mapping each: input_ids, token_type_ids for pairs, labels, teacher_logits and
    sample_weight when known.

    truncated: how many inputs were longer than the limit and were cut.
    """

    items: list[dict[str, Any]] = field(default_factory=list)
    truncated: int = 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items[index]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each input."""
        return [len(item["input_ids"]) for item in self.items]

    def with_column(self, name: str, values: Sequence[Any] | Tensor) -> "Encoded":
        """A copy with one more entry per input."""
        return Encoded([{**item, name: value} for item, value in zip(self.items, values, strict=True)], self.truncated)


def encode(
    tokenizer: Any,
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    labels: Sequence[Any] | None = None,
    *,
    max_length: int,
) -> Encoded:
    """Tokenise texts (or pairs of texts) and cut what is longer than `max_length` tokens."""
    tokens = tokenise(tokenizer, texts, pairs, max_length=max_length)
    items: list[dict[str, Any]] = [one.item() for one in tokens]
    if labels is not None:
        items = [{**item, "labels": label} for item, label in zip(items, labels, strict=True)]
    return Encoded(items, sum(one.truncated for one in tokens))


def collator(pad_token_id: int) -> Callable[[list[dict[str, Any]]], dict[str, Tensor]]:
    """Pads a batch on the right to its longest input and stacks the rest."""
    padding = {"input_ids": pad_token_id, "token_type_ids": 0}

    def collate(items: list[dict[str, Any]]) -> dict[str, Tensor]:
        longest = max(len(item["input_ids"]) for item in items)
        batch: dict[str, Tensor] = {}
        for name, fill in padding.items():
            if name in items[0]:
                batch[name] = torch.tensor([[*item[name], *[fill] * (longest - len(item[name]))] for item in items])
        lengths = torch.tensor([len(item["input_ids"]) for item in items])
        batch["attention_mask"] = (torch.arange(longest)[None] < lengths[:, None]).long()
        if "labels" in items[0]:
            several = isinstance(items[0]["labels"], list)
            batch["labels"] = torch.tensor(
                [item["labels"] for item in items], dtype=torch.float32 if several else torch.long
            )
        if "teacher_logits" in items[0]:
            batch["teacher_logits"] = torch.stack([item["teacher_logits"] for item in items])
        if "sample_weight" in items[0]:
            batch["sample_weight"] = torch.tensor([item["sample_weight"] for item in items], dtype=torch.float32)
        return batch

    return collate


def length_batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Positions of the inputs in batches of similar length, longest first (memory trouble then shows at once)."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
