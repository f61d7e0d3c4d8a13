"""Gradients as flat buffers, and their sums over every group over which they are partial.

What is split: the batch (data and context ranks see other tokens), and whatever the placement records call partial.
Forward: nothing. Backward: each bucket is summed over dp·cp as soon as the last micro-batch has completed it, while
backward goes on; what is partial over tp, copies or tied stages too is summed after that, one call per group.
Replaces no submodule: after backward, parameters' `.grad` are views of the buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from plait.parallel import collectives as comm
from plait.parallel.collectives import Group, Transfer
from plait.parallel.mesh import Mesh
from plait.parallel.weights import Held
from plait.placement import Placement
from plait.placement.place import Placements

BUCKET_ELEMENTS = 2**20  # a bucket closes once it holds this many: large enough to hide the latency of a call
SECOND_GROUPS = ("copies", "tp", "tied")  # summed after dp·cp, in this order on every rank


@dataclass
class Bucket:
    """Some parameters of a stage whose gradients are one flat tensor, in the order in which backward completes them.

    `views[i]` is the part of `parameters[i]`, in its shape.
    """

    parameters: list[nn.Parameter]
    flat: Tensor
    views: list[Tensor]
    waiting: int = 0
    transfer: Transfer | None = None


class Gradients:
    """The gradients of all stages of this rank."""

    def __init__(self, held: list[Held], placements: Placements, mesh: Mesh) -> None:
        self.held = held
        self.group = mesh.group("dp_cp")
        asked = {name for placement in placements.values() for name in placement.partial}
        self.second = {name: mesh.group(name) for name in SECOND_GROUPS if name in asked}
        sent = held if self.group.size > 1 else []  # what nobody else adds to stays where autograd puts it
        self.buckets = {stage: _buckets(sent, stage) for stage in sorted({h.stage for h in held})}
        self._next: dict[int, int] = {}  # armed stage -> its next bucket to send
        for stage, buckets in self.buckets.items():
            for bucket in buckets:
                for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                    parameter.register_post_accumulate_grad_hook(partial(self._accumulated, stage, bucket, view))

    def zero(self) -> None:
        """Start a step: no parameter has a gradient, and nothing is sent before `arm`."""
        self._next.clear()
        for h in self.held:
            h.parameter.grad = None

    def arm(self, stage: int) -> None:
        """The next backward of this stage is its last: from now on, complete buckets are sent."""
        self._next[stage] = 0
        for bucket in self.buckets[stage]:
            bucket.waiting = len(bucket.parameters)

    def flush(self, stage: int) -> None:
        """Send what is left: a parameter that no micro-batch used has gradient zero, on every rank alike."""
        for bucket in self.buckets[stage]:
            bucket.waiting = 0
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is None:
                    parameter.grad = view.zero_()
        for h in self.held:
            if h.stage == stage and h.parameter.grad is None:
                h.parameter.grad = torch.zeros_like(h.parameter)
        self._send_complete(stage)

    def finish(self) -> None:
        """Wait for dp·cp, then sum what is partial over other groups."""
        for bucket in self._all():
            assert bucket.transfer is not None, "a stage was not flushed"
            bucket.transfer.wait()
            bucket.transfer = None
        for name, group in self.second.items():
            _sum_together([view for p, view in self.views() if name in p.partial], group)

    def scale(self, factor: float) -> None:
        """Multiply every gradient (clipping)."""
        torch._foreach_mul_([h.gradient for h in self.held], factor)

    def views(self) -> list[tuple[Placement, Tensor]]:
        """Each tensor's placement with this rank's gradient of it, in listing order."""
        return [part for h in self.held for part in h.parts(h.gradient)]

    def _all(self) -> Iterator[Bucket]:
        for buckets in self.buckets.values():
            yield from buckets

    def _accumulated(self, stage: int, bucket: Bucket, view: Tensor, parameter: nn.Parameter) -> None:
        # The first gradient of a step is a tensor of autograd's own: one copy, where zeroing and adding are two passes.
        # The following ones are added in place.
        if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
            parameter.grad = view.copy_(parameter.grad)
        if stage in self._next:
            bucket.waiting -= 1
            self._send_complete(stage)

    def _send_complete(self, stage: int) -> None:
        # In one order on all ranks, whichever bucket is complete first here.
        buckets = self.buckets[stage]
        while self._next[stage] < len(buckets) and buckets[self._next[stage]].waiting == 0:
            bucket = buckets[self._next[stage]]
            bucket.transfer = comm.sum_in_place(bucket.flat, self.group)
            self._next[stage] += 1


def _buckets(held: list[Held], stage: int) -> list[Bucket]:
    """The stage's parameters from last to first, in groups of about BUCKET_ELEMENTS.

    What tp ranks hold alike is summed apart from what they cut: the order in which a ring adds up an element depends
    on the size of the whole, shards may be of different sizes, and copies must stay equal to the last bit.
    """
    cut: list[list[nn.Parameter]] = [[]]
    alike: list[list[nn.Parameter]] = [[]]
    for h in reversed([h for h in held if h.stage == stage]):
        first = h.placements[0]
        groups = alike if first.dim is None and first.layout.tp > 1 else cut
        if sum(p.numel() for p in groups[-1]) >= BUCKET_ELEMENTS:
            groups.append([])
        groups[-1].append(h.parameter)
    return [_bucket(parameters) for parameters in (*cut, *alike) if parameters]


def _bucket(parameters: list[nn.Parameter]) -> Bucket:
    first = parameters[0]
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
    parts = flat.split([p.numel() for p in parameters])
    return Bucket(parameters, flat, [part.view_as(p) for p, part in zip(parameters, parts, strict=True)])


def _sum_together(views: list[Tensor], group: Group) -> None:
    """Sum small tensors over a group in one call."""
    if group.size == 1 or not views:
        return
    flat = torch.cat([view.flatten() for view in views])
    summed = comm.sum_in_place(flat, group).wait().split([view.numel() for view in views])
    torch._foreach_copy_(views, [part.view_as(view) for part, view in zip(summed, views, strict=True)])


def local_norm_squared(gradients: Gradients) -> Tensor:
    """This rank's share of the squared gradient norm: Σ local² / copies. Shares of the world add up to one device's."""
    by_copies: dict[int, list[Tensor]] = {}
    for placement, view in gradients.views():
        by_copies.setdefault(placement.copies, []).append(view)
    shares = [nn.utils.get_total_norm(views).double().square() / copies for copies, views in by_copies.items()]
    return torch.stack(shares).sum()
