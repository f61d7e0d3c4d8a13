"""What one rank of a plait run sends in a step: calls and bytes by axis and operation, as closed forms.

Bytes under ring algorithms (all-reduce, all-gather, reduce-scatter), leaving bytes of an all-to-all, messages at their
sender, as training counts them. Each part of a block says what it sends forward and backward; full recompute runs the
forward once more, up to the last tensor that backward asks for. Experts are counted as if routing were even.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import NamedTuple

from plait.placement.cuts import piece
from plait.planner.seat import Seat
from plait.schedule.actions import RECV, SEND
from plait.spec.layout import AXIS_OF

Collectives = dict[str, dict[str, dict[str, int]]]  # axis -> operation -> {"calls", "bytes"}

REDUCE, GATHER, SCATTER, EXCHANGE = "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"

# Operation -> what one of n ranks sends of an input of so many bytes; an all-to-all is told by what leaves.
SHARE: Mapping[str, Callable[[int, int], Fraction]] = {
    REDUCE: lambda size, n: Fraction(2 * size * (n - 1), n),
    GATHER: lambda size, n: Fraction(size * (n - 1)),
    SCATTER: lambda size, n: Fraction(size * (n - 1), n),
    EXCHANGE: lambda size, n: Fraction(size),
    "send": lambda size, n: Fraction(size),
    "recv": lambda size, n: Fraction(0),
}
LONG, DOUBLE, FLOAT = 8, 8, 4  # bytes: counts, sums over the world, loads of experts
SHARED_USE = 3  # numbers of each layer of experts that the world learns
SUMS = 4  # norm, loss, count, and whether to stop


class Call(NamedTuple):
    """`times` calls of one operation over a group; `size` bytes are the input of all of them together."""

    group: str
    operation: str
    size: int
    times: int = 1


class Passes(NamedTuple):
    """What a part sends in forward, in backward, and in forward after the last tensor that backward asks for."""

    forward: tuple[Call, ...] = ()
    backward: tuple[Call, ...] = ()
    tail: tuple[Call, ...] = ()

    def calls(self, again: bool = False, dropped: bool = False) -> Iterable[Call]:
        """Of one micro-batch; `again`: forward is run twice, the tail too where dropout asks for what comes after."""
        once = self.forward + self.tail + self.backward
        return once + (self.forward + (self.tail if dropped else ()) if again else ())


def collectives(seat: Seat) -> Collectives:
    """Calls and bytes sent of one rank in a step, as over NCCL."""
    layout = seat.layout
    calls: list[tuple[Call, int]] = [(call, 1) for call in (*_once(seat), *_gradients(seat), *_messages(seat))]
    calls += [(call, seat.micro_batches) for stage in seat.mine for call in _stage(seat, stage)]
    sent: defaultdict[tuple[str, str], list[Fraction]] = defaultdict(lambda: [Fraction(0), Fraction(0)])
    for call, times in calls:
        ranks = layout.size(call.group)
        if ranks > 1 and call.times:
            row = sent[AXIS_OF[call.group], call.operation]
            row[0] += times * call.times
            row[1] += times * SHARE[call.operation](call.size, ranks)
    found: Collectives = {}
    for (axis, operation), (count, size) in sorted(sent.items()):
        found.setdefault(axis, {})[operation] = {"calls": round(count), "bytes": round(size)}
    return found


# --- by micro-batch ---------------------------------------------------------------------------------------------------


def _stage(seat: Seat, stage: int) -> Iterable[Call]:
    """One micro-batch through one stage, forward and backward."""
    recompute, dropped = seat.run.recompute, seat.run.model.dropout > 0
    layers = seat.stages.layers[stage]
    again = (len(layers) if recompute.layers == "all" else recompute.layers) if recompute.mode == "full" else 0
    if stage == 0:
        yield from _embedding(seat).calls()
    for index, layer in enumerate(layers):
        for part in (_attention(seat), _feed_forward(seat, layer)):
            yield from part.calls(index < again, dropped)
    if stage == seat.stages.last:
        yield from _head(seat).calls()


def _column(seat: Seat, features: int) -> Passes:
    """A matrix cut by outputs, of an input of so many features."""
    width = seat.widths.compute * features
    if not seat.layout.sequence_parallel:
        return Passes((), (Call("tp", REDUCE, seat.tokens * width),))
    gather = Call("tp", GATHER, seat.between * width)
    return Passes((gather,), (gather, Call("tp", SCATTER, seat.tokens * width)))


def _row(seat: Seat) -> Passes:
    """A matrix cut by inputs, whose partial results meet; or a table cut by rows."""
    width = seat.widths.compute * seat.run.model.hidden
    if not seat.layout.sequence_parallel:
        return Passes((Call("tp", REDUCE, seat.tokens * width),))
    return Passes((Call("tp", SCATTER, seat.tokens * width),), (Call("tp", GATHER, seat.between * width),))


_embedding = _row


def _joined(*parts: Passes) -> Passes:
    """Parts one after the other; only the last one's tail is a tail."""
    before = tuple(call for part in parts[:-1] for call in part.forward + part.tail)
    return Passes(before + parts[-1].forward, tuple(call for part in parts for call in part.backward), parts[-1].tail)


def _attention(seat: Seat) -> Passes:
    model = seat.run.model
    if model.latent is None:
        return _joined(_column(seat, model.hidden), _core(seat), _row(seat))
    latent = model.latent
    queries, keys = _column(seat, latent.q_rank or model.hidden), _column(seat, latent.kv_rank)
    return _joined(queries, keys, _spread(seat, latent.rotated), _core(seat), _row(seat))


def _spread(seat: Seat, features: int) -> Passes:
    """What all heads share meets the heads of every rank."""
    width = seat.widths.compute * features
    if not seat.layout.sequence_parallel:
        return Passes((), (Call("tp", REDUCE, seat.tokens * width),))
    gather, scatter = Call("tp", GATHER, seat.between * width), Call("tp", SCATTER, seat.tokens * width)
    return Passes((gather,), (scatter,))


def _core(seat: Seat) -> Passes:
    """Attention over tokens that are spread: heads for tokens inside, keys and values of others outside."""
    model, layout = seat.run.model, seat.layout
    ulysses, ring = layout.size("ulysses"), layout.size("ring")
    heads, kv = model.heads // layout.tp, model.kv_heads // layout.kv
    if kv % ulysses:
        kv *= ulysses // kv if ulysses % kv == 0 else heads // kv
    sizes = [seat.tokens * n * seat.widths.compute for n in (kv * model.head_dim, kv * model.value_dim)]
    whole = [seat.tokens * n * seat.widths.compute for n in (heads * model.head_dim, heads * model.value_dim)]
    swap = tuple(Call("ulysses", EXCHANGE, size * (ulysses - 1) // ulysses) for size in (*whole, *sizes))
    widened = seat.widths.wide // seat.widths.compute
    if seat.run.layout.context == "gather":
        come = tuple(Call("ring", GATHER, size) for size in sizes)
        home = tuple(Call("ring", SCATTER, ring * size * widened) for size in sizes)
    else:
        come = tuple(Call("ring", EXCHANGE, (ring - 1) * size, ring - 1) for size in sizes)
        home = tuple(Call("ring", EXCHANGE, (ring - 1) * size * widened, ring - 1) for size in sizes)
    return Passes(swap + come, swap + come + home)


def _feed_forward(seat: Seat, layer: int) -> Passes:
    if not seat.run.model.has_experts(layer):
        return _mlp(seat)
    experts, shared = _experts(seat), _mlp(seat) if seat.run.model.moe and seat.run.model.moe.shared else Passes()
    return _joined(shared, experts)


def _mlp(seat: Seat) -> Passes:
    up, down = _column(seat, seat.run.model.hidden), _row(seat)
    return Passes(up.forward, up.backward + down.backward, down.forward)


def _experts(seat: Seat) -> Passes:
    """Statistics of sequences that are spread, tokens to their experts and back, and between the parts of experts."""
    moe, layout, hidden = seat.run.model.moe, seat.layout, seat.run.model.hidden * seat.widths.compute
    assert moe is not None
    here, come = even_rows(seat)
    to_ranks, rows = [sum(counts) for counts in here], sum(come)
    leaving = (sum(to_ranks) - to_ranks[seat.at.ep]) * hidden
    returning = (rows - come[seat.at.ep]) * hidden
    travel = (Call("ep", EXCHANGE, leaving), Call("ep", EXCHANGE, returning))
    parts = layout.size("etp")
    between = Call("etp", EXCHANGE, 2 * (parts - 1) * rows * hidden, 2)
    counted = (
        Call("ep", EXCHANGE, LONG * moe.count * (layout.ep - 1) // layout.ep), Call("etp", GATHER, LONG * moe.count),
    )  # fmt: skip
    alike = () if layout.sequence_parallel else (Call("tp", GATHER, -(-seat.tokens // layout.tp) * hidden),)
    return Passes((*_statistics(seat), *counted, *travel, between), (*travel, between, *alike), alike)


def _statistics(seat: Seat) -> Iterable[Call]:
    """What a router learns of the tokens of its sequences that other ranks route."""
    moe, rows = seat.run.model.moe, seat.run.batch.micro_size
    assert moe is not None
    if moe.balance_coef and not moe.remembers:
        yield from (Call(group, REDUCE, FLOAT * rows * moe.count) for group in ("tp", "cp"))
    if moe.capacity is not None:
        size = seat.widths.wide * rows * seat.run.batch.sequence * moe.count
        yield from (Call(group, REDUCE, size) for group in ("tp", "cp"))


def even_rows(seat: Seat) -> tuple[list[list[int]], list[int]]:
    """Choices of this rank's tokens for each expert of each ep rank, and how many come from each ep rank, if routing is
    even: the first experts get one more where they do not divide, and all ranks choose alike."""
    moe, layout = seat.run.model.moe, seat.layout
    assert moe is not None
    start, stop = piece(seat.tokens, layout.tp, seat.at.tp)
    chosen = (seat.between if layout.sequence_parallel else stop - start) * moe.top_k
    counts = [last - first for first, last in (piece(chosen, moe.count, expert) for expert in range(moe.count))]
    each = moe.count // layout.ep
    here = [counts[rank * each : (rank + 1) * each] for rank in range(layout.ep)]
    return here, [sum(here[seat.at.ep])] * layout.ep


def _head(seat: Seat) -> Passes:
    """Projection and loss, in chunks of tokens where the run says so."""
    chunk, parts = seat.run.recompute.loss_chunk, seat.layout.tp if seat.layout.sequence_parallel else 1
    pieces = -(-seat.between // max(1, chunk // parts)) if chunk else 1
    projection = _column(seat, seat.run.model.hidden)
    loss = [Call("tp", REDUCE, n * seat.tokens * seat.widths.wide) for n in (1, 2)]
    forward, backward = (
        tuple(call._replace(times=pieces) for call in calls)
        for calls in ((*projection.forward, *loss), projection.backward)
    )
    return Passes(forward, backward)


# --- by step ----------------------------------------------------------------------------------------------------------


def _once(seat: Seat) -> Iterable[Call]:
    """Label counts, the use of experts, and the sums that the whole world learns."""
    model, moe = seat.run.model, seat.run.model.moe
    yield Call("dp_cp", REDUCE, LONG)
    mixed = [layer for layer in range(model.layers) if model.has_experts(layer)]
    mine = [layer for stage in seat.mine for layer in seat.stages.layers[stage] if layer in mixed]
    if moe is not None and mine:
        yield Call("stage", REDUCE, DOUBLE * len(mine) * (2 * moe.count + 1))
    losses = (model.z_loss, *((moe.balance_coef, moe.z_coef) if moe is not None else ()))
    yield Call("world", REDUCE, DOUBLE * (SUMS + sum(x > 0 for x in losses) + SHARED_USE * len(mixed)))


def _messages(seat: Seat) -> Iterable[Call]:
    """Activations and their gradients between stages."""
    size = seat.between * seat.run.model.hidden * seat.widths.compute
    sent, received = (sum(action.kind is kind for action in seat.program) for kind in (SEND, RECV))
    yield Call("pp", "send", sent * size, sent)
    yield Call("pp", "recv", 0, received)


def _gradients(seat: Seat) -> Iterable[Call]:
    """Buffers of gradients and weights, as the ZeRO stage says (Rajbhandari et al. 2020), then what else is partial."""
    widths = seat.widths
    for row, gathered, reduced in zip(seat.rows, *seat.times(), strict=True):
        shard, repeat = row.groups
        buffer = row.buffer
        own = buffer.length * widths.compute
        times = gathered + buffer.republishes(row.zero)
        yield Call(shard, GATHER, own * times, times)
        if row.zero == 0:
            yield Call(repeat, REDUCE, buffer.size * widths.reduce)
            continue
        yield Call(shard, SCATTER, reduced * buffer.size * widths.reduce, reduced)
        yield Call(repeat, REDUCE, buffer.length * widths.reduce)
    pieces = seat.pieces()
    for name in ("copies", "tp", "tied"):
        elements = sum(p.stop - p.start for p in pieces if name in p.placement.partial)
        yield Call(name, REDUCE, elements * widths.accumulate, int(elements > 0))
