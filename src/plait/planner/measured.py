"""From timings of a machine (`parallel/probe.py`) to a cluster file that a plan can use, and to ranks that are slow.

Peaks are what the best product reached here, so a measured machine's efficiencies are relative to itself. Links follow
from the all-reduce: seconds = latency + bytes on the wire / bandwidth, the line through its smallest and largest size.
Where ranks share processors, seconds are a processor's, and a plan has the ranks share it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import tomli_w

from plait.planner.passes import fit_passes, least_squares
from plait.planner.work import ADAM
from plait.spec.cluster import Device

SLOW = 1.15  # of the others' median


@dataclass(frozen=True)
class Probe:
    """One rank's timings."""

    rank: int
    kind: str
    name: str
    memory: int
    ranks: int
    local: int
    products: Mapping[str, tuple[tuple[float, float], ...]]  # dtype -> (FLOP, seconds) by shape
    attention: tuple[str, float, float]  # dtype, FLOP, seconds
    copied: tuple[float, float]  # bytes, seconds
    kernel: float
    collectives: tuple[tuple[str, int, float, float], ...]  # operation, ranks, bytes, seconds
    cores: int | None = None  # of the host
    passes: tuple[Mapping[str, Any], ...] = ()  # of small blocks and heads
    updated: tuple[float, float] | None = None  # elements, seconds of an optimizer's update

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Probe:
        """From what a rank reported."""
        products: dict[str, tuple[tuple[float, float], ...]] = {}
        for one in found["products"]:
            rows, inner, columns = one["shape"]
            flops = 2.0 * rows * inner * columns
            products[one["dtype"]] = (*products.get(one["dtype"], ()), (flops, one["seconds"]))
        attention, copy, update = found["attention"], found["copy"], found["update"]
        return cls(
            found["rank"], found["kind"], found["name"], found["memory"], found["ranks"], found["local"], products,
            (attention["dtype"], attention["flops"], attention["seconds"]), (copy["bytes"], copy["seconds"]),
            found["kernel"],
            tuple((one["operation"], one["ranks"], one["bytes"], one["seconds"]) for one in found["collectives"]),
            found["cores"], tuple(found["passes"]), update and (update["elements"], update["seconds"]),
        )  # fmt: skip

    @property
    def shared(self) -> bool:
        """Whether ranks share processors: then seconds are a processor's."""
        return self.cores is not None and self.local > self.cores

    def peak(self, dtype: str) -> float:
        """The best rate of a product."""
        return max(flops / seconds for flops, seconds in self.products[dtype])

    @property
    def bandwidth(self) -> float:
        return self.copied[0] / self.copied[1]


# What a rank does alone, and how long it takes for it.
ALONE: tuple[tuple[str, Callable[[Probe], float]], ...] = (
    ("products", lambda probe: sum(seconds for each in probe.products.values() for _, seconds in each)),
    ("memory copies", lambda probe: probe.copied[1]),
    ("attention", lambda probe: probe.attention[2]),
)


def slow_ranks(probes: Sequence[Probe]) -> list[str]:
    """A line for each rank that is slower than the others' median in something that it does alone."""
    lines = []
    for what, read in ALONE:
        taken = {probe.rank: read(probe) for probe in probes}
        for rank, own in taken.items():
            others = [seconds for other, seconds in taken.items() if other != rank]
            if others and own > SLOW * median(others):
                lines.append(f"rank {rank} takes {own / median(others):.2f} times as long as the others for {what}")
    return lines


def wires_of(probe: Probe) -> tuple[float, float]:
    """(bytes per second of one rank, seconds of one message) from the all-reduces of the largest group."""
    n = max((ranks for _, ranks, _, _ in probe.collectives), default=1)
    times = sorted(
        (2 * size * (n - 1) / n, seconds)
        for name, ranks, size, seconds in probe.collectives
        if name == "all_reduce" and ranks == n
    )
    if not times:
        return 1e12, 0.0
    (small, soon), (large, late) = times[0], times[-1]
    if large == small or late <= soon:
        return large / late, 0.0
    bandwidth = (large - small) / (late - soon)
    rounds = max(1, (n - 1).bit_length())
    return bandwidth, max(0.0, soon - small / bandwidth) / rounds


# Of a tensor of so many bytes: what each of n ranks sends.
SENT: Mapping[str, Callable[[float, int], float]] = {
    "all_reduce": lambda size, n: 2 * size * (n - 1) / n,
    "all_gather": lambda size, n: size * (n - 1) / n,
    "reduce_scatter": lambda size, n: size * (n - 1) / n,
    "send": lambda size, n: size,
}


def timed_of(probes: Sequence[Probe]) -> list[dict[str, Any]]:
    """Each collective of each group as start and bandwidth: the line that misses all sizes least, relatively.

    Of all ranks' seconds the one in the middle.
    """
    found = []
    together = zip(*(probe.collectives for probe in probes), strict=True)
    middle = [(*ranks[0][:3], median(seconds for *_, seconds in ranks)) for ranks in together]
    for name, ranks in dict.fromkeys((name, ranks) for name, ranks, _, _ in middle):
        sizes = [(SENT[name](size, ranks), t) for other, n, size, t in middle if (other, n) == (name, ranks)]
        # A message was timed to and fro: twice its way, or what it takes of a processor on both of its sides.
        messages = 2 if name == "send" and not probes[0].shared else 1
        design = np.array([[1 / seconds, sent / seconds] for sent, seconds in sizes])
        start, each = (float(x) / messages for x in least_squares(design, np.ones(len(sizes))))
        found.append({"operation": name, "ranks": ranks, "start": start, "bandwidth": 1 / max(each, 1e-12)})
    return found


def cluster_toml(probes: Sequence[Probe]) -> str:
    """A cluster file: the slowest rank's device, for a step waits for it, and the links as rank 0 saw them."""
    first = probes[0]
    peaks = {dtype: min(probe.peak(dtype) for probe in probes) for dtype in first.products}
    bandwidth, latency = wires_of(first)
    share = 1.0 if first.kind == "cuda" else 1 / first.local  # processes of one host share its memory
    device = {
        "name": first.name, "kind": first.kind, "memory": int(min(p.memory for p in probes) * share),
        "bandwidth": min(probe.bandwidth for probe in probes), "source": "plait measure", "peaks": peaks,
    }  # fmt: skip
    link = {"bandwidth": bandwidth, "latency": latency, "source": "plait measure: all-reduce"}
    alone = _alone(first, peaks)
    measured = alone | _of_passes(probes, device, alone["attention"]) | {"link": 1.0, "collectives": timed_of(probes)}
    cores = {"cores": float(first.cores)} if first.cores else {}
    document = {
        "name": "measured", "node": first.local, **cores, "device": device, "links": [link], "measured": measured,
    }  # fmt: skip
    return tomli_w.dumps(document)


def _alone(probe: Probe, peaks: Mapping[str, float]) -> dict[str, Any]:
    """What single operations say of a device."""
    dtype, flops, seconds = probe.attention
    return {
        "gemm": {name: _mean_rate(probe, name) / peaks[name] for name in peaks},
        "attention": flops / seconds / peaks.get("bfloat16" if probe.kind == "cuda" else dtype, peaks[dtype]),
        "memory": 1.0,
        "kernel": probe.kernel,
    }


def _of_passes(probes: Sequence[Probe], device: Mapping[str, Any], attention: float) -> dict[str, Any]:
    """What passes of whole blocks say, which goes before: in a program operations meet other caches than alone.

    Of the ranks the one in the middle, pass by pass.
    """
    first, updates = probes[0], [probe.updated for probe in probes if probe.updated is not None]
    if not first.passes or not updates:
        return {}
    trials = [
        {**trial, **{way: median(probe.passes[at][way] for probe in probes) for way in ("forward", "backward")}}
        for at, trial in enumerate(first.passes)
    ]
    fit = fit_passes(Device.model_validate(device), attention, trials)
    update = median(elements / seconds for elements, seconds in updates)
    gemm = {name: _mean_rate(first, name) / device["peaks"][name] for name in first.products} | {"float32": fit.gemm}
    return {
        "gemm": gemm, "memory": fit.memory, "operands": fit.operands, "kernel": fit.kernel,
        "update": ADAM * update / device["bandwidth"],
    }  # fmt: skip


def _mean_rate(probe: Probe, dtype: str) -> float:
    """FLOP per second over all shapes together."""
    each = probe.products[dtype]
    return sum(flops for flops, _ in each) / sum(seconds for _, seconds in each)
