"""What one micro-batch keeps of a stage, and from that the peak of a whole step.

`step.py` runs every micro-batch; here one stands for all of them, which takes no time and leaves out what comes and
goes with weights. A test holds the two against each other.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from plait.planner.seat import Seat
from plait.planner.sized.passes import Passes
from plait.planner.sized.tape import Heap, Sized
from plait.schedule.actions import BW, RECV, SENDS_IN_FLIGHT, Action, B, F, Kind, Message, Schedule, W

# Device -> whether its RMSNorm is one kernel; in pieces it keeps what it normalised too, in fp32.
FUSED_NORM: Mapping[str, bool] = {"cuda": True, "cuda-shared": True, "cpu": False, "auto": False}


class Kept(NamedTuple):
    """Bytes of one micro-batch of a stage: `held` from its forward to its backward and `late` from B to W, what stages
    hand each other left out; the most that F, BW (the `whole` backward), B and W add to what is there; and what stages
    `send` each other."""

    held: int
    late: int
    forward: int
    whole: int
    backward: int
    weights: int
    send: int
    ends: int  # of the stage, that others are at

    @property
    def between(self) -> int:
        """All that is there from forward to backward."""
        return self.held + self.ends * self.send


def kept(seat: Seat, stage: int, splits: bool) -> Kept:
    """Of a stage of the rank, on the kernels of the run's device; `splits`: B and W are taken apart."""
    passes = Passes(seat, splits, FUSED_NORM[seat.run.train.device])
    _run(passes, stage, BW)  # of a first micro-batch gradients of weights stay where the others are added
    whole = _run(passes, stage, BW)
    return _run(passes, stage, B)._replace(whole=whole.whole) if splits else whole


def _run(passes: Passes, stage: int, kind: Kind) -> Kept:
    heap = passes.tape.heap
    received = [passes.boundary() for _ in range(stage > 0)]
    gradients = [passes.boundary() for _ in range(stage < passes.seat.stages.last)]
    handed = sum(x.memory.size for x in gradients)
    empty = heap.live - handed
    forward = _most(heap, lambda: passes.forward(Action(F, stage), *received))
    held = heap.live - empty - 2 * handed  # what the stage hands on is as large as what comes back
    backward = _most(heap, lambda: passes.backward(Action(kind, stage), *gradients))
    gradients.clear()
    late = heap.live - empty
    weights = _most(heap, lambda: passes.weights(Action(W, stage))) if kind is B else 0
    ends = len(received) + (handed > 0)
    return Kept(held, late, forward, backward, backward, weights, passes.boundary().memory.size, ends)


def _most(heap: Heap, run: Callable[[], Sized | None]) -> int:
    """The most bytes that running adds to what is there."""
    heap.most = before = heap.live
    run()
    return heap.most - before


def peak_of(seat: Seat, schedule: Schedule, stages: Mapping[int, Kept]) -> int:
    """The most bytes of activations on a rank in a step of the schedule, tokens and labels included."""
    level = _Level(seat, schedule, stages)
    for action in schedule.programs[seat.at.pp]:
        level.take(action)
    return level.most


class _Level:
    """The bytes that there are between the actions of a program, and the most that there ever were.

    What stages hand on is counted apart: it lives while it is on its way, is read, or is held on either side.
    """

    def __init__(self, seat: Seat, schedule: Schedule, stages: Mapping[int, Kept]) -> None:
        self.stages, self.last, self.most_sends = stages, schedule.stages - 1, SENDS_IN_FLIGHT * schedule.ranks
        self.boundary = next(iter(stages.values())).send
        self.now = self.most = seat.batch
        self.leaving: deque[Message] = deque()
        self.holders: Counter[Message] = Counter()

    def take(self, action: Action) -> None:
        if action.message is not None:
            if action.kind is RECV:
                self._hold(action.message)
            else:
                self.leaving.append(action.message)
            if len(self.leaving) > self.most_sends:
                self._let_go(self.leaving.popleft())
        for part in action.parts:
            self._pass(part)
        for part in action.parts:
            if part.kind in (B, BW):
                self._let_go(Message(part.stage + 1, part.stage, part.micro))

    def _pass(self, part: Action) -> None:
        (kind, stage, micro, *_), of = part, self.stages[part.stage]
        entered, left = Message(stage - 1, stage, micro), Message(stage, stage + 1, micro)
        if kind is F:
            self._change(of.forward, of.held)
            self._hold(left, times=2)  # it is sent, or read here, and backward starts from it
        elif kind is W:
            self._change(of.weights, -of.late)
        else:
            added, late = (of.backward, of.late) if kind is B else (of.whole, 0)
            self._change(added, late - of.held)
            self._hold(Message(stage, stage - 1, micro))
            self._let_go(entered)
            self._let_go(left)

    def _hold(self, message: Message, times: int = 1) -> None:
        self._change(0, self._size(message) if not self.holders[message] else 0)
        self.holders[message] += times

    def _let_go(self, message: Message) -> None:
        self.holders[message] -= 1
        self._change(0, -self._size(message) if not self.holders[message] else 0)

    def _size(self, message: Message) -> int:
        """Nothing comes to the first stage or from the last."""
        return self.boundary if 0 <= min(message.source, message.target) <= max(message[:2]) <= self.last else 0

    def _change(self, added: int, change: int) -> None:
        self.most = max(self.most, self.now + added, self.now + change)
        self.now += change
