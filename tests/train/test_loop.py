"""A whole run: what ranks read, what evaluation leaves alone, what is written down, and what is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from plait.data import Batch, Samples, Synthetic
from plait.parallel.launch import World, launch
from plait.spec.fit import fit
from plait.spec.run import OptimSpec, RunSpec, TrainSpec
from plait.train.job import train
from plait.train.loop import Training, evaluate, prepare, train_steps
from plait.train.metrics import Metrics
from plait.train.sinks import Progress
from plait.train.step import Step
from tests.fixtures import T0, run_of

DROPPING = T0.model_copy(update={"dropout": 0.1, "attention_dropout": 0.1})
LAYOUTS: list[dict[str, Any]] = [{"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}, {"dp": 4, "order": ("tp", "dp", "cp", "pp")}]


def a_run(steps: int, model: Any = T0, eval_every: int = 0, **layout: Any) -> RunSpec:
    """On synthetic data, which knows its samples by number."""
    run = run_of(model, **layout)
    return run.model_copy(
        update={
            "train": TrainSpec(steps=steps, eval_every=eval_every, eval_batches=2),
            "optim": OptimSpec(lr=1e-2, schedule="constant"),
        }
    )


def read_by(run: RunSpec) -> list[list[Batch]]:
    """Rank -> the rows that it was given in each step of a real run."""

    def record(world: World) -> list[Batch]:
        given: list[Batch] = []
        plain = Step.backward
        Step.backward = lambda self, step, batch: given.append(batch) or plain(self, step, batch)  # type: ignore
        list(train_steps(prepare(run, world)))
        return given

    return launch(fit(run).world, record, threads=1, timeout_s=60)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_data_parallel_ranks_share_out_the_batch_and_the_others_of_a_replica_read_the_same(
    layout: dict[str, Any],
) -> None:
    run = a_run(2, **layout)
    batches, places = read_by(run), fit(run)
    for step in range(2):
        by_replica: dict[int, list[Batch]] = {}
        for rank, given in enumerate(batches):
            by_replica.setdefault(places.coordinates(rank).dp, []).append(given[step])
        for same in by_replica.values():
            assert all(torch.equal(a, b) for batch in same for a, b in zip(batch[:3], same[0][:3], strict=True))
        samples = torch.cat([by_replica[dp][0].samples for dp in range(places.dp)])
        assert samples.tolist() == list(range(8 * step, 8 * step + 8))


def test_the_global_batch_of_a_step_does_not_depend_on_the_layout() -> None:
    def tokens(**layout: Any) -> list[Tensor]:
        run = a_run(2, **layout)
        batches, places = read_by(run), fit(run)
        firsts = [batches[places.rank(dp=dp)] for dp in range(places.dp)]
        return [torch.cat([given[step].tokens for given in firsts]) for step in range(2)]

    alone = tokens()
    for layout in LAYOUTS:
        assert all(torch.equal(a, b) for a, b in zip(alone, tokens(**layout), strict=True))


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", [{"dp": 2, "pp": 2}, {"tp": 2, "sequence_parallel": True}], ids=str)
def test_evaluating_every_step_does_not_change_a_single_bit_of_training(layout: dict[str, Any]) -> None:
    def losses(world: World, every: int) -> list[tuple[float, float]]:
        return [(m.loss, m.norm) for m in train_steps(prepare(a_run(10, DROPPING, every, **layout), world))]

    world = fit(a_run(10, **layout)).world
    every_step, never = (launch(world, losses, every, threads=1, timeout_s=60)[0] for every in (1, 0))
    assert every_step == never and len(never) == 10


def test_two_evaluations_in_a_row_are_equal_and_drop_nothing() -> None:
    def evaluations(world: World) -> tuple[float | None, float | None, float | None]:
        with_dropout = prepare(a_run(2, DROPPING, pp=2), world)
        list(train_steps(with_dropout))
        without = prepare(a_run(2, T0, pp=2), world)
        for (_, mine), (_, other) in zip(
            without.parallel.states.weights(), with_dropout.parallel.states.weights(), strict=True
        ):
            mine.copy_(other)
        return evaluate(with_dropout, 2), evaluate(with_dropout, 2), evaluate(without, 2)

    first, second, undropped = launch(2, evaluations, threads=1, timeout_s=60)[0]
    assert first is not None and first == second == undropped


def test_a_step_without_a_label_is_announced_once_and_training_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    def job(world: World) -> list[tuple[int, int, float | None]]:
        run = a_run(3, dp=2)
        training = prepare(run, world)
        empty = Samples(Synthetic(64, 16, seed=1, empty=range(8, 16)), seed=1, shuffle=False)
        training = replace(training, data=replace(training.data, train=empty))
        return [(m.step, m.updates, m.lr) for m in tell(training)]

    assert launch(2, job, threads=1, timeout_s=60)[0] == [(1, 1, 0.01), (2, 1, None), (3, 2, 0.01)]
    lines = [line for line in capfd.readouterr().err.splitlines() if "no valid label" in line]
    assert lines == ["step 2: no valid label in the batch; weights unchanged"]


def tell(training: Training) -> list[Metrics]:
    """Run, with the progress line on rank 0."""
    sink, history = Progress(training.run), []
    for metrics in train_steps(training):
        history.append(metrics)
        if training.world.rank == 0:
            sink.write(metrics, memory=0)
    return history


def test_a_run_s_directory_tells_every_step_and_every_rank_s_actions(tmp_path: Path) -> None:
    run = a_run(3, eval_every=2, pp=2, micro_batches=4)
    summary = launch(2, train, run, tmp_path, threads=1, timeout_s=60)[0]
    assert summary is not None
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3] and summary.steps == 3
    assert [line["eval_loss"] is not None for line in lines] == [False, True, True]
    assert (summary.loss_first, summary.loss_last) == (lines[0]["loss"], lines[2]["loss"])
    assert summary.eval_loss == lines[2]["eval_loss"]
    spans = [json.loads(line) for line in (tmp_path / "spans.jsonl").read_text().splitlines()]
    assert sorted({span["rank"] for span in spans}) == [0, 1] and len(spans) == 2 * 2 * 4
    assert {(s["rank"], s["stage"], s["kind"]) for s in spans} == {(r, r, kind) for r in (0, 1) for kind in ("F", "BW")}
    assert all(span["end"] >= span["start"] for span in spans)


def test_steps_is_the_loop_as_an_iterator_and_equals_a_split_run() -> None:
    def alone(world: World) -> list[float]:
        return [metrics.loss for metrics in plait.steps(a_run(4))]

    def split(world: World) -> list[float]:
        return [metrics.loss for metrics in train_steps(prepare(a_run(4, tp=2, dp=2), world))]

    (one,) = launch(1, alone, threads=1, timeout_s=60)
    assert launch(4, split, threads=1, timeout_s=60) == [pytest.approx(one, rel=1e-5)] * 4
