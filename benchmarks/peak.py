"""Peak memory of a side: alone in fresh ranks, by the system's own count, with the same recipe for every side.

A tiny copy of the side takes a step first, so that libraries, threads and connections are there before anything is
counted. Then the state of the process is noted, the side is made and warmed by a step, the high-water mark is reset,
and two steps are taken: the peak is the mark above the state noted. glibc gives large blocks back to the system at
once (its threshold for that would otherwise grow with each block freed, and differently for each side).
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

from benchmarks.floor import Pipes
from benchmarks.work import TINY, Side, Size
from plait.parallel.launch import World, launch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGE = 1 << 16
STEPS = 2


def peak_bytes(ranks: int, make: Callable[[Size, World, Pipes], Side], size: Size) -> list[int]:
    """Of each rank: resident bytes at the highest moment of a step, above those before the side was made."""
    pipes = Pipes(ranks)
    try:
        return launch(ranks, _on_rank, make, size, pipes, threads=1, timeout_s=None)
    finally:
        pipes.close()


def _on_rank(world: World, make: Callable[[Size, World, Pipes], Side], size: Size, pipes: Pipes) -> int:
    library = ctypes.CDLL(None)
    library.mallopt(M_MMAP_THRESHOLD, LARGE)
    library.mallopt(M_TRIM_THRESHOLD, LARGE)
    _take(make(TINY, world, pipes), 1)
    gc.collect()
    library.malloc_trim(0)
    before = _status("VmRSS")
    side = make(size, world, pipes)
    _take(side, 1)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    _take(side, STEPS)
    return _status("VmHWM") - before


def _take(side: Side, steps: int) -> None:
    for _ in range(steps):
        side.backward()
        side.update()


def _status(name: str) -> int:
    """Bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
