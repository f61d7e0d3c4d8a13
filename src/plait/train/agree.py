"""One outcome on all ranks: what the first rank finds, or what any rank fails at, is told to everyone.

Files are seen by each rank alone, and a rank that raised while the others wait would end the job under a wrong name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from plait.parallel import collectives as comm
from plait.parallel.collectives import Group
from plait.spec.errors import BrokenCheckpoint, CheckpointMismatch, PlaitError, SaveFailed, UsageError

T = TypeVar("T")

# What an error is raised again as: the first of these that it is an instance of.
_KINDS: Mapping[str, type[PlaitError]] = {
    kind.__name__: kind for kind in (CheckpointMismatch, UsageError, SaveFailed, PlaitError)
}


def told_by_first(look: Callable[[], Any], group: Group) -> Any:
    """What rank 0 of the group finds (a JSON value), on every rank; its error too. Collective."""
    mine = _outcome(look) if group.rank == 0 else {}
    return _value(json.loads(comm.gather_bytes(json.dumps(mine).encode(), group)[0]))


def agreed(act: Callable[[], T], group: Group) -> T:
    """What this rank's act returns, where no rank's act fails; else the first failure, on every rank. Collective."""
    found: list[T] = []
    mine = _outcome(lambda: found.append(act()))
    for told in comm.gather_bytes(json.dumps(mine).encode(), group):
        _value(json.loads(told))
    return found[0]


def _outcome(act: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": act()}
    except BrokenCheckpoint as error:
        return {"path": str(error.path), "reason": error.reason}
    except PlaitError as error:
        kind = next(name for name, kind in _KINDS.items() if isinstance(error, kind))
        return {"kind": kind, "message": error.message, "hint": error.hint}
    except OSError as error:
        return {"kind": "UsageError", "message": f"{error.filename}: {error.strerror or error}", "hint": ""}


def _value(told: Mapping[str, Any]) -> Any:
    if "reason" in told:
        raise BrokenCheckpoint(Path(told["path"]), told["reason"])
    if "kind" in told:
        raise _KINDS[told["kind"]](told["message"], told["hint"])
    return told["value"]
