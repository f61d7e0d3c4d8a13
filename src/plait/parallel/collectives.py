"""Every communication of the project, and nothing that knows what is being communicated.

| name            | forward        | backward        | who uses it                                               |
|-----------------|----------------|-----------------|-----------------------------------------------------------|
| …_all_gather    | all-gather     | (by the caller) | column inputs, row output gradients, where tokens are split |
| …_reduce_scatter | reduce-scatter | (by the caller) | row outputs, column input gradients, where tokens are split |
| all_reduce      | all-reduce     | (by the caller) | row outputs, column input gradients, cross-entropy        |
| shift           | to the next    | (by the caller) | keys and values on a ring, and their gradients            |
| exchange        | all-to-all     | (by the caller) | heads for tokens (Ulysses), tokens to experts and back    |
| spread          | (all-gather)   | all-reduce or   | the rotated key of latent attention, one for all heads    |
|                 |                | reduce-scatter  |                                                           |
| sum_partial     | all-reduce     | identity        | embedding                                                 |
| scatter_partial | reduce-scatter | all-gather      | embedding, where tokens are split                         |
| sum_in_place    | all-reduce     | none            | gradient buffers, norm and loss, label counts             |
| sum_to_shards   | reduce-scatter | none            | gradient buffers under ZeRO                               |
| gather_shards   | all-gather     | none            | weight buffers under ZeRO                                 |
| send, receive   | point to point | none            | pipeline                                                  |
| gather_to_first | point to point | none            | proofs and samples, never on the hot path                 |
| gather_bytes    | all-reduce     | none            | small reports, what rank 0 tells the others               |

Inside a block the start/finish pairs are functional operators, which torch.compile traces and a dispatch mode counts:
`finish` must be called before the tensor is read. Every function is the identity in a group of one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the _c10d_functional operators
from torch import Tensor

_op = torch.ops._c10d_functional


@dataclass(frozen=True)
class Group:
    """The ranks that communicate, as seen by one of them. `process_group` is None in a group of one.

    `device` is the kind on which its tensors are; `backend` is what moves those ("gloo", "nccl").
    """

    name: str
    ranks: tuple[int, ...]
    rank: int  # index of this process within `ranks`
    process_group: Any = None
    device: str = "cpu"
    backend: str = "gloo"

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def handle(self) -> str:
        """The name under which torch's operators know the group."""
        return str(self.process_group.group_name)

    @property
    def scatters_by_exchange(self) -> bool:
        """gloo's reduce-scatter is an all-reduce inside and sends twice; exchanging pieces and adding sends once."""
        return self.backend == "gloo"

    @property
    def gathers_into_given(self) -> bool:
        """An all-gather into a tensor of its own is sent to gloo as a coalesced one. The two threads of a group both
        write down the name of what they last did, unlocked; one as long as that is freed twice (torch 2.13: now and
        then a rank dies of a corrupt heap). Names of at most 15 letters, as of all else here, live in place.
        """
        return self.backend == "gloo"

    @property
    def connects_late(self) -> bool:
        """Whether two ranks meet at their first message only."""
        return self.backend == "nccl"

    @property
    def exchanges(self) -> bool:
        """Whether buffers travel as messages. gloo's all-gather and all-to-all copy everything once more than these."""
        return self.backend == "gloo" and self.device == "cpu"


# Operators whose result is a tensor that they were given: without memory, torch would make another one.
GIVEN: Mapping[Any, Callable[[Any, Any], Any]] = {
    _op.wait_tensor.default: lambda args, kwargs: args[0],
    _op.all_gather_into_tensor_out.default: lambda args, kwargs: kwargs["out"],
}


# --- functional pairs over one dim ---------------------------------------------------------------------------------


def start_all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Begin the sum (or "max") of x over the group; the result has x's shape."""
    return x if group.size == 1 else cast(Tensor, _op.all_reduce(x, op, group.handle))


def finish_all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum, ready to be read."""
    return x if group.size == 1 else cast(Tensor, _op.wait_tensor(x))


def start_all_gather(x: Tensor, group: Group) -> Tensor:
    """Begin to gather (A, T/n, …) from n ranks; the pending tensor is (n·A, T/n, …)."""
    if group.size == 1:
        return x
    x = x.contiguous()
    if group.gathers_into_given:
        into = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
        return cast(Tensor, _op.all_gather_into_tensor_out(x, group.size, group.handle, out=into))
    return cast(Tensor, _op.all_gather_into_tensor(x, group.size, group.handle))


def finish_all_gather(x: Tensor, group: Group) -> Tensor:
    """The pieces side by side along dim 1: (A, T, …)."""
    if group.size == 1:
        return x
    n, x = group.size, _op.wait_tensor(x)
    pieces = x.view(n, x.shape[0] // n, *x.shape[1:])  # (n, A, T/n, …)
    return pieces.transpose(0, 1).reshape(pieces.shape[1], n * pieces.shape[2], *pieces.shape[3:])


def start_reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Begin to sum (A, T, …) over n ranks, each to keep its piece of dim 1."""
    if group.size == 1:
        return x
    n = group.size
    pieces = x.unflatten(1, (n, x.shape[1] // n)).transpose(0, 1).contiguous()  # (n, A, T/n, …)
    if group.scatters_by_exchange:
        return cast(Tensor, _op.all_to_all_single(pieces, [1] * n, [1] * n, group.handle))
    return cast(Tensor, _op.reduce_scatter_tensor(pieces, "sum", n, group.handle))


def finish_reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """This rank's piece of the sum: (A, T/n, …)."""
    if group.size == 1:
        return x
    pieces: Tensor = _op.wait_tensor(x)
    return pieces.sum(0) if group.scatters_by_exchange else pieces[0]


def start_shift(x: Tensor, group: Group) -> Tensor:
    """Begin to send x to the next rank, the last one's to the first; what arrives is finished by `finish_shift`."""
    if group.size == 1:
        return x
    ranks, here, size = range(group.size), group.rank, x.shape[0]
    to = [size if rank == (here + 1) % group.size else 0 for rank in ranks]
    come = [size if rank == (here - 1) % group.size else 0 for rank in ranks]
    return cast(Tensor, _op.all_to_all_single(x.contiguous(), come, to, group.handle))


def finish_shift(x: Tensor, group: Group) -> Tensor:
    """What the rank before sent, in the shape of what was sent."""
    return x if group.size == 1 else cast(Tensor, _op.wait_tensor(x))


def start_exchange(x: Tensor, come: Sequence[int], to: Sequence[int], group: Group) -> Tensor:
    """Begin to send to[r] rows of x to each rank r, in order, and to receive come[r] rows from it."""
    if group.size == 1:
        return x
    return cast(Tensor, _op.all_to_all_single(x.contiguous(), list(come), list(to), group.handle))


def finish_exchange(x: Tensor, group: Group) -> Tensor:
    """The rows of all ranks, one rank's after the other's."""
    return x if group.size == 1 else cast(Tensor, _op.wait_tensor(x))


def exchange(x: Tensor, group: Group) -> Tensor:
    """Piece r of x (n, …) goes to rank r; the result holds every rank's piece for this one, (n, …)."""
    ones = [1] * group.size
    return finish_exchange(start_exchange(x, ones, ones, group), group)


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """start and finish at once."""
    return finish_all_reduce(start_all_reduce(x, group, op), group)


# --- with a backward of their own ----------------------------------------------------------------------------------


class _SumPartial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _ScatterPartial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return finish_reduce_scatter(start_reduce_scatter(x, group), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return finish_all_gather(start_all_gather(grad, ctx.group), ctx.group), None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, split: bool) -> Tensor:
        ctx.group, ctx.split = group, split
        return finish_all_gather(start_all_gather(x, group), group) if split else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.split:
            return finish_reduce_scatter(start_reduce_scatter(grad, ctx.group), ctx.group), None, None
        return all_reduce(grad, ctx.group), None, None


def spread(x: Tensor, group: Group, split: bool) -> Tensor:
    """x as every rank uses it in its own way, gathered along dim 1 where it is `split`; so its gradient is a sum."""
    return x if group.size == 1 else cast(Tensor, _Spread.apply(x, group, split))  # type: ignore[no-untyped-call]


def sum_partial(x: Tensor, group: Group) -> Tensor:
    """The sum of partial x over the group; each rank goes on with the same value, so the gradient passes through."""
    return x if group.size == 1 else cast(Tensor, _SumPartial.apply(x, group))  # type: ignore[no-untyped-call]


def scatter_partial(x: Tensor, group: Group) -> Tensor:
    """The sum of partial x (B, T, …), each rank going on with its piece (B, T/n, …)."""
    return x if group.size == 1 else cast(Tensor, _ScatterPartial.apply(x, group))  # type: ignore[no-untyped-call]


def read(x: Tensor) -> list[float]:
    """The numbers of a vector, on the host: waits for the device. A count on tensors without values replaces it."""
    return cast(list[float], x.tolist())


# --- outside blocks ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Transfer:
    """Asynchronous work on a tensor that must stay alive and untouched until `wait`, which adds `terms` to it.

    `source` is kept alive as long.
    """

    tensor: Tensor
    works: list[Any]
    terms: Sequence[Tensor] = ()
    source: Tensor | None = None

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        for term in self.terms:
            self.tensor.add_(term)
        self.works, self.terms, self.source = [], (), None
        return self.tensor


@dataclass(slots=True)
class _Pending:
    """Work of a functional operator, by the tensor that it will fill."""

    tensor: Tensor

    def wait(self) -> None:
        _op.wait_tensor(self.tensor)


def sum_in_place(x: Tensor, group: Group) -> Transfer:
    """Begin to replace x by its sum over the group."""
    if group.size == 1:
        return Transfer(x, [])
    return Transfer(x, [dist.all_reduce(x, group=group.process_group, async_op=True)])


def sum_to_shards(x: Tensor, group: Group) -> Transfer:
    """Begin to sum flat x (n·L,) over n ranks, each to get its part (L,). In a group of one the result is x itself."""
    if group.size == 1:
        return Transfer(x, [])
    if group.exchanges:
        pieces = x.view(group.size, -1)
        received = {peer: torch.empty_like(pieces[0]) for peer in _others(group)}
        works = _exchange({peer: pieces[peer] for peer in received}, received, group)
        first, *terms = received.values()
        return Transfer(first, works, [*terms, pieces[group.rank]], source=x)
    part = _op.reduce_scatter_tensor(x, "sum", group.size, group.handle)
    return Transfer(part, [_Pending(part)], source=x)


def gather_shards(into: Tensor, part: Tensor, group: Group) -> Transfer:
    """Begin to fill flat `into` (n·L,) with the parts (L,) of all ranks; `part` may be this rank's place in it."""
    if group.size == 1:
        return Transfer(into if into.data_ptr() == part.data_ptr() else into.copy_(part), [])
    if group.exchanges:
        pieces = into.view(group.size, -1)
        works = _exchange(dict.fromkeys(_others(group), part), {peer: pieces[peer] for peer in _others(group)}, group)
        if part.untyped_storage()._cdata != into.untyped_storage()._cdata:
            pieces[group.rank].copy_(part)
        return Transfer(into, works, source=part)
    _op.all_gather_into_tensor_out(part, group.size, group.handle, out=into)
    return Transfer(into, [_Pending(into)], source=part)


def _others(group: Group) -> list[int]:
    """The other ranks, the next one first: no two ranks begin with the same peer."""
    return [(group.rank + step) % group.size for step in range(1, group.size)]


def _exchange(sent: Mapping[int, Tensor], received: Mapping[int, Tensor], group: Group) -> list[Any]:
    """Begin to send one contiguous tensor to each peer, and to receive one from each."""
    receives = [dist.irecv(x, group=group.process_group, group_src=peer) for peer, x in received.items()]
    return receives + [dist.isend(x, group=group.process_group, group_dst=peer) for peer, x in sent.items()]


def send(x: Tensor, group: Group, to: int) -> Transfer:
    """Begin to send x to the `to`-th rank of the group."""
    x = x.contiguous()
    return Transfer(x, [dist.isend(x, group=group.process_group, group_dst=to)])


def receive(into: Tensor, group: Group, source: int) -> Transfer:
    """Post a receive from the `source`-th rank of the group into a contiguous tensor."""
    return Transfer(into, [dist.irecv(into, group=group.process_group, group_src=source)])


def gather_to_first(x: Tensor, sizes: Sequence[int], group: Group) -> list[Tensor]:
    """Rank 0 of the group gets every rank's flat tensor of `sizes[rank]` elements; the others get an empty list."""
    if group.rank > 0:
        send(x, group, 0).wait()
        return []
    return [x, *(receive(x.new_empty(size), group, rank).wait() for rank, size in enumerate(sizes) if rank > 0)]


def gather_bytes(content: bytes, group: Group) -> list[bytes]:
    """The bytes of every rank, on every rank. For small reports at the end of a run."""
    if group.size == 1:
        return [content]
    lengths = torch.zeros(group.size, dtype=torch.int64, device=group.device)
    lengths[group.rank] = len(content)
    longest = int(sum_in_place(lengths, group).wait().max())
    table = torch.zeros((group.size, longest), dtype=torch.uint8, device=lengths.device)
    table[group.rank, : len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    sum_in_place(table, group).wait()
    return [row[:length].numpy().tobytes() for row, length in zip(table.cpu(), lengths.tolist(), strict=True)]


def tell_by_store(key: str, mine: str, ranks: Sequence[int], here: int, wait_s: float) -> dict[int, str]:
    """What other ranks of the world tell under the same key, as far as they do within a time. For when groups fail.

    `here` is this rank of the world. Nothing is raised: where the store is gone too, nobody answers.
    """
    answers = {here: mine}
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{key}/{here}", mine)
        until = time.monotonic() + wait_s
        while len(answers) < len(ranks) and time.monotonic() < until:
            there = [rank for rank in ranks if rank not in answers and store.check([f"{key}/{rank}"])]
            answers |= {rank: store.get(f"{key}/{rank}").decode() for rank in there}
            time.sleep(0.05)
    except RuntimeError:  # the process that holds the store has ended: whoever asks is about to end as well
        return answers
    return answers


def missing_callers(key: str, size: int, here: int, wait_s: float) -> list[int]:
    """The ranks of the world of `size` that do not make the same call, named `key`, as often as this one in a time.

    All that call learn the same: the first to have waited long enough, or the last to come, decides, and who comes
    later is told too.
    """
    if size == 1:
        return []
    store = dist.distributed_c10d._get_default_store()
    times = store.add(f"{key}/{here}", 1)
    verdict = f"{key}/call {times}/verdict"
    missing: list[int] = []
    if store.add(f"{key}/call {times}", 1) < size:
        until = time.monotonic() + wait_s
        while not store.check([verdict]) and time.monotonic() < until:
            time.sleep(0.01)
        missing = [rank for rank in range(size) if store.add(f"{key}/{rank}", 0) < times]
    decided = store.compare_set(verdict, "", json.dumps(missing))
    return [int(rank) for rank in json.loads(decided)]
