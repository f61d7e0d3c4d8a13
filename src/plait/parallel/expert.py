"""Expert parallelism (Lepikhin et al. 2020): tokens travel to the ranks that hold their experts, and back.

| what is split          | forward                           | backward                         | replaces      |
|------------------------|-----------------------------------|----------------------------------|---------------|
| tokens over tp, where  | all-gather of outputs             | all-gather of input gradients    | mlp           |
| they are whole         |                                   |                                  |               |
| experts over ep        | all-to-all of tokens and of their | the same the other way           |               |
|                        | outputs, sizes as routed          |                                  |               |
| an expert over etp     | all-gather of tokens, sum of      | the same the other way           |               |
|                        | outputs at the rank they belong to|                                  |               |
| sequences over cp, tp  | all-reduce of statistics          | none                             | router.parts  |

edp x ep x etp are the ranks of a stage. Every rank routes tokens of its own, so that none travels twice and the
router's gradient is partial over tp too. Tokens are sorted by expert once; what arrives stays in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from plait.models.layers import Terms
from plait.models.moe import MoE, Parts, Tokens, combine, sort_by_expert, to_experts
from plait.models.where import Where
from plait.parallel import collectives as comm
from plait.parallel.collectives import Group
from plait.parallel.mesh import Mesh
from plait.placement.cuts import piece
from plait.spec.run import RunSpec


@dataclass(frozen=True)
class Spread:
    """Where the tokens and experts of a stage are: its groups, whether tokens come split over tp, and the length of a
    whole sequence."""

    tp: Group
    cp: Group
    ep: Group
    etp: Group
    split: bool
    sequence: int

    @classmethod
    def of(cls, mesh: Mesh, run: RunSpec) -> Spread:
        tp, cp, ep, etp = (mesh.group(name) for name in ("tp", "cp", "ep", "etp"))
        return cls(tp, cp, ep, etp, mesh.layout.sequence_parallel, run.batch.sequence)


class SpreadParts(Parts):
    """Tokens of a sequence are spread over cp and tp."""

    def __init__(self, spread: Spread) -> None:
        super().__init__()
        self.spread = spread

    def length(self, here: int) -> int:
        return self.spread.sequence

    def sum(self, x: Tensor) -> Tensor:
        return comm.all_reduce(comm.all_reduce(x, self.spread.tp), self.spread.cp)


# --- whole tokens over tp --------------------------------------------------------------------------------------------


def _all_rows(x: Tensor, count: int, group: Group) -> Tensor:
    """The rows of all ranks from each rank's piece of `count` rows; the longest piece is sent by all."""
    longest = -(-count // group.size)
    padded = torch.cat((x, x.new_zeros(longest - x.shape[0], *x.shape[1:])))
    rows = comm.finish_all_gather(comm.start_all_gather(padded.unsqueeze(0), group), group)[0]
    if count == longest * group.size:
        return rows
    sizes = [stop - start for start, stop in (piece(count, group.size, rank) for rank in range(group.size))]
    return torch.cat([part[:size] for part, size in zip(rows.chunk(group.size), sizes, strict=True)])


class _OwnRows(torch.autograd.Function):
    """This rank's piece of rows (N, d) that all ranks have; the gradient is of all rows again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.count, ctx.group = x.shape[0], group
        start, stop = piece(x.shape[0], group.size, group.rank)
        return x[start:stop].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_rows(grad, ctx.count, ctx.group), None


class _AllRows(torch.autograd.Function):
    """The other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, group: Group) -> Tensor:
        ctx.count, ctx.group = count, group
        return _all_rows(x, count, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        start, stop = piece(ctx.count, ctx.group.size, ctx.group.rank)
        return grad[start:stop], None, None


def own_rows(x: Tensor, group: Group) -> Tensor:
    """This rank's piece of x (N, …), of which all ranks hold the same."""
    return x if group.size == 1 else cast(Tensor, _OwnRows.apply(x, group))  # type: ignore[no-untyped-call]


def all_rows(x: Tensor, count: int, group: Group) -> Tensor:
    """All `count` rows from each rank's piece."""
    return x if group.size == 1 else cast(Tensor, _AllRows.apply(x, count, group))  # type: ignore[no-untyped-call]


# --- to the experts and back -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Rows that go to each rank of a group, and rows that come from it."""

    to: Sequence[int]
    come: Sequence[int]

    @property
    def back(self) -> Sizes:
        return Sizes(self.come, self.to)


class Journey:
    """Rows on their way between the ranks of a group. `pending` holds what arrives: rows, in backward gradients."""

    def __init__(self, sizes: Sizes, group: Group) -> None:
        self.sizes, self.group = sizes, group
        self.pending: Tensor | None = None

    def start(self, x: Tensor, sizes: Sizes) -> None:
        self.pending = comm.start_exchange(x, sizes.come, sizes.to, self.group)

    def finish(self) -> Tensor:
        assert self.pending is not None, "nothing is on its way"
        arrived, self.pending = comm.finish_exchange(self.pending, self.group), None
        return arrived


class _Start(torch.autograd.Function):
    """Send rows. What it returns only ties `_Finish` to it; in backward the two change roles, so that whatever stands
    between them overlaps both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        journey.start(x, journey.sizes)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.journey.finish(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tie: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        return journey.finish()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.journey.start(grad, ctx.journey.sizes.back)
        return grad.new_empty(0), None


def start_rows(x: Tensor, journey: Journey) -> Tensor:
    """Begin to send rows (M, d) to the ranks of the journey's group."""
    return x if journey.group.size == 1 else cast(Tensor, _Start.apply(x, journey))  # type: ignore[no-untyped-call]


def finish_rows(started: Tensor, journey: Journey) -> Tensor:
    """The rows that came, rank by rank."""
    if journey.group.size == 1:
        return started
    return cast(Tensor, _Finish.apply(started, journey))  # type: ignore[no-untyped-call]


class _Together(torch.autograd.Function):
    """Rows of all ranks of etp, as many as each has; the gradient of a rank's rows is a sum over all. And the reverse:
    partial rows of all ranks, summed at the rank that they belong to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], group: Group, reverse: bool) -> Tensor:
        ctx.sizes, ctx.group, ctx.reverse = sizes, group, reverse
        return (_summed if reverse else _gathered)(x, sizes, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return (_gathered if ctx.reverse else _summed)(grad, ctx.sizes, ctx.group), None, None, None


def _gathered(x: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
    copies = x.repeat(group.size, *[1] * (x.ndim - 1))
    own = [sizes[group.rank]] * group.size
    return comm.finish_exchange(comm.start_exchange(copies, sizes, own, group), group)


def _summed(x: Tensor, sizes: Sequence[int], group: Group) -> Tensor:
    own = sizes[group.rank]
    parts = comm.finish_exchange(comm.start_exchange(x, [own] * group.size, sizes, group), group)
    return parts.view(group.size, own, *x.shape[1:]).sum(0)


def together(x: Tensor, sizes: Sequence[int], group: Group, reverse: bool = False) -> Tensor:
    """Rows of all ranks side by side, or `reverse`, their partial sums back where they belong."""
    if group.size == 1:
        return x
    return cast(Tensor, _Together.apply(x, sizes, group, reverse))  # type: ignore[no-untyped-call]


def exchange_counts(counts: Tensor, group: Group) -> Tensor:
    """counts (n, E/n) of tokens for the experts of each rank -> (n, E/n) from each rank for the experts here.

    The one place where a rank learns what others send it.
    """
    return comm.exchange(counts, group)


class SpreadMoE(nn.Module):
    """The mixture in the feed-forward slot: x (B, T, d), or (B, T/tp, d) of split tokens -> y alike, and own terms."""

    def __init__(self, moe: MoE, spread: Spread) -> None:
        super().__init__()
        self.router, self.experts, self.shared = moe.router, moe.experts, moe.shared
        self.spread = spread
        self.whole = Group("tp", (0,), 0) if spread.split else spread.tp  # over which tokens that come are alike

    def forward(self, x: Tensor, where: Where) -> tuple[Tensor, Terms]:
        tokens = x.flatten(0, 1)
        mine = own_rows(tokens, self.whole)  # (N, d)
        routes, terms = self.router(mine, self._places(x, where))
        order, counts = sort_by_expert(routes.experts, self.router.moe.count)
        ep = self.spread.ep
        here = counts.view(ep.size, -1)
        come = exchange_counts(here, ep)
        sizes = Sizes(here.sum(1).tolist(), come.sum(1).tolist())
        there, back = Journey(sizes, ep), Journey(sizes.back, ep)
        started = start_rows(to_experts(mine, order, self.router.moe.top_k), there)
        shared = None if self.shared is None else self.shared(x, where)[0]  # while tokens travel
        out = self._run(finish_rows(started, there), come)
        out = finish_rows(start_rows(out, back), back)
        y = all_rows(combine(out, order, routes.weights), tokens.shape[0], self.whole).view_as(x)
        return (y if shared is None else y + shared), terms

    def _places(self, x: Tensor, where: Where) -> Tokens:
        """Where the tokens that this rank routes stand."""
        tp = self.spread.tp
        if self.spread.split:  # `where` tells of all tokens of the tp group, x holds a part of each row
            where = where.narrow(tp.rank * x.shape[1], x.shape[1]) if tp.size > 1 else where
            return Tokens.of(x, where, self.spread.sequence)
        at = Tokens.of(x, where, self.spread.sequence)
        start, stop = piece(len(at.row), tp.size, tp.rank)
        return at._replace(row=at.row[start:stop], place=at.place[start:stop])

    def _run(self, x: Tensor, come: Tensor) -> Tensor:
        """The experts here on the rows that came, come (ranks, experts) of each; split ones on those of all etp."""
        etp = self.spread.etp
        if etp.size == 1:
            return cast(Tensor, self.experts(x, come.flatten()))
        counts = comm.finish_all_gather(comm.start_all_gather(come[None, None], etp), etp)[0]  # (etp, ep, E/ep)
        sizes = counts.sum((1, 2)).tolist()
        out = self.experts(together(x, sizes, etp), counts.flatten())
        return together(out, sizes, etp, reverse=True)


def spread_experts(stage: nn.Module, spread: Spread) -> None:
    """Replace the mixtures of a stage where their tokens or experts are on several ranks."""
    if spread.tp.size * spread.cp.size * spread.ep.size * spread.etp.size == 1:
        return
    for path, module in list(stage.named_modules()):
        if isinstance(module, MoE):
            module.router.parts = SpreadParts(spread)
            parent, _, name = path.rpartition(".")
            setattr(stage.get_submodule(parent), name, SpreadMoE(module, spread))
