"""What one rank's device and links do, timed: products of several shapes, attention, copies, and each collective.

Nothing is split here and no module is replaced. Seconds out of several repetitions, in plain values: what
they mean for a plan is worked out in `planner/measured.py`. Where ranks share processors, seconds are a processor's:
who waits lends it to another, and what other programs do at the same time is not counted.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from plait.parallel.collectives import Group, all_reduce, gather_bytes, gather_shards, receive, send, sum_to_shards
from plait.parallel.mesh import Mesh
from plait.parallel.passes import Clock, passes, update
from plait.parallel.world import World
from plait.spec.layout import Layout

SHAPES = {
    "cpu": ((256, 256, 256), (512, 1024, 512), (1024, 1024, 1024)),
    "cuda": ((4096, 4096, 4096), (8192, 8192, 8192)),
}
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float32, torch.bfloat16, torch.float16)}
BETWEEN = 256  # rows and columns of a product between two collectives
TOGETHER = 5  # collectives that follow each other
LEAST_RUN_S = 1e-6  # what a collective takes at least, where the clock is not that fine
SIZES = (2**10, 2**14, 2**17, 2**19, 2**21)  # elements of a float32 message
QUICK_SIZES = (2**12, 2**16, 2**20)
REPEATS, QUICK_REPEATS = 5, 3
LEAST_S = 0.2  # for which a short operation is repeated
LONGEST_S = 0.2  # of a product: where a dtype is emulated, the small ones must do
HEADS, HEAD_DIM, SEQUENCE = 8, 64, {"cpu": 512, "cuda": 4096}


def probe(world: World, quick: bool) -> list[dict[str, Any]] | None:
    """The findings of every rank, on rank 0; None on the others."""
    repeats = QUICK_REPEATS if quick else REPEATS
    mesh = Mesh(Layout(dp=world.size), world.device)
    kind, local = world.device.type, world.local_size or world.size
    cores = _cores(kind)
    shared = cores is not None and local > cores
    clock = _clock(world.device, repeats, shared, LEAST_S)
    together = _clock(world.device, repeats, shared, 0.0)  # as often on every rank
    found: dict[str, Any] = {
        "rank": world.rank,
        "kind": kind,
        "name": torch.cuda.get_device_name(world.device) if kind == "cuda" else "cpu",
        "memory": _memory(world.device),
        "ranks": world.size,
        "local": local,
        "cores": cores,
        "products": _products(world.device, clock),
        "attention": _attention(world.device, clock),
        "copy": _copy(world.device, clock),
        "kernel": _kernel(world.device, clock),
        "passes": passes(mesh, clock, quick) if kind == "cpu" else [],
        "update": update(clock) if kind == "cpu" else None,
        "collectives": _collectives(world, QUICK_SIZES if quick else SIZES, together),
    }
    table = gather_bytes(json.dumps(found).encode(), mesh.group("world"))
    return [json.loads(one) for one in table] if world.rank == 0 else None


def _cores(kind: str) -> int | None:
    """Processors that the ranks of this host share; None where each rank has a device of its own."""
    return len(os.sched_getaffinity(0)) if kind == "cpu" else None


def _clock(device: torch.device, repeats: int, shared: bool, least_s: float) -> Clock:
    """Each run's fastest of `repeats` rounds, or of as many as there are in `least_s`, after one that is not counted.

    Where processors are shared it is the median of their processor time: a rank that another one has interrupted finds
    other caches, and in training it always is.
    """
    read, chosen = (time.process_time, median) if shared else (time.perf_counter, min)

    def seconds(*runs: Callable[[], object]) -> list[float]:
        taken: list[list[float]] = []
        until = time.perf_counter() + least_s
        while len(taken) <= repeats or time.perf_counter() < until:
            taken.append([])
            for run in runs:
                _settle(device)
                begun = read()
                run()
                _settle(device)
                taken[-1].append(read() - begun)
        return [float(chosen(each)) for each in zip(*taken[1:], strict=True)]

    return seconds


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory(device: torch.device) -> int:
    """Bytes of the device; of a CPU, this rank's part of what the machine has free."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    with open("/proc/meminfo", encoding="ascii") as lines:
        free = next(line for line in lines if line.startswith("MemAvailable"))
    return int(free.split()[1]) * 1024


def _products(device: torch.device, clock: Clock) -> list[dict[str, Any]]:
    found = []
    for dtype in DTYPES[device.type]:
        rate = math.inf
        for rows, inner, columns in SHAPES[device.type]:
            if rows * inner * columns / rate > LONGEST_S:
                break
            a = torch.randn(rows, inner, device=device).to(dtype)
            b = torch.randn(inner, columns, device=device).to(dtype)
            seconds = clock(lambda a=a, b=b: a @ b)[0]
            rate, name = rows * inner * columns / seconds, str(dtype).removeprefix("torch.")
            found.append({"dtype": name, "shape": [rows, inner, columns], "seconds": seconds})
    return found


def _attention(device: torch.device, clock: Clock) -> dict[str, Any]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    length = SEQUENCE[device.type]
    q = torch.randn(1, HEADS, length, HEAD_DIM, device=device, dtype=dtype)
    seconds = clock(lambda: scaled_dot_product_attention(q, q, q, is_causal=True))[0]
    flops = 2 * HEADS * length * length * HEAD_DIM  # of the causal half
    return {"dtype": str(dtype).removeprefix("torch."), "flops": flops, "seconds": seconds}


def _copy(device: torch.device, clock: Clock) -> dict[str, Any]:
    source = torch.ones(2**24, device=device)
    target = torch.empty_like(source)
    return {"bytes": 2 * source.nbytes, "seconds": clock(lambda: target.copy_(source))[0]}


def _kernel(device: torch.device, clock: Clock) -> float:
    """Seconds that a tiny operation costs, one of a hundred."""
    x = torch.zeros(1, device=device)

    def hundred() -> None:
        for _ in range(100):
            x.add_(1)

    return clock(hundred)[0] / 100


def _collectives(world: World, sizes: tuple[int, ...], clock: Clock) -> list[dict[str, Any]]:
    """What each collective of each group of neighbours adds to a product, all groups at once; of `bytes` as a whole.

    Ranks come to a collective when their product is done, as they do in training.
    """
    found = []
    for ranks in (n for n in range(2, world.size + 1) if world.size % n == 0):
        mesh = Mesh(Layout(tp=ranks, dp=world.size // ranks), world.device)
        for elements in sizes:
            whole = elements // ranks * ranks
            for name, run in _runs(mesh, whole).items():
                seconds = _added(run, mesh, clock)
                found.append({"operation": name, "ranks": ranks, "bytes": 4 * whole, "seconds": seconds})
    return found


def _added(run: Callable[[], object], mesh: Mesh, clock: Clock) -> float:
    """Seconds that a run adds to a product."""
    a, zero = torch.randn(BETWEEN, BETWEEN, device=mesh.device), torch.zeros(1, device=mesh.device)

    def repeated(*more: Callable[[], object]) -> None:
        for _ in range(TOGETHER):
            a @ a
            for one in more:
                one()

    def meet() -> None:
        all_reduce(zero, mesh.group("world"))

    product, _, both, _ = clock(repeated, meet, lambda: repeated(run), meet)
    return max(LEAST_RUN_S, (both - product) / TOGETHER)


def _runs(mesh: Mesh, elements: int) -> dict[str, Callable[[], object]]:
    group = mesh.group("tp")
    whole = torch.ones(elements, device=mesh.device)
    part = torch.ones(elements // group.size, device=mesh.device)
    runs: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: all_reduce(whole, group),
        "reduce_scatter": lambda: sum_to_shards(whole, group).wait(),
        "all_gather": lambda: gather_shards(whole, part, group).wait(),
    }
    return runs | ({"send": lambda: _to_and_fro(whole, group)} if group.size == 2 else {})


def _to_and_fro(x: torch.Tensor, group: Group) -> None:
    """Rank 0 sends to rank 1, which sends back."""
    if group.rank == 0:
        send(x, group, 1).wait()
        receive(x, group, 1).wait()
    else:
        receive(x, group, 0).wait()
        send(x, group, 0).wait()
