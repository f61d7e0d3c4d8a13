"""Whatever happens to a save or its files: the newest whole checkpoint is found, and a broken one is never loaded."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.checkpoint import save
from plait.checkpoint.manifest import MANIFEST, read_manifest
from plait.checkpoint.save import Saver
from plait.checkpoint.shelf import expire, folders, held
from plait.models.decoder import Decoder
from plait.parallel.faults import POINTS
from plait.parallel.launch import World, launch
from plait.parallel.mesh import Mesh
from plait.parallel.parallelize import parallelize
from plait.spec.errors import BrokenCheckpoint, CheckpointMismatch, RankFailed, SaveFailed, UsageError
from plait.spec.fit import fit
from plait.spec.model import RopeScaling
from plait.spec.run import CheckpointSpec, OptimSpec, RunSpec, TrainSpec
from plait.train.job import train
from plait.train.resume import Start, refuse_changes
from plait.train.states import facts_of, states_of
from plait.train.step import Step
from tests.fixtures import T0, run_of

SAVING = [point for point in POINTS if point.startswith(("snapshot", "save"))]
FIRST_RANK_ONLY = ("save publishing", "save published")


def a_run(folder: Path, steps: int = 4, keep: int = 10, resume: str | None = "auto", **layout: Any) -> RunSpec:
    return run_of(T0, **layout).model_copy(
        update={
            "train": TrainSpec(steps=steps, run_dir=str(folder), resume=resume, eval_batches=0),
            "optim": OptimSpec(lr=1e-2, schedule="constant"),
            "checkpoint": CheckpointSpec(every=1, keep=keep),
        }
    )


def go(run: RunSpec, changes: frozenset[str] = frozenset()) -> Any:
    return launch(
        fit(run).world, train, run, Path(str(run.train.run_dir)), Start(None, changes), threads=1, timeout_s=60
    )[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps on two ranks that nothing happened to, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("whole")
    go(a_run(folder, tp=2))
    return folder


def values(folder: Path) -> dict[str, bytes]:
    """What a run's last checkpoint holds, file by file, whatever the files are called."""
    newest = folders(folder / "checkpoints")[0]
    return {path.name.partition("-")[2]: path.read_bytes() for path in newest.glob("*.safetensors")}


def killed(at: str, rank: str, folder: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(folder, tp=2)
    with monkeypatch.context() as patch:
        patch.setenv("PLAIT_FAULT", f"rank={rank},step=3,at={at},kind=kill")
        with pytest.raises(RankFailed, match="signal 9"):
            go(run)
    left = {path.name for path in folders(folder / "checkpoints")}
    assert {"step-00000001", "step-00000002"} <= left
    go(run)
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]
    assert values(folder) == values(whole)
    assert [path.name for path in folders(folder / "checkpoints")] == [f"step-{n:08d}" for n in (4, 3, 2, 1)]
    for path in folders(folder / "checkpoints"):  # nothing of the save that was broken off is left
        assert {p.name for p in path.iterdir()} == {MANIFEST, *read_manifest(path).files}


@pytest.mark.quick(1)
@pytest.mark.parametrize(("at", "rank"), [("save writing", "1"), ("save publishing", "0"), ("save written", "all")])
def test_b66_killed_in_a_save_the_run_goes_on_from_a_whole_checkpoint(
    at: str, rank: str, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(at, rank, tmp_path, whole, monkeypatch)


@pytest.mark.proof
@pytest.mark.parametrize("rank", ["0", "1", "all"])
@pytest.mark.parametrize("at", SAVING)
def test_b66_killed_at_every_point_of_a_save_the_run_goes_on_from_a_whole_checkpoint(
    at: str, rank: str, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(at, "0" if at in FIRST_RANK_ONLY else rank, tmp_path, whole, monkeypatch)


def damage(folder: Path, dice: random.Random) -> tuple[Path, str]:
    """One of the ways in which a file can be broken; the file, and how."""
    path = dice.choice(sorted(folder.iterdir()))
    size, kind = path.stat().st_size, dice.choice(("bit", "bit", "truncated", "missing", "empty", "longer", "zeros"))
    content = bytearray(path.read_bytes())
    if kind == "bit":
        content[dice.randrange(size)] ^= 1 << dice.randrange(8)
    elif kind == "zeros":
        at = dice.randrange(size)
        content[at : at + 64] = bytes(len(content[at : at + 64])) if any(content[at : at + 64]) else b"\1" * 64
    elif kind == "truncated":
        content = content[: -dice.randrange(1, size)]
    elif kind == "longer":
        content += b"\0"
    path.write_bytes(b"" if kind == "empty" else content)
    if kind == "missing":
        path.unlink()
    return path, kind


def refused(number: int, whole: Path, tmp_path: Path) -> None:
    """An explicit request for a damaged checkpoint fails on all ranks, with the file and the reason; auto skips it."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    newest = folders(tmp_path / "checkpoints")[0]
    path, kind = damage(newest, random.Random(number))
    explicit = a_run(tmp_path / "other", 4, resume=str(newest), tp=2)

    def attempt(world: World) -> str:
        try:
            train(world, explicit, None)
        except BrokenCheckpoint as error:
            return error.message
        return "loaded"

    told = launch(2, attempt, threads=1, timeout_s=30)
    assert told[0] == told[1] and str(path) in told[0], (kind, told)
    assert go(a_run(tmp_path, 4, tp=2)).loss_first == pytest.approx(losses_of(whole)[3], abs=0)


def losses_of(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("number", range(3))
def test_b66_a_damaged_checkpoint_is_refused_on_all_ranks_by_file_and_reason(
    number: int, whole: Path, tmp_path: Path
) -> None:
    refused(number, whole, tmp_path)


@pytest.mark.proof
@pytest.mark.parametrize("number", range(3, 63))
def test_b66_sixty_damaged_checkpoints_are_refused(number: int, whole: Path, tmp_path: Path) -> None:
    refused(number, whole, tmp_path)


def test_b70_a_failed_write_stops_all_ranks_and_leaves_the_checkpoints_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under `ulimit -f`: rank 1's file of step 2 may not grow. The first is whole, nothing of the second is left."""
    import resource

    plain = save._write

    def limited(path: Path, taken: Any, step: int) -> Any:
        if (taken.rank, step) == (1, 2):
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        return plain(path, taken, step)

    monkeypatch.setattr(save, "_write", limited)

    def attempt(world: World) -> str:
        try:
            train(world, a_run(tmp_path, 6, tp=2), tmp_path)
        except SaveFailed as error:
            return error.message
        return "nothing"

    told = launch(2, attempt, threads=1, timeout_s=30)
    assert told[0] == told[1]
    assert "step 2 could not be written by rank 1" in told[0] and "bytes are needed" in told[0]
    assert [path.name for path in folders(tmp_path / "checkpoints")] == ["step-00000001"]


def test_two_jobs_in_one_directory_are_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with held(tmp_path / "checkpoints"), pytest.raises(UsageError, match=r"process \d+ on .* writes its checkpoints"):
        go(a_run(tmp_path))
    go(a_run(tmp_path))


def test_a_second_job_that_is_refused_leaves_the_run_that_is_written_there(tmp_path: Path) -> None:
    go(a_run(tmp_path, 1))
    before = (tmp_path / "run.toml").read_text()
    with held(tmp_path / "checkpoints"), pytest.raises(UsageError, match="writes its checkpoints"):
        go(a_run(tmp_path, 3), frozenset({"train.steps"}))
    assert (tmp_path / "run.toml").read_text() == before
    go(a_run(tmp_path, 3), frozenset({"train.steps"}))
    assert "steps = 3" in (tmp_path / "run.toml").read_text() and "steps = 1" in before


def test_only_the_newest_are_kept_and_broken_ones_do_not_count(tmp_path: Path) -> None:
    go(a_run(tmp_path, 4, keep=2))
    shelf = tmp_path / "checkpoints"
    assert [path.name for path in folders(shelf)] == ["step-00000004", "step-00000003"]
    newest = folders(shelf)[0]
    file = next(newest.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    expire(shelf, keep=1, newest=newest)
    assert [path.name for path in folders(shelf)] == ["step-00000004", "step-00000003"], "the whole one stays"


def test_weights_that_are_not_finite_are_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from plait.train import keep

    plain = keep.states_of

    def poisoned(step: Any) -> Any:
        if step.updates == 2 and step.mesh.rank == 1:
            step.masters[0][0] = torch.nan
        return plain(step)

    monkeypatch.setattr(keep, "states_of", poisoned)
    with pytest.raises(RankFailed, match="not finite") as stopped:
        go(a_run(tmp_path, tp=2))
    assert stopped.value.exit_code == 3
    assert [path.name for path in folders(tmp_path / "checkpoints")] == ["step-00000001"]


def test_b72_another_model_optimizer_or_schedule_is_refused_unless_it_was_asked_for(
    whole: Path, tmp_path: Path
) -> None:
    start = a_run(tmp_path, 5, resume=str(whole), tp=2)
    with pytest.raises(UsageError, match=r"train\.steps: was 4, is 5"):
        go(start)
    assert go(start, frozenset({"train.steps"})).steps == 5
    start = a_run(tmp_path / "other", 5, resume=str(whole), tp=2)
    slower = start.model_copy(update={"optim": start.optim.model_copy(update={"lr": 1e-3})})
    with pytest.raises(UsageError, match=r"optim\.lr: was 0.01, is 0.001"):
        go(slower, frozenset({"train.steps"}))
    other = start.model_copy(update={"model": T0.model_copy(update={"ffn": 66})})
    with pytest.raises(UsageError, match=r"mlp\.gate\.weight is \(64, 32\), the model's is \(66, 32\)"):
        go(other, frozenset({"train.steps", "model.ffn"}))
    plain = start.model_copy(update={"optim": OptimSpec(name="sgd", momentum=0.9, schedule="constant", lr=0.01)})
    keys = frozenset({"train.steps", "optim.name", "optim.momentum"})
    with pytest.raises(UsageError, match=r"lacks the optimizer's: momentum_buffer"):
        go(plain, keys)
    assert issubclass(CheckpointMismatch, UsageError)


def test_a_model_with_another_rope_scaling_or_none_is_another_model(whole: Path) -> None:
    facts = read_manifest(folders(whole / "checkpoints")[0]).facts
    run = a_run(whole, tp=2)
    longer = RopeScaling(kind="linear", factor=8.0)
    scaled = run.model_copy(update={"model": T0.model_copy(update={"rope_scaling": longer})})
    with pytest.raises(CheckpointMismatch, match=r"model\.rope_scaling: was None, is 'a table'"):
        refuse_changes(facts, scaled, facts.data, frozenset())
    refuse_changes(facts, scaled, facts.data, frozenset({"model.rope_scaling.factor"}))
    refuse_changes(facts, run, facts.data, frozenset())


def test_a_run_named_by_its_directory_goes_on_from_its_newest_whole_checkpoint(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    (folders(folder / "checkpoints")[0] / MANIFEST).unlink()  # a save that was broken off
    go(a_run(tmp_path / "other", 4, resume=str(folder), tp=2))
    assert values(tmp_path / "other") == values(whole)


def test_a_run_that_would_save_among_later_steps_of_another_is_refused(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    for resume, at in ((str(folder / "checkpoints" / "step-00000002"), 2), (None, 0)):
        with pytest.raises(UsageError, match=rf"holds step 4, and this run begins after step {at}"):
            go(a_run(folder, resume=resume, tp=2))
    assert len(folders(folder / "checkpoints")) == 4


def test_a_file_of_the_user_s_own_beside_a_checkpoint_stays_and_stops_nothing(tmp_path: Path) -> None:
    go(a_run(tmp_path, 1))
    notes = tmp_path / "checkpoints" / "step-00000001" / "notes"
    notes.mkdir()
    (notes / "why.txt").write_text("a good one")
    go(a_run(tmp_path, 3, keep=1), frozenset({"train.steps"}))
    assert (notes / "why.txt").read_text() == "a good one"
    assert [path.name for path in notes.parent.iterdir()] == ["notes"]
    with pytest.raises(BrokenCheckpoint):
        read_manifest(notes.parent)


def test_a_run_with_nothing_left_to_do_keeps_the_times_that_it_measured(tmp_path: Path) -> None:
    go(a_run(tmp_path, 2))
    before = (tmp_path / "spans.jsonl").read_text()
    go(a_run(tmp_path, 2))
    assert (tmp_path / "spans.jsonl").read_text() == before != ""


@pytest.mark.parametrize("fails", [RuntimeError("can't start new thread"), MemoryError()], ids=repr)
def test_whatever_keeps_one_rank_from_writing_is_told_on_all(
    fails: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = save._write

    def write(path: Path, taken: Any, step: int) -> Any:
        if taken.rank == 1:
            raise fails
        return plain(path, taken, step)

    monkeypatch.setattr(save, "_write", write)

    def attempt(world: World) -> str:
        with pytest.raises(SaveFailed, match="could not be written by rank 1") as failed:
            train(world, a_run(tmp_path, 1, tp=2), tmp_path)
        return failed.value.message

    one, other = launch(2, attempt, threads=1, timeout_s=30)
    assert one == other and type(fails).__name__ in one


def test_a_directory_that_is_not_shared_by_all_ranks_is_told_at_the_first_save(tmp_path: Path) -> None:
    def attempt(world: World) -> str:
        run = run_of(T0, tp=2)
        mesh = Mesh(fit(run))
        step = Step(run, mesh, parallelize(Decoder(run.model), mesh, run))
        saver = Saver(tmp_path / f"node{world.rank}", mesh.group_beside("world"), keep=1)
        saver.start(states_of(step), facts_of(step, 1, None, ""))
        with pytest.raises(SaveFailed, match=r"all nodes must share train\.run_dir") as failed:
            saver.wait()
        return failed.value.message

    one, other = launch(2, attempt, threads=1, timeout_s=30)
    assert one == other and not list(tmp_path.glob("node*/*/manifest.json"))
