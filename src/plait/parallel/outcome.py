"""What became of a rank: its result, or why it failed and how near that is to the cause.

Nothing is split here. When one rank goes, the others fail too, often sooner than anyone hears of the first; this file
tells the two apart.
"""

from __future__ import annotations

import enum
import re
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from plait.spec.errors import PlaitError

# What a rank says when another one has left: gloo and the stores raise plain RuntimeErrors, so the text must tell.
_LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket (closed|timeout)|failed to (send|recv)|timed out waiting"
    r"|gloo/transport|pair closure|ncclRemoteError|ncclSystemError|NCCL communicator was aborted"
    r"|collective operation timeout",
    re.IGNORECASE,
)


class Origin(enum.IntEnum):
    """How a failure came about; the lower, the nearer to the cause."""

    DIED = 0
    ABORTED = 1  # SIGABRT: a communication library may do this to a survivor
    RAISED = 2
    LOST_PEER = 3


@dataclass(frozen=True)
class Success:
    """A rank came to its end; `value` is what its target returned."""

    value: Any


@dataclass(frozen=True)
class Failure:
    """What ended one rank; `moment` in monotonic seconds, which all processes of a machine share.

    An error of plait's own keeps its exit code (above 128: a run that was asked to stop, and has), and its hint stands
    where others have a traceback.
    """

    origin: Origin
    moment: float
    cause: str
    trace: str
    exit_code: int = 1


def failure_of(error: BaseException) -> Failure:
    """The failure of a rank that raised."""
    origin = Origin.LOST_PEER if lost_peer(error) else Origin.RAISED
    if isinstance(error, PlaitError):
        return Failure(origin, time.monotonic(), error.message, error.hint, error.exit_code)
    return Failure(origin, time.monotonic(), cause_of(error), "".join(traceback.format_exception(error)))


def death_of(code: int, trace: str) -> Failure:
    """The failure of a rank that was seen to end by itself, with an exit code or (negative) by a signal."""
    if code >= 0:
        return Failure(Origin.DIED, time.monotonic(), f"exit code {code}", trace)
    name = {number.value: number.name for number in signal.Signals}.get(-code, "real-time")
    cause = f"signal {-code} ({name})"
    if code == -signal.SIGKILL:
        cause += ", possibly out of memory"
    return Failure(Origin.ABORTED if code == -signal.SIGABRT else Origin.DIED, time.monotonic(), cause, trace)


def cause_of(error: BaseException) -> str:
    """An exception in one line: `ValueError: text`, or `exit code 3` where the rank asked to leave."""
    if isinstance(error, SystemExit):
        return f"exit code {error.code if isinstance(error.code, int) else int(error.code is not None)}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def lost_peer(error: BaseException) -> bool:
    """True where the error, or one behind it, says that another rank went away: a consequence, seldom a cause."""
    return any(
        isinstance(e, ConnectionError | dist.DistError) or bool(_LOST_PEER.search(str(e))) for e in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
