"""run.toml and `dotted.key=value` overrides in, RunSpec out, and its exact inverse.

Every mistake is found before anything starts and named with the file, the full key, the line or the override where it
stands, and the nearest valid name (`keys.py`). Reading executes nothing.
"""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from plait.spec.errors import InvalidRun, UsageError, Violation
from plait.spec.keys import Key, Origins, Table, key_of, known_part, lines_of, mistakes
from plait.spec.presets import PRESETS
from plait.spec.run import RunSpec

RUN_FILE = "run.toml"  # the complete run, in its directory

BOUNDS = "numbers have at most 4300 digits, and a value nests a few levels at most"
PRESET: Key = ("model", "preset")
BUILTIN: Mapping[str, str] = {"preset": "builtin"}  # the model of a run that says nothing of it


def load(
    path: str | Path | None = None, overrides: Iterable[str] = (), model: Mapping[str, Any] | None = None
) -> RunSpec:
    """The run of a TOML file (none: the built-in run) with `section.key=value` overrides applied in order.

    A preset gives every field of [model], and fields beside it replace the preset's; head_dim and kv_heads follow from
    hidden and heads again where they do in the preset. An override of model.preset puts aside all that the file says
    of its model. `model` stands in for the built-in one where the file says nothing of it. Raises
    InvalidRun (all problems at once) or UsageError (no such file, not TOML).
    """
    source, text = ("", "") if path is None else (str(path), _read(Path(path)))
    table = _parse(text, source)
    origins = Origins(text)
    given = [(override, *_parse_override(override)) for override in overrides]
    if "model" not in table or PRESET in [key for _, key, _ in given]:
        table["model"] = dict(model or BUILTIN)
    for override, key, value in given:
        _set(table, key, value)
        origins.override(key, override)

    table, found = _expand_preset(table, origins)
    table, unknown = known_part(table, origins)
    found += unknown
    try:
        run = RunSpec.model_validate(table)
    except ValidationError as error:
        found += mistakes(error, table, origins)
    if found:
        raise InvalidRun(found, source)
    return run


def dump(run: RunSpec) -> str:
    """The run as complete TOML; `load` of it gives an equal run."""
    return tomli_w.dumps(_plain(run.model_dump(exclude_none=True)))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # some editors open a file with a byte order mark
    except FileNotFoundError as error:
        near = get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")], n=1)
        hint = f"did you mean {path.with_name(near[0])}?" if near else "without a file it is the built-in run."
        raise UsageError(f"{path}: no such file", f"{hint} A key is set as section.key=value") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start})", "a run file is TOML") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error


def _parse(text: str, source: str) -> Table:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        number = int(found[1]) if found else len(text.splitlines())
        if twice := _standing_twice(text, number):
            raise InvalidRun([twice], source) from error
        line = text.splitlines()[number - 1].strip() if text else ""
        message = f"{source}: line {number}: not TOML: {str(error).partition(' (at ')[0]}: {line}"
        hint = "text stands in quotes, true and false do not" if "Invalid value" in str(error) else ""
        raise UsageError(message, hint) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source}: {_beyond(error)}", BOUNDS) from error


def _beyond(error: ValueError | RecursionError) -> str:
    """What Python itself refuses in a text that may be TOML."""
    return "nests too deeply to be read" if isinstance(error, RecursionError) else "a number has too many digits"


def _standing_twice(text: str, number: int) -> Violation | None:
    """A key or section of line `number` that stands on an earlier one too."""
    entries = list(lines_of(text))
    for line, key, opens in entries:
        first = next(other for other, same, also in entries if (same, also) == (key, opens))
        if line == number > first:
            return Violation(".".join(key), f"stands twice, on lines {first} and {line}", "keep one")
    return None


def _parse_override(override: str) -> tuple[Key, Any]:
    """The key and the value of `dotted.key=value`: the value as TOML, else as text. A run holds no dates: text too."""
    name, equals, text = override.partition("=")
    key = key_of(name)
    if not equals or not key or ".".join(key) != name.strip():
        raise UsageError(f"{override!r} is not section.key=value", "for example: layout.tp=2")
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return key, text
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name.strip()}: {_beyond(error)}", BOUNDS) from error
    value = parsed["value"]
    is_text = len(parsed) > 1 or isinstance(value, datetime.date | datetime.time)
    return key, text if is_text else value


def _set(table: Table, key: Key, value: object) -> None:
    for depth, part in enumerate(key[:-1], 1):
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise UsageError(f"{'.'.join(key)}: {'.'.join(key[:depth])} is {inner!r}, a value and not a section")
        table = inner
    table[key[-1]] = value


def _expand_preset(table: Table, origins: Origins) -> tuple[Table, list[Violation]]:
    """The table with the preset's fields under those that stand beside it; an unknown preset counts as the built-in."""
    model = table["model"]
    if not isinstance(model, dict) or "preset" not in model:
        return table, []
    name, found = model["preset"], []
    if not isinstance(name, str) or name not in PRESETS:
        near = get_close_matches(str(name).lower(), PRESETS, n=1)
        fix = f"did you mean {near[0]}?" if near else "known: " + ", ".join(PRESETS)
        found.append(Violation("model.preset", f"{name!r} is unknown{origins.where(PRESET)}", fix))
        name = BUILTIN["preset"]
    preset = PRESETS[name]
    fields = preset.model_dump()
    given = {key: value for key, value in model.items() if key != "preset"}
    if {"hidden", "heads"} & given.keys():
        derived = {"kv_heads": preset.heads, "head_dim": preset.hidden // preset.heads}
        fields = {key: value for key, value in fields.items() if derived.get(key) != value}
    for key, value in given.items():
        base = fields.get(key)
        fields[key] = {**base, **value} if isinstance(base, dict) and isinstance(value, dict) else value
    return {**table, "model": fields}, found
