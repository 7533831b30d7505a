"""What is classified: real words at stated lengths, and the batches that an engine which pads makes of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

WINDOW = 1024  # texts that are sorted by length together
BATCH = 32  # texts of a stream that are padded together
STREAM_MEAN, STREAM_SIGMA, STREAM_MAX = 60, 0.71, 512  # log-normal lengths, in tokens

SHAPES = ("1x32", "1x128", "8x128", "32x32", "4x512", "stream")


@dataclass(frozen=True)
class Padded:
    """A batch with padding. ids (batch, token) int64, 0 where there is no token; lengths and rows (batch,).

    rows: the place of each input among all. full: no input is padded.
    """

    ids: np.ndarray
    lengths: np.ndarray
    rows: np.ndarray

    @property
    def full(self) -> bool:
        return bool((self.lengths == self.ids.shape[1]).all())

    @property
    def mask(self) -> np.ndarray:
        """(batch, token) int64: 1 for a token."""
        return (np.arange(self.ids.shape[1]) < self.lengths[:, None]).astype(np.int64)


@dataclass(frozen=True)
class Inputs:
    """Inputs as ids, in the order they come, and as the texts they came from."""

    name: str
    ids: list[np.ndarray]
    texts: list[str]
    batch_size: int

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each input, (inputs,)."""
        return np.array([len(one) for one in self.ids])

    @property
    def tokens(self) -> int:
        """Tokens of all inputs."""
        return int(self.lengths.sum())

    def padded(self) -> list[Padded]:
        """Batches of similar length, the longest first."""
        return pad_sorted(self.ids, self.batch_size)


def pad_sorted(ids: Sequence[np.ndarray] | Sequence[Sequence[int]], batch_size: int) -> list[Padded]:
    """Sort by length, within windows, and pad each batch to its longest input."""
    batches = []
    for start in range(0, len(ids), WINDOW):
        window = range(start, min(start + WINDOW, len(ids)))
        order = sorted(window, key=lambda row: (-len(ids[row]), row))
        for first in range(0, len(order), batch_size):
            rows = order[first : first + batch_size]
            lengths = np.array([len(ids[row]) for row in rows])
            made = np.zeros((len(rows), int(lengths.max())), np.int64)
            for place, row in enumerate(rows):
                made[place, : lengths[place]] = ids[row]
            batches.append(Padded(made, lengths, np.array(rows)))
    return batches


def make_inputs(shape: str, tokenizer: Tokenizer, texts: Sequence[str], *, stream: int = 256) -> Inputs:
    """Inputs of a shape: "8x128" is 8 of 128 tokens; "stream" is `stream` inputs of log-normal length.

    A stream stands for a window: 1,024 lengths are drawn, sorted and cut into batches as an engine that pads would do
    it, and those batches are kept whose mean length and padding are closest to the window's.
    """
    if shape == "stream":
        lengths, batch_size = stream_lengths(stream), BATCH
    else:
        batch, length = (int(word) for word in shape.split("x"))
        lengths, batch_size = np.full(batch, length), batch
    words = _words(texts)
    made = [_text_of(int(length), words, tokenizer) for length in lengths]
    return Inputs(shape, [ids for ids, _ in made], [text for _, text in made], batch_size)


def stream_lengths(count: int) -> np.ndarray:
    """Lengths of `count` inputs of a stream, a multiple of the batch, in random order."""
    random = np.random.default_rng(60)
    mu = np.log(STREAM_MEAN) - STREAM_SIGMA**2 / 2
    drawn = np.clip(np.rint(random.lognormal(mu, STREAM_SIGMA, WINDOW)), 4, STREAM_MAX).astype(int)
    batches = np.sort(drawn).reshape(-1, BATCH)
    number = min(max(1, count // BATCH), len(batches))
    tries = [random.choice(len(batches), number, replace=False) for _ in range(2000)]
    kept = min(tries, key=lambda rows: _unlike(batches[rows], batches))
    return random.permutation(batches[kept].reshape(-1))


def overhead(batches: np.ndarray) -> float:
    """Tokens with padding over tokens without, of lengths (batch, input)."""
    return float(batches.max(1).sum() * batches.shape[1] / batches.sum())


def _unlike(some: np.ndarray, all_of_them: np.ndarray) -> float:
    mean, padding = some.mean() / all_of_them.mean(), overhead(some) / overhead(all_of_them)
    return abs(float(np.log(mean))) + abs(float(np.log(padding)))


def _words(texts: Sequence[str]) -> Iterator[str]:
    while True:
        for text in texts:
            yield from text.split()


def _text_of(length: int, words: Iterator[str], tokenizer: Tokenizer) -> tuple[np.ndarray, str]:
    """Words until they fill `length` tokens; ids cut to exactly so many, the last one kept (the end of a sequence)."""
    chosen: list[str] = [next(words) for _ in range(max(1, (length - 2) * 2 // 3))]
    while True:
        ids = tokenizer.encode(" ".join(chosen)).ids
        if len(ids) >= length:
            break
        chosen += [next(words) for _ in range(max(1, (length - len(ids)) * 2 // 3))]
    return np.array([*ids[: length - 1], ids[-1]]), " ".join(chosen)
