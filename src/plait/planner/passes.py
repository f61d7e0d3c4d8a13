"""From timed passes of small stages (`parallel/passes.py`) to the rates of a device: a fit of the very counts that a
plan is made of.

What a pass takes is linear in a few numbers (`pace.passes`): seconds of a FLOP, of a byte, of a product's operands, of
a kernel's start. They are found by least squares of relative residuals, none below zero; attention was timed alone. A
row is a forward and its backward together: how a program's own time falls on the two, kernels do not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from plait.planner.block import INDEX
from plait.planner.ground import Ground
from plait.planner.job import Job
from plait.planner.stack import load_stack
from plait.planner.work import position_counts
from plait.spec.cluster import Cluster, Device, Link
from plait.spec.model import ModelSpec

HEAD_DIM = 32  # of every trial
FITTED = ("gemm", "operands", "traffic", "kernels")


class Fit(NamedTuple):
    """Rates of the device, and by how much a pass is missed, on average."""

    gemm: float  # of the peak
    memory: float  # of the bandwidth
    operands: float
    kernel: float  # seconds
    residual: float


def fit_passes(device: Device, attention: float, trials: Sequence[Mapping[str, Any]]) -> Fit:
    """The rates under which the passes of a float32 device are predicted best; `attention` is known."""
    rows, rest, seconds = [], [], []
    for trial in trials:
        counts = trial_counts(device, trial).sum(0)
        rows.append([counts[INDEX[column]] for column in FITTED])
        rows[-1][0] += counts[INDEX["wide"]]
        seconds.append(trial["forward"] + trial["backward"])
        rest.append(seconds[-1] - counts[INDEX["attention"]] / attention)
    design, target = np.array(rows) / np.array(seconds)[:, None], np.array(rest) / np.array(seconds)
    found = least_squares(design, target)
    gemm, operands, traffic, kernels = (max(float(x), 1e-12) for x in found)
    missed = float(np.abs(design @ found - target).mean())
    return Fit(1 / gemm, 1 / traffic, operands / traffic, kernels, missed)


def least_squares(design: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The x ≥ 0 for which design · x is nearest to the target: the best over all sets of columns that are positive."""
    best, least = np.zeros(design.shape[1]), float((target**2).sum())
    for size in range(1, design.shape[1] + 1):
        for chosen in map(list, combinations(range(design.shape[1]), size)):
            part = np.linalg.lstsq(design[:, chosen], target, rcond=None)[0]
            missed = float(((design[:, chosen] @ part - target) ** 2).sum())
            if (part >= 0).all() and missed < least:
                best, least = np.zeros(design.shape[1]), missed
                best[chosen] = part
    return best


def trial_counts(device: Device, trial: Mapping[str, Any]) -> np.ndarray:
    """(forward, backward) counts of a trial's pass."""
    spec = ModelSpec(
        vocab=trial["vocab"], hidden=trial["hidden"], layers=trial["layers"], heads=trial["heads"], ffn=trial["ffn"],
        max_sequence=trial["sequence"], kv_heads=trial["heads"], head_dim=HEAD_DIM,
    )  # fmt: skip
    alone = Cluster(name="alone", device=device, node=1, links=(Link(bandwidth=1e12, latency=0.0),))
    ground = Ground.of(spec, load_stack("plait"), alone)
    job = Job(micro=trial["rows"], batch=trial["rows"], sequence=trial["sequence"], compute="float32")
    whole: np.ndarray = position_counts(ground, job)[0]
    return whole
