"""The few calibrated numbers: their meaning, what was believed before any run was read, and what runs made of them.

A rate of `pace.Rates` is a product of constants, and which ones follows from what the job is (`recipe`): so one table
serves a single plan, and its logarithm is linear for the fit. The values of `constants.toml` are written by
`published/calibrate.py`; a device family that no run is known of keeps the values believed beforehand.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import NamedTuple

from plait.planner.ground import Ground
from plait.planner.job import Job
from plait.planner.pace import Rates

CALIBRATED = Path(__file__).parent / "constants.toml"


class Belief(NamedTuple):
    """A value before any run, and how far (in its logarithm) it may be off."""

    value: float
    spread: float
    meaning: str


# Of each device family, at most six.
OF_FAMILY: Mapping[str, Belief] = {
    "gemm16": Belief(0.72, 0.10, "products in 16 bits, of the dense peak"),
    "gemm8": Belief(0.66, 0.12, "products in 8 bits"),
    "gemm4": Belief(0.52, 0.15, "products in 4 bits"),
    "attention": Belief(0.48, 0.12, "attention by kernels of the device's own generation, of the 16-bit peak"),
}
# Where a family is believed to differ: a kernel generation, a power limit.
FAMILY_BELIEFS: Mapping[str, float] = {
    "v100.attention": 0.40, "b200.attention": 0.42, "b300.attention": 0.42, "gb200.attention": 0.42,
    "gb300.attention": 0.42,
}  # fmt: skip
SHARED: Mapping[str, Belief] = {
    "expert": Belief(0.85, 0.10, "grouped products of experts, relative to a dense product"),
    "memory": Belief(0.80, 0.10, "of the memory's bandwidth"),
    "operands": Belief(0.50, 0.50, "part of a product's reading and writing that its arithmetic does not hide"),
    "quantise": Belief(1.00, 0.50, "cost of narrowing, relative to its traffic"),
    "blocks": Belief(1.50, 0.30, "the same with a scale per block (MXFP8, NVFP4)"),
    "kernel": Belief(3e-6, 0.40, "seconds of a kernel's start that nothing hides"),
    "graphs": Belief(0.40, 0.40, "of the starts and waits that are left where graphs start the kernels"),
    "routing": Belief(
        1e-3, 0.60, "seconds of one pass through a layer of experts that is neither product nor exchange"
    ),
    "host": Belief(5e-5, 0.30, "seconds in which the host starts one operation, where no graph does"),
    "fast": Belief(0.75, 0.15, "of the links inside a domain"),
    "network": Belief(0.70, 0.20, "of the links between nodes"),
    "staged": Belief(0.50, 0.30, "of that, where what is sent passes through the host's memory on both sides"),
    "tensor": Belief(0.50, 0.40, "visible part of tensor-parallel traffic where it runs in pieces beside products"),
    "exchange": Belief(0.80, 0.40, "visible part of expert exchange"),
    "hidden": Belief(0.60, 0.30, "of the visible exchange that is left where it runs beside other micro-batches"),
    "stages": Belief(0.50, 0.50, "visible part of messages between stages where they overlap"),
    "leak": Belief(0.20, 0.50, "part of hidden traffic that slows what hides it"),
    "jitter": Belief(0.006, 0.50, "of a step, for each doubling of the ranks beyond eight"),
    "step": Belief(5e-3, 0.70, "seconds of a step that nothing else explains"),
    "unfused": Belief(0.60, 0.30, "products of unfused attention, relative to a dense product"),
    "flash1": Belief(0.60, 0.10, "first flash kernels, relative to the second (Dao 2023, figure 4)"),
    "older": Belief(0.63, 0.10, "attention kernels of an older device generation (Dao 2023, figure 6)"),
}
KERNELS_OF = {"a100": "flash-2", "v100": "flash-2"}  # families whose own generation of kernels an older stack has

Constants = Mapping[str, float]
Recipe = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Calibration:
    """Constants by name, and the spreads of held-out predictions by kind (`published/score.py`)."""

    constants: Constants
    spreads: Mapping[str, float]


def belief(name: str) -> Belief:
    """What was believed of a constant ("h100.gemm8", "leak")."""
    family, _, own = name.rpartition(".")
    if not family:
        return SHARED[name]
    found = OF_FAMILY[own]
    return found._replace(value=FAMILY_BELIEFS.get(name, found.value))


@cache
def calibration() -> Calibration:
    """What stands in `constants.toml`."""
    table = tomllib.loads(CALIBRATED.read_text(encoding="utf-8"))
    families = {f"{family}.{name}": value for family, own in table["families"].items() for name, value in own.items()}
    return Calibration({**table["shared"], **families}, table["spreads"])


def value(constants: Constants, name: str) -> float:
    """A constant, or what was believed of it where it was never calibrated."""
    return constants[name] if name in constants else belief(name).value


def recipe(ground: Ground, job: Job, blocks: bool = False) -> Recipe:
    """Which constants make each rate of a job. `blocks`: narrow products have a scale per block of elements."""
    stack, family = ground.stack, ground.cluster.device.family or ground.cluster.device.name
    narrow = {"float8": "gemm8", "float4": "gemm4"}.get(job.compute, "gemm16")
    older = ("older",) if stack.attention in ("flash-1", "flash-2") and family not in KERNELS_OF else ()
    first = ("flash1",) if stack.attention == "flash-1" else ()
    attention = (f"{family}.attention", *first, *older)
    inside = job.world <= ground.cluster.domain
    staged = ("staged",) if ground.cluster.links[-1].staged else ()
    graphs = ("graphs",) if family in stack.graphs else ()
    return {
        "gemm": (f"{family}.{narrow}",),
        "wide": (f"{family}.gemm16",),
        "expert": ("expert",),
        "attention": (f"{family}.gemm16", "unfused") if stack.attention == "unfused" else attention,
        "memory": ("memory",),
        "update": ("memory",),
        "operands": ("operands",),
        "quantise": ("quantise", "blocks") if blocks else ("quantise",),
        "kernel": ("kernel", *graphs),
        "routing": ("routing", *graphs),
        "host": ("host", *graphs),
        "fast": ("fast",),
        "network": ("fast",) if inside else ("network", *staged),
        "tp": ("tensor",) if stack.overlap_tp and job.sequence_parallel else (),
        "ep": ("exchange", "hidden") if stack.overlap_ep else ("exchange",),
        "pp": ("stages",) if stack.overlap_pp else (),
        "leak": ("leak",),
        "jitter": ("jitter",),
        "step": ("step",),
    }


def fixed(ground: Ground, job: Job) -> dict[str, float]:
    """Rates of a job that no calibration moves: habits of its stack, and what its cluster's file has measured."""
    measured, by_itself = ground.cluster.measured, ground.cluster.device.moves_itself
    own = {
        "gemm": measured.gemm.get(job.compute),
        "wide": measured.gemm.get(job.compute if job.width >= 4 else "bfloat16"),
        "expert": measured.expert,
        "attention": measured.attention,
        "memory": measured.memory,
        "update": measured.update,
        "operands": measured.operands,
        "kernel": measured.kernel,
        "fast": measured.link,
        "network": measured.link,
        "host": 0.0 if by_itself else None,
        "pp": 1.0 if by_itself else None,
        "dp": float(ground.stack.overlap_dp and not by_itself),
    }
    return {name: number for name, number in own.items() if number is not None}


def rates(ground: Ground, job: Job, constants: Constants, blocks: bool = False) -> Rates:
    """The rates of one job. What the cluster's own file has measured goes before what was calibrated."""
    made = {name: prod(value(constants, part) for part in parts) for name, parts in recipe(ground, job, blocks).items()}
    return Rates(**{**made, **fixed(ground, job)})
