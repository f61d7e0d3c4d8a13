"""`plait.save` and `plait.restore` in a loop of the user's own, with nothing but public names."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from plait.checkpoint.manifest import read_manifest
from plait.data import Samples, batch, rows_of
from plait.parallel.launch import World, launch
from plait.spec.errors import CheckpointMismatch, UsageError
from plait.spec.fit import fit
from plait.spec.model import ModelSpec
from plait.spec.run import CheckpointSpec, PrecisionSpec, TrainSpec
from plait.train.keep import keeping
from plait.train.loop import prepare, train_steps
from plait.train.resume import Start
from tests.fixtures import B8, run_of

SMALL = ModelSpec(vocab=64, hidden=16, layers=2, heads=2, kv_heads=2, ffn=24, max_sequence=16)


def own_loop(shelf: Path, until: int, at: int = 0, **layout: Any) -> list[list[float]]:
    """Steps from the newest checkpoint in `shelf` (with `at` 0: from the first) up to `until`, saved; each rank's
    losses."""
    run = run_of(SMALL, **layout)

    def job(world: World) -> list[float]:
        mesh = plait.Mesh(fit(run))
        step = plait.Step(run, mesh, plait.parallelize(plait.Decoder(run.model), mesh, run))
        samples = Samples(B8(), run.train.seed, shuffle=False)
        rows = rows_of(run.batch.global_size, mesh.at.dp, mesh.layout.dp)
        done = plait.restore(step, shelf, data="B8").step if at else 0
        assert done == at
        losses = []
        for number in range(done + 1, until + 1):
            sums = step.backward(number, batch(samples, number - 1, run.batch.global_size, rows))
            step.update(sums)
            losses.append(sums.loss)
        assert plait.save(step, shelf, until, loss=losses[-1], data="B8") == shelf / f"step-{until:08d}"
        return losses

    return launch(fit(run).world, job, threads=1, timeout_s=60)


def test_a_loop_of_ones_own_goes_on_in_another_layout(tmp_path: Path) -> None:
    unbroken = own_loop(tmp_path / "whole", 4)[0]
    assert own_loop(tmp_path / "parts", 2, dp=2, zero=3)[0] == pytest.approx(unbroken[:2], rel=1e-5)
    assert own_loop(tmp_path / "parts", 4, at=2, tp=2)[1] == pytest.approx(unbroken[2:], rel=1e-5)


def on_two(job: Any) -> list[Any]:
    def with_step(world: World) -> Any:
        run = run_of(SMALL, tp=2)
        mesh = plait.Mesh(fit(run))
        return job(plait.Step(run, mesh, plait.parallelize(plait.Decoder(run.model), mesh, run)))

    return launch(2, with_step, threads=1, timeout_s=60)


def test_b67_a_save_or_restore_on_one_rank_alone_is_told_instead_of_waited_for(tmp_path: Path) -> None:
    def alone(step: plait.Step) -> list[str]:
        plait.save(step, tmp_path, 1)  # together: that call does not count for the next
        if step.mesh.rank == 1:
            return []
        told = []
        for call in (
            lambda: plait.save(step, tmp_path, 1, patience=0.2),
            lambda: plait.restore(step, tmp_path, patience=0.2),
        ):
            with pytest.raises(UsageError, match=r"rank 0 waits for rank 1") as refused:
                call()
            told.append(refused.value.message.split(":")[0])
        return told

    place = f"{tmp_path}"
    assert on_two(alone)[0] == [f"plait.save of step 1 to {place}", f"plait.restore of {place}"]


def test_a_rank_that_saves_after_the_others_gave_up_is_told_so_and_the_next_call_of_all_goes_well(
    tmp_path: Path,
) -> None:
    def late(step: plait.Step) -> list[str]:
        if step.mesh.rank == 1:
            time.sleep(2)
        with pytest.raises(UsageError, match=r"waits for rank 1|came after the others") as refused:
            plait.save(step, tmp_path, 1, patience=0.5)
        plait.save(step, tmp_path, 2)
        return [refused.value.message, *(path.name for path in tmp_path.glob("step-*"))]

    one, other = on_two(late)
    assert "rank 0 waits" in one[0] and "rank 1 came after the others" in other[0]
    assert one[1:] == other[1:] == ["step-00000002"]


def test_restore_skips_what_is_broken_and_refuses_other_data_and_an_empty_place_on_all_ranks(tmp_path: Path) -> None:
    def job(step: plait.Step) -> list[str]:
        told = []
        for number in (1, 2):
            plait.save(step, tmp_path, number, data="these")
        if step.mesh.rank == 0:
            file = next((tmp_path / "step-00000002").glob("*.safetensors"))
            file.write_bytes(file.read_bytes()[:-1])
        found = plait.restore(step, tmp_path, data="these")
        told += [str(found.step), found.notices[0].split(":")[0]]
        for place, data, error in ((tmp_path, "those", CheckpointMismatch), (tmp_path / "none", "", UsageError)):
            with pytest.raises(error) as refused:
                plait.restore(step, place, data=data)
            told.append(refused.value.message)
        return told

    one, other = on_two(job)
    assert one == other and one[:2] == ["1", f"skipped {tmp_path / 'step-00000002'}"]
    assert "the tokens are not those" in one[2] and one[3] == f"{tmp_path / 'none'} holds no whole checkpoint"


def alone(**precision: Any) -> plait.Step:
    """The step of a model on one device."""
    run = run_of(SMALL).model_copy(update={"precision": PrecisionSpec(**precision)})
    mesh = plait.Mesh(fit(run))
    return plait.Step(run, mesh, plait.parallelize(plait.Decoder(run.model), mesh, run))


def go(step: plait.Step, number: int) -> None:
    samples = Samples(B8(), step.run.train.seed, shuffle=False)
    step.update(step.backward(number, batch(samples, number - 1, step.run.batch.global_size)))


def test_what_is_saved_stays_though_later_steps_stand_beside_it(tmp_path: Path) -> None:
    step = alone()
    for number in (10, 20, 30, 40):
        plait.save(step, tmp_path, number)
    assert plait.save(step, tmp_path, 11).is_dir()
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [f"step-{n:08d}" for n in (11, 20, 30, 40)]


def test_moments_of_a_checkpoint_that_proves_damaged_are_forgotten(tmp_path: Path) -> None:
    step = alone()
    plait.save(step, tmp_path, 1)
    go(step, 1)
    (file,) = plait.save(step, tmp_path, 2).glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    other = alone()
    assert plait.restore(other, tmp_path).step == 1
    assert other.updates == 0 and not other.optimizer.state


def test_a_loss_scale_goes_on_in_its_own_precision_alone(tmp_path: Path) -> None:
    step = alone(compute="float16")
    step.scale.value = 128.0
    plait.save(step, tmp_path, 1)
    same, wider = alone(compute="float16"), alone(compute="bfloat16")
    plait.restore(same, tmp_path)
    found = plait.restore(wider, tmp_path)
    assert (same.scale.value, wider.scale.value) == (128.0, 1.0)
    assert "changed since: precision.compute: was 'float16', is 'bfloat16'" in found.notices


def test_another_global_batch_goes_on_with_the_next_sample(tmp_path: Path) -> None:
    """3 batches of 8, then of 4: what comes is sample 24, none twice and none left out."""
    run = run_of(SMALL).model_copy(
        update={
            "train": TrainSpec(steps=6, run_dir=str(tmp_path), eval_batches=0),
            "checkpoint": CheckpointSpec(every=3),
        }
    )
    for metrics in plait.steps(run):
        if metrics.step == 4:
            break  # what was being saved is saved, and the directory is free
    smaller = run.model_copy(
        update={
            "batch": run.batch.model_copy(update={"global_size": 4}),
            "train": run.train.model_copy(update={"resume": "auto"}),
        }
    )
    with pytest.raises(CheckpointMismatch, match=r"batch\.global_size: was 8, is 4"):
        next(plait.steps(smaller))
    shelf = tmp_path / "checkpoints"
    training = prepare(smaller, World(0, 1, 0, torch.device("cpu")), Start(changes=frozenset({"batch.global_size"})))
    seen: list[int] = []
    plain = training.step.backward
    training.step.backward = lambda n, b: (seen.extend(b.samples.tolist()), plain(n, b))[1]  # type: ignore[method-assign]
    with keeping(smaller, training.mesh, tmp_path, training.data.fingerprint) as training.keeper:
        assert [metrics.step for metrics in train_steps(training)] == [4, 5, 6]
    assert seen == list(range(24, 36))
    assert read_manifest(shelf / "step-00000006").facts.samples == 36
