"""What a setting may hold: a rule in words, a test for it, and how to read it from a string."""

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable
from typing import Any

from budgetformer.errors import UsageError

TRUE_WORDS = frozenset({"1", "true", "yes", "on"})
FALSE_WORDS = frozenset({"0", "false", "no", "off"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """`words` completes "it must be ..."; `kind` is a value's type; `choices` are words that it may be.

    A misspelt value is compared with the choices.
    """

    words: str
    kind: type
    holds: Callable[[Any], bool]
    choices: tuple[str, ...] = ()
    optional: bool = False

    def accepts(self, value: object) -> bool:
        """True when `value` has the rule's type and satisfies it. A bool is never a number."""
        if value is None:
            return self.optional
        if isinstance(value, str) and value in self.choices:
            return True
        if self.kind is bool or isinstance(value, bool):
            return self.kind is bool and isinstance(value, bool)
        if self.kind is float:
            return isinstance(value, (int, float)) and math.isfinite(value) and self.holds(value)
        return isinstance(value, self.kind) and self.holds(value)

    def read(self, value: object) -> object:
        """`value` in the rule's type; what cannot be read comes back as it is, for `check` to refuse."""
        if isinstance(value, bool) and "on" in self.choices:
            return "on" if value else "off"  # YAML reads these words as true and false
        if not isinstance(value, str):
            return float(value) if self.kind is float and type(value) is int else value
        if self.kind is bool:
            word = value.strip().lower()
            return True if word in TRUE_WORDS else False if word in FALSE_WORDS else value
        if self.kind in (int, float):
            try:
                return self.kind(value)
            except ValueError:
                return value
        return value


def nearest(word: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The name most like `word`, or None when nothing is close."""
    found = difflib.get_close_matches(word, list(names), n=1, cutoff=cutoff)
    return found[0] if found else None


def hint(word: str, names: Iterable[str]) -> str:
    """`"; did you mean 'accuracy'?"`, or nothing when no name is close."""
    name = nearest(word, names)
    return f"; did you mean {name!r}?" if name else ""


def whole(low: int, high: int | None = None) -> Rule:
    """A whole number from `low` to `high`, both included."""
    words = f"a whole number of at least {low}" + (f" and at most {high}" if high is not None else "")
    return Rule(words=words, kind=int, holds=lambda value: value >= low and (high is None or value <= high))


def number(low: float, high: float = math.inf, *, above: bool = False, below: bool = False) -> Rule:
    """A number in [low, high]; `above` leaves out the lower end, `below` the upper one."""
    interval = f"{'(' if above else '['}{low:g}, {'infinity' if math.isinf(high) else f'{high:g}'}"
    interval += ")" if below or math.isinf(high) else "]"

    def holds(value: float) -> bool:
        return (value > low if above else value >= low) and (value < high if below else value <= high)

    return Rule(words=f"a number in {interval}", kind=float, holds=holds)


def one_of(*choices: str) -> Rule:
    """One of a few names."""
    return Rule(words="one of " + ", ".join(choices), kind=str, holds=choices.__contains__, choices=choices)


def or_word(rule: Rule, word: str) -> Rule:
    """The same rule, but `word` is fine too."""
    return dataclasses.replace(rule, words=f"{rule.words}, or {word}", choices=(*rule.choices, word))


def span(text: str) -> tuple[float, float] | None:
    """(LOW, HIGH) of `LOW:HIGH`, and a share twice when it stands alone; None when these are no shares in order."""
    try:
        low, high = map(float, text.split(":") if ":" in text else (text, text))
    except ValueError:
        return None
    return (low, high) if 0 < low <= high <= 1 else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Span(Rule):
    def read(self, value: object) -> object:
        return str(value) if type(value) in (int, float) else value  # a share alone in a config file is a number


def shares(*words: str) -> Rule:
    """A share in (0, 1], two of them as `LOW:HIGH`, or one of some words."""
    given = ", ".join(["a share in (0, 1], LOW:HIGH", *words])
    return _Span(words=given, kind=str, holds=lambda value: span(value) is not None, choices=words)


def listed(text: str) -> tuple[float, ...] | None:
    """The shares of `A,B,...`; None when one of them is none, or is 1."""
    try:
        found = tuple(map(float, text.split(",")))
    except ValueError:
        return None
    return found if all(0 < share < 1 for share in found) else None


def list_of_shares() -> Rule:
    """Shares in (0, 1), with commas between them."""
    words = "shares in (0, 1), separated by commas"
    return _Span(words=words, kind=str, holds=lambda value: listed(value) is not None)


def some(what: str) -> Rule:
    """Any string with something in it; `what` says what it stands for."""
    return Rule(words=what, kind=str, holds=lambda value: value.strip() != "" and "\0" not in value)


def separator() -> Rule:
    """A string of at least one character; white space is one."""
    return Rule(words="at least one character", kind=str, holds=bool)


def yes_or_no() -> Rule:
    """A switch."""
    return Rule(words="true or false", kind=bool, holds=lambda value: True)


def optional(rule: Rule) -> Rule:
    """The same rule, but None (left out) is fine."""
    return dataclasses.replace(rule, optional=True)


def setting(
    rule: Rule,
    help: str,
    *,
    default: Any = dataclasses.MISSING,
    panel: str = "Options",
    flag: str | None = None,
    example: str | None = None,
    argument: bool = False,
) -> Any:
    """A dataclass field that carries its rule and the words of its help.

    A field without `default` must be given, unless its rule is optional. `flag` replaces the name made from the
    field, `example` is a good value to name in errors, `argument` marks a positional argument, which neither
    files nor the environment can set.
    """
    if rule.optional and default is dataclasses.MISSING:
        default = None
    metadata = {"rule": rule, "help": help, "panel": panel, "flag": flag, "example": example, "argument": argument}
    return dataclasses.field(default=default, metadata=metadata)


def flag_of(field: "dataclasses.Field[Any]") -> str:
    """`--target-budget` for `target_budget`."""
    return field.metadata["flag"] or "--" + field.name.replace("_", "-")


def check(field: "dataclasses.Field[Any]", value: object, where: str, *, given: object = None) -> None:
    """Refuse a value that does not fit the field: a `UsageError` with source, value, rule and remedy.

    `where` names the source, `given` is the value as it was spelt there.
    """
    rule: Rule = field.metadata["rule"]
    if rule.accepts(value):
        return
    remedy = hint(str(value), rule.choices) if isinstance(value, str) else ""
    if not remedy and field.metadata["example"] is not None:
        remedy = f"; for example {flag_of(field)} {field.metadata['example']}"
    elif not remedy and field.default not in (dataclasses.MISSING, None):
        remedy = f"; the default is {field.default}"
    shown = _shown(value if given is None else given, quoted=rule.kind is str)
    raise UsageError(f"{where} is {shown}; it must be {rule.words}{remedy}")


def _shown(value: object, *, quoted: bool) -> str:
    """`value` for an error line: one line, not endless."""
    text = repr(value)
    if isinstance(value, str) and not quoted and value.strip():
        text = text[1:-1]
    return text if len(text) <= 80 else text[:77] + "..."


class Checked:
    """Base of the settings: valid or not constructed."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]  # every subclass is a dataclass
            check(field, getattr(self, field.name), field.name)
