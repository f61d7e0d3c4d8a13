"""The learning rate of update n (from 1): a pure function of the run, the same on every rank and after every resume."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from plait.spec.run import OptimSpec


def _constant(done: float, optim: OptimSpec) -> float:
    return 1.0


def _linear(done: float, optim: OptimSpec) -> float:
    return 1.0 - (1.0 - optim.final) * done


def _cosine(done: float, optim: OptimSpec) -> float:
    return optim.final + (1.0 - optim.final) * 0.5 * (1.0 + math.cos(math.pi * done))


# Name -> factor after the warm-up, from the share of the falling part that is done (0 … 1). "wsd" (warm-up, stable,
# decay; Hu et al. 2024) falls in its last `decay` steps only.
SHAPES: Mapping[str, Callable[[float, OptimSpec], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "wsd": _linear,
}


def rate(update: int, optim: OptimSpec, steps: int) -> float:
    """lr(n): rises to `optim.lr` at n = warmup, and stands at `optim.lr · final` at n = steps (unless constant)."""
    if update <= optim.warmup:
        return optim.lr * update / optim.warmup
    falls = optim.decay if optim.schedule == "wsd" else steps - optim.warmup
    done = max(0.0, (update - (steps - falls)) / falls) if falls else 1.0
    return optim.lr * SHAPES[optim.schedule](min(1.0, done), optim)
