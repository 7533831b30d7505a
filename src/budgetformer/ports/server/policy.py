"""Which budget a text is computed with: as learned, fixed, or less of it the more texts wait."""

from dataclasses import dataclass

from budgetformer.errors import UsageError
from budgetformer.settings.rules import span

# Batches' worth of waiting tokens at which the lowest budget is reached: a queue this long is a fraction of a second.
LONGEST = 4.0


@dataclass(frozen=True)
class Policy:
    """What the server does by itself, and the shares that a request may ask for.

    word: "learned" and "calibrated" leave the budget to the model, "fixed" names `high` always, and "load" goes from
    `high`, when nothing waits, down to `low`.
    """

    word: str = "learned"
    low: float = 0.0
    high: float = 1.0

    @classmethod
    def parse(cls, text: str | None) -> "Policy":
        """From a setting: None, `calibrated`, a share such as `0.4`, or `LOW:HIGH`.

        Raises:
            UsageError: it is none of these.
        """
        if text is None or text == "calibrated":
            return cls(text or "learned")
        shares = span(text)
        if shares is None:
            raise UsageError(f"budget is {text!r}; give a share in (0, 1], LOW:HIGH with LOW <= HIGH, or calibrated")
        return cls("load" if ":" in text else "fixed", *shares)

    def share(self, waiting: float) -> float | None:
        """The budget of the next batch while `waiting` more batches' worth of tokens wait; None is the model's own."""
        if self.word == "load":
            return self.high - (self.high - self.low) * min(waiting / LONGEST, 1.0)
        return self.high if self.word == "fixed" else None

    @property
    def limits(self) -> tuple[float, float]:
        """The shares that a request may ask for, the ends included; a lower end of 0 itself is not."""
        return (self.low, self.high) if self.word == "load" else (0.0, 1.0)

    def allows(self, asked: float) -> bool:
        """Whether a request may ask for this share."""
        low, high = self.limits
        return asked > 0 and low <= asked <= high
