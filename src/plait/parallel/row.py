"""One buffer at work: its weights and its gradient as flat tensors, and the collectives that move them whole.

What is split: depends on the ZeRO stage (Rajbhandari et al. 2020, section 5): from 1 on the optimizer's master copy,
from 2 on the summed gradient, from 3 on the weights; a rank keeps its shard of each. Forward: under stage 3 an
all-gather of the weights. Backward: the same once more, and a reduce-scatter of the gradient (an all-reduce where
nothing is sharded). Replaces no submodule: parameters are views.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from plait.parallel import collectives as comm
from plait.parallel.collectives import Group, Transfer
from plait.parallel.precision import Dtypes
from plait.placement import Buffer, Piece


class Sharing(NamedTuple):
    """Over whom a buffer is shared: ranks with other shards (one communicator each way), ranks that repeat a shard."""

    gather: Group
    reduce: Group
    repeat: Group


class Row:
    """The states of one buffer on this rank.

    `full` (size,) and `own` (length,) are weights in the compute dtype, `own` a view of `full` below stage 3; `master`
    is the optimizer's copy of `own`, the same tensor where dtypes are the same. Gradients of single backwards are
    collected in a flat tensor (size,) until `reduce`.
    """

    def __init__(self, buffer: Buffer, sharing: Sharing, stage: int, dtypes: Dtypes, device: torch.device) -> None:
        self.buffer, self.sharing, self.dtypes = buffer, sharing, dtypes
        self.shard = sharing.reduce.rank if stage > 0 else None
        self.gathers, self.republishes = buffer.gathers(stage), buffer.republishes(stage)
        self.keeps_whole = buffer.keeps_whole(stage)
        low = sharing.reduce.rank * buffer.length
        self.full = torch.zeros(buffer.size, dtype=dtypes.compute, device=device)
        place = self.full[low : low + buffer.length]
        self.own = place.clone() if self.gathers else place
        self.master = self.own if dtypes.master == dtypes.compute else self.own.to(dtypes.master)
        self.parameters = [nn.Parameter(torch.empty(0, dtype=dtypes.compute, device=device)) for _ in buffer.members]
        self._gathering: Transfer | None = None
        self.is_whole = True
        self._prepare_gradients(device)
        self._let_go()

    def _prepare_gradients(self, device: torch.device) -> None:
        buffer, dtypes = self.buffer, self.dtypes
        alone = self.sharing.reduce.size == self.sharing.repeat.size == 1
        self._collected: Tensor | None = None
        if not alone or dtypes.compute != dtypes.accumulate:  # else gradients stay where autograd puts them
            dtype = dtypes.accumulate if self.keeps_whole else dtypes.reduce
            self._collected = torch.zeros(buffer.size, dtype=dtype, device=device)
        self._views: list[Tensor | None] = [None] * len(buffer.members)
        self._filled = [False] * len(buffer.members)
        self.waiting = 0
        self._reducing: Transfer | None = None
        self._sum: Tensor | None = None  # this rank's part of the gradient, summed

    def shape_parameters(self, shapes: list[tuple[int, ...]]) -> None:
        """Make the parameters views of `full`, in the shapes of this rank's rectangles."""
        _allocate(self.full)  # there are no views of what is freed
        for parameter, member, shape in zip(self.parameters, self.buffer.members, shapes, strict=True):
            # Set as data, so that its version does not move with the other views of the buffer.
            parameter.data = self.full[member.start : member.stop].view(shape)
        if self._collected is not None:
            _allocate(self._collected)
            self._views = [
                self._collected[member.start : member.stop].view(shape)
                for member, shape in zip(self.buffer.members, shapes, strict=True)
            ]
        self._let_go()

    def _let_go(self) -> None:
        """Free what is whole between steps only, before the next row is made: a rank never holds two such rows."""
        if self._collected is not None and not self.keeps_whole:
            self._collected.untyped_storage().resize_(0)
        if self.gathers:
            self.is_whole = False
            self.full.untyped_storage().resize_(0)

    # --- weights ---------------------------------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Begin to make the weights whole, if they are not."""
        if not self.is_whole:
            self.is_whole = True
            _allocate(self.full)
            self._gathering = comm.gather_shards(self.full, self.own, self.sharing.gather)

    def finish_gather(self) -> None:
        """Wait until the weights can be read."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def drop(self) -> None:
        """Free the gathered weights; whoever saved a view of them must gather again before reading it."""
        if self.gathers and self.is_whole:
            self.finish_gather()
            self.is_whole = False
            self.full.untyped_storage().resize_(0)

    def publish(self) -> Transfer:
        """Begin to make the optimizer's new weights everyone's."""
        if self.master is not self.own:
            self.own.copy_(self.master)
        return (
            comm.gather_shards(self.full, self.own, self.sharing.gather) if self.republishes else Transfer(self.own, [])
        )

    # --- gradients -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a step without any gradient."""
        self._filled = [False] * len(self._filled)
        self._sum = None
        if self._collected is None:  # nobody needs last step's: they are freed before the forward
            self._views = [None] * len(self._views)

    def add(self, index: int, gradient: Tensor) -> None:
        """Add to the gradient of the `index`-th member. The first of a step is copied, which spares zeroing."""
        self.settle()  # what is being summed may be what is collected into
        if self._collected is not None:
            _allocate(self._collected)
        view = self._views[index]
        if view is not None and self._filled[index]:
            view.add_(gradient)
        elif view is None or self._collected is None:
            self._views[index] = gradient
        else:
            view.copy_(gradient)
        self._filled[index] = True

    def reduce(self) -> None:
        """Begin to sum what was collected; a member that no token used has gradient zero, on every rank alike."""
        for index, filled in enumerate(self._filled):
            if not filled:
                self.add(index, torch.zeros_like(self.parameters[index]))
        if self._collected is None:
            return
        if self.buffer.padding:
            self._zero_padding(self._collected)
        flat = self._collected.to(self.dtypes.reduce)
        if self.shard is None:
            self._reducing = comm.sum_in_place(flat, self.sharing.repeat)
        else:
            self._reducing = comm.sum_to_shards(flat, self.sharing.reduce)
        if not self.keeps_whole:
            self._filled = [False] * len(self._filled)

    def _zero_padding(self, flat: Tensor) -> None:
        stop = 0
        for member in self.buffer.members:
            flat[stop : member.start].zero_()
            stop = member.stop
        flat[stop:].zero_()

    def settle(self) -> None:
        """Wait for the sum that was begun, and keep this rank's part of it."""
        if self._reducing is None:
            return
        part, self._reducing = self._reducing.wait(), None
        assert self._collected is not None
        if self.keeps_whole:
            low = (self.shard or 0) * self.buffer.length
            self._sum = self._collected[low : low + self.buffer.length]
            if not _same_storage(part, self._collected):
                self._sum.copy_(part)
            return
        if self._sum is not None:
            self._sum.add_(part)
        else:
            self._sum = part.to(self.dtypes.accumulate, copy=_same_storage(part, self._collected))
        if not any(self._filled):
            self._collected.untyped_storage().resize_(0)

    def start_repeat(self) -> Transfer | None:
        """Begin to sum over the ranks that hold the same shard, once a step."""
        self.settle()
        if self._sum is None or self.sharing.repeat.size == 1 or self.shard is None:
            return None
        return comm.sum_in_place(self._sum.to(self.dtypes.reduce), self.sharing.repeat)

    def finish_repeat(self, transfer: Transfer | None) -> None:
        """Keep the sum where the rank's own was."""
        if transfer is not None and self._sum is not None:
            self._sum.copy_(transfer.wait())

    def held(self) -> dict[str, list[Tensor]]:
        """The weights, gradients and master copy that stand in memory now; what was freed has no bytes."""
        weights = [self.full, self.own] if self.gathers else [self.full]
        gradients = [x for x in (self._collected, None if self.keeps_whole else self._sum) if x is not None]
        gradients += [] if self._collected is not None else [view for view in self._views if view is not None]
        master = [] if self.master is self.own else [self.master]
        return {"weights": weights, "gradients": gradients, "master": master}

    def come_and_go(self) -> list[Tensor]:
        """What is allocated and freed within a step: gathered weights, gradients on their way to be sharded."""
        collected = [] if self._collected is None or self.keeps_whole else [self._collected]
        return [self.full, *collected] if self.gathers else collected

    # --- by tensor -------------------------------------------------------------------------------------------------

    def gradients(self) -> list[tuple[Piece, Tensor]]:
        """What this rank keeps of each tensor's summed gradient, flat."""
        if self._collected is None:
            assert all(self._filled), "gradients were not reduced"
            views = [view.flatten() for view in self._views if view is not None]
            sizes = [member.sizes for member in self.buffer.members]
            parts = [part for view, each in zip(views, sizes, strict=True) for part in view.split(each)]
            return [(piece, part) for (piece, _), part in zip(self.buffer.pieces(self.shard), parts, strict=True)]
        assert self._sum is not None, "gradients were not reduced"
        return self._pieces(self._sum)

    def masters(self) -> list[tuple[Piece, Tensor]]:
        """This rank's part of each tensor as the optimizer sees it, flat views."""
        return self._pieces(self.master)

    def weights(self) -> list[tuple[Piece, Tensor]]:
        """The weights that forward reads, flat: whole rectangles below stage 3, this rank's shard there."""
        if self.gathers:
            return self._pieces(self.own)
        return [(piece, self.full[at : at + piece.stop - piece.start]) for piece, at in self.buffer.pieces(None)]

    def _pieces(self, flat: Tensor) -> list[tuple[Piece, Tensor]]:
        base = 0 if self.shard is None else self.shard * self.buffer.length
        return [
            (piece, flat[at - base : at - base + piece.stop - piece.start])
            for piece, at in self.buffer.pieces(self.shard)
        ]


def _allocate(flat: Tensor) -> None:
    """Give a freed tensor memory again; what it holds is then undefined."""
    storage = flat.untyped_storage()
    size = flat.numel() * flat.element_size()
    if storage.size() != size:
        storage.resize_(size)


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)
