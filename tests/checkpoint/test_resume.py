"""A run that goes on is the run that was never broken off: bitwise in its layout, and to rounding in another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from plait.checkpoint.manifest import read_manifest
from plait.checkpoint.source import Source
from plait.parallel.launch import World, launch
from plait.spec.fit import fit
from plait.spec.run import CheckpointSpec, DataSpec, OptimSpec, RunSpec, TrainSpec
from plait.train.keep import keeping
from plait.train.loop import prepare, train_steps
from plait.train.step import Step
from tests.fixtures import T0, run_of

DROPPING = T0.model_copy(update={"dropout": 0.1, "attention_dropout": 0.1})
SPLIT: dict[str, Any] = {"tp": 2, "pp": 2, "dp": 2}


def a_run(folder: Path, steps: int = 6, every: int = 3, model: Any = DROPPING, **layout: Any) -> RunSpec:
    run = run_of(model, **layout)
    return run.model_copy(
        update={
            "train": TrainSpec(steps=steps, run_dir=str(folder), resume="auto", eval_batches=0),
            "optim": OptimSpec(lr=1e-2, warmup=2, schedule="linear"),
            "checkpoint": CheckpointSpec(every=every, keep=10),
        }
    )


def run_until(world: World, run: RunSpec, until: int | None) -> list[float]:
    """Losses of the steps that the run still has to make, up to step `until`, where it is left as by a kill."""
    found: list[float] = []
    training = prepare(run, world)
    with keeping(run, training.mesh, Path(str(run.train.run_dir)), training.data.fingerprint) as training.keeper:
        assert training.keeper is not None
        for metrics in train_steps(training):
            found.append(metrics.loss)
            if metrics.step == until:
                training.keeper.saver.wait()
                break
    return found


def losses(run: RunSpec, until: int | None = None) -> list[float]:
    """The same on as many ranks as the run needs."""
    return launch(fit(run).world, run_until, run, until, threads=1, timeout_s=100)[0]


def states(shelf: Path, step: int) -> dict[str, Tensor]:
    """Every state of every tensor of a checkpoint."""
    with Source(read_manifest(shelf / f"step-{step:08d}")) as source:
        return {
            f"{state} of {name}": source.read(name, tuple((0, size) for size in tensor.shape), state)
            for name, tensor in source.manifest.tensors.items()
            for state in tensor.states
        }


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    ("zero", "layout"),
    [(3, {"dp": 2, "pp": 2}), *(pytest.param(stage, SPLIT, marks=pytest.mark.proof) for stage in range(4))],
)
def test_a_run_broken_off_twice_ends_bitwise_as_the_unbroken_one(
    zero: int, layout: dict[str, Any], tmp_path: Path
) -> None:
    def run(name: str) -> RunSpec:
        return a_run(tmp_path / name, steps=6, every=2, zero=zero, **layout)

    unbroken = losses(run("whole"))
    first = losses(run("parts"), until=3)  # goes on after 2
    second = losses(run("parts"), until=5)  # and after 4
    third = losses(run("parts"))
    assert (first, second, third) == (unbroken[:3], unbroken[2:5], unbroken[4:])
    assert equal(*(states(tmp_path / name / "checkpoints", 6) for name in ("whole", "parts")))


@pytest.mark.proof
def test_a_run_goes_on_in_another_layout_with_dropout_to_rounding(tmp_path: Path) -> None:
    unbroken = losses(a_run(tmp_path / "whole", dp=2))
    losses(a_run(tmp_path / "parts", **SPLIT, zero=1), until=4)
    rest = losses(a_run(tmp_path / "parts", tp=2, zero=3))
    assert rest == [pytest.approx(loss, rel=1e-5) for loss in unbroken[3:]]


def test_a_resumed_run_reads_on_in_the_data_across_the_ends_of_epochs(tmp_path: Path) -> None:
    """20 windows and batches of 8: an epoch ends within step 3, the next with step 5. The second resume counts too."""
    file = tmp_path / "tokens.bin"
    np.random.default_rng(0).integers(0, 64, 20 * 16 + 1).astype("<u2").tofile(file)
    plain = Step.backward

    def read(name: str, until: int | None = None) -> list[list[list[int]]]:
        run = a_run(tmp_path / name, steps=7, every=1, model=T0)
        data = DataSpec(source="tokens", files=(str(file),), validation=0.0)

        def job(world: World) -> list[list[list[int]]]:
            given: list[list[list[int]]] = []
            Step.backward = lambda s, n, batch: given.append(batch.tokens.tolist()) or plain(s, n, batch)  # type: ignore
            run_until(world, run.model_copy(update={"data": data}), until)
            return given

        return launch(1, job, threads=1, timeout_s=60)[0]

    whole = read("whole")
    samples = [row for rows in whole[:5] for row in rows]
    assert sorted(samples[:20]) == sorted(samples[20:]) and samples[:20] != samples[20:]
    assert read("parts", until=3) == whole[:3]
    assert read("parts", until=5) == whole[2:5]
    assert read("parts") == whole[4:]


def test_the_first_checkpoint_holds_the_weights_after_the_first_update(tmp_path: Path) -> None:
    losses(a_run(tmp_path, steps=3, every=1, model=T0), until=3)
    facts = read_manifest(tmp_path / "checkpoints" / "step-00000001").facts
    assert (facts.step, facts.updates, facts.samples) == (1, 1, 8)
    one, two = states(tmp_path / "checkpoints", 1), states(tmp_path / "checkpoints", 2)
    assert all(value.abs().max() > 0 for name, value in one.items() if name.startswith("exp_avg"))
    assert not any(torch.equal(one[name], two[name]) for name in one)
