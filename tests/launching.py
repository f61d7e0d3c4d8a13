"""Run a function on forked ranks, for tests: gloo, one thread per rank, a time limit. Closures work; nothing is pickled
but the results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

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
