"""Two hosts on one machine: two network namespaces joined by a slow link, and in each a torchrun with four ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.cli.commands import SOURCE

RATE, LINK, ADDRESSES = "100mbit", "wire", ("10.77.0.1", "10.77.0.2")
LONG = 600
TRAIN = ("batch.global_size=32", "batch.micro_size=4", "train.eval_batches=0", "layout.pp=1", "train.log_every=1")


@dataclass(frozen=True)
class Hosts:
    """Two namespaces by name, each with an end of the wire and an address on it."""

    names: tuple[str, str]

    def start(self, host: int, log: Path, *words: str) -> subprocess.Popen[bytes]:
        """torchrun on one host, in a session of its own; what it says goes to a file."""
        agent = (
            "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "4", "--max-restarts", "3",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29477", "--rdzv-id", "two",
            "--rdzv-conf", f"is_host={host == 0}", "--local-addr", ADDRESSES[host], "-m", "plait", "train",
        )  # fmt: skip
        # torchrun's own store outlives a restart, and in it the addresses of ranks that are gone.
        there = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": LINK}
        there |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE}
        with log.open("wb") as out:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.names[host], sys.executable, *agent, *words],
                stdout=out, stderr=subprocess.STDOUT, env=os.environ | there, start_new_session=True,
            )  # fmt: skip


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    names = (f"plait-{os.getpid()}-a", f"plait-{os.getpid()}-b")
    if not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("two hosts need ip and tc (iproute2)")
    ends = [f"end{os.getpid()}{which}" for which in "ab"]
    wiring = [
        *(f"ip netns add {name}" for name in names),
        f"ip link add {ends[0]} type veth peer name {ends[1]}",
        *(f"ip link set {end} netns {name} name {LINK}" for end, name in zip(ends, names, strict=True)),
        *(f"ip -n {name} addr add {at}/24 dev {LINK}" for name, at in zip(names, ADDRESSES, strict=True)),
        *(f"ip -n {name} link set {device} up" for name in names for device in ("lo", LINK)),
        *(f"tc -n {name} qdisc add dev {LINK} root tbf rate {RATE} burst 256kb latency 200ms" for name in names),
    ]
    try:
        for step in wiring:
            done = subprocess.run(step.split(), capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"two hosts cannot be made here: {step}: {done.stderr.strip()}")
        yield Hosts(names)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def steps_in(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run so far; a line that is still being written is left out."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def ended(agents: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
    """Wait for both torchruns; whatever happens, nobody is left."""
    try:
        codes = [agent.wait(LONG) for agent in agents]
        assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()


def trained(hosts: Hosts, folder: Path, *words: str, lose: int | None = None) -> list[dict[str, Any]]:
    """A run over both hosts, of which the second's ranks are killed once `lose` steps are done; its metrics."""
    folder.mkdir()
    logs = [folder / f"host{host}.log" for host in range(2)]
    asked = (*TRAIN, *words, f"train.run_dir={folder / 'run'}", "train.resume=auto", "checkpoint.every=2")
    agents = [hosts.start(host, logs[host], *asked) for host in range(2)]
    if lose is not None:
        until = time.monotonic() + LONG
        while len(steps_in(folder / "run")) < lose and time.monotonic() < until:
            assert all(agent.poll() is None for agent in agents), "\n".join(log.read_text()[-3000:] for log in logs)
            time.sleep(0.1)
        ranks = subprocess.run(["pgrep", "-P", str(agents[1].pid)], capture_output=True, text=True).stdout.split()
        assert len(ranks) == 4, ranks
        for pid in ranks:
            os.kill(int(pid), signal.SIGKILL)
    ended(agents, logs)
    return steps_in(folder / "run")


@pytest.mark.proof
@pytest.mark.timeout(1500)
def test_a_job_survives_the_loss_of_one_host_s_ranks_and_ends_as_the_unbroken_one(hosts: Hosts, tmp_path: Path) -> None:
    split = ("layout.tp=2", "layout.dp=4", "train.steps=8")
    whole = trained(hosts, tmp_path / "whole", *split)
    broken = trained(hosts, tmp_path / "broken", *split, lose=5)
    assert [step["step"] for step in whole] == list(range(1, 9))
    last = {step["step"]: step["loss"] for step in broken}
    assert last == {step["step"]: step["loss"] for step in whole}


@pytest.mark.proof
@pytest.mark.timeout(1500)
def test_w24_a_tensor_group_across_hosts_has_less_than_half_the_throughput_of_one_inside(
    hosts: Hosts, tmp_path: Path
) -> None:
    speeds = []
    for name, order in (("inside", "pp dp cp tp"), ("across", "tp pp dp cp")):
        order = f"layout.order={json.dumps(order.split())}"
        steps = trained(hosts, tmp_path / name, "layout.tp=2", "layout.dp=4", order, "train.steps=4")
        speeds.append(median(step["tokens_per_second"] for step in steps[1:]))
    inside, across = speeds
    print(f"tokens/s with the tensor group inside a host {inside:.0f}, across hosts {across:.0f}")
    assert across < inside / 2
