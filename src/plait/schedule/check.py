"""Proof that a lowered schedule computes one step and ends: completeness, order, pairing, and no deadlock.

Every fault is an InvalidSchedule that names the rank and the action. What is checked is the very list that runs.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import product, zip_longest

from plait.schedule.actions import (
    BW,
    DROP,
    REDUCE,
    SEND,
    WEIGHT_GRADIENTS,
    Action,
    B,
    F,
    Kind,
    Message,
    Program,
    Schedule,
    W,
)
from plait.schedule.bulk import uncollected
from plait.schedule.walk import walk
from plait.spec.errors import InvalidSchedule

NEEDS = {F: (), B: (F,), W: (B,), BW: (F,)}  # what must be done before each pass
MAKES = {F: (F,), B: (B,), W: (W,), BW: (B, W)}


@uncollected()
def check(schedule: Schedule) -> Schedule:
    """Return the lowered schedule if it is valid, else raise InvalidSchedule.

    Valid: each (stage, micro-batch) has on its owner one F and, in training, one BW or one B then one W, in this
    order; every message is produced, sent, received and consumed once, in this order, and each channel sends and
    receives in one order; each weight gradient is reduced once and each REDUCE has one to reduce; where gathered
    weights are dropped, nothing is dropped that was not used and nothing stays gathered; and no rank waits for ever,
    neither with sends that return at once nor with sends that block until their receive is posted.
    """
    for rank, program in enumerate(schedule.programs):
        computed = [action for action in program if action.message is None]
        passes = [part for action in computed for part in action.parts]
        _check_places(schedule, rank, [*passes, *program])
        _check_passes(schedule, rank, passes)
        _check_messages(schedule, rank, program)
        _check_reductions(rank, computed)
        _check_drops(rank, computed)
    _check_channels(schedule)
    try:
        _check_end(schedule, blocking=True)
    except InvalidSchedule:
        _check_end(schedule, blocking=False)  # the plainer reason, where it ends in neither way
        raise
    return schedule


def _check_end(schedule: Schedule, blocking: bool) -> None:
    """The walk reaches every action. One that does so with blocking sends does so without."""
    for _ in walk(schedule, blocking):
        pass


def _check_places(schedule: Schedule, rank: int, actions: list[Action]) -> None:
    """Stages that exist and belong to the rank, micro-batches that exist, messages between neighbours."""
    held, count = schedule.held_by(rank), schedule.micro_batches
    ends = [(action.message.source, action.message.target) for action in actions if action.message is not None]
    strange = {action.stage for action in actions} - set(held)
    beyond = {action.micro for action in actions} - set(range(count))
    apart = {pair for pair in set(ends) if not _joins_ranks(schedule, *pair)}
    for action in actions if strange or beyond or apart else ():
        if action.stage in strange:
            raise _fault(rank, action, f"is not of this rank, which holds {_listed(held)}")
        if action.micro in beyond:
            raise _fault(rank, action, f"is not one of {count} micro-batches")
        if action.message is not None and action.message[:2] in apart:
            raise _fault(rank, action, "does not join two neighbouring stages on different ranks")


def _listed(stages: tuple[int, ...]) -> str:
    return f"stage{'s' * (len(stages) != 1)} {', '.join(map(str, stages)) or 'none'}"


def _joins_ranks(schedule: Schedule, source: int, target: int) -> bool:
    exist = 0 <= source < schedule.stages and 0 <= target < schedule.stages
    return exist and abs(source - target) == 1 and schedule.crosses(Message(source, target, 0))


def _check_passes(schedule: Schedule, rank: int, passes: list[Action]) -> None:
    """F, then B, then W, once each; in an evaluation F alone."""
    done: dict[Kind, set[tuple[int, int]]] = {F: set(), B: set(), W: set()}
    for part in passes:
        at = (part.stage, part.micro)
        if part.kind is not F and not schedule.trains:
            raise _fault(rank, part, "has no place in an evaluation")
        for kind in NEEDS[part.kind]:
            if at not in done[kind]:
                raise _fault(rank, part, f"comes without {Action(kind, *at)} before it")
        for kind in MAKES[part.kind]:
            if at in done[kind]:
                raise _fault(rank, part, f"comes after {kind} of this stage and micro-batch was already done")
            done[kind].add(at)
    for at in product(schedule.held_by(rank), range(schedule.micro_batches)):
        missing = [kind for kind in ((F, B, W) if schedule.trains else (F,)) if at not in done[kind]]
        if missing:
            kind = BW if missing == [B, W] else missing[0]
            raise _fault(rank, Action(kind, *at), "is missing")


def _check_messages(schedule: Schedule, rank: int, program: Program) -> None:
    """Received or made here before it is consumed, made before it is sent, and nothing left over."""
    arriving: set[Message] = set()  # received, or handed over on this rank, and not yet consumed
    leaving: set[Message] = set()  # made for another rank and not yet sent
    for action in program:
        kind, message = action.kind, action.message
        if message is None:
            taken = schedule.inputs(action)
            if not arriving.issuperset(taken):
                absent = next(one for one in taken if one not in arriving)
                raise _fault(rank, action, f"needs the {absent}, {_without_source(schedule, absent)}")
            arriving.difference_update(taken)
            for made in schedule.outputs(action):
                (leaving if schedule.crosses(made) else arriving).add(made)
        elif kind is SEND:
            if message not in leaving:
                raise _fault(rank, action, "comes before its message is computed, or a second time")
            leaving.remove(message)
        elif message in arriving:
            raise _fault(rank, action, "is posted twice")
        else:
            arriving.add(message)
    if leaving:
        raise _fault(rank, Action.send(min(leaving)), "is missing: its message is computed and never sent")
    if arriving:
        raise _fault(rank, Action.receive(min(arriving)), "is posted, but nothing after it consumes its message")


def _without_source(schedule: Schedule, message: Message) -> str:
    if schedule.crosses(message):
        return f"but no {Action.receive(message)} stands before it"
    return "which this rank computes only later"


def _check_reductions(rank: int, computed: list[Action]) -> None:
    """In training every weight gradient is followed by a REDUCE of its stage, and each REDUCE has one to reduce."""
    gathered: set[int] = set()  # stages with weight gradients that are not reduced
    for action in computed:
        if action.kind is REDUCE:
            if action.stage not in gathered:
                raise _fault(rank, action, "has no weight gradient to reduce")
            gathered.remove(action.stage)
        elif action.kind in WEIGHT_GRADIENTS:
            gathered.add(action.stage)
        elif action.backward is not None:
            gathered.add(action.backward.stage)
    for stage in sorted(gathered):
        raise _fault(rank, Action(REDUCE, stage), "is missing after the stage's last weight gradient")


def _check_drops(rank: int, computed: list[Action]) -> None:
    """Where weights are dropped at all: each DROP follows a use of its stage, and nothing stays gathered."""
    if not any(action.kind is DROP for action in computed):
        return
    gathered: set[int] = set()  # stages used since they were last dropped
    for action in computed:
        if action.kind is DROP:
            if action.stage not in gathered:
                raise _fault(rank, action, "drops weights that nothing has gathered")
            gathered.remove(action.stage)
        gathered.update(part.stage for part in action.parts)
    for stage in sorted(gathered):
        raise _fault(rank, Action(DROP, stage), "is missing after the stage's last use")


def _check_channels(schedule: Schedule) -> None:
    """What a rank sends to another is what the other receives from it, in the same order."""
    sends: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
    receives: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
    for program in schedule.programs:
        for action in program:
            if action.message is not None:
                side = sends if action.kind is SEND else receives
                side[schedule.channel(action.message)].append(action.message)
    for channel in sorted(sends.keys() | receives.keys()):
        if sends[channel] != receives[channel]:
            _tell_apart(channel, sends[channel], receives[channel])


def _tell_apart(channel: tuple[int, int], sends: list[Message], receives: list[Message]) -> None:
    """Raise what is wrong at the first place where a channel's two ends differ."""
    source, target = channel
    for sent, received in zip_longest(sends, receives):
        if sent is None:
            raise _fault(target, Action.receive(received), f"has no SEND on rank {source}")
        if received is None:
            raise _fault(source, Action.send(sent), f"has no RECV on rank {target}")
        if sent != received:
            meets = f"meets {Action.receive(received)} of rank {target}: the orders differ"
            raise _fault(source, Action.send(sent), meets)


def _fault(rank: int, action: Action, problem: str) -> InvalidSchedule:
    return InvalidSchedule(f"rank {rank}: {action} {problem}", rank=rank)
