"""What one rank's device and links do, timed: products of several shapes, attention, copies, and each collective.

Nothing is split here and no module is replaced. Seconds of the fastest of several repetitions, in plain values: what
they mean for a plan is worked out in `planner/measured.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from plait.parallel.collectives import all_reduce, gather_bytes, gather_shards, receive, send, sum_to_shards
from plait.parallel.mesh import Mesh
from plait.parallel.world import World
from plait.spec.layout import Layout

SHAPES = {
    "cpu": ((256, 256, 256), (512, 1024, 512), (1024, 1024, 1024)),
    "cuda": ((4096, 4096, 4096), (8192, 8192, 8192)),
}
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float32, torch.bfloat16, torch.float16)}
SIZES = (2**12, 2**16, 2**20, 2**23)  # elements of a float32 message
QUICK_SIZES = (2**12, 2**20)
REPEATS, QUICK_REPEATS = 10, 3
HEADS, HEAD_DIM, SEQUENCE = 8, 64, {"cpu": 512, "cuda": 4096}


def probe(world: World, quick: bool) -> list[dict[str, Any]] | None:
    """The findings of every rank, on rank 0; None on the others."""
    mesh = Mesh(Layout(dp=world.size), world.device)
    repeats = QUICK_REPEATS if quick else REPEATS
    kind = world.device.type
    found: dict[str, Any] = {
        "rank": world.rank,
        "kind": kind,
        "name": torch.cuda.get_device_name(world.device) if kind == "cuda" else "cpu",
        "memory": _memory(world.device),
        "ranks": world.size,
        "local": world.local_size or world.size,
        "products": _products(world.device, repeats),
        "attention": _attention(world.device, repeats),
        "copy": _copy(world.device, repeats),
        "kernel": _kernel(world.device),
        "collectives": _collectives(mesh, QUICK_SIZES if quick else SIZES, repeats),
    }
    table = gather_bytes(json.dumps(found).encode(), mesh.group("world"))
    return [json.loads(one) for one in table] if world.rank == 0 else None


def _seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The fastest of `repeats` runs, after one that is not counted."""
    taken = []
    for _ in range(repeats + 1):
        _settle(device)
        begun = time.perf_counter()
        run()
        _settle(device)
        taken.append(time.perf_counter() - begun)
    return min(taken[1:])


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


def _products(device: torch.device, repeats: int) -> list[dict[str, Any]]:
    found = []
    for dtype in DTYPES[device.type]:
        for rows, inner, columns in SHAPES[device.type]:
            a = torch.randn(rows, inner, device=device).to(dtype)
            b = torch.randn(inner, columns, device=device).to(dtype)
            seconds = _seconds(lambda a=a, b=b: a @ b, device, repeats)  # type: ignore[misc]
            name = str(dtype).removeprefix("torch.")
            found.append({"dtype": name, "shape": [rows, inner, columns], "seconds": seconds})
    return found


def _attention(device: torch.device, repeats: int) -> dict[str, Any]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    length = SEQUENCE[device.type]
    q = torch.randn(1, HEADS, length, HEAD_DIM, device=device, dtype=dtype)
    seconds = _seconds(lambda: scaled_dot_product_attention(q, q, q, is_causal=True), device, repeats)
    flops = 2 * HEADS * length * length * HEAD_DIM  # of the causal half
    return {"dtype": str(dtype).removeprefix("torch."), "flops": flops, "seconds": seconds}


def _copy(device: torch.device, repeats: int) -> dict[str, Any]:
    source = torch.ones(2**24, device=device)
    target = torch.empty_like(source)
    return {"bytes": 2 * source.nbytes, "seconds": _seconds(lambda: target.copy_(source), device, repeats)}


def _kernel(device: torch.device) -> float:
    """Seconds that a tiny operation costs, one of a hundred."""
    x = torch.zeros(1, device=device)

    def hundred() -> None:
        for _ in range(100):
            x.add_(1)

    return _seconds(hundred, device, QUICK_REPEATS) / 100


def _collectives(mesh: Mesh, sizes: tuple[int, ...], repeats: int) -> list[dict[str, Any]]:
    group = mesh.group("world")
    if group.size == 1:
        return []
    found = []
    for elements in sizes:
        whole = torch.ones(elements // group.size * group.size, device=mesh.device)
        part = torch.ones(elements // group.size, device=mesh.device)
        runs: dict[str, Callable[[], object]] = {
            "all_reduce": lambda x=whole: all_reduce(x, group),  # type: ignore[misc]
            "reduce_scatter": lambda x=whole: sum_to_shards(x, group).wait(),  # type: ignore[misc]
            "all_gather": lambda x=whole, p=part: gather_shards(x, p, group).wait(),  # type: ignore[misc]
            "send": lambda x=whole: _to_and_fro(x, mesh),  # type: ignore[misc]
        }
        for name, run in runs.items():
            seconds = _seconds(run, mesh.device, repeats)
            found.append({"operation": name, "bytes": whole.nbytes, "seconds": seconds})
    return found


def _to_and_fro(x: torch.Tensor, mesh: Mesh) -> None:
    """Rank 0 sends to rank 1, which sends back; the others wait in the next collective."""
    group = mesh.group("world")
    if group.rank == 0:
        send(x, group, 1).wait()
        receive(x, group, 1).wait()
    elif group.rank == 1:
        receive(x, group, 0).wait()
        send(x, group, 0).wait()
