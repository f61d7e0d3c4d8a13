"""Calls and bytes of one step, counted where torch dispatches them: eager, compiled and fake runs count alike.

Bytes are those sent under ring (all-reduce, all-gather, reduce-scatter) or pairwise (all-to-all) algorithms, point to
point at the sender. It holds no formula of any strategy: those stand in the tests that compare.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plait.parallel.collectives import Group, gather_bytes

Traffic = dict[str, dict[str, dict[str, int]]]  # axis -> operation -> {"calls", "bytes"}


def _size(x: Any) -> int:
    return x.numel() * x.element_size() if isinstance(x, Tensor) else sum(_size(item) for item in x)


def _leaving(args: tuple[Any, ...]) -> float:
    """Bytes of an all-to-all (tensor, rows that come, rows that go, group) that go to other ranks."""
    x, _, rows, handle = args
    own = rows[dist.distributed_c10d._resolve_process_group(handle).rank()]  # type: ignore[attr-defined]
    return _size(x) * (sum(rows) - own) / sum(rows) if sum(rows) else 0.0


# Operator -> (torch's name of the operation, bytes that one rank of n sends). Positions are those of the schemas.
OPERATORS: Mapping[str, tuple[str, Callable[[tuple[Any, ...], int], float]]] = {
    "_c10d_functional::all_reduce": ("all_reduce", lambda a, n: 2 * _size(a[0]) * (n - 1) / n),
    "_c10d_functional::all_gather_into_tensor": ("all_gather_into_tensor", lambda a, n: _size(a[0]) * (n - 1)),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter_tensor", lambda a, n: _size(a[0]) * (n - 1) / n),
    "_c10d_functional::all_to_all_single": ("all_to_all_single", lambda a, n: _leaving(a)),
    "_c10d_functional::wait_tensor": ("", lambda a, n: 0),
    "c10d::allreduce_": ("all_reduce", lambda a, n: 2 * _size(a[0]) * (n - 1) / n),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather_into_tensor", lambda a, n: _size(a[0]) * (n - 1)),
    "c10d::send": ("send", lambda a, n: _size(a[0])),
    "c10d::recv_": ("recv", lambda a, n: 0),
}


class TrafficCounter(TorchDispatchMode):
    """Counts the communication of one rank while it is entered. `axes` maps torch's group names to axes."""

    def __init__(self, axes: Mapping[str, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.axes = axes
        self._calls: dict[tuple[str, str], int] = defaultdict(int)
        self._bytes: dict[tuple[str, str], float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        if name in OPERATORS:
            self._count(name, args)
        else:
            assert not name.startswith(("c10d::", "_c10d_functional")), f"{name} has no row in the traffic table"
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        operation, sent = OPERATORS[name]
        if not operation:
            return
        handle, n = _group_of(args)
        key = self.axes[handle], operation
        self._calls[key] += 1
        self._bytes[key] += sent(args, n)

    def rows(self) -> list[tuple[str, str, int, float]]:
        """(axis, operation, calls, bytes sent) of this rank."""
        return [(*key, calls, self._bytes[key]) for key, calls in self._calls.items()]


def _group_of(args: tuple[Any, ...]) -> tuple[str, int]:
    for arg in args:
        if isinstance(arg, str) and arg not in ("sum", "max"):
            group = dist.distributed_c10d._resolve_process_group(arg)  # type: ignore[attr-defined, arg-type]
            return arg, group.size()
        if not isinstance(arg, Tensor | list | int | str):
            group = dist.ProcessGroup.unbox(arg)
            return group.group_name, group.size()
    raise AssertionError("a communication without a group")


def total(counter: TrafficCounter, world: Group) -> Traffic:
    """The sum over all ranks, on every rank. Calls of a collective count once per rank that took part."""
    counted = [json.loads(content) for content in gather_bytes(json.dumps(counter.rows()).encode(), world)]
    summed: dict[tuple[str, str], list[float]] = {}
    for axis, operation, calls, sent in (row for rows in counted for row in rows):
        before = summed.get((axis, operation), [0, 0])
        summed[axis, operation] = [before[0] + calls, before[1] + sent]
    traffic: Traffic = {}
    for (axis, operation), (calls, sent) in sorted(summed.items()):
        traffic.setdefault(axis, {})[operation] = {"calls": round(calls), "bytes": round(sent)}
    return traffic
