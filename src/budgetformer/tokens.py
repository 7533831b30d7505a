"""Texts to token ids, cut to a length.

A tokenizer's own truncation keeps every piece it cuts off, and for two long texts every combination of pieces: a pair
of texts of 100 KB each takes 10 GB. Here the tokens are cut by us, with the same result and nothing kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from budgetformer.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """One input: its ids, token types (as long) where the tokenizer has them, and whether something was cut off."""

    ids: list[int]
    types: list[int] | None
    truncated: bool

    def __len__(self) -> int:
        return len(self.ids)

    def item(self) -> dict[str, list[int]]:
        """The input as a collator takes it."""
        return {"input_ids": self.ids, **({} if self.types is None else {"token_type_ids": self.types})}


def tokenise(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None = None, *, max_length: int
) -> list[Tokens]:
    """The tokens of each text, or of each pair of texts, with special tokens, at most `max_length` of them.

    Of a pair the longer text is cut first, as `truncation="longest_first"` does.

    Raises:
        UsageError: `max_length` leaves no room beside the special tokens.
        TypeError, ValueError: from the tokenizer, when a text is no valid Unicode.
    """
    special = tokenizer.num_special_tokens_to_add(pair=pairs is not None)
    if max_length <= special:
        raise UsageError(
            f"max_length is {max_length}; {special} special tokens leave no room for text, give at least {special + 1}"
        )
    if not texts:
        return []
    encoded = tokenizer(list(texts), None if pairs is None else list(pairs), verbose=False)
    with_types = "token_type_ids" in tokenizer.model_input_names
    return [_cut(encoding, max_length, tokenizer.truncation_side, with_types) for encoding in encoded.encodings]


def longest_input(config: Any, tokenizer: Any, asked: int | None = None) -> int:
    """How many tokens of an input are read: what was asked for, else what tokenizer and model were made for.

    Raises:
        UsageError: more was asked for than the model has positions.
    """
    if asked is not None and asked > config.max_positions:
        raise UsageError(
            f"max_length is {asked}; the model has {config.max_positions} positions, give no more than that"
        )
    return asked if asked is not None else min(config.max_positions, tokenizer.model_max_length)


def _cut(encoding: Any, max_length: int, side: str, with_types: bool) -> Tokens:
    ids, types = encoding.ids, encoding.type_ids if with_types else None
    if len(ids) <= max_length:
        return Tokens(ids=ids, types=types, truncated=False)
    # 0 and 1 for the tokens of the first and the second text, None for special tokens.
    owners = encoding.sequence_ids
    first, second = owners.count(0), owners.count(1)
    keep = _longest_first(first, second, max_length - (len(ids) - first - second))
    skip = (first - keep[0], second - keep[1]) if side == "left" else (0, 0)
    seen, kept = [0, 0], []
    for place, owner in enumerate(owners):
        if owner is not None:
            seen[owner] += 1
            if not skip[owner] < seen[owner] <= skip[owner] + keep[owner]:
                continue
        kept.append(place)
    kept_types = None if types is None else [types[place] for place in kept]
    return Tokens(ids=[ids[place] for place in kept], types=kept_types, truncated=True)


def _longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens each text keeps: the longer one is cut until they are equal, then both."""
    short, long = min(first, second), max(first, second)
    if short + long > room:
        short, long = (short, room - short) if room - short >= short else (room // 2, room - room // 2)
    return (short, long) if first <= second else (long, short)
