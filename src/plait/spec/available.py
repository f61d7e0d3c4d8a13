"""What this version does not have yet, as a table: a run that asks for it is refused when the file is read.

A mechanism that arrives deletes its row. What can never be is judged in `fit.py`, not here.
"""

from __future__ import annotations

from collections.abc import Callable

from plait.spec.errors import Violation
from plait.spec.run import RunSpec

SCHEDULES = ("gpipe", "1f1b")  # of the names that scripts rely on
KNOWN_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "v-half", "dualpipe-v")

# Key, what is asked for, whether the run asks for it.
NOT_YET: tuple[tuple[str, Callable[[RunSpec], object], Callable[[RunSpec], bool]], ...] = (
    ("layout.mode", lambda r: r.layout.mode, lambda r: r.layout.mode == "auto"),
    ("layout.cp", lambda r: r.layout.cp, lambda r: r.layout.cp > 1),
    ("layout.ep", lambda r: r.layout.ep, lambda r: r.layout.ep > 1),
    ("layout.etp", lambda r: r.layout.etp, lambda r: r.layout.etp > 1),
    ("schedule.name", lambda r: r.schedule.name, lambda r: r.schedule.name in set(KNOWN_SCHEDULES) - set(SCHEDULES)),
    ("schedule.chunks", lambda r: r.schedule.chunks, lambda r: r.schedule.chunks > 1),
    ("schedule.file", lambda r: r.schedule.file, lambda r: r.schedule.file is not None),
    ("zero.stage", lambda r: r.zero.stage, lambda r: r.zero.stage > 0),
    ("precision.compute", lambda r: r.precision.compute, lambda r: r.precision.compute in ("bfloat16", "float16")),
    (
        "precision.grad_accumulate",
        lambda r: r.precision.grad_accumulate,
        lambda r: r.precision.grad_accumulate in ("bfloat16", "float16"),
    ),
    (
        "precision.grad_reduce",
        lambda r: r.precision.grad_reduce,
        lambda r: r.precision.grad_reduce in ("bfloat16", "float16"),
    ),
    ("recompute.mode", lambda r: r.recompute.mode, lambda r: r.recompute.mode != "none"),
    ("train.resume", lambda r: r.train.resume, lambda r: r.train.resume is not None),
    ("checkpoint.every", lambda r: r.checkpoint.every, lambda r: r.checkpoint.every > 0),
)


def unavailable(run: RunSpec) -> list[Violation]:
    """One violation for each thing that the run asks for and this version lacks."""
    return [
        Violation(key, f"{value(run)!r} is not available in this version")
        for key, value, asked in NOT_YET
        if asked(run)
    ]
