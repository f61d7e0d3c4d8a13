"""Half precision: fp32 where it matters, one decision for the whole world about an overflow, nothing lost by a skip."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.parallel.launch import World, launch
from plait.parallel.precision import Dtypes, LossScale
from plait.parallel.row import Row
from plait.spec.errors import TrainingStopped
from plait.spec.fit import fit
from plait.spec.run import OptimSpec, PrecisionSpec, RunSpec
from plait.train.loop import prepare, train_steps
from tests.fixtures import T0, run_of
from tests.launching import on_ranks
from tests.ranks import Rank, gradients_of, one_number, rows_of_numbers

HALF = PrecisionSpec(compute="float16", scale=1024)  # so few tokens have gradients that overflow at 65536


def in_precision(run: RunSpec, precision: PrecisionSpec, **optim: Any) -> RunSpec:
    return run.model_copy(update={"precision": precision, "optim": OptimSpec(**optim)})


# --- dtypes -----------------------------------------------------------------------------------------------------------


def test_float32_means_the_wider_of_itself_and_what_is_computed_in() -> None:
    half, single, double = torch.bfloat16, torch.float32, torch.float64
    assert Dtypes.of(PrecisionSpec(compute="bfloat16")) == Dtypes(half, single, single, single)
    assert Dtypes.of(PrecisionSpec(compute="float64")) == Dtypes(double, double, double, double)
    asked = PrecisionSpec(compute="float32", grad_reduce="bfloat16")
    assert Dtypes.of(asked) == Dtypes(single, single, single, half)


def test_a_gradient_below_fp16_s_smallest_number_survives_scaled_and_comes_back_as_it_was() -> None:
    tiny = torch.tensor(2.0**-26)
    assert tiny.half() == 0 and torch.tensor(2.0**-24).half() == 2.0**-24
    assert (tiny * 1024).half().float() / 1024 == tiny


def test_bf16_has_range_and_fp16_has_precision() -> None:
    assert torch.tensor(257.0).bfloat16() == 256 and torch.tensor(257.0).half() == 257
    assert torch.tensor(65536.0).half().isinf() and torch.tensor(65536.0).bfloat16() == 65536


@pytest.mark.parametrize(
    ("micro_batches", "accumulate", "expected"),
    [(512, "float32", 1.0), (512, "bfloat16", 0.5), (1000, "float32", 1.0)],
)
def test_many_small_bf16_gradients_add_up_in_the_dtype_that_is_asked_for(
    micro_batches: int, accumulate: str, expected: float
) -> None:
    """512 gradients of 1/512: a bf16 sum sticks at a half, where adding one changes nothing any more."""
    run = run_of(rows=micro_batches, micro_batches=micro_batches)
    precision = PrecisionSpec(compute="bfloat16", grad_accumulate=accumulate)  # type: ignore[arg-type]
    step, w = one_number(in_precision(run, precision), tokens=1)
    assert w.dtype == torch.bfloat16
    sums = step.backward(1, rows_of_numbers(*[[1]] * micro_batches))
    assert sums.labels == micro_batches
    assert gradients_of(step.states)["w"].item() == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_are_reduced_in_the_dtype_that_is_asked_for(zero: int) -> None:
    """1 on one rank, 2⁻⁹ on the other: their sum has more bits than bf16 has."""

    def run(rank: int, world: int, reduce: str) -> list[float]:
        asked = run_of(zero=zero, dp=2, rows=2, micro_batches=1)
        step, _ = one_number(in_precision(asked, PrecisionSpec(grad_reduce=reduce)), tokens=1)  # type: ignore[arg-type]
        for row in step.states.rows:
            row.start_gather()
            row.finish_gather()
        step.backward(1, rows_of_numbers([[512], [1]][rank], first=rank))
        return [x * 2 / 512 for part in gradients_of(step.states).values() for x in part.tolist()]

    assert on_ranks(2, lambda rank, world: run(rank, world, "float32"))[0] == [1 + 2**-9]
    assert on_ranks(2, lambda rank, world: run(rank, world, "bfloat16"))[0] == [1.0]


# --- the loss scale ---------------------------------------------------------------------------------------------------


def test_the_scale_doubles_after_good_steps_and_halves_after_as_many_overflows_as_it_may_bear() -> None:
    scale = LossScale(PrecisionSpec(compute="float16", scale=8, scale_growth_every=3, scale_hysteresis=2))
    seen = []
    for overflow in (False, False, False, True, False, True, True):
        scale.overflowed(1) if overflow else scale.succeeded()
        seen.append(scale.value)
    assert seen == [8, 8, 16, 16, 16, 8, 8]


def test_the_scale_stops_the_run_at_its_floor() -> None:
    scale = LossScale(PrecisionSpec(compute="float16", scale=2, scale_floor=1))
    scale.overflowed(1)
    with pytest.raises(TrainingStopped, match="step 2: gradients overflow fp16 at a loss scale of 1"):
        scale.overflowed(2)


@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float64"])
def test_other_dtypes_are_not_scaled(compute: str) -> None:
    scale = LossScale(PrecisionSpec(compute=compute, scale_growth_every=1))  # type: ignore[arg-type]
    scale.succeeded()
    assert scale.value == 1


def overflow_on(rank: int, last: int, when: Any, patch: pytest.MonkeyPatch) -> None:
    """On the last rank, an element of each gradient is infinite while `when()` says so."""
    plain = Row.add

    def add(row: Row, index: int, gradient: Tensor) -> None:
        if rank == last and when():
            gradient.view(-1)[0] = torch.inf
        plain(row, index, gradient)

    patch.setattr(Row, "add", add)


def states_of(mine: Rank) -> list[Tensor]:
    kept = [value for state in mine.step.optimizer.state.values() for value in state.values()]
    return [tensor.clone() for tensor in [*mine.step.masters, *kept, *(w for _, w in mine.weights())]]


@pytest.mark.parametrize(
    "layout",
    [{"dp": 2}, {"tp": 2}, {"pp": 2}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 2}, {"dp": 2, "pp": 2, "zero": 3}],
    ids=str,
)
def test_an_overflow_that_one_rank_sees_makes_all_skip_and_changes_nothing_else(
    layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = in_precision(run_of(T0, **layout), HALF, name="adamw", lr=1e-3, schedule="constant")

    def steps(rank: int, world: int) -> tuple[list[bool], list[float], bool, int]:
        number = 0
        overflow_on(rank, world - 1, lambda: number == 2, monkeypatch)
        mine = Rank.of(run, randomise=False)
        applied, scales = [], []
        same = False
        for number in (1, 2, 3):
            before = states_of(mine)
            applied.append(mine.step.update(mine.backward(number)) is not None)
            scales.append(mine.step.scale.value)
            if number == 2:
                same = all(torch.equal(a, b) for a, b in zip(before, states_of(mine), strict=True))
        return applied, scales, same, mine.step.updates

    world = fit(run).world
    assert on_ranks(world, steps) == [([True, False, True], [1024, 512, 512], True, 2)] * world


def test_skipped_steps_advance_neither_the_learning_rate_nor_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up over 10 updates to 1e-3, overflows at steps 1 and 4."""
    run = in_precision(run_of(T0), HALF, name="adamw", lr=1e-3, schedule="constant", warmup=10)
    run = run.model_copy(update={"train": run.train.model_copy(update={"steps": 11, "eval_batches": 0})})
    now = 0

    def job(world: World) -> tuple[list[float | None], list[int], list[float | None], set[float]]:
        nonlocal now
        training = prepare(run, world)
        overflow_on(0, 0, lambda: now in (1, 4), monkeypatch)
        found = []
        now = 1
        for metrics in train_steps(training):
            found.append(metrics)
            now = metrics.step + 1
        counters = {state["step"].item() for state in training.step.optimizer.state.values()}
        return [m.lr for m in found], [m.updates for m in found], [m.loss_scale for m in found], counters

    rates, updates, scales, counters = launch(1, job, threads=1, timeout_s=60)[0]
    assert updates == [0, 1, 2, 2, *range(3, 10)] and counters == {9.0}
    assert [rate and round(rate * 1e4, 9) for rate in rates] == [None, 1, 2, None, *range(3, 10)]
    assert scales == [512] * 3 + [256] * 8


# --- training ---------------------------------------------------------------------------------------------------------


def losses(run: RunSpec, precision: PrecisionSpec) -> list[float]:
    asked = in_precision(run, precision, name="adamw", lr=3e-3, schedule="constant")

    def job(world: World) -> list[float]:
        return [metrics.loss for metrics in train_steps(prepare(asked, world))]

    return launch(fit(asked).world, job, threads=1, timeout_s=240)[0]


@pytest.mark.proof
@pytest.mark.parametrize(("compute", "within"), [("float16", 0.02), ("bfloat16", 0.01)])
def test_a_tiny_model_learns_in_half_precision_as_it_does_in_single(compute: str, within: float) -> None:
    run = run_of(T0, dp=2, tp=2, zero=2)
    run = run.model_copy(update={"train": run.train.model_copy(update={"steps": 12, "eval_batches": 0})})
    single, half = (losses(run, PrecisionSpec(compute=c, scale=1024)) for c in ("float32", compute))  # type: ignore[arg-type]
    assert half == pytest.approx(single, rel=within)


@pytest.mark.proof
@pytest.mark.timeout(1800)
def test_the_built_in_run_reaches_in_bf16_the_loss_of_single_within_one_percent() -> None:
    """From the same numbers: those that bf16 has, since single precision from other ones ends up to 3 % away itself."""
    run = RunSpec()
    run = run.model_copy(update={"layout": run.layout.model_copy(update={"dp": 2})})

    def job(world: World, asked: RunSpec) -> list[float]:
        training = prepare(asked, world)
        with torch.no_grad():
            for master in training.step.masters:
                master.copy_(master.bfloat16())
        training.parallel.states.publish()
        return [metrics.loss for metrics in train_steps(training)][-20:]

    single, half = (
        launch(2, job, run.model_copy(update={"precision": PrecisionSpec(compute=c)}), threads=1, timeout_s=900)[0]
        for c in ("float32", "bfloat16")  # type: ignore[arg-type]
    )
    assert sum(half) == pytest.approx(sum(single), rel=0.01)
    assert all(low <= 1.01 * high for low, high in zip(half, single, strict=True)), (half, single)
