"""Timings of a machine become a cluster file, ranks that share its cores are planned to share them, and a slow rank is
named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.planner.block import INDEX
from plait.planner.estimate import Estimate, estimate
from plait.planner.ground import Ground
from plait.planner.job import Job
from plait.planner.measured import Probe, cluster_toml, slow_ranks, timed_of, wires_of
from plait.planner.network import wires
from plait.planner.passes import fit_passes, trial_counts
from plait.planner.stack import load_stack
from plait.spec.cluster import Cluster, Device, Link, Measured, Timed, load_cluster
from plait.spec.presets import PRESETS


def report(rank: int, seconds: float = 0.01, **changed: Any) -> dict[str, Any]:
    """A rank of four on one CPU: 2e9 FLOP in `seconds`, links of 1e9 bytes/s with 1 ms a round."""
    wire = {size: 2 * size * 3 / 4 / 1e9 + 2 * 1e-3 for size in (2**14, 2**24)}
    return {
        **{"rank": rank, "kind": "cpu", "name": "cpu", "memory": 2**34, "ranks": 4, "local": 4, "kernel": 5e-6},
        **{"cores": 8, "passes": [], "update": None},
        "products": [
            {"dtype": "float32", "shape": [1000, 1000, 1000], "seconds": seconds},
            {"dtype": "float32", "shape": [100, 1000, 1000], "seconds": seconds / 5},
        ],
        "attention": {"dtype": "float32", "flops": 1e9, "seconds": seconds},
        "copy": {"bytes": 2**27, "seconds": 0.01},
        "collectives": [
            {"operation": "all_reduce", "ranks": 4, "bytes": size, "seconds": s} for size, s in wire.items()
        ],
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


def test_a_collective_is_the_line_through_its_sizes_as_the_rank_in_the_middle_has_them() -> None:
    slow = [{**one, "seconds": 9 * one["seconds"]} for one in report(0)["collectives"]]
    (found,) = timed_of([Probe.of(report(0)), Probe.of(report(1)), Probe.of(report(2, collectives=slow))])
    assert found == pytest.approx({"operation": "all_reduce", "ranks": 4, "start": 2e-3, "bandwidth": 1e9})


def test_rates_that_made_the_passes_are_found_again() -> None:
    device = Device(name="cpu", kind="cpu", memory=2**34, bandwidth=1e10, peaks={"float32": 5e10})
    made = {
        "gemm": 1 / 0.7,
        "wide": 1 / 0.7,
        "attention": 1 / 0.3,
        "operands": 0.4,
        "traffic": 1 / 0.8,
        "kernels": 2e-5,
    }
    sizes = [(64, 2, 64, 1, 8, 96), (256, 8, 704, 4, 128, 96), (256, 2, 176, 4, 64, 96), (256, 8, 64, 2, 64, 2048)]
    trials = []
    for size in sizes:
        trial: dict[str, Any] = {"layers": 2} | dict(
            zip(("hidden", "heads", "ffn", "rows", "sequence", "vocab"), size, strict=True)
        )
        times = [
            sum(counts[INDEX[name]] * rate for name, rate in made.items()) for counts in trial_counts(device, trial)
        ]
        trials.append({**trial, "forward": times[0], "backward": times[1]})
    fit = fit_passes(device, 0.3, trials)
    assert fit == pytest.approx((0.7, 0.8, 0.4 * 0.8, 2e-5, 0.0), abs=1e-9)


def machine(cores: float | None) -> Cluster:
    """Eight ranks of one host, links that cost next to nothing, and 10 ms for each all-reduce of two of them."""
    device = Device(name="cpu", kind="cpu", memory=2**36, bandwidth=1e11, peaks={"float32": 1e11})
    timed = Timed(operation="all_reduce", ranks=2, start=1e-2, bandwidth=1e15)
    link = Link(bandwidth=1e15, latency=0.0)
    return Cluster(
        name="host", device=device, node=8, links=(link,), cores=cores, measured=Measured(collectives=(timed,))
    )


def planned(cores: float | None, **job: Any) -> Estimate:
    ground = Ground.of(PRESETS["llama-tiny"], load_stack("plait"), machine(cores))
    return estimate(ground, Job(**{"batch": 8, "sequence": 64, "compute": "float32", **job}))


def test_ranks_that_share_cores_take_as_many_times_as_long_as_there_are_ranks_on_a_core() -> None:
    assert planned(2, dp=8).step == pytest.approx(4 * planned(None, dp=8).step)
    assert planned(16, dp=8).step == planned(None, dp=8).step
    assert planned(2, dp=2).step == planned(None, dp=2).step


def test_a_bubble_is_filled_by_who_has_work_where_cores_are_shared() -> None:
    """Four stages, eight micro-batches: on one core there is no idle time at all, on four each stage has its own."""
    job = {"pp": 4, "dp": 1, "micro": 1}
    own, one, two = (planned(cores, **job) for cores in (None, 1, 2))
    assert one.terms["bubble"] == pytest.approx(0, abs=1e-9)
    assert own.step < two.step < one.step
    assert sum(two.terms.values()) == two.step


def test_a_measured_collective_goes_before_the_link_and_the_next_larger_group_stands_in() -> None:
    ground = Ground.of(PRESETS["llama-tiny"], load_stack("plait"), machine(None))
    assert wires(ground, 2, 1).start("all_reduce") == 1e-2
    assert wires(ground, 4, 1).start("all_reduce") == 1e-2
    assert wires(ground, 2, 1).start("all_gather") == 0.0
    assert planned(None, tp=2).terms["tensor"] > 4 * 1e-2 * PRESETS["llama-tiny"].layers
