"""The only maker of process groups: a layout's groups, each made when it is first asked for, in one order on all ranks.

It decides nothing: which ranks form a group is the layout's arithmetic.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from plait.parallel.collectives import Group
from plait.spec.errors import UsageError
from plait.spec.layout import AXIS_OF, Coordinates, Layout

TIMEOUT = timedelta(minutes=10)
BESIDE = "beside"  # the purpose of groups for a thread beside training
PATIENT = timedelta(days=1)  # beside training ranks wait for the slowest disk; who is gone is told by its connection


class Mesh:
    """This process's place in a layout. Asking for a group is collective: all ranks ask for the same, in one order.

    `backend` is told only where the one that is there stands for another (a count without a network).
    """

    def __init__(self, layout: Layout, device: torch.device | str = "cpu", backend: str | None = None) -> None:
        joined = dist.is_initialized()
        world, self.rank = (dist.get_world_size(), dist.get_rank()) if joined else (1, 0)
        if world != layout.world:
            raise UsageError(f"a layout of {layout.world} ranks in a world of {world}", f"start {layout.world} ranks")
        self.layout = layout
        self.device = torch.device(device)
        moves = dict(pair.split(":") for pair in dist.get_backend_config().split(",")) if joined else {}
        self._backend = backend or moves.get(self.device.type, "gloo")  # what moves the tensors of this device
        self._groups: dict[str, Group] = {}
        self.group("world")

    @property
    def at(self) -> Coordinates:
        return self.layout.coordinates(self.rank)

    def group(self, name: str, purpose: str = "") -> Group:
        """The group of that name around this rank; one communicator for each `purpose`."""
        key = f"{name}:{purpose}" if purpose else name
        if key not in self._groups:
            self._groups[key] = self._make(name, key)
        return self._groups[key]

    def group_beside(self, name: str) -> Group:
        """The same for a thread beside training: with tensors on the CPU, whatever the device, and a communicator that
        is nobody else's."""
        return replace(self.group(name, BESIDE), device="cpu", backend="gloo")

    def axes(self) -> dict[str, str]:
        """torch's name of each group made so far -> the axis under which its traffic is reported."""
        made = [g for g in self._groups.values() if g.process_group is not None]
        return {g.handle: AXIS_OF[g.name] for g in made}

    def _make(self, name: str, key: str) -> Group:
        ranks = self.layout.group(name, self.rank)
        # A rank that stands between first and last stage shares no tied tensor: it makes a group of its own, so that
        # all ranks have made equally many groups (torch derives the group's name from that number).
        ranks = ranks if self.rank in ranks else (self.rank,)
        made = self._process_group(name, ranks, key)
        return Group(
            name, ranks, ranks.index(self.rank), made if len(ranks) > 1 else None, self.device.type, self._backend
        )

    def _process_group(self, name: str, ranks: tuple[int, ...], key: str) -> Any:
        if self.layout.size(name) == 1:
            return None
        if key == "world":
            return dist.group.WORLD
        timeout = PATIENT if key == f"{name}:{BESIDE}" else TIMEOUT
        return dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True, group_desc=key)
