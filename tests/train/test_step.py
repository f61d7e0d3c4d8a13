"""A step is a sum over the global batch: how its labels are grouped, or what came before, does not matter."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.spec.errors import InvalidRun, TrainingStopped
from plait.spec.fit import fit
from plait.spec.run import BatchSpec, LayoutSpec, OptimSpec, RunSpec
from plait.train.optimizer import make_optimizer
from tests.fixtures import M0, MASK, T0, T0_GROUPED, T0_TIED, assert_equals_one_device, run_of
from tests.launching import on_ranks
from tests.ranks import Rank

HALF_EMPTY = (1, 3, 5, 7, 0, 0, 0, 0)  # the second half of the rows has no label
EMPTY = (0,) * 8


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
def test_accumulation_does_not_change_the_step(micro_batches: int) -> None:
    assert_equals_one_device(run_of(T0, micro_batches=micro_batches))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"dp": 2}, id="a data-parallel rank"),
        pytest.param({"micro_batches": 2}, id="a micro-batch"),
        pytest.param({"tp": 2, "dp": 2, "sequence_parallel": True}, id="a rank with split vocabulary"),
        pytest.param({"pp": 2, "dp": 2}, id="a pipeline"),
    ],
)
def test_a_part_without_any_label_counts_as_nothing(layout: dict[str, Any]) -> None:
    verdict = assert_equals_one_device(run_of(T0, **layout), HALF_EMPTY)
    assert math.isfinite(verdict.loss.split) and verdict.loss.split > 0


@pytest.mark.parametrize("layout", [{}, {"dp": 2}, {"tp": 2}, {"pp": 2, "tp": 2, "dp": 2}], ids=str)
def test_a_batch_without_any_label_changes_nothing_bit_for_bit(layout: dict[str, Any]) -> None:
    run = run_of(T0, **layout).model_copy(update={"optim": OptimSpec(name="adamw", lr=0.1, schedule="constant")})

    def step(rank: int, world: int) -> tuple[float, float, float | None, int, bool]:
        mine = Rank.of(run)
        mine.step.update(mine.backward(1))  # moments are there
        before = state_of(mine)
        sums = mine.backward(2, EMPTY)
        lr = mine.step.update(sums)
        same = all(torch.equal(a, b) for a, b in zip(before, state_of(mine), strict=True))
        return sums.loss, sums.norm, lr, mine.step.updates, same

    world = fit(run).world
    assert on_ranks(world, step) == [(0.0, 0.0, None, 1, True)] * world


def state_of(mine: Rank) -> list[Tensor]:
    """Weights, and every tensor of the optimizer: moments and counters."""
    kept = [value for state in mine.step.optimizer.state.values() for value in state.values()]
    assert len(kept) == 3 * len(mine.step.masters)
    return [tensor.clone() for tensor in [*(weight for _, weight in mine.weights()), *kept]]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batches", [2, 4, 8])
def test_a_pipeline_scales_gradients_as_one_device_does_whatever_the_micro_batches(
    schedule: str, micro_batches: int
) -> None:
    verdict = assert_equals_one_device(run_of(T0, pp=2, schedule=schedule, micro_batches=micro_batches))
    assert verdict.norm.split / verdict.norm.one == pytest.approx(1, rel=1e-10)


@pytest.mark.parametrize("model", [T0_GROUPED, T0_TIED])
def test_three_axes_equal_one_device_in_float32(model: Any) -> None:
    assert_equals_one_device(run_of(model, tp=2, pp=2, dp=2, sequence_parallel=True), dtype="float32")


def test_nothing_of_a_step_is_left_in_the_next() -> None:
    """The same batch twice, while weights stand still, gives the same gradients to the bit; an empty one gives none."""

    def gradients(rank: int, world: int) -> tuple[bool, float]:
        mine = Rank.of(run_of(T0, pp=2, micro_batches=4))
        found = []
        for keep in (MASK, MASK, EMPTY):
            mine.backward(1, keep)
            found.append([g.clone() for _, g in mine.step.states.gradients()])
        same = all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
        return same, max(g.abs().max().item() for g in found[2])

    assert on_ranks(2, gradients) == [(True, 0.0)] * 2


@pytest.mark.parametrize(("rows", "micro_size", "dp"), [(23, 4, 1), (3, 4, 1), (6, 2, 2)])
def test_a_batch_that_micro_batches_do_not_divide_is_refused_before_any_step(
    rows: int, micro_size: int, dp: int
) -> None:
    run = RunSpec(layout=LayoutSpec(dp=dp), batch=BatchSpec(global_size=rows, micro_size=micro_size))
    with pytest.raises(InvalidRun, match=rf"batch.global_size: .*does not divide {rows}"):
        fit(run)


@pytest.mark.quick(3)
@pytest.mark.parametrize("where", ["weight", "gradient of"])
@pytest.mark.parametrize(
    ("model", "layout"),
    [(T0, {"pp": 2}), (T0, {"dp": 2}), (T0, {"tp": 2}), (M0, {"dp": 2, "ep": 2})],
    ids=["pp", "dp", "tp", "ep"],
)
def test_b101_a_number_that_is_not_finite_on_one_rank_stops_all_alike_and_is_named_and_weights_are_as_they_were(
    model: Any, layout: dict[str, Any], where: str
) -> None:
    def step(rank: int, world: int) -> tuple[str, bool, int]:
        mine = Rank.of(run_of(model, **layout))
        states, finish = mine.step.states, mine.step.states.finish
        if rank == 1:
            spoil = states.weights if where == "weight" else states.gradients
            spoilt = lambda: spoil()[0][1].view(-1)[:1].fill_(math.inf)  # noqa: E731
            if where == "weight":
                spoilt()
            else:
                states.finish = lambda: (finish(), spoilt())[0]  # type: ignore[method-assign]
        before = [weight.clone() for _, weight in mine.weights()]
        sums = mine.backward(4)
        with pytest.raises(TrainingStopped) as stopped:
            mine.step.update(sums)
        same = all(torch.equal(a, b) for a, (_, b) in zip(before, mine.weights(), strict=True))
        return stopped.value.message, same, mine.step.updates

    found = on_ranks(2, step)
    assert found[0] == found[1] and found[0][1:] == (True, 0)
    assert re.fullmatch(rf"step 4: loss .*not finite; first {where} \S+ on rank 1; samples 24 to 31", found[0][0])


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    model = T0.model_copy(update={"norm": "layer", "qkv_bias": True})
    mine = Rank.of(run_of(model))
    masters = mine.parallel.states.masters()
    optimizer = make_optimizer(masters, OptimSpec(name="adamw", weight_decay=0.5))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for piece, master in masters:
        assert decay[id(master)] == (0.5 if len(piece.placement.tensor.shape) == 2 else 0.0)
    assert sorted(group["weight_decay"] for group in optimizer.param_groups) == [0.0, 0.5]
