"""Counted bytes and calls equal the formulas of each strategy exactly, and the network interface agrees.

The formulas are written out here from sizes alone, with every extra by its name. One optimizer step, summed over
ranks: n ranks that all-reduce S bytes send 2·S·(n-1) together; gathered or scattered, S·(n-1).
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import struct
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.parallel import collectives as comm
from plait.parallel.launch import launch
from plait.parallel.mesh import Mesh
from plait.parallel.traffic import Traffic, TrafficCounter, total
from plait.parallel.world import World
from plait.spec.layout import Layout
from plait.spec.model import ModelSpec
from plait.spec.run import RunSpec
from tests.fixtures import SEQUENCE, T0, T0_RATIO_4, T0_TIED, run_of
from tests.launching import on_ranks
from tests.ranks import Rank

FLOAT, DOUBLE, LONG = 4, 8, 8  # bytes
SCATTER = "all_to_all_single"  # what a reduce-scatter is on gloo: pieces exchanged, then added


class Expected:
    """Calls (once per rank that takes part) and bytes by axis and operation."""

    def __init__(self) -> None:
        self.rows: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])

    def add(self, axis: str, operation: str, calls: int, sent: int) -> None:
        if calls:
            self.rows[axis, operation][0] += calls
            self.rows[axis, operation][1] += sent

    def all_reduce(self, axis: str, ranks: int, size: int, times: int = 1) -> None:
        """`times` groups or calls of `ranks` ranks, each over `size` bytes."""
        if ranks > 1:
            self.add(axis, "all_reduce", times * ranks, times * 2 * size * (ranks - 1))

    def as_traffic(self) -> Traffic:
        found: Traffic = {}
        for (axis, operation), (calls, sent) in sorted(self.rows.items()):
            found.setdefault(axis, {})[operation] = {"calls": calls, "bytes": sent}
        return found


def expected(run: RunSpec) -> Traffic:
    """The formulas, for a model of matrices without biases and norms of one weight."""
    model, layout, found = run.model, run.layout, Expected()
    tp, pp, dp = layout.tp, layout.pp, layout.dp or 1
    tokens = run.batch.micro_size * SEQUENCE
    passes = dp * run.batch.global_size // (dp * run.batch.micro_size)  # micro-batches of all replicas
    activation = tokens * model.hidden * FLOAT
    norms = (2 * model.layers + 1) * model.hidden
    if layout.sequence_parallel:
        gathers = 2 * model.layers + 1  # forward: attention and mlp of each block, head
        gathers += 4 * model.layers + 2  # backward: both inputs again, both output gradients; head, embedding
        scatters = 2 * (2 * model.layers + 1)  # forward: two a block and the embedding; backward: two and the head
        found.add("tp", "all_gather_into_tensor", passes * gathers * tp, passes * gathers * activation * (tp - 1))
        found.add("tp", SCATTER, passes * scatters * tp, passes * scatters * activation * (tp - 1))
        found.add("tp", "all_reduce", tp * pp * dp, 2 * norms * FLOAT * (tp - 1) * dp)  # norm gradients, a call a stage
    else:
        reduces = 2 * (2 * model.layers + 1)  # forward: two a block and the embedding; backward: two and the head
        found.all_reduce("tp", tp, activation, passes * reduces)
    found.all_reduce("tp", tp, tokens * FLOAT, passes)  # cross-entropy: the largest logit
    found.all_reduce("tp", tp, 2 * tokens * FLOAT, passes)  # cross-entropy: sum of exponentials, target's logit
    kv_matrices = 2 * model.layers * model.hidden * model.head_dim * model.kv_heads
    copies = max(1, tp // model.kv_heads)
    if copies > 1:  # gradients of the kv heads that ranks share
        found.add("tp", "all_reduce", tp * pp * dp, 2 * kv_matrices * FLOAT * (copies - 1) * dp)

    table = model.vocab * model.hidden
    found.add("pp", "send", (pp - 1) * 2 * passes * tp, message_bytes(run) * (pp - 1) * 2 * passes * tp)
    found.add("pp", "recv", (pp - 1) * 2 * passes * tp, 0)
    if model.tied and pp > 1:
        found.add("tied", "all_reduce", 2 * tp * dp, 2 * table * FLOAT * dp)

    held = model.parameter_count() + (tp - 1) * norms + (copies - 1) * kv_matrices  # of one replica, copies and all
    held += table if model.tied and pp > 1 else 0
    if dp > 1:
        buffers = pp * (1 + (tp > 1))  # what tp cuts, and what its ranks hold alike, of each stage
        buffers += min(pp, 2) if model.tied else 0  # a tied table has a buffer of its own, on first and last stage
        found.add("dp", "all_reduce", dp * tp * buffers, 2 * held * FLOAT * (dp - 1))
        found.all_reduce("dp", dp, LONG, tp * pp)  # label counts
    found.all_reduce("world", tp * pp * dp, 4 * DOUBLE)  # norm, loss, count, and whether to stop
    return found.as_traffic()


def message_bytes(run: RunSpec) -> int:
    """One activation, or its gradient: (B, S, d), and a tp-th of it where tokens are split."""
    whole = run.batch.micro_size * SEQUENCE * run.model.hidden * FLOAT
    return whole // run.layout.tp if run.layout.sequence_parallel else whole


def counted(run: RunSpec) -> Traffic:
    def step(rank: int, world: int) -> Traffic:
        mine = Rank.of(run)
        with TrafficCounter(mine.mesh.axes()) as counter:
            mine.step.update(mine.backward())
        return total(counter, mine.mesh.group("world"))

    layout = run.layout
    reports = on_ranks(layout.tp * layout.pp * (layout.dp or 1), step)
    assert all(report == reports[0] for report in reports)
    return reports[0]


SPLIT = {"sequence_parallel": True}
ODD = T0.model_copy(update={"vocab": 61})


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(T0, {"tp": 2}, id="tensor"),
        pytest.param(T0_RATIO_4, {"tp": 4}, id="tensor with shared kv heads"),
        pytest.param(ODD, {"tp": 2, **SPLIT}, id="tensor with split tokens and an odd vocabulary"),
        pytest.param(T0, {"pp": 4, "micro_batches": 4}, id="pipeline"),
        pytest.param(T0, {"dp": 4}, id="data"),
        pytest.param(T0_TIED, {"pp": 2, "dp": 2, "schedule": "gpipe"}, id="tied over stages"),
        pytest.param(T0, {"tp": 2, "pp": 2}, id="tensor and pipeline"),
        pytest.param(T0_TIED, {"tp": 2, "pp": 2, "dp": 2, **SPLIT}, id="all three with split tokens"),
    ],
)
def test_counted_traffic_is_the_formula_to_the_byte_and_the_call(model: ModelSpec, layout: dict[str, Any]) -> None:
    run = run_of(model, **layout)
    assert counted(run) == expected(run)


def calls_of(run: RunSpec) -> tuple[dict[str, int], dict[str, int]]:
    """Calls over tp of one rank, by operation: in an evaluation (one forward), and in a step."""

    def passes(rank: int, world: int) -> tuple[dict[str, int], dict[str, int]]:
        mine = Rank.of(run)
        found: list[dict[str, int]] = []
        for act in (mine.step.evaluate, lambda batch: mine.step.backward(1, batch)):
            with TrafficCounter(mine.mesh.axes()) as counter:
                act(mine.batch())
            found.append({operation: calls for axis, operation, calls, _ in counter.rows() if axis == "tp"})
        return found[0], found[1]

    return on_ranks(run.layout.tp, passes)[0]


CROSS_ENTROPY = 2  # all-reduces of a row or two per token


@pytest.mark.parametrize("layers", [4, pytest.param(80, marks=pytest.mark.proof)])
def test_a_block_costs_two_all_reduces_each_way_and_the_ends_one_each_way(layers: int) -> None:
    """80 layers: 160 and 160, and one for the embedding forward, one for the head's input backward."""
    model = ModelSpec(vocab=8, hidden=4, layers=layers, heads=2, kv_heads=2, head_dim=2, ffn=4, max_sequence=16)
    forward, step = calls_of(run_of(model, tp=2, micro_batches=1))
    assert forward == {"all_reduce": 2 * layers + 1 + CROSS_ENTROPY}
    assert step["all_reduce"] - forward["all_reduce"] == 2 * layers + 1


def test_split_tokens_cost_two_gathers_and_scatters_forward_four_and_two_backward() -> None:
    layers, norm_gradients = T0.layers, 1
    forward, step = calls_of(run_of(T0, tp=2, micro_batches=1, sequence_parallel=True))
    assert forward == {
        "all_gather_into_tensor": 2 * layers + 1, SCATTER: 2 * layers + 1, "all_reduce": CROSS_ENTROPY,
    }  # fmt: skip
    assert {operation: step[operation] - calls for operation, calls in forward.items()} == {
        "all_gather_into_tensor": 4 * layers + 2, SCATTER: 2 * layers + 1, "all_reduce": norm_gradients,
    }  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_all_reduce_sends_what_a_reduce_scatter_and_an_all_gather_send(ranks: int) -> None:
    elements = 120

    def run(rank: int, world: int) -> dict[str, float]:
        mesh = Mesh(Layout(tp=ranks))
        group, x = mesh.group("tp"), torch.ones(1, elements, 1)
        with TrafficCounter(mesh.axes()) as counter:
            comm.all_reduce(x, group)
            part = comm.finish_reduce_scatter(comm.start_reduce_scatter(x, group), group)
            comm.finish_all_gather(comm.start_all_gather(part, group), group)
        return {operation: sent for _, operation, _, sent in counter.rows()}

    for sent in on_ranks(ranks, run):
        assert sent["all_reduce"] == 2 * elements * FLOAT * (ranks - 1) / ranks
        assert sent["all_reduce"] == sent[SCATTER] + sent["all_gather_into_tensor"]


# --- the interface's own counter --------------------------------------------------------------------------------------


def enter_network_namespace() -> str:
    """Move this process into a network of its own, with a loopback interface; the reason where that is refused."""
    new_user, new_network, interface_up, set_flags = 0x10000000, 0x40000000, 0x1, 0x8914
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare"):
        return "this system has no namespaces"
    if libc.unshare(new_network) and libc.unshare(new_user | new_network):
        return f"network namespaces cannot be made here: {os.strerror(ctypes.get_errno())}"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        try:
            fcntl.ioctl(control, set_flags, struct.pack("16sH14x", b"lo", interface_up))
        except OSError as refused:
            return f"the loopback interface of a new namespace cannot be started: {refused}"
    return ""


def sent_over_loopback() -> int:
    (line,) = [line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[8])


def payload(world: World) -> list[tuple[float, int]]:
    """64 MiB through each kind of transfer: the bytes that this rank counts, and those that the interface counts."""
    mesh = Mesh(Layout(tp=world.size))
    group = mesh.group("tp")
    x, quarter = torch.ones(1, 2**24, 1), torch.ones(1, 2**22, 1)

    def one_way() -> None:
        if world.rank < 2:
            (comm.send if world.rank == 0 else comm.receive)(x, group, 1 - world.rank).wait()

    found = []
    for transfer in (
        lambda: comm.all_reduce(x, group),
        lambda: comm.finish_reduce_scatter(comm.start_reduce_scatter(x, group), group),
        lambda: comm.finish_all_gather(comm.start_all_gather(quarter, group), group),
        one_way,
    ):
        comm.all_reduce(torch.ones(8), group)  # everyone is here, and connected
        before = sent_over_loopback()
        with TrafficCounter(mesh.axes()) as counter:
            transfer()
        comm.all_reduce(torch.ones(8), group)
        found.append((sum(sent for *_, sent in counter.rows()), sent_over_loopback() - before))
    return found


def test_the_loopback_interface_counts_the_bytes_that_we_count_within_two_percent() -> None:
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:  # a process enters a namespace once and for all, so another one does
        try:
            refused = enter_network_namespace()
            told = {"refused": refused} if refused else {"ranks": launch(4, payload, threads=1, timeout_s=60)}
            os.write(writing, json.dumps(told).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    assert text, "the job in the namespace failed"
    told = json.loads(text)
    if "refused" in told:
        pytest.skip(told["refused"])
    for ranks in zip(*told["ranks"], strict=True):  # one kind of transfer, as each rank saw it
        counted = sum(sent for sent, _ in ranks)
        assert counted >= 64e6
        assert max(seen for _, seen in ranks) == pytest.approx(counted, rel=0.02)
