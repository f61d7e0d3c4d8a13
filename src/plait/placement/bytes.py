"""Bytes of model states per rank, read off the placement records: weights, gradients, master copy, moments."""

from __future__ import annotations

from collections.abc import Mapping

from plait.placement.cuts import area
from plait.placement.place import Placement, Placements
from plait.spec.run import RunSpec

SIZES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

# Kind of state -> the ZeRO stage from which on a rank holds only its own slice of it.
SHARDED_FROM: Mapping[str, int] = {"weights": 3, "gradients": 2, "master": 1, "moments": 1}


def element_bytes(run: RunSpec) -> dict[str, int]:
    """Bytes of each kind of state per element of a weight; "float32" widens to a wider compute dtype."""
    compute = SIZES[run.precision.compute]
    full = max(compute, SIZES["float32"])
    moments = {"adamw": 2, "sgd": int(run.optim.momentum > 0)}[run.optim.name]
    return {
        "weights": compute,
        "gradients": max(compute, SIZES[run.precision.grad_accumulate]),
        "master": full if compute < full else 0,
        "moments": moments * full,
    }


def state_bytes(placements: Placements, run: RunSpec, rank: int) -> dict[str, int]:
    """Kind of state -> bytes on `rank`, ZeRO's padding included."""
    held = [p for p in placements.values() if p.held_by(rank)]
    return {
        kind: each * sum(_elements(p, rank, p.zero_stage >= SHARDED_FROM[kind]) for p in held)
        for kind, each in element_bytes(run).items()
    }


def _elements(placement: Placement, rank: int, sharded: bool) -> int:
    if not sharded:
        return area(placement.rectangle(rank))
    own = placement.zero_slice(rank)
    return own.stop - own.start + own.padding
