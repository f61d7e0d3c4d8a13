"""The search for a schedule: given what each stage costs and what each rank may hold, the shortest step that it finds.

It tries the named schedules that keep the limit and what many policies make (`greedy.py`), changes the best policies a
little while that helps, and then moves single actions. So it is never worse than a named schedule of the same
placement. Pure and repeatable: the same question has the same answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import NamedTuple

from plait.schedule.actions import B, F, Schedule, W
from plait.schedule.check import check
from plait.schedule.generators import generate
from plait.schedule.greedy import Found, Limits, Policy, list_schedule
from plait.schedule.live import live
from plait.schedule.lower import lower
from plait.schedule.simulate import Costs, simulate
from plait.spec.errors import InvalidSchedule, UsageError
from plait.spec.pipeline import SHAPES, owners

ORDERS = tuple((first, second, third) for first, second, third in permutations((F, B, W)))
PATIENCE = (0.0, 0.5, 1.0)
SLOPES = (0.0, 0.5, 1.0, 2.0)  # how many micro-batches fewer a stage may hold than the one before it
SPARE = (0, 1, 2, 4)
KEPT = 4  # policies of the first round that go into the second
CHANGES, MOVES = 200, 100  # tries of a changed policy, for each that is kept, and of a moved action


@dataclass(frozen=True)
class Memory:
    """Bytes (or any unit) per stage and micro-batch from F to B and from B to W, and what each rank may hold."""

    forward: tuple[int, ...]
    weight: tuple[int, ...]
    limit: tuple[int, ...]

    def allows(self, schedule: Schedule) -> bool:
        """Whether every rank stays within its limit at all times."""
        held = live(schedule, self.forward, self.weight)
        return all(rank.total <= limit for rank, limit in zip(held, self.limit, strict=True))


class Task(NamedTuple):
    """What a schedule is sought for: the rank of each stage, micro-batches, seconds, and what ranks may hold."""

    owner: tuple[int, ...]
    micro_batches: int
    costs: Costs
    memory: Memory


class Plan(NamedTuple):
    """What makes a list schedule: the most micro-batches of each stage, and each rank's policy."""

    caps: tuple[int, ...]
    policies: tuple[Policy, ...]


def search(task: Task) -> Found:
    """The shortest step found. Raises UsageError where not one micro-batch fits."""
    dice = random.Random(0)
    plans = [(found, plan) for plan in _plans(task) if (found := _listed(task, plan)) is not None]
    plans.sort(key=lambda pair: pair[0].seconds)
    changed = [_changed(task, *pair, dice) for pair in plans[:KEPT]]
    fits = [s for s in (*named(task.owner, task.micro_batches), *changed) if task.memory.allows(s)]
    if not fits:
        least = f"{max(task.memory.forward):g} for a micro-batch of each of its stages"
        raise UsageError(f"a limit of {min(task.memory.limit):g} lets no micro-batch come through", f"allow {least}")
    best = min((Found(s, seconds(s, task.costs)) for s in fits), key=lambda found: found.seconds)
    return _moved(task, best, dice)


def named(owner: tuple[int, ...], micro_batches: int) -> Iterator[Schedule]:
    """The named schedules whose stages are placed as `owner` says."""
    ranks = max(owner) + 1
    chunks = len(owner) // ranks
    for name, shape in SHAPES.items():
        if owner == owners(ranks, chunks, shape.folded) and (shape.chosen or chunks == shape.chunks):
            yield generate(name, ranks, micro_batches, chunks)


def seconds(schedule: Schedule, costs: Costs) -> float:
    """The simulated step of a compute-only schedule. Raises InvalidSchedule where it is none."""
    return simulate(check(lower(schedule)), costs).step


def _plans(task: Task) -> Iterator[Plan]:
    ranks = max(task.owner) + 1
    for caps in dict.fromkeys(_caps(task, slope, spare) for slope, spare in product(SLOPES, SPARE)):
        for order, oldest, patience in product(ORDERS, (True, False), PATIENCE):
            yield Plan(caps, (Policy(order, oldest, patience),) * ranks)


def _caps(task: Task, slope: float, spare: int) -> tuple[int, ...]:
    """From no further limit than the rank's own to steeply falling ones."""
    caps = []
    for stage, rank in enumerate(task.owner):
        room = task.memory.limit[rank] // task.memory.forward[stage]
        wanted = int(slope * (len(task.owner) - 1 - stage)) + 1 + spare if slope else room - spare
        caps.append(max(1, min(room, wanted, task.micro_batches)))
    return tuple(caps)


def _listed(task: Task, plan: Plan) -> Found | None:
    limits = Limits(task.memory.forward, task.memory.weight, task.memory.limit, plan.caps)
    return list_schedule(task.owner, task.micro_batches, task.costs, limits, plan.policies)


def _changed(task: Task, best: Found, plan: Plan, dice: random.Random) -> Schedule:
    """Change one stage's cap or one rank's policy, and keep what is shorter."""
    for _ in range(CHANGES):
        other = _with_other_cap(plan, dice) if dice.random() < 0.5 else _with_other_policy(plan, dice)
        found = _listed(task, other)
        if found is not None and found.seconds <= best.seconds:
            best, plan = found, other
    return best.schedule


def _with_other_cap(plan: Plan, dice: random.Random) -> Plan:
    stage = dice.randrange(len(plan.caps))
    cap = max(1, plan.caps[stage] + dice.choice((-2, -1, 1, 2)))
    return plan._replace(caps=(*plan.caps[:stage], cap, *plan.caps[stage + 1 :]))


def _with_other_policy(plan: Plan, dice: random.Random) -> Plan:
    rank = dice.randrange(len(plan.policies))
    policy = Policy(dice.choice(ORDERS), dice.random() < 0.5, dice.choice(PATIENCE))
    return plan._replace(policies=(*plan.policies[:rank], policy, *plan.policies[rank + 1 :]))


def _moved(task: Task, best: Found, dice: random.Random) -> Found:
    """Move one action of one rank a few places, and keep what is shorter."""
    for _ in range(MOVES):
        moved = _with_moved_action(best.schedule, dice)
        try:
            found = Found(moved, seconds(moved, task.costs))
        except InvalidSchedule:  # an order that its messages do not allow
            continue
        if found.seconds < best.seconds and task.memory.allows(moved):
            best = found
    return best


def _with_moved_action(schedule: Schedule, dice: random.Random) -> Schedule:
    rank = dice.randrange(schedule.ranks)
    program = list(schedule.programs[rank])
    source = dice.randrange(len(program))
    target = min(len(program) - 1, max(0, source + dice.choice((-4, -3, -2, -1, 1, 2, 3, 4))))
    program.insert(target, program.pop(source))
    return replace(schedule, programs=(*schedule.programs[:rank], tuple(program), *schedule.programs[rank + 1 :]))
