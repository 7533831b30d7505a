"""A cell as the reader gave it, turned into a text or a label, or into what is wrong with it."""


def as_text(value: object) -> tuple[str | None, str | None]:
    """A cell as text, or None and what is wrong with it."""
    if value is None or value == "":
        return None, "is empty"
    if not isinstance(value, str):
        return None, "is a list" if isinstance(value, list) else "is an object"
    if value.isspace():
        return None, "is only white space"
    try:
        value.encode()
    except UnicodeEncodeError:
        # JSON can write half of a character; no tokenizer takes it.
        return None, "holds half of a surrogate pair"
    return value, None


def as_label(value: object, separator: str) -> tuple[str | None, str | None]:
    """A label; a list becomes one string. An empty list is an answer, "none of them", and not a missing one."""
    if not isinstance(value, list):
        return as_text(value)
    parts: list[str] = []
    for item in value:
        part, problem = as_text(item)
        if part is None:
            return None, f"has a part that {problem}"
        if separator in part:
            return None, f"has a part that holds {separator!r}"
        parts.append(part)
    return separator.join(parts), None
