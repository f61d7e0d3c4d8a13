"""From timings of a machine (`parallel/probe.py`) to a cluster file that a plan can use, and to ranks that are slow.

Peaks are what the best product reached here, so a measured machine's efficiencies are relative to itself. Links follow
from the all-reduce: seconds = latency + bytes on the wire / bandwidth, the line through its smallest and largest size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import tomli_w

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
    collectives: tuple[tuple[str, float, float], ...]  # operation, bytes, seconds

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Probe:
        """From what a rank reported."""
        products: dict[str, tuple[tuple[float, float], ...]] = {}
        for one in found["products"]:
            rows, inner, columns = one["shape"]
            flops = 2.0 * rows * inner * columns
            products[one["dtype"]] = (*products.get(one["dtype"], ()), (flops, one["seconds"]))
        attention, copy = found["attention"], found["copy"]
        return cls(
            found["rank"], found["kind"], found["name"], found["memory"], found["ranks"], found["local"], products,
            (attention["dtype"], attention["flops"], attention["seconds"]), (copy["bytes"], copy["seconds"]),
            found["kernel"],
            tuple((one["operation"], one["bytes"], one["seconds"]) for one in found["collectives"]),
        )  # fmt: skip

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
    """(bytes per second of one rank, seconds of one message) from the all-reduces."""
    n = probe.ranks
    times = sorted(
        (2 * size * (n - 1) / n, seconds) for name, size, seconds in probe.collectives if name == "all_reduce"
    )
    if not times:
        return 1e12, 0.0
    (small, soon), (large, late) = times[0], times[-1]
    if large == small or late <= soon:
        return large / late, 0.0
    bandwidth = (large - small) / (late - soon)
    rounds = max(1, (n - 1).bit_length())
    return bandwidth, max(0.0, soon - small / bandwidth) / rounds


def cluster_toml(probes: Sequence[Probe]) -> str:
    """A cluster file: the slowest rank's device, for a step waits for it, and the links as rank 0 saw them."""
    first = probes[0]
    peaks = {dtype: min(probe.peak(dtype) for probe in probes) for dtype in first.products}
    bandwidth, latency = wires_of(first)
    dtype, flops, seconds = first.attention
    share = 1.0 if first.kind == "cuda" else 1 / first.local  # processes of one host share its memory
    device = {
        "name": first.name, "kind": first.kind, "memory": int(min(p.memory for p in probes) * share),
        "bandwidth": min(probe.bandwidth for probe in probes), "source": "plait measure", "peaks": peaks,
    }  # fmt: skip
    link = {"bandwidth": bandwidth, "latency": latency, "source": "plait measure: all-reduce"}
    measured = {
        "gemm": {name: _mean_rate(first, name) / peaks[name] for name in peaks},
        "attention": flops / seconds / peaks.get("bfloat16" if first.kind == "cuda" else dtype, peaks[dtype]),
        "memory": 1.0,
        "kernel": first.kernel,
        "link": 1.0,
    }
    document = {"name": "measured", "node": first.local, "device": device, "links": [link], "measured": measured}
    return tomli_w.dumps(document)


def _mean_rate(probe: Probe, dtype: str) -> float:
    """FLOP per second over all shapes together."""
    each = probe.products[dtype]
    return sum(flops for flops, _ in each) / sum(seconds for _, seconds in each)
