"""From the times of a contest to what is said about it: medians, paired ratios, and an interval for each.

Times of one round were taken within seconds of each other, so ratios are taken round by round ("paired") and the
median is taken last. The interval is the distribution-free one for a median: of n ratios the k-th smallest and the
k-th largest, k as large as a coverage of 95 % allows. With 7 rounds these are the smallest and the largest.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any

import numpy as np
import torch

import plait
from benchmarks.contest import Contest, Turns
from benchmarks.sleeping import Naps
from benchmarks.work import Size

COVERAGE = 0.95


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios, and the interval that holds the true median with probability `coverage`.

    None stands for infinity, which JSON lacks.
    """

    median: float | None
    low: float | None
    high: float | None
    coverage: float


def ratio(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """The median of a / b. Where b ≤ 0 the ratio counts as infinite: against whoever is a."""
    ratios = sorted(a / b if b > 0 else math.inf for a, b in pairs)
    n = len(ratios)
    k = max([1, *(k for k in range(1, n // 2 + 1) if _coverage(n, k) >= COVERAGE)])
    low, middle, high = (None if math.isinf(r) else r for r in (ratios[k - 1], median(ratios), ratios[n - k]))
    return Ratio(middle, low, high, _coverage(n, k))


def _coverage(n: int, k: int) -> float:
    """The chance that the true median lies between the k-th smallest and the k-th largest of n."""
    return 1.0 - 2 * sum(math.comb(n, i) for i in range(k)) / float(2**n)


def judge(contest: Contest, turns: Turns, size: Size | Naps, steps: int) -> dict[str, Any]:
    """The result file of a contest."""
    seconds = turns.seconds
    medians = {side: median(times) for side, times in seconds.items()}
    floors = [side for side in medians if side.startswith("floor")]
    floor = min(floors, key=lambda side: medians[side], default=None)
    return {
        "benchmark": contest.key,
        "title": contest.title,
        "peer": contest.peer,
        "ranks": contest.ranks,
        "threads_per_rank": 1,
        "optimizer": "AdamW (fused)" if isinstance(size, Size) else None,
        "size": size.as_dict(),
        "rounds": len(seconds["plait"]),
        "steps_per_turn": steps,
        "gradient_error_of_step_1": dict(turns.gradient_error),
        "milliseconds": {side: 1e3 * value for side, value in medians.items()},
        "cpu_milliseconds_per_rank": {side: 1e3 * median(times) for side, times in turns.cpu_seconds.items()},
        "floor": floor,
        "throughput": asdict(ratio(list(zip(seconds["peer"], seconds["plait"], strict=True)))),
        "above_floor": None if floor is None else asdict(ratio(_above(seconds, floor))),
        "cpu": _of_processor(turns),
        "peak_bytes": {side: list(by_rank) for side, by_rank in turns.peak_bytes.items()},
        "orders": {side: order._asdict() for side, order in turns.orders.items()},
        "wanted": {"throughput_at_least": contest.throughput, "above_floor_at_most": contest.above_floor,
                   "memory_at_most": contest.memory},
        "milliseconds_by_round": {side: [1e3 * t for t in times] for side, times in seconds.items()},
        "cpu_milliseconds_by_round": {side: [1e3 * t for t in times] for side, times in turns.cpu_seconds.items()},
        "machine": machine(),
        "versions": {"plait": plait.__version__, "torch": torch.__version__, "numpy": np.__version__,
                     "python": platform.python_version()},
    }  # fmt: skip


def _of_processor(turns: Turns) -> dict[str, Any]:
    """The same figures in CPU seconds: what a machine that others use at the same time can still tell."""
    seconds = turns.cpu_seconds
    floors = [side for side in seconds if side.startswith("floor")]
    floor = min(floors, key=lambda side: median(seconds[side]), default=None)
    return {
        "floor": floor,
        "throughput": asdict(ratio(list(zip(seconds["peer"], seconds["plait"], strict=True)))),
        "above_floor": None if floor is None else asdict(ratio(_above(seconds, floor))),
    }


def _above(seconds: Mapping[str, Sequence[float]], floor: str) -> list[tuple[float, float]]:
    rounds = zip(seconds["plait"], seconds["peer"], seconds[floor], strict=True)
    return [(ours - least, theirs - least) for ours, theirs, least in rounds]


def machine() -> dict[str, Any]:
    """What the figures depend on, and how busy it was just now."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.platform(),
        "load": os.getloadavg()[0],
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def processor() -> str:
    """The processor's own name for itself, where the system tells."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
