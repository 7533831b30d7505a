"""Where settings come from: flag, then environment, then config file, then default; and how they are written down."""

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from budgetformer.errors import UsageError
from budgetformer.settings.rules import Checked, Rule, check, flag_of, hint, nearest

if TYPE_CHECKING:
    from dataclasses import Field

PREFIX = "BUDGETFORMER_"
MAX_CONFIG_BYTES = 1_000_000
Settings = TypeVar("Settings", bound=Checked)


def resolve(
    cls: type[Settings],
    flags: Mapping[str, object],
    config_path: str | Path | None,
    environ: Mapping[str, str],
) -> tuple[Settings, dict[str, str]]:
    """Settings of class `cls` from all sources, and for each name the source that won.

    Args:
        cls: one of the settings classes.
        flags: what the command line gave, by field name; None means not given.
        config_path: a YAML, TOML or JSON file with a flat table of settings, or None.
        environ: the environment; `BUDGETFORMER_<NAME>` sets a field, an empty value is no value.

    Returns:
        The settings, and `{name: "flag" | "environment" | "config" | "default"}`.

    Raises:
        UsageError: an unknown key, a value outside its rule (the line names the source), or a setting that is missing.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    config = load_config(config_path, fields) if config_path is not None else {}
    _refuse_misspelt(environ, fields)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, field in fields.items():
        variable = PREFIX + name.upper()
        settable = not field.metadata["argument"]
        if flags.get(name) is not None:
            value, sources[name], where = flags[name], "flag", name if field.metadata["argument"] else flag_of(field)
        elif settable and environ.get(variable):
            value, sources[name], where = environ[variable], "environment", variable
        elif settable and name in config:
            value, sources[name], where = config[name], "config", f"{name} in {config_path}"
        elif field.default is dataclasses.MISSING:
            raise UsageError(_missing(field, variable))
        else:
            sources[name] = "default"
            continue
        rule: Rule = field.metadata["rule"]
        values[name] = rule.read(value)
        check(field, values[name], where, given=value)
    return cls(**values), sources


def load_config(path: str | Path, fields: Mapping[str, "Field[Any]"]) -> dict[str, Any]:
    """The table in a config file; its keys are field names, with `-` or `_`.

    Raises:
        UsageError: the file is missing, too large, not readable as its suffix says, not a flat table, or has a key that
            is no setting of the command.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise UsageError(f"{path}: larger than {MAX_CONFIG_BYTES:,} bytes; a config file holds settings only")
        table = _parse(path, path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); give --config an existing file") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: byte {error.start} is not UTF-8; save the config file as UTF-8") from None
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise UsageError(f"{path}: holds a {type(table).__name__}, not a table; write one 'name: value' a line")
    config: dict[str, Any] = {}
    for key, value in table.items():
        name = str(key).replace("-", "_")
        if name not in fields or fields[name].metadata["argument"]:
            known = [name for name, field in fields.items() if not field.metadata["argument"]]
            raise UsageError(f"{path}: {key!r} is no setting of this command{hint(name, known)}")
        if name in config:
            raise UsageError(f"{path}: {name!r} is there twice; keep one of them")
        config[name] = value
    return config


def save(settings: Checked, path: str | Path) -> None:
    """Write all settings as YAML that `--config` reads back; whole or not at all.

    Raises:
        OSError: the folder cannot be written.
    """
    import yaml

    from budgetformer.folder import write_aside

    table = {
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(settings)  # pyright: ignore[reportArgumentType]
        if not field.metadata["argument"]
    }
    with write_aside(path) as temporary:
        temporary.write_text(yaml.safe_dump(table, sort_keys=False, allow_unicode=True), encoding="utf-8")


def _parse(path: Path, text: str) -> Any:
    suffix = path.suffix.lower()
    if suffix not in {".yaml", ".yml", ".toml", ".json"}:
        raise UsageError(f"{path}: suffix {suffix!r} is not known; use .yaml, .toml or .json")
    try:
        if suffix == ".toml":
            return tomllib.loads(text)
        if suffix == ".json":
            return json.loads(text)
        return _parse_yaml(text)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"{path}: not valid {suffix[1:]} ({reason}); correct the file") from None


def _parse_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _missing(field: "Field[Any]", variable: str) -> str:
    if field.metadata["argument"]:
        return f"{field.name} is missing; give {field.metadata['rule'].words} as an argument"
    example = f" (for example {field.metadata['example']})" if field.metadata["example"] else ""
    what = field.metadata["help"]
    return f"{field.name} is missing: {what}; give {flag_of(field)}{example}, {variable}, or a line in --config"


def _refuse_misspelt(environ: Mapping[str, str], fields: Mapping[str, "Field[Any]"]) -> None:
    """Other commands' and other programs' variables are none of our business; one letter off ours is a mistake."""
    known = {PREFIX + name.upper() for name in fields}
    for variable in environ:
        if variable.startswith(PREFIX) and variable not in known:
            meant = nearest(variable[len(PREFIX) :], [name[len(PREFIX) :] for name in known], cutoff=0.85)
            if meant is not None and not _is_setting_elsewhere(variable):
                raise UsageError(
                    f"{variable} is no setting of this command; did you mean {PREFIX}{meant}? Else unset it"
                )


def _is_setting_elsewhere(variable: str) -> bool:
    from budgetformer import settings

    classes = [value for value in vars(settings).values() if isinstance(value, type) and issubclass(value, Checked)]
    return any(
        variable == PREFIX + field.name.upper()
        for cls in classes
        if cls is not Checked
        for field in dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    )
