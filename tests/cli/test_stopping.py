"""Asked to stop, a run saves once and leaves in time; killed, it is started again and ends as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from plait.checkpoint.manifest import read_manifest
from plait.checkpoint.shelf import folders
from tests.cli.commands import SOURCE, plait
from tests.cli.test_train import TINY, TORCHRUN, document

SHORT = tuple(word for word in TINY if not word.startswith("train.steps"))
LONG = (*SHORT, "train.steps=100000", "layout.dp=2")


@contextmanager
def started(
    folder: Path, *words: str, launcher: tuple[str, ...] = ("-m", "plait"), **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """A job in a session of its own, of which nothing is left afterwards."""
    job = subprocess.Popen(
        [sys.executable, *launcher, "train", *LONG, f"train.run_dir={folder}", *words],
        env={**os.environ, "PYTHONPATH": SOURCE, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job of a script ignores it
    )  # fmt: skip
    try:
        yield job
    finally:
        for pid in alive(job.pid):
            os.kill(pid, signal.SIGKILL)
        job.communicate()


def steps_in(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def wait_until(true: Callable[[], bool], job: subprocess.Popen[str], seconds: float = 60) -> None:
    limit = time.monotonic() + seconds
    while not true():
        assert job.poll() is None and time.monotonic() < limit
        time.sleep(0.02)


def alive(session: int) -> list[int]:
    found = subprocess.run(["ps", "-s", str(session), "-o", "pid=,stat="], capture_output=True, text=True).stdout
    return [int(line.split()[0]) for line in found.splitlines() if not line.split()[1].startswith("Z")]


def stopped(folder: Path, number: signal.Signals, whom: str, *words: str) -> None:
    """Ask after the fifth step: one checkpoint, of the last step that the metrics tell; the run goes on from there."""
    with started(folder, *words) as job:
        wait_until(lambda: steps_in(folder) >= 5, job)
        ranks = [pid for pid in alive(job.pid) if pid != job.pid]
        os.kill(job.pid if whom == "launcher" else ranks[0], number)
        asked = time.monotonic()
        _, told = job.communicate(timeout=60)
        assert time.monotonic() - asked < 30
        assert job.returncode == 128 + number and alive(job.pid) == []
    last = steps_in(folder)
    assert f"\nstopped after step {last} of 100000, saved in {folder / 'checkpoints'}" in told, told
    assert [path.name for path in folders(folder / "checkpoints")] == [f"step-{last:08d}"]
    assert read_manifest(folders(folder / "checkpoints")[0]).facts.step == last
    words = (*SHORT, f"train.steps={last + 2}", "layout.dp=2", f"train.run_dir={folder}", "train.resume=auto", "--json")
    assert document(plait("train", *words))["steps"] == last + 2
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()] == list(range(1, last + 3))


def test_b102_sigterm_saves_once_and_leaves_in_time(tmp_path: Path) -> None:
    stopped(tmp_path, signal.SIGTERM, "launcher")


@pytest.mark.proof
@pytest.mark.parametrize("words", [(), ("train.eval_every=1", "train.eval_batches=50")], ids=["step", "evaluation"])
@pytest.mark.parametrize(
    ("number", "whom"), [(signal.SIGTERM, "launcher"), (signal.SIGTERM, "rank"), (signal.SIGINT, "launcher")]
)
def test_b102_a_signal_to_the_launcher_or_to_one_rank_stops_all_after_one_step(
    number: signal.Signals, whom: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    stopped(tmp_path, number, whom, *words)


@pytest.mark.proof
def test_b102_a_second_ctrl_c_leaves_at_once_where_the_first_one_cannot(tmp_path: Path) -> None:
    with started(tmp_path, PLAIT_FAULT="rank=1,step=3,at=forward,kind=hang") as job:
        wait_until(lambda: steps_in(tmp_path) == 2, job)
        os.kill(job.pid, signal.SIGINT)
        time.sleep(1)
        assert job.poll() is None
        os.kill(job.pid, signal.SIGINT)
        asked = time.monotonic()
        job.communicate(timeout=30)
        assert job.returncode == 130 and time.monotonic() - asked < 10 and alive(job.pid) == []


@pytest.mark.proof
def test_under_torchrun_sigterm_saves_and_leaves(tmp_path: Path) -> None:
    with started(tmp_path, launcher=TORCHRUN) as job:
        wait_until(lambda: steps_in(tmp_path) >= 5, job, 100)
        os.kill(job.pid, signal.SIGTERM)
        job.communicate(timeout=60)
        assert job.returncode != 0 and alive(job.pid) == []
    assert [path.name for path in folders(tmp_path / "checkpoints")] == [f"step-{steps_in(tmp_path):08d}"]


def test_a_killed_rank_is_started_again_and_the_run_ends_as_the_unbroken_one(tmp_path: Path) -> None:
    words = ("train", *TINY, "layout.tp=2", "checkpoint.every=1", "--json")
    fault = "rank=1,step=3,at=save finished,kind=kill"
    ended = plait(*words, f"train.run_dir={tmp_path / 'a'}", "--restarts", 1, PLAIT_FAULT=fault)
    whole = document(plait(*words, f"train.run_dir={tmp_path / 'b'}"))
    assert "rank 1, step 4: signal 9" in ended.stderr or "rank 1, step 3: signal 9" in ended.stderr
    assert "restart 1 of 1" in ended.stderr and "goes on after step 3" in ended.stderr
    again = document(ended)
    assert (again["steps"], again["loss_last"], again["eval_loss"]) == (4, whole["loss_last"], whole["eval_loss"])


def test_a_run_that_stopped_itself_is_not_started_again(tmp_path: Path) -> None:
    words = ("train", *TINY, "optim.lr=1e30", "optim.clip=0", "optim.name=sgd", "layout.dp=2", "checkpoint.every=1")
    ended = plait(*words, f"train.run_dir={tmp_path}", "--restarts", 3)
    assert ended.code == 3 and "not finite" in ended.error and "restart" not in ended.stderr
