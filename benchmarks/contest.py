"""A contest: some sides in the same ranks, whose gradients must be equal before the clock starts, then take turns.

One round gives every side one turn of a few steps; the order is reversed each round, so that no side always follows
the same one. A turn begins when all ranks are ready and ends, on each rank, when its steps are done; its time is that
of the slowest rank. The collector is off in a turn and runs between turns.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from statistics import mean
from time import perf_counter, process_time
from typing import Any

import torch.distributed as dist
from torch import Tensor

from benchmarks.floor import Pipes, floor
from benchmarks.peak import peak_bytes
from benchmarks.peers import SCHEDULES, DataParallel, Pipelining, PipeliningFloor, PlainFloor, PlainLoop, PlainShard
from benchmarks.plait_side import plait
from benchmarks.ring_peer import Ring
from benchmarks.sharded_peers import DeepSpeed, FullySharded, ShardedFloor
from benchmarks.sleeping import QUICK_NAPS, Naps, Order, SleepingPeer, SleepingPlait
from benchmarks.tensor_peer import TensorParallel
from benchmarks.work import LONG, TINY, WIDE, Side, Size
from plait.parallel.launch import World, launch
from plait.proof.compare import TOLERANCE, error

MakeSide = Callable[[Any, World, Pipes], Side]  # from a Size, or from Naps
MICRO_BATCHES_PER_RANK = (1, 2, 4)  # the peer's interleaved schedules accept no other kind of number
LEAST_PER_RANK = {"dualpipe-v": 2}  # what the peer's schedule refuses to go below


@dataclass(frozen=True)
class Contest:
    """Who meets: "plait" and "peer", and floors, whose names begin with "floor"; then what is to be shown.

    `needs` is a package that the peer is from, if it is not PyTorch. With `memory`, peaks are measured too.
    """

    name: str
    title: str
    peer: str
    ranks: int
    sides: Mapping[str, MakeSide]
    size: Size | Naps = field(default_factory=Size)
    needs: str | None = None
    throughput: float = 1.0  # at least
    above_floor: float | None = None  # at most
    memory: float | None = None  # at most
    tiny: Size | Naps = TINY  # in place of the size, to try the machinery

    @property
    def key(self) -> str:
        return f"{self.name}-{self.ranks}"


@dataclass(frozen=True)
class Turns:
    """What a contest measured, by side: seconds per step of each round, and how far gradients of step 1 were apart.

    `cpu_seconds` are those of all threads, the mean of the ranks: a busy machine disturbs them far less than the clock.
    `peak_bytes` are by rank. Sides whose work is nothing but an order of passes have that in `orders`.
    """

    seconds: Mapping[str, list[float]]
    cpu_seconds: Mapping[str, list[float]]
    gradient_error: Mapping[str, float]
    peak_bytes: Mapping[str, list[int]] = field(default_factory=dict)
    orders: Mapping[str, Order] = field(default_factory=dict)


def one_process() -> Contest:
    sides = {"plait": _apart(plait()), "peer": _apart(PlainLoop)}
    return Contest("one", "one process", "a plain PyTorch loop", 1, sides, throughput=0.98)


def data_parallel(ranks: int) -> Contest:
    sides: dict[str, MakeSide] = {
        "plait": _apart(plait(dp=ranks)),
        "peer": _apart(DataParallel),
        "floor": floor(dp=ranks),
        "floor_plain": _apart(PlainFloor),
    }
    return Contest("dp", "data parallel", "DistributedDataParallel", ranks, sides, above_floor=0.9)


def tensor_parallel(ranks: int) -> Contest:
    sides: dict[str, MakeSide] = {
        "plait": _apart(plait(tp=ranks, sequence_parallel=True)),
        "plait_whole": _apart(plait(tp=ranks)),
        "peer": _apart(TensorParallel),
        "floor": floor(tp=ranks, sequence_parallel=True),
        "floor_plain": _apart(PlainShard),
    }
    title = "tensor and sequence parallel"
    return Contest("tp", title, "torch.distributed.tensor.parallel", ranks, sides, above_floor=0.7)


def context_parallel(ranks: int) -> Contest:
    sides: dict[str, MakeSide] = {
        "plait": _apart(plait(cp=ranks)),
        "peer": _apart(Ring),
        "floor": floor(cp=ranks),
    }
    needs = "ring_attention_pytorch"
    return Contest("cp", "context parallel", "ring-attention-pytorch", ranks, sides, LONG, needs, throughput=1.2)


def pipeline(schedule: str, per_rank: int) -> Callable[[int], Contest]:
    def contest(ranks: int) -> Contest:
        micro = per_rank * ranks
        asked = {"pp": ranks, "schedule": schedule, "micro_batches": micro}
        sides: dict[str, MakeSide] = {
            "plait": _apart(plait(**asked)),
            "peer": lambda size, world, _: Pipelining(size, world, schedule, micro),
            "floor": floor(**asked),
            "floor_peer": lambda size, world, pipes: PipeliningFloor(size, world, pipes, schedule, micro),
        }
        title = f"pipeline, {schedule}, {micro} micro-batches"
        return Contest(
            f"pp-{schedule}-{per_rank}p", title, "torch.distributed.pipelining", ranks, sides, above_floor=0.7
        )

    return contest


def sleeping(schedule: str, per_rank: int) -> Callable[[int], Contest]:
    def contest(ranks: int) -> Contest:
        micro = per_rank * ranks
        sides: dict[str, MakeSide] = {
            "plait": lambda naps, world, _: SleepingPlait(naps, world, schedule, micro),
            "peer": lambda naps, world, _: SleepingPeer(naps, world, schedule, micro),
        }
        peer = SCHEDULES[schedule].__name__
        key, title = f"sleep-{schedule}-{per_rank}p", f"{schedule}, {micro} micro-batches"
        return Contest(key, title, peer, ranks, sides, Naps(), tiny=QUICK_NAPS)

    return contest


def sharded(stage: int, peer: str) -> Callable[[int], Contest]:
    def contest(ranks: int) -> Contest:
        title, make, needs = SHARDED_PEERS[peer]
        asked = {"dp": ranks, "zero": stage}
        sides: dict[str, MakeSide] = {
            "plait": _apart(plait(**asked)),
            "peer": _apart(make(stage)),
            "floor": floor(**asked),
            "floor_plain": _apart(lambda size, world: ShardedFloor(size, world, stage)),
        }
        limits = {"above_floor": 0.7, "memory": 1.0}
        return Contest(f"zero{stage}-{peer}", f"ZeRO {stage}", title, ranks, sides, WIDE, needs, **limits)

    return contest


# Name -> title, side by ZeRO stage, package.
SHARDED_PEERS: Mapping[str, tuple[str, Callable[[int], Callable[[Size, World], Side]], str | None]] = {
    "fsdp": ("FSDP2 `fully_shard`", lambda stage: FullySharded, None),
    "deepspeed": ("DeepSpeed", lambda stage: lambda size, world: DeepSpeed(size, world, stage), "deepspeed"),
}


def _apart(make: Callable[[Size, World], Side]) -> MakeSide:
    """A side that needs no pipes."""
    return lambda size, world, _: make(size, world)


# Schedule and micro-batches per rank.
PIPELINES = [
    (schedule, each)
    for schedule in SCHEDULES
    for each in MICRO_BATCHES_PER_RANK
    if each >= LEAST_PER_RANK.get(schedule, 1)
]

# Name on the command line -> its contests, as functions of the number of ranks; and the numbers it runs by default.
CONTESTS: Mapping[str, tuple[list[Callable[[int], Contest]], tuple[int, ...]]] = {
    "one": ([lambda ranks: one_process()], (1,)),
    "dp": ([data_parallel], (2, 4)),
    "tp": ([tensor_parallel], (2, 4)),
    "cp": ([context_parallel], (2,)),
    "pp": ([pipeline(*each) for each in PIPELINES], (2,)),
    "sleep": ([sleeping(*each) for each in PIPELINES if each[0] != "gpipe"], (4, 8)),
    "zero": ([sharded(3, "fsdp"), *(sharded(stage, "deepspeed") for stage in (3, 2, 1))], (2, 4)),
}


def hold(contest: Contest, size: Size | Naps, rounds: int, steps: int) -> Turns:
    """Run a contest on forked ranks of one thread each. Raises ValueError, in words, where two sides do not agree."""
    if contest.needs is not None:
        import_module(contest.needs)  # once, before ranks are forked
    pipes = Pipes(contest.ranks)
    try:
        everyone = launch(contest.ranks, _on_rank, contest, size, rounds, steps, pipes, threads=1, timeout_s=None)
    finally:
        pipes.close()
    seconds = {side: _by_round(max, [turns.seconds[side] for turns in everyone]) for side in contest.sides}
    cpu = {side: _by_round(mean, [turns.cpu_seconds[side] for turns in everyone]) for side in contest.sides}
    measured = ("plait", "peer") if contest.memory is not None else ()
    peaks = {side: peak_bytes(contest.ranks, contest.sides[side], size) for side in measured}
    return Turns(seconds, cpu, everyone[0].gradient_error, peaks, everyone[0].orders)


def _by_round(combine: Callable[[Sequence[float]], float], ranks: list[list[float]]) -> list[float]:
    return [combine(times) for times in zip(*ranks, strict=True)]


def _on_rank(world: World, contest: Contest, size: Size | Naps, rounds: int, steps: int, pipes: Pipes) -> Turns:
    sides = {name: make(size, world, pipes) for name, make in contest.sides.items()}
    world.progress(1, "gradients")
    errors = agreement(sides, judge="peer") if world.rank == 0 else agreement(sides, judge=None)
    orders = {name: side.order for name, side in sides.items() if isinstance(side, SleepingPlait | SleepingPeer)}
    turns = Turns({name: [] for name in sides}, {name: [] for name in sides}, errors, orders=orders)
    for number in range(rounds + 1):
        world.progress(number, "turns")
        for name in reversed(sides) if number % 2 else sides:
            seconds, cpu_seconds = turn(sides[name], steps)
            if number > 0:  # round 0 warms up
                turns.seconds[name].append(seconds)
                turns.cpu_seconds[name].append(cpu_seconds)
    return turns


def agreement(sides: Mapping[str, Side], judge: str | None) -> dict[str, float]:
    """Raw gradients of step 1, each side against the judge: the largest error of a tensor by plait's measure.

    All ranks call it; on rank 0 (where `judge` is given) it raises ValueError at an error over the tolerance.
    """
    found = {}
    for name, side in sides.items():
        side.backward()
        if not name.startswith("floor"):
            found[name] = side.gradients()
        side.update()
    if judge is None:
        return {}
    errors = {name: furthest(gradients, found[judge]) for name, gradients in found.items() if name != judge}
    for name, (tensor, far) in errors.items():
        if not far <= TOLERANCE["float32"]:
            raise ValueError(f"gradients of {name} and {judge} differ most at {tensor}: {far:.3g}")
    return {name: far for name, (_, far) in errors.items()}


def furthest(ones: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> tuple[str, float]:
    """The tensor that differs most, and its error."""
    if set(ones) != set(others):
        raise ValueError(f"gradients of different tensors: {sorted(set(ones) ^ set(others))}")
    largest = max(other.abs().max().item() for other in others.values())
    errors = {name: error(one, others[name], largest) for name, one in ones.items()}
    name = max(errors, key=lambda n: errors[n])
    return name, errors[name]


def turn(side: Side, steps: int) -> tuple[float, float]:
    """Seconds and CPU seconds per step of some full steps, begun together by all ranks."""
    gc.collect()
    dist.barrier()
    with _collector_off():
        start, cpu_start = perf_counter(), process_time()
        for _ in range(steps):
            side.backward()
            side.update()
        return (perf_counter() - start) / steps, (process_time() - cpu_start) / steps


@contextmanager
def _collector_off() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
