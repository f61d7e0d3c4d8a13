"""The process's place in the job: its rank, its device, the mark it leaves of its progress, and how it joins.

Nothing is split here and no module is replaced: the mesh asks torch for the same. Under torchrun the job is there
already and `run_here` joins it; on one machine `plait.parallel.launch` forks it.
"""

from __future__ import annotations

import faulthandler
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar, TypeVarTuple

import torch
import torch.distributed as dist

from plait.parallel import faults
from plait.parallel.outcome import Origin, failure_of
from plait.spec.errors import UsageError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed does not export it by name

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# What is asked for -> what moves the tensors of each device. "cuda-shared", for tests: ranks share the GPUs there are.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "cuda-shared": "cpu:gloo,cuda:gloo"}
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
FOLLOW_UP_WAIT_S = 5.0  # torchrun looks at its workers every 0.1 s and ends the survivors long before this


class Standing(NamedTuple):
    """Where a rank stands: the step (None before the first), what it does in it, and since when (monotonic seconds)."""

    step: int | None
    phase: str
    since: float

    @property
    def order(self) -> tuple[int, int, float]:
        """Sorts standings from the furthest behind; the points of a step are known by name, in their order."""
        point = faults.POINTS.index(self.phase) if self.phase in faults.POINTS else -1
        return (-1 if self.step is None else self.step, point, self.since)

    def __str__(self) -> str:
        return ("before the first step" if self.step is None else f"step {self.step}") + f", {self.phase}"


class Mark:
    """A rank's own few bytes, in memory that outlives it: where a killed rank stood can still be read."""

    _format = struct.Struct("=qd32s?")
    size = _format.size

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._heeds = False
        self.set(None, "start")

    def set(self, step: int | None, phase: str) -> None:
        """Overwrite the mark; `phase` keeps its first 32 bytes."""
        number = -1 if step is None else step
        self._format.pack_into(self._memory, 0, number, time.monotonic(), phase.encode(), self._heeds)

    def heeds(self, does: bool) -> None:
        """Say whether SIGTERM asks this rank to stop when it can, instead of ending it."""
        self._heeds = does
        self._format.pack_into(self._memory, 0, *self._format.unpack_from(self._memory)[:3], does)

    @property
    def heeding(self) -> bool:
        """What the rank said last of that."""
        return bool(self._format.unpack_from(self._memory)[3])

    def read(self) -> Standing:
        step, since, phase, _ = self._format.unpack_from(self._memory)
        return Standing(None if step < 0 else step, phase.rstrip(b"\0").decode(errors="ignore"), since)


@dataclass(frozen=True)
class World:
    """One rank's view of the job: who it is among how many, the device it computes on, and the ranks of its machine."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    backend: str = BACKENDS["cpu"]
    local_size: int | None = None  # None: all ranks are on one machine
    mark: Mark = field(default_factory=lambda: Mark(memoryview(bytearray(Mark.size))), repr=False, compare=False)

    def progress(self, step: int, phase: str) -> None:
        """Say where this rank stands (under a microsecond); a failure is reported with the last word said here."""
        self.mark.set(step, phase)

    def leave(self) -> None:
        """Leave the default process group, in order: every rank calls it."""
        dist.destroy_process_group()

    def join(self, store: Store | None = None) -> None:
        """Enter the default process group, over `store` or over what torchrun left in the environment."""
        if self.device.type == "cuda":
            if (self.device.index or 0) >= torch.cuda.device_count():
                raise UsageError(f"rank {self.rank} needs GPU {self.local_rank}, here are {torch.cuda.device_count()}")
            torch.cuda.set_device(self.device)
        dist.init_process_group(self.backend, store=store, rank=self.rank, world_size=self.size)


def device_kind(asked: str) -> str:
    """ "auto" is "cuda" where a GPU can be seen; looking does not start CUDA, so ranks can still be forked."""
    return ("cuda" if torch.cuda.device_count() else "cpu") if asked == "auto" else asked


def on_device(kind: str, local_rank: int) -> torch.device:
    """The device of a local rank: "cpu", its own GPU for "cuda", one of those there are for "cuda-shared"."""
    if kind not in BACKENDS:
        raise UsageError(f"device {kind} is not one of {', '.join(BACKENDS)}")
    if kind == "cpu":
        return torch.device(kind)
    return torch.device("cuda", local_rank if kind == "cuda" else local_rank % max(1, torch.cuda.device_count()))


def joined_world(device: str = "cpu") -> World | None:
    """This process's place in a job that torchrun (or srun + torchrun) has started; None outside of one."""
    if "RANK" not in os.environ:
        return None
    missing = [name for name in TORCHRUN if name not in os.environ]
    if missing:
        raise UsageError(f"RANK is set, but {', '.join(missing)} is not", "start under torchrun, or unset RANK")
    rank, size, local_rank = (int(os.environ[name]) for name in TORCHRUN[:3])
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return World(rank, size, local_rank, on_device(device, local_rank), BACKENDS[device], local_size)


def run_here(world: World, target: Callable[[World, *Ts], T], *args: *Ts) -> T:
    """Run `target(world, *args)` as one rank of the job that is there.

    A failure is told on stderr (rank, step, cause, traceback) and ends the process with exit code 1, at once: leaving a
    process group in order would wait for ranks that will not come. A rank that only lost its peer waits a moment first,
    so that the cause stands above its followers, or alone.
    """
    faults.planned()
    faulthandler.enable()
    try:
        world.join()
        result = target(world, *args)
    except Exception as error:
        failure, note = failure_of(error), "error: "
        if failure.origin is Origin.LOST_PEER:
            time.sleep(FOLLOW_UP_WAIT_S)
            note = "another rank failed first, then "
        sys.stdout.flush()
        told = f"{note}rank {world.rank}, {world.mark.read()}: {failure.cause}\n{failure.trace}\n"
        sys.stderr.write(told)  # with its end of line in one write: other ranks write to the same stream
        sys.stderr.flush()
        os._exit(failure.exit_code)
    world.leave()
    return result


@contextmanager
def alone(rank: int, world: int) -> Iterator[None]:
    """A default process group in which this process is `rank` and nobody else is there: what is sent goes nowhere."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
