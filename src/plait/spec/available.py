"""What this version does not have yet, as a table: a run that asks for it is refused when the file is read.

A mechanism that arrives deletes its row. What can never be is judged in `fit.py`, not here.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from plait.spec.errors import Violation
from plait.spec.run import RunSpec

# Key, whether its value in this run is one that is missing, a value that is there.
NOT_YET: tuple[tuple[str, Callable[[Any, RunSpec], bool], str], ...] = (
    ("model.mlp", lambda value, run: value in ("relu", "relu2"), "'gelu'"),
)


def unavailable(run: RunSpec) -> list[Violation]:
    """One violation for each thing that the run asks for and this version lacks."""
    return [
        Violation(key, f"{value!r} is not available in this version", instead and f"use {instead}")
        for key, missing, instead in NOT_YET
        if missing(value := attrgetter(key)(run), run)
    ]
