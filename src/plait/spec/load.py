"""run.toml and `dotted.key=value` overrides in, RunSpec out, and its exact inverse.

Every mistake in the file is found before anything starts and named with the file, the full key, the line where it is
known, and the nearest valid name. Reading executes nothing.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from plait.spec.errors import InvalidRun, UsageError, Violation
from plait.spec.presets import PRESETS
from plait.spec.run import RunSpec

Table = dict[str, Any]


def load(path: str | Path | None = None, overrides: Iterable[str] = ()) -> RunSpec:
    """The run of a TOML file (none: the built-in run) with `section.key=value` overrides applied in order.

    Raises InvalidRun (all problems at once) or UsageError (no such file, not TOML).
    """
    text, source = "", "overrides"
    if path is not None:
        source = str(path)
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{source}: cannot be read: {error}") from error
    try:
        table: Table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{source}: not TOML: {error}") from error
    table.setdefault("model", {"preset": "builtin"})  # a file that names no model changes the built-in run
    for override in overrides:
        _override(table, override)
    found = _unknown(table, text)
    if found:
        raise InvalidRun(found, source)
    table = _expand_preset(table, source)
    try:
        return RunSpec.model_validate(table)
    except ValidationError as error:
        raise InvalidRun([_violation(e, text) for e in error.errors()], source) from None


def dump(run: RunSpec) -> str:
    """The run as complete TOML; `load` of it gives an equal run."""
    return tomli_w.dumps(_plain(run.model_dump(exclude_none=True)))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _override(table: Table, override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UsageError(f"{override!r} is not dotted.key=value", "for example: layout.tp=2")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise UsageError(f"{override!r}: {part} is a value, not a section")
    table[parts[-1]] = value


def _expand_preset(table: Table, source: str) -> Table:
    """[model] preset = "name" gives every field; fields beside it replace the preset's."""
    model = table.get("model")
    if model is None or "preset" not in model:
        return table
    name = model["preset"]
    if name not in PRESETS:
        near = nearest(str(name), PRESETS)
        raise InvalidRun(
            [Violation("model.preset", f"{name!r} is unknown", near or "known: " + ", ".join(PRESETS))], source
        )
    fields = {key: value for key, value in model.items() if key != "preset"}
    return {**table, "model": {**PRESETS[name].model_dump(), **fields}}


def nearest(name: str, known: Iterable[str]) -> str:
    """'did you mean …?' with the nearest of the known names, or nothing."""
    close = difflib.get_close_matches(name.replace("-", "_"), list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else ""


def _fields(model: type[BaseModel]) -> dict[str, type[BaseModel] | None]:
    """Field -> its own spec where it is a section."""
    kinds = {name: field.annotation for name, field in model.model_fields.items()}
    return {n: k if isinstance(k, type) and issubclass(k, BaseModel) else None for n, k in kinds.items()}


def _unknown(table: Table, text: str) -> list[Violation]:
    """Keys that no section has, before types are judged, so that each is named with the section where it belongs."""
    found = []
    sections = _fields(RunSpec)
    for name, content in table.items():
        if name not in sections:
            where = (
                f"did you mean [{', '.join(_homes(name, sections))}]?"
                if _homes(name, sections)
                else nearest(name, sections)
            )
            found.append(Violation(name, f"unknown section or key{_line(text, (name,))}", where))
        elif not isinstance(content, dict):
            found.append(Violation(name, f"is a section, not a value{_line(text, (name,))}", f"[{name}]"))
        else:
            found += _unknown_keys(name, content, sections, text)
    return found


def _unknown_keys(section: str, content: Table, sections: Mapping[str, Any], text: str) -> list[Violation]:
    known = [*_fields(sections[section]), *(["preset"] if section == "model" else [])]
    found = []
    for key in content:
        if key not in known:
            homes = _homes(key, sections)
            fix = nearest(key, known) or (f"it belongs to [{homes[0]}]" if homes else "known: " + ", ".join(known))
            found.append(Violation(f"{section}.{key}", f"unknown key{_line(text, (section, key))}", fix))
    return found


def _homes(key: str, sections: Mapping[str, Any]) -> list[str]:
    return [name for name, spec in sections.items() if key in _fields(spec)]


def _violation(error: Any, text: str) -> Violation:
    # pydantic names the branch of a union after the field ("zero.shard.int"): keep what is a key of the run.
    path: list[str] = []
    fields: Mapping[str, Any] = _fields(RunSpec)
    for part in error["loc"]:
        if not isinstance(part, str) or part not in fields:
            break
        path.append(part)
        inner = fields[part]
        fields = _fields(inner) if inner else {}
    got = "" if error["type"] == "missing" else f", got {error['input']!r}"
    return Violation(".".join(path), f"{error['msg']}{got}{_line(text, tuple(path))}")


def _line(text: str, path: tuple[str, ...]) -> str:
    """' (line N)' of a key in the file, or nothing where it comes from an override."""
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[\s*([\w.-]+)\s*\]", line)
        if header:
            section = header[1]
            if (section,) == path:
                return f" (line {number})"
        key = re.match(r"\s*([\w.-]+)\s*=", line)
        if key and tuple(f"{section}.{key[1]}".strip(".").split(".")) == path:
            return f" (line {number})"
    return ""
