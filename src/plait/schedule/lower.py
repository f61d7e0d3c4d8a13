"""Lowering: from compute actions to the list that the executor runs, with SEND, RECV, REDUCE and DROP in their places.

What the added actions mean, and where they stand:

- SEND starts a send and returns, or where `SENDS_IN_FLIGHT` a rank are on their way, once the oldest is gone. It stands
  right after the compute action that produced the message.
- RECV posts a receive and returns; the consumer waits for it. It stands before the compute action that precedes its
  consumer, so a transfer has a whole action to hide behind, or earlier where one of two rules asks for it. Messages of
  one channel (sending rank, receiving rank) are received in the order in which they are sent. And a receive is posted
  by the time its message is computed, if all actions took equally long: so a schedule that ends with sends that
  return at once also ends on a backend whose sends block until they are received.
- REDUCE starts the reduction of what a stage's gradients have gathered. It stands after the stage's last weight
  gradient; where gradients are sharded (ZeRO 2 and 3) after each one, so that no rank holds a stage's whole sum.
- DROP lets a stage's gathered weights go, which only ZeRO 3 gathers. It stands after each compute action of the stage,
  or where gathered weights are kept, after the last one of the step.

What stands after one compute action stands in this order: SEND, REDUCE, DROP.

A message between two stages of one rank is not sent: the executor hands it over. Nothing here judges a schedule:
whatever cannot be paired is left out, and `check` names it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from plait.schedule.actions import DROP, REDUCE, WEIGHT_GRADIENTS, Action, Message, Program, Schedule
from plait.schedule.bulk import uncollected

Flow = list[list[tuple[Message, ...]]]  # for each rank and compute action, what it takes in, or gives out

SHARDS_GRADIENTS, SHARDS_WEIGHTS = 2, 3  # the first ZeRO stages that do


class Pace(NamedTuple):
    """The tick at which each rank runs each of its actions, and each message is made."""

    ticks: list[list[int]]
    made: dict[Message, int]


@uncollected()
def lower(schedule: Schedule, zero: int = 0, keep: bool = False) -> Schedule:
    """The same schedule with its communication listed, for a ZeRO stage; stage 3 may `keep` what it has gathered."""
    inputs = [[schedule.inputs(action) for action in program] for program in schedule.programs]
    outputs = [[schedule.outputs(action) for action in program] for program in schedule.programs]
    leaving = [[tuple(filter(schedule.crosses, made)) for made in made_here] for made_here in outputs]
    receives = _receive_slots(schedule, inputs, leaving, _lockstep(inputs, outputs))
    programs = []
    for program, posted, sent in zip(schedule.programs, receives, leaving, strict=True):
        lowered: list[Action] = []
        endings = _endings(program, zero, keep)
        for index, action in enumerate(program):
            if index in posted:
                lowered += map(Action.receive, posted[index])
            lowered.append(action)
            if sent[index]:
                lowered += map(Action.send, sent[index])
            if index in endings:
                lowered += endings[index]
        programs.append(tuple(lowered))
    return replace(schedule, programs=tuple(programs))


def _receive_slots(
    schedule: Schedule, inputs: Flow, leaving: Flow, pace: Pace
) -> list[defaultdict[int, list[Message]]]:
    """For each rank: compute action's index -> the messages whose receives are posted just before it."""
    consumer: dict[Message, int] = {}  # index of the compute action that needs the message
    sent: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
    for consumed, made_here in zip(inputs, leaving, strict=True):
        for index, messages in enumerate(consumed):
            for message in messages:
                consumer[message] = index
        for message in chain.from_iterable(made_here):
            sent[schedule.channel(message)].append(message)

    slots: list[defaultdict[int, list[Message]]] = [defaultdict(list) for _ in schedule.programs]
    for (_, target), in_order in sent.items():
        posted, ticks, slot = slots[target], pace.ticks[target], len(schedule.programs[target])
        for message in reversed(in_order):
            needed_at, tick = consumer.get(message), pace.made.get(message)
            if needed_at is not None:
                in_time = slot if tick is None else bisect_left(ticks, tick)
                slot = min(slot, in_time, max(needed_at - 1, 0))
                posted[slot].append(message)
    for receives in chain.from_iterable(posted.values() for posted in slots):
        receives.reverse()
    return slots


def _lockstep(inputs: Flow, outputs: Flow) -> Pace:
    """The pace if every action took one tick. Actions that wait for ever have none."""
    ticks: list[list[int]] = [[] for _ in inputs]
    made: dict[Message, int] = {}
    now, moved = 0, True
    while moved:
        moved = False
        for run, needed, makes in zip(ticks, inputs, outputs, strict=True):
            at = len(run)
            if at == len(needed) or any([made.get(message, now) >= now for message in needed[at]]):
                continue
            run.append(now)
            moved = True
            for message in makes[at]:
                made[message] = now
        now += 1
    return Pace(ticks, made)


def _endings(program: Program, zero: int, keep: bool) -> dict[int, list[Action]]:
    """Compute action's index -> the REDUCEs and DROPs after it."""
    passes = [(i, part) for i, action in enumerate(program) for part in action.parts]
    computed = [(i, part.stage) for i, part in passes]
    gradients = [(i, part.stage) for i, part in passes if part.kind in WEIGHT_GRADIENTS]
    reduces = gradients if zero >= SHARDS_GRADIENTS else _last_of_each(gradients)
    drops = [] if zero < SHARDS_WEIGHTS else _last_of_each(computed) if keep else computed
    endings: defaultdict[int, list[Action]] = defaultdict(list)
    for kind, places in ((REDUCE, reduces), (DROP, dict.fromkeys(drops))):
        for index, stage in places:
            endings[index].append(Action(kind, stage))
    return endings


def _last_of_each(places: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of (index, stage) in ascending order, the last one of each stage."""
    return [(index, stage) for stage, index in {stage: index for index, stage in places}.items()]
