"""The checkpoints of a run that goes on: when one is due, who may write here, and how a run that is asked to stops.

Whether to stop is agreed in the sum that every step makes anyway, so all ranks leave after the same step.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

from plait.checkpoint.save import Saver
from plait.checkpoint.shelf import held
from plait.parallel.collectives import Group
from plait.parallel.faults import strike
from plait.parallel.mesh import Mesh
from plait.parallel.world import World
from plait.spec.errors import Interrupted, PlaitError
from plait.spec.run import RunSpec
from plait.train.agree import told_by_first
from plait.train.resume import CHECKPOINTS
from plait.train.states import facts_of, states_of
from plait.train.step import Step


class Keeper:
    """Saves a run's states onto a shelf of checkpoints, and stops a run that is asked to.

    `data` is the fingerprint of the tokens, which a checkpoint names.
    """

    def __init__(self, run: RunSpec, mesh: Mesh, shelf: Path, data: str) -> None:
        self.run, self.rank, self.data, self.shelf = run, mesh.rank, data, shelf
        self.saver = Saver(shelf, mesh.group_beside("world"), run.checkpoint.keep)

    def after(self, step: Step, number: int, loss: float, world: World) -> None:
        """Step `number` is done: save where a checkpoint is due. Raises Interrupted once a run that is to stop is safe.

        Raises what kept the last checkpoint from being written, on all ranks.
        """
        run, last = self.run, number == self.run.train.steps
        every = run.checkpoint.every
        if step.stopping:
            self.saver.wait()  # where its failure is why we stop, it is raised here
        if step.stopping or (every and (last or number % every == 0)):
            world.progress(number, "snapshot")
            strike(self.rank, number, "snapshot")
            facts = facts_of(step, number, loss if math.isfinite(loss) else None, self.data)
            self.saver.start(states_of(step), facts)
        if self.saver.failed and not step.asked:
            step.asked = 1  # all stop after the next step, and `wait` says why
        if step.stopping or last:
            world.progress(number, "save")
            self.saver.wait()
        if step.stopping and not last:
            asked = step.asked if step.asked > 1 else signal.SIGTERM  # another rank was asked
            raise Interrupted(asked, f"stopped after step {number} of {run.train.steps}, saved in {self.shelf}")

    def settle(self) -> None:
        """Wait for what is being saved, where the run ends for another cause: that one counts. A save that failed is
        told by its thread."""
        with suppress(PlaitError):
            self.saver.wait()


@contextmanager
def keeping(run: RunSpec, mesh: Mesh, folder: Path | None, data: str) -> Iterator[Keeper | None]:
    """The keeper of a run whose directory rank 0 knows (None: nothing is kept). Collective.

    Raises UsageError, on all ranks, where another job writes there.
    """
    shelf = None if folder is None else (folder / CHECKPOINTS).absolute()
    writes = bool(run.checkpoint.every) or run.train.resume is not None
    with occupied(shelf, mesh.group("world"), writes) as told:
        keeper = Keeper(run, mesh, told, data) if told else None
        try:
            yield keeper
        except GeneratorExit:  # who left the loop early did so on all ranks: what is being saved is still good
            _finish(keeper)
            raise
        _finish(keeper)


def _finish(keeper: Keeper | None) -> None:
    if keeper is not None:
        keeper.saver.wait()


@contextmanager
def occupied(shelf: Path | None, group: Group, writes: bool = True) -> Iterator[Path | None]:
    """Rank 0's shelf, told to all ranks, and where the job writes there nobody else's meanwhile. Collective."""
    with ExitStack() as lock:

        def take() -> str | None:
            if shelf is not None and writes:
                lock.enter_context(held(shelf))
            return None if shelf is None else str(shelf)

        told = told_by_first(take, group)
        yield None if told is None else Path(told)


@contextmanager
def heeding_signals(step: Step, world: World) -> Iterator[None]:
    """SIGTERM, and Ctrl-C where it comes here, ask the run to stop after this step; a second Ctrl-C ends it at once."""

    def heed(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and step.asked == signal.SIGINT:
            if world.rank == 0:
                os.write(sys.stderr.fileno(), b"stopped at once: what was not saved is lost\n")
            os._exit(Interrupted.exit_code)
        step.asked = number

    numbers = [n for n in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, heed) for number in numbers}
    world.mark.heeds(True)
    try:
        yield
    finally:
        world.mark.heeds(False)
        for number, handler in before.items():
            signal.signal(number, handler)
