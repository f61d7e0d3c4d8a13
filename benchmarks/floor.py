"""The floor: plait's step with every communication replaced by a copy in the rank's own memory.

What stays is the work: ranks, shards, micro-batches, schedule, the shapes of all tensors, the optimizer, and one copy
of each tensor that would have been moved. What goes is moving it between processes and waiting for collectives.

- A collective returns at once: an all-reduce is a copy, an all-gather is this rank's piece n times, an exchange is a
  copy of what would have been sent. Values are then wrong (nothing was summed), sizes and times are right.
- A pipeline message becomes one byte through a pipe and a local copy. The byte is kept because waiting is part of the
  work: a stage cannot start before its neighbour is done, so the bubble and every dependency of the schedule stay.
  A pipe made before the fork costs a few microseconds and nothing of torch.distributed.

Both sides are measured against the same floor, since it stands for the same work: whatever a side spends above it, on
communicating or on getting ready to, is that side's overhead. But plait's step without communication still contains
plait's own bookkeeping, so that floor may be too high, and a floor that is too high flatters whoever is ahead. So each
contest has a second floor that plait has no part in (peers.py): a plain loop on the rank's own rows for dp, a plain
model of the shards' sizes for tp, the peer's own pipeline with its messages replaced as above for pp. The lower counts.

It replaces names of `plait.parallel.collectives` for the length of a step, here only; the library has no such switch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.plait_side import Plait
from benchmarks.work import Size
from plait.parallel import collectives as comm
from plait.parallel.collectives import Group, Transfer
from plait.parallel.launch import World
from plait.spec.run import RunSpec


class Pipes:
    """One pipe for each ordered pair of ranks, made before they are forked."""

    def __init__(self, ranks: int) -> None:
        pairs = [(source, target) for source in range(ranks) for target in range(ranks) if source != target]
        self._ends = {pair: os.pipe() for pair in pairs}

    def signal(self, source: int, target: int) -> None:
        """One byte, at once."""
        os.write(self._ends[source, target][1], b"!")

    def wait(self, source: int, target: int) -> None:
        """Until the next byte is there."""
        os.read(self._ends[source, target][0], 1)

    def arrival(self, into: Tensor, stand_in: Tensor, source: int, target: int) -> Arrival:
        """A receive that is posted."""
        return Arrival(into, stand_in, lambda: self.wait(source, target))

    def close(self) -> None:
        for ends in self._ends.values():
            for end in ends:
                os.close(end)


class LocalOperators:
    """What stands in for torch's functional collectives: copies that cost what an output costs, and no more."""

    @staticmethod
    def all_reduce(x: Tensor, op: str, handle: str) -> Tensor:
        return x.clone()

    @staticmethod
    def all_gather_into_tensor(x: Tensor, n: int, handle: str) -> Tensor:
        return x.repeat(n, *[1] * (x.ndim - 1))

    @staticmethod
    def all_gather_into_tensor_out(x: Tensor, n: int, handle: str, out: Tensor) -> Tensor:
        out.view(n, *x.shape).copy_(x)
        return out

    @staticmethod
    def reduce_scatter_tensor(x: Tensor, op: str, n: int, handle: str) -> Tensor:
        return x[: x.shape[0] // n].clone()

    @staticmethod
    def all_to_all_single(x: Tensor, received: list[int], sent: list[int], handle: str) -> Tensor:
        return x.clone()

    @staticmethod
    def wait_tensor(x: Tensor) -> Tensor:
        return x


class Arrival:
    """A posted receive: its wait ends with the sender's byte, then copies something of the message's size."""

    def __init__(self, into: Tensor, stand_in: Tensor, await_byte: Callable[[], None]) -> None:
        self._into, self._stand_in, self._await_byte = into, stand_in, await_byte

    def wait(self) -> None:
        self._await_byte()
        self._into.detach().copy_(self._stand_in)


class Local:
    """Point to point and in-place sums without communication."""

    def __init__(self, pipes: Pipes) -> None:
        self.pipes = pipes
        self._kept: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def sum_in_place(self, x: Tensor, group: Group) -> Transfer:
        if group.size > 1:
            self._like(x).copy_(x)
        return Transfer(x, [])

    def send(self, x: Tensor, group: Group, to: int) -> Transfer:
        self.pipes.signal(group.ranks[group.rank], group.ranks[to])
        return Transfer(x, [])

    def receive(self, into: Tensor, group: Group, source: int) -> Transfer:
        sender, here = group.ranks[source], group.ranks[group.rank]
        return Transfer(into, [self.pipes.arrival(into, self._like(into), sender, here)])

    def exchange(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], group: Group) -> list[Any]:
        for peer, x in received.items():
            x.copy_(sent[peer])
        return []

    def _like(self, x: Tensor) -> Tensor:
        # Of ordinary size, neither zeros nor denormals, and made once.
        return self._kept.setdefault((x.shape, x.dtype), torch.full_like(x, 1e-3))

    @contextmanager
    def instead(self) -> Iterator[None]:
        """Communication is replaced while entered."""
        stand_ins: dict[str, Any] = {name: getattr(self, name) for name in ("sum_in_place", "send", "receive")}
        stand_ins["_exchange"] = self.exchange
        with mock.patch.multiple(comm, _op=LocalOperators, **stand_ins):
            yield


class Floor(Plait):
    """plait's side without communication. It has no gradients to compare."""

    def __init__(self, size: Size, run: RunSpec, world: World, pipes: Pipes) -> None:
        super().__init__(size, run, world)
        self.local = Local(pipes)

    def backward(self) -> None:
        with self.local.instead():
            super().backward()
        assert self.sums is not None
        # A stage without the head has seen no label, and nobody told it; it updates all the same.
        self.sums = self.sums._replace(labels=1)


def floor(**asked: object) -> Callable[[Size, World, Pipes], Floor]:
    """The floor of a layout and schedule, as a row of the table of contests."""
    return lambda size, world, pipes: Floor(size, size.run(**asked), world, pipes)  # type: ignore[arg-type]
