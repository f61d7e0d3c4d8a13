"""Run a function on forked ranks, for tests: gloo, one thread per rank, a time limit. Closures work; nothing is pickled
but the results."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from plait.parallel import faults
from plait.parallel.launch import World, launch

T = TypeVar("T")


def on_ranks(world: int, fn: Callable[..., T], *args: Any, timeout: float = 60) -> list[T]:
    """The results of `fn(rank, world, *args)` by rank.

    A failure is a RankFailed that shows the rank and its traceback; a hang is one too, with the stack of every rank,
    `timeout` seconds after the last rank moved.
    """

    def target(here: World) -> T:
        return fn(here.rank, here.size, *args)

    return launch(world, target, threads=1, timeout_s=timeout)


def steps(world: World, pid_folder: Path | None = None) -> float:
    """Five steps of a job whose ranks need each other in each step."""
    if pid_folder is not None:
        (pid_folder / f"{os.getpid()}").touch()
    total = torch.zeros(1)
    for step in range(1, 6):
        for phase in faults.POINTS:
            world.progress(step, phase)
            faults.strike(world.rank, step, phase)
            if phase == "collective":
                total += 1
                dist.all_reduce(total)
    return total.item()


def in_child(body: Callable[[], object]) -> int:
    """Fork a stand-in for the launcher's process; it exits 0, or 130 after a KeyboardInterrupt."""
    pid = os.fork()
    if pid == 0:
        code = 1
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a script ignores it
        try:
            body()
            code = 0
        except KeyboardInterrupt:
            code = 130
        finally:
            os._exit(code)
    return pid


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
