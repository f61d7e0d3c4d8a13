"""Keys of a run: which there are, where each stands in what the user wrote, and what is wrong with one that is wrong.

A key is a path, ("layout", "tp"), written layout.tp. Nothing is read from disk here, and no value is changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import ceil, floor, isfinite
from typing import Any, get_args

from pydantic import ValidationError

from plait.spec.base import Spec
from plait.spec.errors import Violation
from plait.spec.nearest import closest, did_you_mean, nearest_multiples, neighbours
from plait.spec.run import RunSpec

Key = tuple[str, ...]
Table = dict[str, Any]

# What other programs call a key -> its name here.
SYNONYMS: Mapping[str, str] = {
    "learning_rate": "lr", "warmup_steps": "warmup", "grad_clip": "clip", "max_steps": "steps",
    "batch_size": "global_size", "global_batch_size": "global_size", "micro_batch_size": "micro_size",
    "seq_len": "sequence", "sequence_length": "sequence", "vocab_size": "vocab", "hidden_size": "hidden",
    "num_layers": "layers", "num_heads": "heads", "num_kv_heads": "kv_heads", "intermediate_size": "ffn",
    "tensor_parallel": "tp", "pipeline_parallel": "pp", "data_parallel": "dp", "context_parallel": "cp",
    "expert_parallel": "ep", "dtype": "compute",
}  # fmt: skip

_NAME = r"""(?:[\w-]+|"[^"]*"|'[^']*')"""
_PATH = rf"{_NAME}(?:\s*\.\s*{_NAME})*"
_LINE = re.compile(rf"\s*(?:\[\s*(?P<section>{_PATH})\s*\]|(?P<key>{_PATH})\s*=)")


def key_of(text: str) -> Key:
    """layout.tp -> ("layout", "tp"); a part may stand in quotes."""
    return tuple(part.strip("\"'") for part in re.findall(_NAME, text))


def lines_of(text: str) -> Iterator[tuple[int, Key, bool]]:
    """(number, full key, whether it opens a section) of each line of a TOML file on which a key stands."""
    section: Key = ()
    for number, line in enumerate(text.splitlines(), 1):
        if found := _LINE.match(line):
            opens = found["section"] is not None
            key = key_of(found["section"] if opens else found["key"])
            section = key if opens else section
            yield number, key if opens else (*section, *key), opens


class Origins:
    """Where each key stands: on a line of the file, or in an override."""

    def __init__(self, text: str) -> None:
        self._places: dict[Key, str] = {}
        for number, key, _ in lines_of(text):
            for length in range(1, len(key) + 1):
                self._places.setdefault(key[:length], f"line {number}")

    def override(self, key: Key, override: str) -> None:
        """From now on this key, and all below it, is what an override says."""
        self._places = {other: place for other, place in self._places.items() if other[: len(key)] != key}
        for length in range(1, len(key) + 1):
            self._places.setdefault(key[:length], f"in the override {override!r}")

    def where(self, key: Key) -> str:
        """', line 3', of the key or of what holds it (an inline table); nothing where neither was written."""
        places = [self._places[key[:n]] for n in range(len(key), 0, -1) if key[:n] in self._places]
        return f", {places[0]}" if places else ""


def inner_spec(spec: type[Spec], name: str) -> type[Spec] | None:
    """The spec that a field holds, where it holds one."""
    annotation = spec.model_fields[name].annotation
    kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type) and issubclass(kind, Spec)]
    return kinds[0] if kinds else None


SECTIONS: Mapping[str, type[Spec]] = {
    name: inner for name in RunSpec.model_fields if (inner := inner_spec(RunSpec, name)) is not None
}


def known_part(
    table: Table, origins: Origins, spec: type[Spec] = RunSpec, at: Key = ()
) -> tuple[Table, list[Violation]]:
    """What `spec` knows of a table, and a violation for each key that it does not."""
    known: Table = {}
    found: list[Violation] = []
    for name, value in table.items():
        key = (*at, name)
        inner = inner_spec(spec, name) if name in spec.model_fields else None
        if name not in spec.model_fields:
            found.append(Violation(".".join(key), f"unknown key{origins.where(key)}", _suggest(name, spec)))
        elif inner is not None and isinstance(value, dict):
            known[name], deeper = known_part(value, origins, inner, key)
            found += deeper
        elif name in SECTIONS and not at:
            found.append(Violation(name, f"is a section, not a value{origins.where(key)}", f"[{name}]"))
        else:
            known[name] = value
    return known, found


def _suggest(name: str, spec: type[Spec]) -> str:
    """Where an unknown name belongs, or what it was meant to be: first as it is, then as something spelled like it."""
    plain = name.lower().replace("-", "_")
    plain = SYNONYMS.get(plain, plain)
    own = list(spec.model_fields)
    homes = [f"[{section}]" for section, inner in SECTIONS.items() if plain in inner.model_fields]
    if plain in own:
        return f"did you mean {plain}?"
    if homes:
        return f"{'it' if plain == name else plain} belongs to {' or '.join(homes)}"
    keys = {key: f"{section}.{key}" for section, inner in SECTIONS.items() for key in inner.model_fields}
    here = {key: key for key in own}
    here |= {full: full for full in keys.values()} if spec is RunSpec else {}
    here |= {other: ours for other, ours in SYNONYMS.items() if ours in own}
    elsewhere = {**keys, **{other: keys[ours] for other, ours in SYNONYMS.items()}}
    for names in (here, elsewhere):
        if near := closest(plain, names):
            return f"did you mean {names[near]}?"
    return "known: " + ", ".join(own)


def mistakes(error: ValidationError, table: Table, origins: Origins) -> list[Violation]:
    """pydantic's complaints in the words of a run file, one for each key."""
    by_key: dict[Key, list[Any]] = {}
    for complaint in error.errors():
        by_key.setdefault(_key_of_complaint(complaint["loc"]), []).append(complaint)
    model = table.get("model", {})
    sizes = {"hidden", "heads"}
    if not all(isinstance(model.get(size), int) for size in sizes):
        by_key = {k: v for k, v in by_key.items() if v[0]["type"] != "missing" or k[-1] not in ("kv_heads", "head_dim")}
    return [_mistake(key, complaints, model, origins) for key, complaints in by_key.items()]


def _key_of_complaint(location: tuple[int | str, ...]) -> Key:
    """pydantic names the branch of a union, or an item, after the field ("zero.shard.int"): keep what is a key."""
    key: Key = ()
    spec: type[Spec] | None = RunSpec
    for part in location:
        if spec is None or part not in spec.model_fields:
            break
        key = (*key, str(part))
        spec = inner_spec(spec, str(part))
    return key


def _mistake(key: Key, complaints: list[Any], model: Table, origins: Origins) -> Violation:
    """One key's violation; the branches of a union that refused it are joined."""
    name, where, given = ".".join(key), origins.where(key), complaints[0]["input"]
    if key == ("model", "head_dim") and complaints[0]["type"] == "missing":
        return _no_head_dim(model["heads"], model["hidden"])
    if complaints[0]["type"] == "missing":
        return Violation(name, f"is missing{where}", "model.preset gives every field" if key[:-1] == ("model",) else "")
    wanted = " or ".join(dict.fromkeys(complaint["msg"].removeprefix("Input should be ") for complaint in complaints))
    for theirs, ours in (("valid tuple", "list of texts"), ("valid integer", "whole number"), ("valid ", "")):
        wanted = wanted.replace(theirs, ours)
    return Violation(name, f"should be {wanted}, got {given!r}{where}", _way_out(complaints, given))


def _no_head_dim(heads: int, hidden: int) -> Violation:
    """head_dim follows from hidden and heads, and here it cannot."""
    if heads < 1:
        return Violation("model.heads", f"is {heads}, but at least 1 is needed", "use 1 or more")
    problem = f"heads {heads} do not divide hidden {hidden}"
    return Violation("model.head_dim", problem, f"set it, or use hidden {nearest_multiples(heads, hidden)}")


def _way_out(complaints: list[Any], given: object) -> str:
    kinds = {complaint["type"] for complaint in complaints}
    if isinstance(given, float) and isfinite(given) and "int_type" in kinds:
        return f"use {neighbours(sorted({floor(given), ceil(given)}), floor(given))}"
    if not isinstance(given, str):
        return "text stands in quotes" if "string_type" in kinds else ""
    if "bool_type" in kinds and given.lower() in ("true", "false"):
        return f"write {given.lower()} without quotes"
    if kinds & {"int_type", "float_type"} and re.fullmatch(r"[+-]?\d[\d_.]*(e[+-]?\d+)?", given, re.IGNORECASE):
        return f"write {given} without quotes"
    if "tuple_type" in kinds and len(kinds) == 1:
        return f"write [{given!r}]"
    choices = [
        choice for c in complaints for choice in re.findall(r"'([^']*)'", str(c.get("ctx", {}).get("expected", "")))
    ]
    return did_you_mean(given, choices)
