"""Timings of a machine become a cluster file, and a slow rank is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.planner.measured import Probe, cluster_toml, slow_ranks, wires_of
from plait.spec.cluster import load_cluster


def report(rank: int, seconds: float = 0.01, **changed: Any) -> dict[str, Any]:
    """A rank of four on one CPU: 2e9 FLOP in `seconds`, links of 1e9 bytes/s with 1 ms a round."""
    wire = {size: 2 * size * 3 / 4 / 1e9 + 2 * 1e-3 for size in (2**14, 2**24)}
    return {
        **{"rank": rank, "kind": "cpu", "name": "cpu", "memory": 2**34, "ranks": 4, "local": 4, "kernel": 5e-6},
        "products": [
            {"dtype": "float32", "shape": [1000, 1000, 1000], "seconds": seconds},
            {"dtype": "float32", "shape": [100, 1000, 1000], "seconds": seconds / 5},
        ],
        "attention": {"dtype": "float32", "flops": 1e9, "seconds": seconds},
        "copy": {"bytes": 2**27, "seconds": 0.01},
        "collectives": [{"operation": "all_reduce", "bytes": size, "seconds": s} for size, s in wire.items()],
        **changed,
    }


def test_links_follow_from_the_line_through_small_and_large_messages() -> None:
    bandwidth, latency = wires_of(Probe.of(report(0)))
    assert bandwidth == pytest.approx(1e9)
    assert latency == pytest.approx(1e-3)


def test_the_file_reads_as_a_cluster_and_holds_the_slowest_ranks_device(tmp_path: Path) -> None:
    file = tmp_path / "here.toml"
    file.write_text(cluster_toml([Probe.of(report(rank, 0.01 + 0.002 * rank)) for rank in range(4)]))
    cluster = load_cluster(str(file))
    assert cluster.device.peak("float32") == pytest.approx(2e9 / 0.016)
    assert cluster.measured.gemm["float32"] == pytest.approx(2.2e9 / 0.012 / (2e9 / 0.016))
    assert cluster.device.memory == 2**34 // 4  # the ranks of one host share it
    assert cluster.links[0].latency == pytest.approx(1e-3)


def test_a_rank_that_is_slower_than_the_others_is_named_with_what_it_is_slow_at() -> None:
    even = [Probe.of(report(rank)) for rank in range(4)]
    assert slow_ranks(even) == []
    slow = [*even[:3], Probe.of(report(3, copy={"bytes": 2**27, "seconds": 0.02}))]
    assert slow_ranks(slow) == ["rank 3 takes 2.00 times as long as the others for memory copies"]


def test_one_rank_alone_has_no_links_and_is_compared_with_nobody(tmp_path: Path) -> None:
    alone = Probe.of(report(0, ranks=1, collectives=[]))
    assert slow_ranks([alone]) == []
    file = tmp_path / "one.toml"
    file.write_text(cluster_toml([alone]))
    assert load_cluster(str(file)).links[0].latency == 0
