"""What is counted without memory or network is what a real run of as many processes sends and holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.parallel.traffic import Traffic, TrafficCounter, total
from plait.placement.bytes import SIZES
from plait.proof import count as counting
from plait.proof.count import Count, count
from plait.spec.fit import fit
from plait.spec.pipeline import SHAPES
from plait.spec.run import RunSpec
from plait.train.memory import RankMemory, Watch
from tests.fixtures import T0, T0_TIED, run_of
from tests.launching import on_ranks
from tests.ranks import Rank

ODD = T0_TIED.model_copy(update={"layers": 5, "vocab": 61, "ffn": 51, "kv_heads": 1})
SPLIT = {"sequence_parallel": True}


def really(run: RunSpec) -> tuple[Traffic, list[RankMemory]]:
    """Traffic of a step of real ranks, and the bytes that each held."""

    def step(rank: int, world: int) -> tuple[Traffic, RankMemory]:
        mine = Rank.of(run)
        watch = Watch(mine.parallel, mine.mesh.device)
        with TrafficCounter(mine.mesh.axes()) as counter:
            with watch():
                sums = mine.backward()
            mine.step.update(sums)
        return total(counter, mine.mesh.group("world")), watch.memory(mine.step.optimizer)

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
        assert each.states == {kind: getattr(real, kind) for kind in each.states}
        assert each.buffers == real.buffers
        # How many messages a rank has on their way at its peak is a matter of time: one more or less.
        message = run.batch.micro_size * run.batch.sequence * run.model.hidden * SIZES[run.precision.compute]
        assert abs(each.activations - real.activations) <= 16 + message * (fit(run).pp > 1)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("name", "pp", "length"),
    [
        ("gpipe", 2, 10), *((name, 3, 15) for name in SHAPES), ("interleaved", 2, 10), ("interleaved", 2, 13),
        ("interleaved", 3, 19), *((name, 2, 10) for name in SHAPES if name not in ("gpipe", "interleaved")),
    ],
)  # fmt: skip
def test_a_long_step_is_counted_from_two_short_ones(
    name: str, pp: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peak that grows with micro-batches (GPipe's) grows on, one that does not stays; messages and calls too."""
    model = T0.model_copy(update={"layers": 2 * pp})
    run = run_of(model, pp=pp, rows=length, micro_batches=length, schedule=name)
    short = count(run, pp, (0, pp - 1))
    assert all(each.micro_batches == length > max(each.counted) and len(each.counted) == 2 for each in short)
    monkeypatch.setattr(counting, "counted_lengths", lambda run, layout, rank, micro_batches: (micro_batches,))
    whole = count(run, pp, (0, pp - 1))
    assert [replace(each, counted=()) for each in short] == [replace(each, counted=()) for each in whole]
