"""What is counted without memory or network is what a real run of as many processes sends and holds."""

from __future__ import annotations

from typing import Any

import pytest

from plait.parallel.traffic import Traffic, TrafficCounter, total
from plait.proof.count import Count, count
from plait.spec.fit import fit
from plait.spec.run import RunSpec
from tests.fixtures import T0, T0_TIED, run_of
from tests.launching import on_ranks
from tests.ranks import Rank

ODD = T0_TIED.model_copy(update={"layers": 5, "vocab": 61, "ffn": 51, "kv_heads": 1})
SPLIT = {"sequence_parallel": True}


def really(run: RunSpec) -> tuple[Traffic, list[dict[str, int]]]:
    """Traffic of a step of real ranks, and the bytes that each holds after it."""

    def step(rank: int, world: int) -> tuple[Traffic, dict[str, int]]:
        mine = Rank.of(run)
        with TrafficCounter(mine.mesh.axes()) as counter:
            mine.step.update(mine.backward())
        return total(counter, mine.mesh.group("world")), mine.step.states.bytes_held()

    reports = on_ranks(fit(run).world, step)
    return reports[0][0], [held for _, held in reports]


def summed(counts: list[Count]) -> Traffic:
    found: Traffic = {}
    for each in counts:
        for axis, operations in each.collectives.items():
            for operation, row in operations.items():
                into = found.setdefault(axis, {}).setdefault(operation, {"calls": 0, "bytes": 0})
                into["calls"] += row["calls"]
                into["bytes"] += row["bytes"]
    return found


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        pytest.param(T0, {"dp": 2, "zero": 3}, id="stage 3"),
        pytest.param(ODD, {"dp": 2, "pp": 2, "zero": 2}, marks=pytest.mark.proof, id="stage 2, tied over two stages"),
        pytest.param(
            ODD,
            {"tp": 2, "pp": 2, "dp": 2, "zero": 1, "schedule": "gpipe", **SPLIT},
            marks=pytest.mark.proof,
            id="all axes, stage 1",
        ),
        pytest.param(T0, {"pp": 2, "micro_batches": 8}, id="more micro-batches than are run"),
    ],
)
def test_every_rank_counts_what_it_sends_and_holds_in_a_real_run(model: Any, asked: dict[str, Any]) -> None:
    run = run_of(model, **asked)
    world = fit(run).world
    traffic, held = really(run)
    counts = count(run, world, range(world), backend="gloo")
    assert {a: {o: r["calls"] for o, r in ops.items()} for a, ops in summed(counts).items()} == {
        a: {o: r["calls"] for o, r in ops.items()} for a, ops in traffic.items()
    }
    for axis, operations in summed(counts).items():
        for operation, row in operations.items():
            assert row["bytes"] == pytest.approx(traffic[axis][operation]["bytes"], abs=world), (axis, operation)
    for each, real in zip(counts, held, strict=True):
        assert {kind: each.states[kind] for kind in real} == real


def test_a_long_step_is_counted_from_two_short_ones() -> None:
    (long,) = count(run_of(T0, pp=2, micro_batches=8), 2, (0,))
    assert long.micro_batches == 8 and long.counted == (1, 2)
    assert long.collectives["pp"]["send"]["calls"] == 8
