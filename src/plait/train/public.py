"""`plait.save` and `plait.restore`: a checkpoint from and for a training loop of the user's own. Both are collective.

A call that other ranks do not make is told by name, instead of waiting for them for good.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from plait.checkpoint.save import Saver
from plait.checkpoint.shelf import folder_of
from plait.parallel.collectives import missing_callers
from plait.parallel.mesh import Mesh
from plait.spec.errors import UsageError
from plait.train.agree import told_by_first
from plait.train.keep import occupied
from plait.train.resume import Resumed, named, resume, whole_in
from plait.train.states import facts_of, states_of
from plait.train.step import Step

PATIENCE_S = 60.0  # between the first rank's call and the last one's
SHOWN = 8  # ranks in an error


def save(
    step: Step,
    shelf: str | Path,
    number: int,
    *,
    loss: float | None = None,
    data: str = "",
    patience: float = PATIENCE_S,
) -> Path:
    """Write the checkpoint of step `number` into a folder of `shelf`, which is returned: whole, and on the disk.

    All ranks call it, and each writes what it owns. Of the checkpoints in `shelf` the newest `checkpoint.keep` of the
    run stay. `loss` is for `plait show`; `data` may be any text that says which tokens it was trained on, and `restore`
    compares it. Raises, on all ranks, SaveFailed where one of them has no room or no leave, and TrainingStopped where a
    value is not finite (neither publishes anything); UsageError where another job writes there, or where not all ranks
    have called within `patience` seconds.
    """
    mesh, place = step.mesh, Path(shelf).absolute()
    _expect_all(f"plait.save of step {number} to {place}", mesh, patience)
    facts = facts_of(step, number, loss if loss is not None and math.isfinite(loss) else None, data)
    with occupied(place, mesh.group("world")):
        saver = Saver(place, mesh.group_beside("world"), step.run.checkpoint.keep)
        saver.start(states_of(step), facts)
        saver.wait()
    return folder_of(place, number)


def restore(
    step: Step, place: str | Path, *, data: str = "", changes: Iterable[str] = (), patience: float = PATIENCE_S
) -> Resumed:
    """Take up weights, moments, counters and scaler of the newest whole checkpoint that `place` means.

    `place` is a checkpoint, a folder of them or a run's directory; any layout may have written it. All ranks call it,
    each reads what it holds, and the step after which the run goes on is returned, with what was skipped and why.
    `changes` are the keys of the run (`optim.lr`, …) that differ on purpose. Raises, on all ranks, UsageError where
    there is no whole checkpoint or not all ranks have called within `patience` seconds, CheckpointMismatch for one of
    another model, run or `data`, and BrokenCheckpoint where none can be read.
    """
    mesh, where = step.mesh, Path(place)
    _expect_all(f"plait.restore of {where.absolute()}", mesh, patience)
    paths, notices = told_by_first(lambda: named(*whole_in(where)), mesh.group("world"))
    if not paths:
        raise UsageError("; ".join([f"{where} holds no whole checkpoint", *notices]), "plait show CHECKPOINT says more")
    found = resume(step, [Path(path) for path in paths], data, frozenset(changes))
    return Resumed(found.step, (*notices, *found.notices))


def _expect_all(what: str, mesh: Mesh, patience: float) -> None:
    """Raise UsageError unless every rank makes the same call within some seconds."""
    missing = missing_callers(what, mesh.layout.world, mesh.rank, patience)
    if missing:
        names = ", ".join(map(str, missing[:SHOWN])) + (", …" if len(missing) > SHOWN else "")
        came = " came after the others" if mesh.rank in missing else ""
        raise UsageError(
            f"{what}: rank {mesh.rank}{came or f' waits for rank {names}'}", "it must be called on all ranks, in time"
        )
