"""The executor runs the schedule it is given, whatever a stage computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.parallel import mesh as meshes
from plait.parallel import pipeline as pipelines
from plait.parallel.mesh import Mesh
from plait.parallel.pipeline import Pipeline
from plait.parallel.stage import Signature, Tensors
from plait.proof.compare import Verdict
from plait.schedule import COMPUTE, Kind, Schedule, Span, check, forward_of, generate, lower
from plait.spec.errors import PlaitError, RankFailed
from plait.spec.layout import Layout
from plait.spec.model import ModelSpec
from plait.spec.pipeline import SHAPES
from plait.spec.run import ScheduleSpec
from tests.fixtures import T0, T0_TIED, assert_equals_one_device, run_of
from tests.launching import on_ranks

SCHEDULES = tuple(SHAPES)
MICRO_BATCHES = (1, 2, 3, 4, 5, 8)
PAIR: Signature = (((3,), torch.float64), ((2, 2), torch.float32))  # two tensors, unlike in shape and dtype


def schedule_of(name: str, ranks: int, micro_batches: int) -> Schedule:
    return check(lower(generate(name, ranks, micro_batches)))


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v"])
def test_every_two_neighbours_can_meet_before_a_receive_is_posted(name: str) -> None:
    """As where a communicator is made at a pair's first message, and both wait for it (NCCL)."""

    def run(rank: int, world: int) -> list[Span]:
        mesh, schedule = Mesh(Layout(pp=world)), schedule_of(name, world, 4)
        stages = {s: PairStage(s, schedule.stages - 1) for s in schedule.held_by(rank)}
        pipeline = Pipeline(stages, mesh)
        pipeline.up, pipeline.down = (replace(g, backend="nccl") for g in (pipeline.up, pipeline.down))
        pipeline.connect(schedule)
        return pipeline.run(schedule)

    assert all(on_ranks(4, run))


class PairStage:
    """Two tensors in, two out: each output depends on both inputs and on the stage's weight."""

    def __init__(self, index: int, last: int) -> None:
        self.weight = torch.tensor(1.0 + index / 8, dtype=torch.float64, requires_grad=True)
        self.first, self.last = index == 0, index == last
        self.inputs, self.outputs = () if self.first else PAIR, () if self.last else PAIR
        self.losses: dict[int, float] = {}
        self.live: dict[int, tuple[Tensors, Tensors]] = {}
        self.late: dict[int, tuple[Tensors, Tensors]] = {}

    def compute(self, a: Tensor, b: Tensor) -> Tensors:
        return (a * self.weight).sin() + b.sum(), b * self.weight.float() + a.float().mean()

    def forward(self, micro: int, received: Tensors) -> Tensors:
        given = tuple(x.requires_grad_() for x in received) if received else start_of(micro)
        outputs = self.compute(*given)
        if self.last:
            outputs = (loss_of(outputs),)
            self.losses[micro] = outputs[0].item()
        self.live[micro] = given, outputs
        return () if self.last else tuple(x.detach() for x in outputs)

    def backward(self, micro: int, gradients: Tensors) -> Tensors:
        given, outputs = self.live.pop(micro)
        torch.autograd.backward(outputs, list(gradients) or None)
        return () if self.first else tuple(x.grad for x in given if x.grad is not None)

    def backward_input(self, micro: int, gradients: Tensors) -> Tensors:
        given, outputs = self.live.pop(micro)
        self.late[micro] = outputs, gradients
        if self.first:
            return ()
        return torch.autograd.grad(outputs, given, list(gradients) or None, retain_graph=True)

    def backward_weight(self, micro: int) -> None:
        outputs, gradients = self.late.pop(micro)
        (gradient,) = torch.autograd.grad(outputs, self.weight, list(gradients) or None)
        self.weight.grad = gradient if self.weight.grad is None else self.weight.grad + gradient


def pair_stages(schedule: Schedule, rank: int) -> dict[int, PairStage]:
    return {index: PairStage(index, last=schedule.stages - 1) for index in schedule.held_by(rank)}


def start_of(micro: int) -> Tensors:
    return torch.arange(3.0, dtype=torch.float64) + micro, torch.full((2, 2), 0.5 * micro)


def loss_of(outputs: Tensors) -> Tensor:
    return outputs[0].sum() + outputs[1].double().square().sum()


def on_one_device(stages: int, micro_batches: int) -> tuple[list[float], list[float]]:
    """Losses by micro-batch and weight gradients by stage, without a pipeline."""
    chain = [PairStage(i, last=-1) for i in range(stages)]
    losses = []
    for micro in range(micro_batches):
        x = start_of(micro)
        for stage in chain:
            x = stage.compute(*x)
        loss_of(x).backward()
        losses.append(loss_of(x).item())
    return losses, [stage.weight.grad.item() for stage in chain if stage.weight.grad is not None]


@pytest.mark.parametrize("ranks", [2, 4])
def test_stages_that_exchange_two_tensors_equal_one_device_for_any_number_of_micro_batches(ranks: int) -> None:
    cases = [schedule_of(name, ranks, micro_batches) for name, micro_batches in product(SCHEDULES, MICRO_BATCHES)]

    def run(rank: int, world: int) -> list[dict[int, tuple[dict[int, float], float]]]:
        mesh, found = Mesh(Layout(pp=ranks)), []
        for schedule in cases:
            stages = pair_stages(schedule, rank)
            Pipeline(stages, mesh).run(schedule)
            assert all(stage.weight.grad is not None and not stage.live and not stage.late for stage in stages.values())
            found.append({index: (stage.losses, stage.weight.grad.item()) for index, stage in stages.items()})  # type: ignore[union-attr]
        return found

    for schedule, *by_rank in zip(cases, *on_ranks(ranks, run), strict=True):
        losses, gradients = on_one_device(schedule.stages, schedule.micro_batches)
        found = {index: stage for rank in by_rank for index, stage in rank.items()}
        assert found[schedule.stages - 1][0] == pytest.approx(dict(enumerate(losses)), rel=1e-6)
        assert [found[index][1] for index in range(schedule.stages)] == pytest.approx(gradients, rel=1e-6)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", SCHEDULES)
def test_an_evaluation_runs_the_forwards_of_every_schedule(name: str) -> None:
    schedule = check(lower(forward_of(generate(name, 2, 3))))

    def run(rank: int, world: int) -> list[int]:
        stages = pair_stages(schedule, rank)
        Pipeline(stages, Mesh(Layout(pp=2))).run(schedule)
        return [len(stage.losses) for index, stage in stages.items() if index == schedule.stages - 1]

    assert [losses for rank in on_ranks(2, run) for losses in rank] == [3]


def test_an_evaluation_runs_forwards_only() -> None:
    def run(rank: int, world: int) -> tuple[list[Kind], int]:
        stage = PairStage(rank, last=1)
        spans = Pipeline({rank: stage}, Mesh(Layout(pp=2))).run(lower(forward_of(generate("1f1b", 2, 3))))
        return [span.action.kind for span in spans], len(stage.losses)

    assert on_ranks(2, run) == [([Kind.F] * 3, 0), ([Kind.F] * 3, 3)]


def test_spans_are_the_compute_actions_of_the_program_in_its_order() -> None:
    schedule = schedule_of("1f1b", 2, 3)

    def run(rank: int, world: int) -> bool:
        spans = Pipeline({rank: PairStage(rank, last=1)}, Mesh(Layout(pp=2))).run(schedule)
        ordered = all(a.start <= a.end <= b.start for a, b in pairwise(spans))
        return ordered and [s.action for s in spans] == [a for a in schedule.programs[rank] if a.kind in COMPUTE]

    assert on_ranks(2, run) == [True, True]


@pytest.mark.proof  # its seconds of patience are too few on a busy machine
def test_a_transfer_that_never_comes_is_told_with_the_action_at_which_each_rank_stands() -> None:
    def run(rank: int, world: int) -> str:
        meshes.TIMEOUT, pipelines.ANSWER_WAIT_S = timedelta(seconds=1), 1.0
        stage, schedule = PairStage(rank, last=2), schedule_of("1f1b", 3, 4)
        if rank == 2:
            plain = stage.forward
            stage.forward = lambda micro, x: time.sleep(5 if micro == 1 else 0) or plain(micro, x)  # type: ignore[method-assign]
        try:
            Pipeline({rank: stage}, Mesh(Layout(pp=3))).run(schedule)
        except PlaitError as error:
            return str(error)
        except RuntimeError:  # the one that slept finds the others gone
            return ""
        return "no error"

    first, second, _ = on_ranks(3, run)
    for told in (first, second):
        assert told.startswith("the pipeline stopped: ") and "timed out" in told.lower()
        assert "pp 0: F2 BW0 F3 [BW1] BW2 BW3" in told
        assert "pp 1: F1 BW0 F2 [BW1] F3 BW2" in told
        assert "pp 2: no answer: it computes, or is gone" in told


def refusal(change: Callable[[PairStage], None]) -> str:
    """What is said when `change` makes the first of two stages break its promise."""

    def run(rank: int, world: int) -> None:
        stage = PairStage(rank, last=1)
        change(stage)
        Pipeline({rank: stage}, Mesh(Layout(pp=2))).run(schedule_of("1f1b", 2, 2))

    with pytest.raises(RankFailed) as failure:
        on_ranks(2, run)
    return failure.value.message


def test_an_output_of_another_dtype_than_declared_is_refused_with_stage_expected_and_got() -> None:
    def halve(stage: PairStage) -> None:
        plain = stage.forward
        stage.forward = lambda micro, x: tuple(y.half() for y in plain(micro, x))  # type: ignore[method-assign]

    assert refusal(halve) == (
        "rank 0: stage 0 made (3,) float16, (2, 2) float16 as activation of micro-batch 0 from stage 0 to "
        "1, where (3,) float64, (2, 2) float32 is expected"
    )


def test_an_output_of_another_shape_than_declared_is_refused_with_stage_expected_and_got() -> None:
    def shorten(stage: PairStage) -> None:
        plain = stage.forward
        stage.forward = lambda micro, x: tuple(y[: micro + 2] for y in plain(micro, x))  # type: ignore[method-assign]

    message = refusal(shorten)
    assert (
        "stage 0 made (2,) float64, (2, 2) float32" in message and "(3,) float64, (2, 2) float32 is expected" in message
    )


def test_a_gradient_that_is_missing_is_refused_with_stage_expected_and_got() -> None:
    def forget(stage: PairStage) -> None:
        plain = stage.backward
        stage.backward = lambda micro, x: plain(micro, x)[:1]  # type: ignore[method-assign]

    message = refusal(forget)
    assert "stage 1 made (3,) float64 as gradient of micro-batch 0 from stage 1 to 0" in message
    assert "where (3,) float64, (2, 2) float32 is expected" in message


def proven(schedule: str, micro_batches: int, model: ModelSpec = T0, **asked: Any) -> Verdict:
    """The verdict on a run whose model has a layer for each of its stages."""
    layers = max(model.layers, asked["pp"] * SHAPES[schedule].chunks)
    run = run_of(
        model.model_copy(update={"layers": layers}),
        schedule=schedule,
        micro_batches=micro_batches,
        rows=micro_batches * asked.get("dp", 1),
        **asked,
    )
    return assert_equals_one_device(run)


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("schedule", "pp", "micro_batches"),
    [*((name, 2, 5) for name in SCHEDULES), ("1f1b", 4, 1), *((name, 4, 3) for name in ("interleaved", "zb-v"))],
)
def test_a_pipeline_equals_one_device_before_clipping(schedule: str, pp: int, micro_batches: int) -> None:
    norm = proven(schedule, micro_batches, pp=pp).norm
    assert norm.error <= 1e-10  # not the number of valid tokens times too large, nor a micro-batch's share


SPLIT = [{"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"dp": 2, "zero": 2}, {"dp": 2, "zero": 3}]


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("schedule", "asked"), list(zip(("interleaved", "zb-h1", "dualpipe-v", "zb-v"), SPLIT, strict=True))
)
def test_schedules_meet_the_other_axes(schedule: str, asked: dict[str, Any]) -> None:
    proven(schedule, 4, T0_TIED, pp=2, **asked)


@pytest.mark.proof
@pytest.mark.parametrize(("schedule", "pp", "micro_batches"), list(product(SCHEDULES, (2, 4), MICRO_BATCHES)))
def test_b45_every_number_of_micro_batches_equals_one_device(schedule: str, pp: int, micro_batches: int) -> None:
    assert proven(schedule, micro_batches, pp=pp).norm.error <= 1e-10


ASKED = [*SPLIT, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 3, "keep": True}, {"tp": 2, "dp": 2, "zero": 3}]


@pytest.mark.proof
@pytest.mark.parametrize(("schedule", "asked"), list(product(SCHEDULES, ASKED)))
@pytest.mark.parametrize("model", [T0, T0_TIED], ids=["untied", "tied"])
def test_every_schedule_meets_every_other_axis(schedule: str, asked: dict[str, Any], model: ModelSpec) -> None:
    proven(schedule, 4, model.model_copy(update={"layers": 5}), pp=2, **asked)


@pytest.mark.parametrize(("layers", "pp"), [(5, 2), (7, 3)])
def test_layers_that_stages_do_not_divide_all_run_once(layers: int, pp: int) -> None:
    model = T0_TIED.model_copy(update={"layers": layers})
    verdict = assert_equals_one_device(run_of(model, pp=pp))
    assert verdict.compared == len(model.parameters())


def test_layers_that_are_listed_run_in_their_stages() -> None:
    run = run_of(T0_TIED.model_copy(update={"layers": 6}), pp=2, schedule="zb-v")
    listed = ScheduleSpec(name="zb-v", layers=(1, 3, 1, 1))
    assert_equals_one_device(run.model_copy(update={"schedule": listed}))
