"""What the commands share: the words after a command become a RunSpec here, and nowhere else.

Light enough for `plait train --help`: no torch, no numpy.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from importlib.util import find_spec
from typing import Annotated, Any, get_type_hints

import typer

from plait.spec.errors import MissingExtra, UsageError
from plait.spec.load import load
from plait.spec.run import RunSpec

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUN.toml | KEY=VALUE",
        help="A run file (none: the built-in run), then overrides such as layout.tp=2.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout and nothing else.")]

# A file may have an equals sign in its name, a key has no slash.
_OVERRIDE = re.compile(r"[\w.-]+=")


def read_run(words: Sequence[str] | None, model: Mapping[str, Any] | None = None) -> RunSpec:
    """The run that the words describe: at most one file, and overrides applied in their order.

    `model` stands in for the built-in one, where no file says what it is.

    Raises UsageError for a second file, and what `load` raises for a run that cannot be.
    """
    overrides = [word for word in words or () if _OVERRIDE.match(word)]
    files = [word for word in words or () if not _OVERRIDE.match(word)]
    if len(files) > 1:
        raise UsageError(f"{len(files)} run files, at most 1: {', '.join(files)}", "an override is section.key=value")
    return load(files[0] if files else None, overrides, model)


def settled(run: RunSpec, world: int | None) -> RunSpec:
    """A run whose layout is decided: as it is written, or for layout.mode "auto" the planner's best for this world.

    Without a world it is that of the sizes which the run names all the same.
    """
    asked = run.layout
    if asked.mode != "auto":
        return run
    from plait.planner.request import settle

    chosen, why = settle(run, world or asked.tp * asked.pp * asked.cp * (asked.dp or 1))
    print(why, file=sys.stderr)
    return chosen


def with_options(command: Callable[[Any], None], options: type[Any]) -> Callable[..., None]:
    """A command for typer whose options are the fields of a dataclass, handed over as one value of it."""
    hints = get_type_hints(options, include_extras=True)
    each = [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if f.default is MISSING else f.default,
            annotation=hints[f.name],
        )
        for f in fields(options)
    ]

    def run(**given: Any) -> None:
        command(options(**given))

    run.__doc__ = command.__doc__
    run.__signature__ = inspect.Signature(each)  # type: ignore[attr-defined]
    run.__annotations__ = hints
    return run


def changed_by(words: Sequence[str] | None) -> frozenset[str]:
    """The keys that the words override."""
    return frozenset(word.partition("=")[0] for word in words or () if _OVERRIDE.match(word))


def to_json(value: Any) -> str:
    """One JSON document; what is not finite is null, since JSON has no infinity."""

    def finite(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: finite(item) for key, item in part.items()}
        if isinstance(part, list | tuple):
            return [finite(item) for item in part]
        return None if isinstance(part, float) and not math.isfinite(part) else part

    return json.dumps(finite(value), allow_nan=False)


def need_torch(command: str) -> None:
    """Refuse a command that needs the extra `train` where torch is not installed."""
    if find_spec("torch") is None:
        raise MissingExtra(command, "train")
