"""The local launcher: results, the naming of the first failure, and that nothing stays behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from plait.parallel import faults
from plait.parallel.launch import World, launch
from plait.parallel.outcome import death_of, lost_peer
from plait.spec.errors import RankFailed, UsageError
from tests.launching import exit_code, in_child, on_ranks, steps

TRIES = 20


def runs(pid: int) -> bool:
    """True for a live process, false for none and for one that only waits to be reaped by somebody else."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until(true: Callable[[], bool], seconds: float = 10) -> bool:
    limit = time.monotonic() + seconds
    while not true():
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True


def pids_in(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir()]


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    yield
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


# Results


def test_results_come_back_by_rank_from_a_closure_and_large_ones_too() -> None:
    shift = 7

    def shifted(rank: int, world: int, by: int) -> tuple[int, torch.Tensor]:
        return rank * by + shift, torch.full((world, 500_000), float(rank))

    results = on_ranks(3, shifted, 10)
    assert [number for number, _ in results] == [7, 17, 27]
    assert all(torch.equal(t, torch.full((3, 500_000), float(r))) for r, (_, t) in enumerate(results))


def test_ranks_talk_in_groups_and_have_the_threads_asked_for() -> None:
    def talk(world: World) -> tuple[float, int]:
        pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][world.rank // 2]
        number = torch.tensor([float(world.rank)])
        dist.all_reduce(number, group=pair)
        return number.item(), torch.get_num_threads()

    assert launch(4, talk, threads=1) == [(1.0, 1), (1.0, 1), (5.0, 1), (5.0, 1)]


def test_one_rank_is_a_world_of_its_own() -> None:
    assert on_ranks(1, lambda rank, world: (rank, world, dist.get_world_size())) == [(0, 1, 1)]


def test_a_host_name_that_resolves_nowhere_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    assert launch(2, steps) == [62.0, 62.0]


def test_a_parent_that_has_used_its_cores_can_still_launch() -> None:
    torch.exp(torch.ones(1000, 1000))
    assert launch(2, lambda world: torch.exp(torch.zeros(1000, 1000)).sum().item(), threads=2) == [1e6, 1e6]


def test_ranks_that_are_done_do_not_disturb_the_others() -> None:
    def slow_group(rank: int, world: int) -> bool:
        if rank > 0:
            time.sleep(0.5)
            dist.new_group([1, 2], use_local_synchronization=True)
        return True

    assert on_ranks(3, slow_group) == [True, True, True]


# The first to fail is named


@pytest.mark.proof
@pytest.mark.parametrize(
    ("kind", "at", "cause"),
    [
        ("raise", "data", "RuntimeError: injected fault"),
        ("exit", "forward", "exit code 3"),
        ("kill", "collective", "signal 9 (SIGKILL), possibly out of memory"),
        ("segv", "update", "signal 11 (SIGSEGV)"),
    ],
)
def test_the_first_to_fail_is_named_every_time_and_a_restart_works_at_once(
    kind: str, at: str, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(faults.VARIABLE, f"rank=1,step=3,at={at},kind={kind}")
    for _ in range(TRIES):
        began = time.monotonic()
        with pytest.raises(RankFailed) as caught:
            launch(3, steps)
        error = caught.value
        assert (error.rank, error.step, error.cause) == (1, 3, cause)
        assert str(error).splitlines()[:2] == [f"rank 1, step 3: {cause}", f"rank 1 was at step 3, {at}"]
        assert ("in strike" in error.details) is (kind in ("raise", "segv"))  # the Python stack, where there is one
        assert time.monotonic() - began < 30
    monkeypatch.delenv(faults.VARIABLE)
    assert launch(3, steps) == [363.0] * 3


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    assert death_of(-40, "").cause == "signal 40 (real-time)"


@pytest.mark.parametrize("wrap", [False, True])
def test_a_survivor_that_reports_long_before_the_death_is_seen_is_only_a_follower(wrap: bool) -> None:
    def target(rank: int, world: int) -> None:
        if rank == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        lost = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234")
        if wrap:
            raise ValueError("no batch") from lost
        raise lost

    with pytest.raises(RankFailed) as caught:
        on_ranks(3, target)
    assert (caught.value.rank, caught.value.cause) == (1, "signal 9 (SIGKILL), possibly out of memory")
    assert "followed by rank 0, before the first step, start: " in caught.value.details


def test_a_lost_peer_is_named_where_no_rank_has_a_better_reason() -> None:
    def target(rank: int, world: int) -> None:
        if rank == 1:
            raise ConnectionError("the data server closed the line")
        dist.barrier()

    with pytest.raises(RankFailed, match="rank 1: ConnectionError: the data server closed the line"):
        on_ranks(2, target)


def test_what_gloo_says_of_a_dead_peer_is_known_as_such(tmp_path: Path) -> None:
    def target(rank: int, world: int) -> None:
        if rank == 1:
            os._exit(3)
        try:
            while True:
                dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            (tmp_path / "seen").write_text(f"{lost_peer(error)}")
            raise

    with pytest.raises(RankFailed, match="rank 1: exit code 3"):
        on_ranks(2, target)
    assert (tmp_path / "seen").read_text() == "True"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_while_groups_are_made_is_told_without_noise(victim: int, capfd: pytest.CaptureFixture[str]) -> None:
    def target(rank: int, world: int) -> None:
        dist.barrier()  # while ranks still meet for the first time, torch itself logs that one has gone
        if rank == victim:
            os._exit(3)
        dist.new_group([0, 1, 2])

    for _ in range(3):
        with pytest.raises(RankFailed, match=f"rank {victim}: exit code 3"):
            on_ranks(3, target)
    assert capfd.readouterr().err == ""


def test_a_result_that_cannot_be_sent_is_that_ranks_failure() -> None:
    with pytest.raises(RankFailed, match=r"rank 0: .*pickle"):
        on_ranks(1, lambda rank, world: lambda: rank)


def test_a_rank_that_asks_to_leave_is_named_with_its_code() -> None:
    with pytest.raises(RankFailed, match="rank 0: exit code 4"):
        on_ranks(1, lambda rank, world: sys.exit(4))


# Hangs, interrupts, orphans


def test_a_hang_says_where_each_rank_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, "rank=1,step=3,at=forward,kind=hang")
    with pytest.raises(RankFailed) as caught:
        launch(2, steps, timeout_s=0.7)
    error = caught.value
    assert (error.rank, error.step) == (1, 3)
    assert error.cause == "no rank has moved for 0.7 s, this one is furthest behind"
    assert "rank 0: step 3, collective\nrank 1: step 3, forward" in error.details
    assert "in all_reduce" in error.details and "in _hang" in error.details


def test_progress_keeps_a_slow_job_alive() -> None:
    def slow(world: World) -> None:
        for step in range(4):
            world.progress(step, "forward")
            time.sleep(0.4)

    assert launch(1, slow, timeout_s=1.2) == [None]


@pytest.mark.parametrize("to_all", [False, True])
def test_an_interrupt_ends_every_rank(tmp_path: Path, to_all: bool) -> None:
    def wait_forever(world: World) -> None:
        (tmp_path / f"{os.getpid()}").touch()
        signal.pause()

    parent = in_child(lambda: launch(3, wait_forever))
    assert wait_until(lambda: len(pids_in(tmp_path)) == 3)
    for pid in [parent, *(pids_in(tmp_path) if to_all else [])]:  # a terminal sends it to all of them
        os.kill(pid, signal.SIGINT)
    assert exit_code(parent) == 130
    assert not any(map(runs, pids_in(tmp_path)))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_die_with_their_parent(tmp_path: Path, number: signal.Signals) -> None:
    def wait_forever(world: World) -> None:
        (tmp_path / f"{os.getpid()}").touch()
        signal.pause()

    parent = in_child(lambda: launch(3, wait_forever))
    assert wait_until(lambda: len(pids_in(tmp_path)) == 3)
    os.kill(parent, number)
    assert exit_code(parent) == -number
    assert wait_until(lambda: not any(map(runs, pids_in(tmp_path))))


def test_a_rank_that_will_not_leave_is_killed() -> None:
    def stubborn(rank: int, world: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        dist.barrier()
        if rank == 0:
            raise ValueError("enough")
        time.sleep(60)

    began = time.monotonic()
    with pytest.raises(RankFailed, match="rank 0: ValueError: enough"):
        on_ranks(2, stubborn)
    assert time.monotonic() - began < 30


def test_two_jobs_run_at_once() -> None:
    pair = [in_child(lambda: launch(3, steps)) for _ in range(2)]
    assert [exit_code(pid) for pid in pair] == [0, 0]


# Refusals


def test_a_process_with_other_threads_is_refused() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="loader")
    thread.start()
    try:
        with pytest.raises(UsageError, match=r"1 other threads run here \(loader\)"):
            launch(1, steps)
    finally:
        stop.set()
        thread.join()


def test_a_process_that_uses_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(UsageError, match="initialised CUDA"):
        launch(1, steps)


def test_a_rank_cannot_launch_ranks() -> None:
    with pytest.raises(UsageError, match="itself a rank"):
        on_ranks(1, lambda rank, world: launch(1, steps))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rank=1",
        "rank=1,step=3,at=forward,kind=kill,kind=exit",
        "rank=1,step=3,at=forward,kind=kill,when=now",
        "rank=1,step=3,at=nowhere,kind=kill",
        "rank=1,step=3,at=forward,kind=explode",
        "rank=-1,step=3,at=forward,kind=kill",
        "rank=1,step=x,at=forward,kind=kill",
        "rank = 1,step=3,at=forward,kind=kill",
    ],
)
def test_a_fault_that_is_not_understood_is_refused_before_any_process_starts(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(faults.VARIABLE, text)
    with pytest.raises(UsageError, match=faults.VARIABLE):
        launch(1, steps)


def test_a_fault_strikes_only_at_its_rank_step_and_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, "kind=raise,at=update,step=2,rank=0")
    for rank, step, at in [(1, 2, "update"), (0, 1, "update"), (0, 2, "data")]:
        faults.strike(rank, step, at)
    with pytest.raises(RuntimeError, match="injected fault"):
        faults.strike(0, 2, "update")
