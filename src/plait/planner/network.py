"""Seconds of collectives on the wires of a cluster, at the catalogue's bandwidth: what no protocol can beat.

A ring sends 2·S·(n-1)/n bytes from each rank for an all-reduce, half of it for an all-gather or a reduce-scatter. Where
a group spans domains its `inside` ranks of one domain share the bytes that leave it, each on its own port, up to what
the fast links carry. How much of this a real library reaches is a constant elsewhere.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from plait.planner.ground import Ground
from plait.spec.cluster import Cluster, Timed


class Wires(NamedTuple):
    """What a group of ranks sends over: bytes per second of one rank, seconds of one message, ranks of one domain.

    `timed` are its collectives, where the cluster's file has measured them.
    """

    bandwidth: float
    latency: float
    inside: int
    ranks: int
    ring: bool = True
    timed: tuple[tuple[str, Timed], ...] = ()

    def gather(self, size: float) -> float:
        """Seconds of an all-gather to `size` bytes."""
        return self._pass(size, "all_gather")

    def scatter(self, size: float) -> float:
        """Seconds of a reduce-scatter from `size` bytes."""
        return self._pass(size, "reduce_scatter")

    def reduce(self, size: float) -> float:
        """Seconds of an all-reduce of `size` bytes."""
        return 2 * self._pass(size, "all_reduce")

    def _pass(self, size: float, operation: str) -> float:
        """Once round the ring, as the operation does it."""
        n = self.ranks
        timed = dict(self.timed).get(operation)
        return size * (n - 1) / n / (self.bandwidth if timed is None else timed.bandwidth)

    def start(self, operation: str = "all_gather") -> float:
        """Seconds that the messages of a collective wait for each other: a tree over domains; a ring inside one.

        A ring's first message takes as long as three, each further rank half a one more: a line through 77 all-reduces
        of 2 to 8 A100 (vTrain's trace, 40 to 76 microseconds at no bytes, an all-reduce being two gathers).
        """
        if self.ranks == 1:
            return 0.0
        timed = dict(self.timed).get(operation)
        if timed is not None:
            return timed.start
        gathers = 2 if operation == "all_reduce" else 1
        return gathers * self.latency * (3 + (self.ranks - 1) / 2 if self.ring else (self.ranks - 1).bit_length())


@lru_cache(maxsize=65536)
def wires(ground: Ground, ranks: int, stride: int) -> Wires:
    """The wires of a group of `ranks`, `stride` apart: rings pass every rank, so the narrowest link decides."""
    cluster = ground.cluster
    if ranks == 1:
        return Wires(cluster.links[0].bandwidth, 0.0, 1, 1)
    fast, link = cluster.links[0], cluster.link(ranks, stride)
    domain = fast.domain or ranks * stride
    inside = max(1, min(ranks, domain // stride))
    if link is fast:
        return Wires(fast.bandwidth, fast.latency, ranks, ranks, timed=_timed(cluster, ranks))
    return Wires(min(fast.bandwidth, inside * link.bandwidth), link.latency, inside, ranks, ring=False)


COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


def _timed(cluster: Cluster, ranks: int) -> tuple[tuple[str, Timed], ...]:
    found = ((operation, cluster.timed(operation, ranks)) for operation in COLLECTIVES)
    return tuple((operation, timed) for operation, timed in found if timed is not None)


def exchange(ground: Ground, ranks: int, stride: int, size: float, copies: int = 1) -> float:
    """Seconds of an all-to-all in which each rank has `size` bytes for all together, its own share included.

    The bytes are `copies` of each token for different ranks; some stacks send one copy to a node and deal it out there,
    so that a token crosses to the n·(1 - (1 - 1/n)^copies) of n nodes that its copies are expected to hit.
    """
    if ranks == 1:
        return 0.0
    cluster = ground.cluster
    fast, link = cluster.links[0], cluster.link(ranks, stride)
    inside = max(1, min(ranks, (fast.domain or ranks * stride) // stride))
    if link is fast:
        return size * (ranks - 1) / ranks / fast.bandwidth
    crossing = size * (ranks - inside) / ranks
    if ground.stack.once_per_node:
        nodes = ranks / inside
        crossing *= nodes * (1 - (1 - 1 / nodes) ** copies) / copies
    return max(crossing / link.bandwidth, size * (inside - 1) / ranks / fast.bandwidth)
