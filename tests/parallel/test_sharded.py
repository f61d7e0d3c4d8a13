"""ZeRO: a rank holds its share and no more, what travels is the formula to the byte, and the result is one device's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.parallel.mesh import Mesh
from plait.parallel.row import Row
from plait.parallel.traffic import TrafficCounter
from plait.parallel.zero import States, Unit
from plait.planner.seat import Seat
from plait.spec.fit import fit
from plait.spec.layout import Layout
from plait.spec.model import ModelSpec
from plait.spec.run import PrecisionSpec, RunSpec
from tests.fixtures import T0, T0_GROUPED, T0_TIED, assert_equals_one_device, run_of
from tests.launching import on_ranks
from tests.ranks import Rank, gradients_of, hold, one_number, rows_of_numbers

ODD = T0_TIED.model_copy(
    update={"layers": 5, "vocab": 61, "ffn": 51, "kv_heads": 1, "norm": "layer", "qkv_bias": True, "dropout": 0.1}
)
SPLIT = {"sequence_parallel": True}
FLOAT = 4


@pytest.mark.quick(4)
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"dp": 3, "rows": 6}, id="three shards of odd sizes"),
        pytest.param({"dp": 4, "shard": 2, "micro_batches": 1}, id="hybrid"),
        pytest.param({"dp": 2, "tp": 2, "pp": 2, "schedule": "gpipe", **SPLIT}, id="all axes"),
    ],
)
def test_every_stage_equals_one_device(layout: dict[str, Any], zero: int) -> None:
    assert_equals_one_device(run_of(ODD, zero=zero, **layout))


@pytest.mark.proof
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("model", [T0, T0_GROUPED, T0_TIED, ODD])
@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 2, **SPLIT}, {"dp": 2, "pp": 2}, {"dp": 2, "pp": 4},
        {"dp": 4, "pp": 2, "shard": 2, "micro_batches": 1}, {"dp": 2, "tp": 4}, {"dp": 2, "tp": 2, "pp": 2, **SPLIT},
        {"dp": 4, "tp": 2, "shard": 1, "micro_batches": 1}, {"dp": 2, "pp": 2, "keep": True},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_every_stage_equals_one_device_on_every_layout(
    layout: dict[str, Any], model: ModelSpec, zero: int, schedule: str
) -> None:
    assert_equals_one_device(run_of(model, zero=zero, schedule=schedule, **layout))


# --- memory -----------------------------------------------------------------------------------------------------------


def with_precision(run: RunSpec, **precision: Any) -> RunSpec:
    return run.model_copy(update={"precision": PrecisionSpec(**precision)})


def measured_states(run: RunSpec) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Of each rank after a step: bytes that stand in memory by kind, and what the placement's formula says."""

    def step(rank: int, world: int) -> tuple[dict[str, int], dict[str, int]]:
        mine = Rank.of(run)
        mine.step.update(mine.backward())
        moments = [x for state in mine.step.optimizer.state.values() for x in state.values() if x.ndim]
        held = mine.step.states.bytes_held() | {"moments": sum(x.numel() * x.element_size() for x in moments)}
        return held, Seat(run, mine.mesh.layout, rank).states()

    return on_ranks(fit(run).world, step)


@pytest.mark.parametrize(
    ("accumulate", "totals"),
    [("bfloat16", (725_504, 317_408, 249_392, 181_376)), ("float32", (816_192, 408_096, 272_064, 204_048))],
)
def test_each_stage_holds_the_bytes_per_parameter_of_its_formula(accumulate: str, totals: tuple[int, ...]) -> None:
    """bf16 weights, fp32 master and moments, 4 ranks: 16, 7, 5.5, 4 bytes; with fp32 gradients 18, 9, 6, 4.5."""
    for zero, total in enumerate(totals):
        run = with_precision(run_of(zero=zero, dp=4, micro_batches=1), compute="bfloat16", grad_accumulate=accumulate)
        for held, formula in measured_states(run):
            assert held == formula and sum(held.values()) == total


@pytest.mark.quick(3)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "layout", [{"dp": 2, "tp": 2, **SPLIT}, {"dp": 2, "pp": 2}, {"dp": 2, "pp": 2, "tp": 2}], ids=str
)
def test_model_states_are_the_placement_s_bytes_beside_other_axes(layout: dict[str, Any], zero: int) -> None:
    """In one dtype: what is not sharded leaves gradients where autograd puts them, without padding."""
    for held, formula in measured_states(run_of(ODD, zero=zero, **layout)):
        assert held == pytest.approx(formula, rel=0.01)


@pytest.mark.parametrize("keep", [False, True])
def test_never_more_than_two_blocks_are_gathered_at_once_unless_they_are_kept(
    keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def most(rank: int, world: int) -> tuple[int, int, int]:
        mine = Rank.of(run_of(T0.model_copy(update={"layers": 6}), zero=3, dp=2, keep=keep))
        seen: list[int] = []
        plain = Unit.enter

        def enter(unit: Unit, ahead: Unit | None) -> None:
            plain(unit, ahead)
            seen.append(sum(row.is_whole for row in mine.step.states.rows))

        monkeypatch.setattr(Unit, "enter", enter)
        mine.step.update(mine.backward())
        in_step = max(seen)
        seen.clear()
        mine.step.evaluate(mine.batch())
        return in_step, max(seen), sum(row.is_whole for row in mine.step.states.rows)

    assert on_ranks(2, most) == [(8, 8, 0) if keep else (2, 2, 0)] * 2


def test_stage_2_has_the_gradients_of_few_buffers_whole_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.placement.buffer.BUCKET_ELEMENTS", 1000)

    def most(rank: int, world: int) -> tuple[int, int]:
        mine = Rank.of(run_of(T0.model_copy(update={"layers": 6}), zero=2, dp=2))
        seen: list[int] = []
        plain = Row.reduce

        def reduce(row: Row) -> None:
            plain(row)
            flats = [r._collected for r in mine.step.states.rows]
            seen.append(sum(flat is not None and flat.untyped_storage().nbytes() > 0 for flat in flats))

        monkeypatch.setattr(Row, "reduce", reduce)
        mine.backward()
        return max(seen), len(mine.step.states.rows)

    for whole, rows in on_ranks(2, most):
        assert whole <= 2 < rows  # the one that leaves, and the next one if backward has begun to fill it


# --- traffic ----------------------------------------------------------------------------------------------------------


def traffic(run: RunSpec) -> dict[str, float]:
    """Bytes that one rank sends over dp in a step, by operation, the label counts left out."""

    def step(rank: int, world: int) -> dict[str, float]:
        mine = Rank.of(run)
        with TrafficCounter(mine.mesh.axes()) as counter:
            mine.step.update(mine.backward())
        return {operation: sent for axis, operation, _, sent in counter.rows() if axis == "dp" and operation != "recv"}

    reports = on_ranks(fit(run).world, step)
    assert all(report == reports[0] for report in reports)
    return reports[0]


@pytest.mark.quick(3)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("model", [T0, T0_TIED])
def test_a_step_sends_what_zero_says(ranks: int, micro_batches: int, model: ModelSpec) -> None:
    """Padded elements Ψ times (N-1)/N: twice under stages 0 and 1, M+1 and 3M times under 2 and 3.

    On gloo the pieces of a reduce-scatter and of an all-gather are messages.
    """
    label_counts = 2 * 8 * (ranks - 1) / ranks
    share = model.parameter_count() * FLOAT * (ranks - 1) / ranks  # Ψ: these sizes divide
    reduce, send = "all_reduce", "send"
    expected = {
        0: {reduce: 2 * share},
        1: {send: 2 * share},
        2: {send: (micro_batches + 1) * share},
        3: {send: 3 * micro_batches * share},
    }
    for zero, of_zero in expected.items():
        counted = traffic(run_of(model, zero=zero, dp=ranks, micro_batches=micro_batches))
        assert counted == of_zero | {reduce: of_zero.get(reduce, 0) + label_counts}, f"stage {zero}"


def test_padding_travels_and_keeping_gathered_weights_spares_their_gathers() -> None:
    model, ranks, micro_batches = T0.model_copy(update={"hidden": 33}), 4, 2
    buffers = [sum(t.size for t in model.parameters() if (t.part, t.layer) == key)
               for key in {(t.part, t.layer) for t in model.parameters()}]  # fmt: skip
    padded = sum(-(-size // ranks) * ranks for size in buffers)
    assert padded > model.parameter_count()
    share = padded * FLOAT * (ranks - 1) / ranks
    for keep, gathers in ((False, 2 * micro_batches), (True, 1)):
        counted = traffic(run_of(model, zero=3, dp=ranks, micro_batches=micro_batches, keep=keep))
        assert counted["send"] == pytest.approx((gathers + micro_batches) * share)


@pytest.mark.quick(1)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_hybrid_shards_send_the_same_inside_and_one_all_reduce_of_a_shard_across(zero: int) -> None:
    ranks, inside, micro_batches = 4, 2, 2
    counted = traffic(run_of(zero=zero, dp=ranks, shard=inside, micro_batches=micro_batches))
    size = T0.parameter_count() * FLOAT
    share, repeats = size * (inside - 1) / inside, ranks // inside
    label_counts = 2 * 8 * (ranks - 1) / ranks
    across = 2 * size / inside * (repeats - 1) / repeats
    times = {1: 2, 2: micro_batches + 1, 3: 3 * micro_batches}[zero]
    assert counted == {"send": times * share, "all_reduce": across + label_counts}


# --- cases ------------------------------------------------------------------------------------------------------------


def gather(states: States) -> None:
    """Make all weights whole, as the wrappers of stage 3 do for one part of a decoder."""
    for row in states.rows:
        row.start_gather()
        row.finish_gather()


@pytest.mark.quick(2)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_tied_table_sums_both_stages_of_all_replicas_whatever_is_sharded(zero: int) -> None:
    """First-stage gradients 1 and 3, last-stage gradients 5 and 7, halved: 8, where mixed shards give 7 and 9."""

    def run(rank: int, world: int) -> list[float]:
        mesh = Mesh(Layout(pp=2, dp=2, shard=2))
        asked = run_of(zero=zero, pp=2, dp=2)
        module = nn.ParameterDict({"table": nn.Parameter(torch.zeros(4))})
        states, _ = hold(mesh, module, asked, tied=True)
        states.begin()
        stage = mesh.at.pp
        gather(states)
        states.arm(stage)
        (module["table"] * [[1.0, 3.0], [5.0, 7.0]][stage][mesh.at.dp] / 2).sum().backward()
        states.flush(stage)
        states.finish()
        return gradients_of(states)["table"].tolist()

    assert on_ranks(4, run) == [[8.0] * (2 if zero else 4)] * 4


@pytest.mark.quick(1)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_both_ends_of_a_tied_table_stay_bitwise_equal_over_ten_updates(zero: int) -> None:
    def run(rank: int, world: int) -> dict[str, Tensor]:
        mine = Rank.of(run_of(T0_TIED, zero=zero, pp=2, dp=2))
        for number in range(1, 11):
            mine.step.update(mine.backward(number))
        return mine.gather(mine.weights())  # raises where copies differ

    assert on_ranks(4, run)[0]["embedding.tokens.weight"].shape == (64, 32)


@pytest.mark.quick(2)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_parameter_that_one_rank_alone_uses_counts_as_zero_elsewhere(zero: int) -> None:
    def run(rank: int, world: int) -> dict[str, list[float]]:
        mesh = Mesh(Layout(dp=2, shard=2))
        module = nn.ParameterDict({name: nn.Parameter(torch.ones(2)) for name in "ab"})
        states, _ = hold(mesh, module, run_of(zero=zero, dp=2))
        states.begin()
        for last in (False, True):
            gather(states)
            if zero > 1 or last:
                states.arm(0)
            (module["a"].sum() + module["b"].sum() * 3 if rank == 0 else module["a"].sum()).backward()
            if zero > 1 or last:
                states.flush(0)
        states.finish()
        return {name: part.tolist() for name, part in gradients_of(states).items()}

    first, second = on_ranks(2, run)
    if zero == 0:
        assert first == second == {"a": [4.0, 4.0], "b": [6.0, 6.0]}
    else:  # backward completes b first: it is the first shard
        assert (first, second) == ({"b": [6.0, 6.0]}, {"a": [4.0, 4.0]})


@pytest.mark.quick(2)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_rank_with_few_labels_does_not_weigh_more_whatever_is_sharded(zero: int) -> None:
    def run(rank: int, world: int) -> tuple[float, list[float]]:
        asked = run_of(zero=zero, dp=2, rows=2, micro_batches=1)
        step, _ = one_number(asked.model_copy(update={"precision": PrecisionSpec(compute="float64")}))
        gather(step.states)
        sums = step.backward(1, rows_of_numbers([[1] * 5, [4] + [-1] * 4][rank], first=rank))
        return sums.norm, [x for part in gradients_of(step.states).values() for x in part.tolist()]

    held = [[1.5], [1.5] if zero == 0 else []]
    assert on_ranks(2, run) == [(1.5, part) for part in held]
