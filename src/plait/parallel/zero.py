"""The model states of a rank: every weight and gradient, in buffers that are sharded as the ZeRO stage says.

| what is split   | forward                       | backward                         | replaces                      |
|-----------------|-------------------------------|----------------------------------|-------------------------------|
| 0: nothing      | nothing                       | all-reduce of each buffer        | nothing                       |
| 1: optimizer    | (all-gather after the update) | reduce-scatter, once a step      | nothing                       |
| 2: + gradients  | (all-gather after the update) | reduce-scatter, each micro-batch | nothing                       |
| 3: + weights    | all-gather of a block, one    | the same, and reduce-scatter of  | embedding, each block, head   |
|                 | block ahead, freed behind     | each micro-batch                 | (by `Gathered`)               |

Source: Rajbhandari et al. 2020; hybrid sharding as in Zhao et al. 2023, section 3.2.2. Reductions are sums and overlap
with backward. What is partial over tp, copies or tied stages too is summed after that, shard by shard, a call a group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from plait.models.decoder import PassThrough
from plait.parallel import collectives as comm
from plait.parallel.collectives import Group
from plait.parallel.mesh import Mesh
from plait.parallel.precision import Dtypes
from plait.parallel.row import Row, Sharing
from plait.parallel.tracker import storage_bytes
from plait.placement import Piece, buffers
from plait.placement.buffer import SHARDING
from plait.placement.place import Placements
from plait.spec.run import ZeroSpec

SECOND_GROUPS = ("copies", "tp", "tied")  # summed after the domain, in this order on every rank
REDUCTIONS_IN_FLIGHT = 1  # buffers under reduction while backward fills the next one, where shards are summed apart
Parts = list[tuple[Piece, Tensor]]


class States:
    """All rows of this rank. The executor tells it when a stage's gradients are complete and its weights not needed.

    Weights are zero until they are materialised. `unit` is what a shard's border may not cut.
    """

    def __init__(
        self, placements: Placements, mesh: Mesh, zero: ZeroSpec, dtypes: Dtypes, unit: str = "element"
    ) -> None:
        self.keep = zero.keep
        # Every rank makes every group, whatever its own stage holds: groups are made in one order everywhere.
        sharing = {
            domain: _sharing(mesh, *SHARDING[domain, zero.stage > 0])
            for domain in dict.fromkeys(placement.domain for placement in placements.values())
        }
        asked = {name for placement in placements.values() for name in placement.partial}
        self.second = {name: mesh.group(name) for name in SECOND_GROUPS if name in asked}
        self.rows = [
            Row(buffer, sharing[buffer.domain], zero.stage, dtypes, mesh.device)
            for buffer in buffers(placements, mesh.rank, unit)
        ]
        self._places: dict[nn.Parameter, tuple[Row, int]] = {}
        self._of_stage: dict[int, list[Row]] = {}
        self._flushed: dict[int, int] = {}  # rows that several stages complete -> how many have
        self._next: dict[int, int] = {}  # armed stage -> its next row to reduce
        self._in_flight: deque[Row] = deque()
        for row in self.rows:
            for stage in row.buffer.stages:
                self._of_stage.setdefault(stage, []).append(row)
            for index, parameter in enumerate(row.parameters):
                self._places[parameter] = row, index
                parameter.register_post_accumulate_grad_hook(partial(self._accumulated, row, index))

    # --- weights ---------------------------------------------------------------------------------------------------

    def reading(self, stage: int, unit: str) -> list[Row]:
        """The rows of a stage that a part of it reads, if they have to be gathered."""
        return [row for row in self._of_stage.get(stage, ()) if unit in row.buffer.units and row.gathers]

    def drop(self, stage: int) -> None:
        """The stage's gathered weights are not needed for now."""
        for row in self._of_stage[stage]:
            row.drop()

    def publish(self) -> None:
        """Make the optimizer's new weights everyone's."""
        for transfer in [row.publish() for row in self.rows]:
            transfer.wait()

    # --- gradients -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a step: no parameter has a gradient, and nothing is reduced before `arm`."""
        self._next.clear()
        self._flushed = {id(row): 0 for row in self.rows}
        for row in self.rows:
            row.begin()

    def add(self, row: Row, index: int, gradient: Tensor) -> None:
        """Add to a parameter's gradient; once a row of an armed stage is complete, it is reduced."""
        row.add(index, gradient)
        if row.buffer.stages[0] in self._next:
            row.waiting -= 1
            self._reduce_complete(row.buffer.stages[0])

    def deliver(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add to a parameter's gradient what autograd has not put there."""
        self.add(*self._places[parameter], gradient)

    def arm(self, stage: int) -> None:
        """The next backward of this stage completes its gradients: from now on, complete rows are reduced."""
        self._next[stage] = 0
        for row in self._of_stage[stage]:
            row.waiting = len(row.parameters)

    def flush(self, stage: int) -> None:
        """Reduce what is left: some parameters were used by no token."""
        for row in self._of_stage[stage]:
            row.waiting = 0
            self._flushed[id(row)] += 1
        if stage not in self._next:
            self._next[stage] = 0
        self._reduce_complete(stage, flushing=True)
        del self._next[stage]

    def finish(self) -> None:
        """Wait for all sums, then sum over the ranks that repeat a shard, and what is partial over other groups."""
        repeats = [(row, row.start_repeat()) for row in self.rows]
        for row, transfer in repeats:
            row.finish_repeat(transfer)
        self._in_flight.clear()
        for name, group in self.second.items():
            _sum_together([part for piece, part in self.gradients() if name in piece.placement.partial], group)

    def gradients(self) -> Parts:
        """What this rank keeps of each tensor's gradient, flat: whole rectangles under stage 0, else its shard."""
        return [part for row in self.rows for part in row.gradients()]

    def masters(self) -> Parts:
        """What this rank's optimizer updates, in the order of `gradients`."""
        return [part for row in self.rows for part in row.masters()]

    def weights(self) -> Parts:
        """What forward reads, flat: whole rectangles, under stage 3 this rank's shard."""
        return [part for row in self.rows for part in row.weights()]

    def held(self) -> dict[str, list[Tensor]]:
        """The weights, gradients and master copy that stand in memory now."""
        rows = [row.held() for row in self.rows]
        return {kind: [x for row in rows for x in row[kind]] for kind in ("weights", "gradients", "master")}

    def bytes_held(self) -> dict[str, int]:
        """Their bytes, each storage once."""
        return {kind: storage_bytes(tensors) for kind, tensors in self.held().items()}

    def come_and_go(self) -> list[Tensor]:
        """What is allocated and freed within a step."""
        return [x for row in self.rows for x in row.come_and_go()]

    def _accumulated(self, row: Row, index: int, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:  # a linear may have left it for later
            self.add(row, index, gradient)

    def _reduce_complete(self, stage: int, flushing: bool = False) -> None:
        # In one order on all ranks, whichever row is complete first here.
        rows = self._of_stage[stage]
        while self._next[stage] < len(rows):
            row = rows[self._next[stage]]
            several = len(row.buffer.stages) > 1
            if row.waiting > 0 or (several and not flushing):
                return
            self._next[stage] += 1
            if not several or not row.keeps_whole or self._flushed[id(row)] == len(row.buffer.stages):
                self._reduce(row)

    def _reduce(self, row: Row) -> None:
        while len(self._in_flight) >= REDUCTIONS_IN_FLIGHT:
            self._in_flight.popleft().settle()
        row.reduce()
        if row.shard is not None:
            self._in_flight.append(row)


def _sharing(mesh: Mesh, shard: str, repeat: str) -> Sharing:
    return Sharing(mesh.group(shard, "weights"), mesh.group(shard), mesh.group(repeat))


def _sum_together(views: list[Tensor], group: Group) -> None:
    """Sum small tensors over a group in one call."""
    if group.size == 1 or not views:
        return
    flat = torch.cat(views)
    summed = comm.sum_in_place(flat, group).wait().split([view.numel() for view in views])
    torch._foreach_copy_(views, summed)


def local_norm_squared(gradients: Parts) -> Tensor:
    """This rank's share of the squared gradient norm: Σ local² / copies. Shares of the world add up to one device's."""
    by_copies: dict[int, list[Tensor]] = {}
    for piece, view in gradients:
        by_copies.setdefault(piece.copies, []).append(view)
    shares = [_norm_squared(views) / copies for copies, views in by_copies.items()]
    return torch.stack(shares).sum() if shares else torch.zeros((), dtype=torch.float64)


def _norm_squared(views: list[Tensor]) -> Tensor:
    wide = torch.promote_types(views[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(views, 2, dtype=wide)).double().square().sum()


# --- stage 3 -------------------------------------------------------------------------------------------------------


class Unit:
    """A part of a stage whose weights are gathered together. `before` and `after` are its neighbours."""

    def __init__(self, rows: list[Row], keep: bool) -> None:
        self.rows = rows
        # A tied table stays until the schedule drops it: its second reader would only gather it again.
        self.freed_behind = [] if keep else [row for row in rows if len(row.buffer.units) == 1]
        self.before: Unit | None = None
        self.after: Unit | None = None

    def enter(self, ahead: Unit | None) -> None:
        """Wait for the weights, and begin to gather those of the unit that will be next."""
        for row in self.rows:
            row.start_gather()
        for row in self.rows:
            row.finish_gather()
        for row in ahead.rows if ahead is not None else ():
            row.start_gather()

    def leave(self) -> None:
        """Free the weights."""
        for row in self.freed_behind:
            row.drop()


class _Behind(torch.autograd.Function):
    """On a unit's input: when its gradient is there, the unit's backward is done."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: Unit) -> Tensor:
        ctx.unit = unit
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.unit.leave()
        return grad, None


class _Ahead(torch.autograd.Function):
    """On all that leaves a unit: before its backward begins, its weights are gathered."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.unit = unit
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.unit.enter(ctx.unit.before)
        return None, *grads


class Gathered(nn.Module):
    """A part of the decoder whose weights are there only while it works."""

    def __init__(self, inner: nn.Module, unit: Unit) -> None:
        super().__init__()
        self.inner, self.unit = inner, unit

    def forward(self, x: Tensor, *rest: Any) -> Any:
        self.unit.enter(self.unit.after)
        x = _Behind.apply(x, self.unit) if x.requires_grad else x  # type: ignore[no-untyped-call]
        out = self.inner(x, *rest)
        self.unit.leave()
        y, terms = out if isinstance(out, tuple) else (out, {})
        names = [name for name, value in terms.items() if value.requires_grad]
        if y.requires_grad:
            y, *values = _Ahead.apply(self.unit, y, *(terms[name] for name in names))  # type: ignore[no-untyped-call]
            terms = terms | dict(zip(names, values, strict=True))
        return (y, terms) if isinstance(out, tuple) else y


def gather_by_unit(stages: Mapping[int, nn.Module], states: States) -> None:
    """Wrap each part of each stage that reads weights which have to be gathered."""
    for index, stage in stages.items():
        blocks = [f"blocks.{name}" for name, _ in stage.get_submodule("blocks").named_children()]
        # An end that another stage has reads nothing here, even where its table is tied to one that is here.
        parts = [p for p in ("embedding", *blocks, "head") if not isinstance(stage.get_submodule(p), PassThrough)]
        reading = {path: states.reading(index, path) for path in parts}
        units = {path: Unit(rows, states.keep) for path, rows in reading.items() if rows}
        for before, after in pairwise(units.values()):
            before.after, after.before = after, before
        for path, unit in units.items():
            parent, _, name = path.rpartition(".")
            setattr(stage.get_submodule(parent), name, Gathered(stage.get_submodule(path), unit))
