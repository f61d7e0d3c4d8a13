"""The one door for injecting faults into a run, for tests: `PLAIT_FAULT="rank=1,step=3,at=forward,kind=kill"`.

The trainer calls `strike` at each of `POINTS`; without the variable that is one look into the environment. Nothing else
in the package may fail on purpose.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

from plait.spec.errors import UsageError

VARIABLE = "PLAIT_FAULT"
POINTS = (
    "data", "forward", "collective", "update", "evaluate",
    "snapshot", "save begun", "save opened", "save writing", "save written", "save agreed", "save publishing",
    "save published", "save finished",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and where: on `rank` (None: on all), in `step` (as the trainer counts), when it comes to the
    point `at`."""

    rank: int | None
    step: int
    at: str
    kind: str


def _throw() -> NoReturn:
    raise RuntimeError("injected fault")


def _exit() -> NoReturn:
    os._exit(3)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _read_null() -> None:
    ctypes.string_at(0)


def _hang() -> NoReturn:
    while True:
        time.sleep(3600)


KINDS: dict[str, Callable[[], None]] = {
    "raise": _throw,
    "exit": _exit,
    "kill": _kill,
    "segv": _read_null,
    "hang": _hang,
}


def strike(rank: int, step: int, at: str) -> None:
    """Fail here if the environment says so; `at` is one of `POINTS`."""
    if VARIABLE not in os.environ:
        return
    fault = planned()
    if fault is not None and fault.rank in (rank, None) and (fault.step, fault.at) == (step, at):
        KINDS[fault.kind]()


def planned() -> Fault | None:
    """The fault that the environment asks for, None without one; a text that is not understood raises UsageError."""
    text = os.environ.get(VARIABLE)
    return None if text is None else parse(text)


@lru_cache(maxsize=1)
def parse(text: str) -> Fault:
    """`rank=1,step=3,at=forward,kind=kill` as a Fault: each key once, in any order. UsageError says what is wrong."""
    pairs = [pair.partition("=")[::2] for pair in text.split(",")]
    fields = dict(pairs)
    if sorted(key for key, _ in pairs) != ["at", "kind", "rank", "step"]:
        raise UsageError(f"{VARIABLE}={text!r}: needs rank, step, at and kind, each once")
    for key, allowed in (("at", POINTS), ("kind", tuple(KINDS))):
        if fields[key] not in allowed:
            raise UsageError(f"{VARIABLE}: {key}={fields[key]} is not one of {', '.join(allowed)}")
    every = fields["rank"] == "all"
    for key in ("step",) if every else ("rank", "step"):
        if not (fields[key].isascii() and fields[key].isdigit()):
            raise UsageError(f"{VARIABLE}: {key}={fields[key]} is not a whole number from 0")
    return Fault(None if every else int(fields["rank"]), int(fields["step"]), fields["at"], fields["kind"])
