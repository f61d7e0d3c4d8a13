"""Bytes of one element of each kind of model state: weights, gradients, master copy, moments."""

from __future__ import annotations

from collections.abc import Mapping

from plait.spec.run import RunSpec

SIZES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

# Kind of state -> the ZeRO stage from which on a rank holds only its own slice of it.
SHARDED_FROM: Mapping[str, int] = {"weights": 3, "gradients": 2, "master": 1, "moments": 1}


def element_bytes(run: RunSpec) -> dict[str, int]:
    """Bytes of each kind of state per element of a weight; "float32" widens to a wider compute dtype."""
    compute = SIZES[run.precision.compute]
    full = max(compute, SIZES["float32"])
    accumulate = run.precision.grad_accumulate
    moments = {"adamw": 2, "sgd": int(run.optim.momentum > 0)}[run.optim.name]
    return {
        "weights": compute,
        "gradients": full if accumulate == "float32" else SIZES[accumulate],
        "master": full if compute < full else 0,
        "moments": moments * full,
    }
