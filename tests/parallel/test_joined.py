"""A rank of a job that is there already, as torchrun leaves it: it joins, leaves in order, and tells its failure."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.parallel import faults
from plait.parallel.launch import World, joined_world, run_here
from plait.spec.errors import UsageError
from tests.launching import exit_code, in_child, steps


def join_as(rank: int, port: int, target: Callable[[World], object]) -> int:
    """Fork one of two processes that find what torchrun would have left them."""

    def body() -> None:
        places = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in places.items()})
        here = joined_world()
        assert here is not None
        run_here(here, target)

    return in_child(body)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as door:
        return int(door.getsockname()[1])


def test_a_job_that_is_there_is_joined_and_left_in_order() -> None:
    port = free_port()
    pair = [join_as(rank, port, lambda world: steps(world) == 62.0 or sys.exit(9)) for rank in range(2)]
    assert [exit_code(pid) for pid in pair] == [0, 0]


def test_in_a_job_that_is_there_a_follower_says_that_another_was_first(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(faults.VARIABLE, "rank=1,step=3,at=update,kind=raise")
    monkeypatch.setattr("plait.parallel.world.FOLLOW_UP_WAIT_S", 1.0)
    port = free_port()
    pair = [join_as(rank, port, steps) for rank in range(2)]
    assert [exit_code(pid) for pid in pair] == [1, 1]
    told = [line for line in capfd.readouterr().err.splitlines() if "rank " in line]
    assert told[0] == "error: rank 1, step 3, update: RuntimeError: injected fault"
    assert told[1].startswith("another rank failed first, then rank 0, step 4, collective: ")


SCRIPT = """
import torch
import torch.distributed as dist
from plait.parallel import faults
from plait.parallel.launch import joined_world, run_here

def target(world, factor):
    number = torch.tensor([factor * world.rank])
    dist.all_reduce(number)
    print(f"rank {world.rank} of {world.size} has {number.item()}\\n", end="", flush=True)  # a line is one write
    world.progress(3, "forward")
    faults.strike(world.rank, 3, "forward")
    dist.barrier()

run_here(joined_world(), target, 5)
"""


@pytest.mark.proof
def test_under_torchrun_a_failure_is_in_the_log_and_the_exit_code_is_not_0(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "job.py"]
    fault = "rank=1,step=3,at=forward,kind=raise"
    environment = {**os.environ, "PYTHONPATH": str(Path(faults.__file__).parents[2]), faults.VARIABLE: fault}
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=100)
    assert done.returncode != 0
    assert {"rank 0 of 2 has 5", "rank 1 of 2 has 5"} <= set(done.stdout.splitlines())
    told = [line for line in done.stderr.splitlines() if "error: rank" in line]
    assert told == ["error: rank 1, step 3, forward: RuntimeError: injected fault"], done.stderr


def test_outside_of_torchrun_there_is_no_world_and_half_of_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert joined_world() is None
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not"):
        joined_world()
