"""A run that goes on is the run that was never broken off: bitwise in its layout, and to rounding in another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from plait.checkpoint.manifest import read_manifest
from plait.checkpoint.source import Source
from plait.parallel.faults import VARIABLE
from plait.parallel.launch import World, launch
from plait.spec.errors import RankFailed
from plait.spec.fit import fit
from plait.spec.run import CheckpointSpec, DataSpec, OptimSpec, RunSpec, TrainSpec
from plait.train.job import train
from plait.train.keep import keeping
from plait.train.loop import prepare, train_steps
from tests.fixtures import M0, T0, mixture, run_of

DROPPING = T0.model_copy(update={"dropout": 0.1, "attention_dropout": 0.1})
DROPPING_M0 = M0.model_copy(update={"dropout": 0.1, "attention_dropout": 0.1})
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
def test_b61_a_run_broken_off_twice_ends_bitwise_as_the_unbroken_one(
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


KILLED: list[tuple[Any, dict[str, Any]]] = [
    *((DROPPING, {**SPLIT, "zero": stage}) for stage in range(4)),
    (DROPPING, {"dp": 2, "tp": 2}),
    (mixture(DROPPING_M0, balance_coef=0.01), {"dp": 4, "ep": 2}),
]


@pytest.mark.proof
@pytest.mark.parametrize(("model", "layout"), KILLED, ids=[*(f"zero {n}" for n in range(4)), "dp tp", "experts"])
def test_b61_ten_steps_equal_five_a_kill_and_five_more_bitwise_and_a_second_kill_and_the_ends_of_epochs(
    model: Any, layout: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 windows and batches of 8: epochs end within step 3 and with step 5, within step 8 and with step 10."""
    file = tmp_path / "tokens.bin"
    np.random.default_rng(0).integers(0, 64, 20 * 16 + 1).astype("<u2").tofile(file)
    data = DataSpec(source="tokens", files=(str(file),), validation=0.0)

    def go(name: str, fault: str | None = None) -> None:
        run = a_run(tmp_path / name, steps=10, every=1, model=model, **layout).model_copy(update={"data": data})
        monkeypatch.setenv(VARIABLE, fault or "")
        if fault is None:
            monkeypatch.delenv(VARIABLE)
        launch(fit(run).world, train, run, tmp_path / name, threads=1, timeout_s=100)

    go("whole")
    for step in (6, 9):
        with pytest.raises(RankFailed, match=rf"rank 1, step {step}: signal 9"):
            go("parts", f"rank=1,step={step},at=forward,kind=kill")
    go("parts")
    told = [
        [(line["step"], line["loss"]) for line in map(json.loads, (tmp_path / name / "metrics.jsonl").open())]
        for name in ("whole", "parts")
    ]
    assert told[0] == told[1] and len(told[0]) == 10
    assert equal(*(states(tmp_path / name / "checkpoints", 10) for name in ("whole", "parts")))


def test_b69_a_checkpoint_holds_the_weights_after_its_step_and_the_next_step_follows(tmp_path: Path) -> None:
    losses(a_run(tmp_path, steps=3, every=1, model=T0), until=3)
    assert len(losses(a_run(tmp_path, steps=3, every=1, model=T0))) == 1, "step 3 is next"
    facts = read_manifest(tmp_path / "checkpoints" / "step-00000001").facts
    assert (facts.step, facts.updates, facts.samples) == (1, 1, 8)
    one, two = states(tmp_path / "checkpoints", 1), states(tmp_path / "checkpoints", 2)
    assert all(value.abs().max() > 0 for name, value in one.items() if name.startswith("exp_avg"))
    assert not any(torch.equal(one[name], two[name]) for name in one)
