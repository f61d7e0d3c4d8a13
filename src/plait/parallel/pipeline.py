"""The executor: one rank's program of a lowered schedule, action by action. There is no other micro-batch loop.

| what is split      | forward                   | backward                  | replaces                  |
|--------------------|---------------------------|---------------------------|---------------------------|
| the list of blocks | a message per boundary    | a message back of the     | Decoder.blocks, both ends |
|                    | and micro-batch           | same size                 |                           |

Receives are posted where the schedule says (before they are needed), a send waits only for one that was started
`SENDS_IN_FLIGHT` per rank before it, and each direction between ranks has a communicator of its own. It knows nothing
of what a stage computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Protocol, TypeVar

import torch

from plait.parallel import collectives as comm
from plait.parallel.collectives import Group, Transfer
from plait.parallel.mesh import Mesh
from plait.parallel.outcome import lost_peer
from plait.parallel.stage import Signature, Stage, Tensors
from plait.schedule import SENDS_IN_FLIGHT, Action, Kind, Message, Schedule, Span, completing
from plait.schedule.standing import standing
from plait.spec.errors import PlaitError

T = TypeVar("T")
ANSWER_WAIT_S = 5.0


class States(Protocol):
    """Who is told when a stage's gradients are about to be, and are, complete, and that its weights may be freed."""

    def arm(self, stage: int) -> None: ...

    def flush(self, stage: int) -> None: ...

    def drop(self, stage: int) -> None: ...


class Pipeline:
    """Runs programs over the stages of this rank. `states` may be None where nothing is trained or sharded."""

    def __init__(self, stages: Mapping[int, Stage], mesh: Mesh, states: States | None = None) -> None:
        self.stages, self.states = stages, states
        self.rank, self.device = mesh.at.pp, mesh.device
        self.ranks = mesh.layout.group("pp", mesh.rank)  # of the world
        self.up, self.down = mesh.group("pp", "up"), mesh.group("pp", "down")
        self._handlers: dict[Kind, Callable[[Schedule, Action], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.W: self._weights,
            Kind.BW: self._backward,
            Kind.FB: self._both,
            Kind.SEND: self._send,
            Kind.RECV: self._receive,
            Kind.REDUCE: self._reduce,
            Kind.DROP: self._drop,
        }
        self._arrived: dict[Message, list[Transfer]] = {}
        self._leaving: dict[Message, Tensors] = {}
        self._in_flight: deque[Transfer] = deque()
        self._completing: frozenset[Action] = frozenset()  # each stage's last weight gradients before a reduction
        self._spans: list[Span] = []

    def connect(self, schedule: Schedule) -> None:
        """Let every two ranks that will exchange messages do so once, in one order. Collective.

        NCCL joins two ranks at their first message, and holds the host until both are there; a receive that is posted
        early would wait for a rank that waits itself.
        """
        owners = list(zip(schedule.owner, schedule.owner[1:], strict=False))
        pairs = {pair for a, b in owners for pair in ((a, b), (b, a)) if a != b}
        for source, target in sorted(pairs):
            group = self.up if target > source else self.down
            if self.rank in (source, target) and group.connects_late:
                one = torch.zeros(1, device=self.device)
                here = self.rank == source
                (comm.send(one, group, target) if here else comm.receive(one, group, source)).wait()

    def run(self, schedule: Schedule) -> list[Span]:
        """One step of this rank's program; returns its compute actions with their times (seconds, waiting left out).

        On CUDA these are the times in which the host starts the work.
        """
        program = schedule.programs[self.rank]
        self._spans = []
        self._completing = completing(program)
        at = 0
        try:
            for at, action in enumerate(program):  # noqa: B007
                self._handlers[action.kind](schedule, action)
            at = len(program)
            self._settle(at_most=0)
        except RuntimeError as error:
            if not lost_peer(error):
                raise
            raise self._stopped(schedule, at, error) from error
        assert not self._arrived and not self._leaving, "a step must consume every message"
        return self._spans

    def _stopped(self, schedule: Schedule, at: int, error: RuntimeError) -> PlaitError:
        """What is said where a transfer failed: where the ranks of this pipeline stand."""
        answers = comm.tell_by_store("plait/standing", str(at), self.ranks, self.ranks[self.rank], ANSWER_WAIT_S)
        positions = {pp: int(answers[rank]) for pp, rank in enumerate(self.ranks) if rank in answers}
        return PlaitError(
            f"the pipeline stopped: {str(error).splitlines()[0]}",
            f"{standing(schedule, positions)}\nwhoever gave no answer, or is furthest behind, holds the others up",
        )

    def _forward(self, schedule: Schedule, action: Action) -> None:
        received, stage = self._take(schedule, action), self.stages[action.stage]
        outputs = self._timed(action, lambda: stage.forward(action.micro, received))
        self._give(schedule, action, outputs, stage.outputs)

    def _backward(self, schedule: Schedule, action: Action) -> None:
        gradients, stage = self._take(schedule, action), self.stages[action.stage]
        self._arm(action)
        backward = stage.backward if action.kind is Kind.BW else stage.backward_input
        returned = self._timed(action, lambda: backward(action.micro, gradients))
        self._give(schedule, action, returned, stage.inputs)

    def _weights(self, schedule: Schedule, action: Action) -> None:
        self._arm(action)
        self._timed(action, lambda: self.stages[action.stage].backward_weight(action.micro))

    def _both(self, schedule: Schedule, action: Action) -> None:
        """A forward and a backward that nothing may come between: what each waits for is there before both."""
        forward, backward = action.parts
        received, gradients = self._take(schedule, forward), self._take(schedule, backward)
        self._arm(backward)

        def compute() -> tuple[Tensors, Tensors]:
            outputs = self.stages[forward.stage].forward(forward.micro, received)
            return outputs, self.stages[backward.stage].backward(backward.micro, gradients)

        outputs, returned = self._timed(action, compute)
        self._give(schedule, forward, outputs, self.stages[forward.stage].outputs)
        self._give(schedule, backward, returned, self.stages[backward.stage].inputs)

    def _arm(self, action: Action) -> None:
        if self.states is not None and action in self._completing:
            self.states.arm(action.stage)

    def _timed(self, action: Action, compute: Callable[[], T]) -> T:
        start = perf_counter()
        result = compute()
        self._spans.append(Span(action, start, perf_counter()))
        return result

    def _reduce(self, schedule: Schedule, action: Action) -> None:
        if self.states is not None:
            self.states.flush(action.stage)

    def _drop(self, schedule: Schedule, action: Action) -> None:
        if self.states is not None:
            self.states.drop(action.stage)

    def _receive(self, schedule: Schedule, action: Action) -> None:
        message, stage = _message(action), self.stages[action.stage]
        source, _ = schedule.channel(message)
        signature = stage.inputs if message.what == "activation" else stage.outputs
        empty = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in signature]
        self._arrived[message] = [comm.receive(x, self._group(schedule, message), source) for x in empty]

    def _send(self, schedule: Schedule, action: Action) -> None:
        message = _message(action)
        group, target = self._group(schedule, message), schedule.owner[message.target]
        self._in_flight += [comm.send(x, group, target) for x in self._leaving.pop(message)]
        self._settle(at_most=SENDS_IN_FLIGHT * schedule.ranks)

    def _settle(self, at_most: int) -> None:
        """Wait for the oldest sends, so that what was sent can be freed.

        gloo cannot say whether a send is done. To wait is safe: a checked schedule ends even where every send blocks.
        """
        while len(self._in_flight) > at_most:
            self._in_flight.popleft().wait()

    def _group(self, schedule: Schedule, message: Message) -> Group:
        """One communicator per direction between ranks: the order of messages is checked for each of them."""
        source, target = schedule.channel(message)
        return self.up if target > source else self.down

    def _take(self, schedule: Schedule, action: Action) -> Tensors:
        return tuple(x.wait() for message in schedule.inputs(action) for x in self._arrived.pop(message))

    def _give(self, schedule: Schedule, action: Action, tensors: Tensors, expected: Signature) -> None:
        for message in schedule.outputs(action):
            _check_signature(message, tensors, expected)
            if schedule.crosses(message):
                self._leaving[message] = tensors
            else:
                self._arrived[message] = [Transfer(x, []) for x in tensors]


def _message(action: Action) -> Message:
    assert action.message is not None, f"{action} carries no message"
    return action.message


def _check_signature(message: Message, tensors: Tensors, expected: Signature) -> None:
    got = tuple((tuple(x.shape), x.dtype) for x in tensors)
    if got != expected:
        raise PlaitError(
            f"stage {message.source} made {_text(got)} as {message}, where {_text(expected)} is expected",
            "a stage must give the shapes and dtypes that the boundary declares",
        )


def _text(signature: Signature) -> str:
    return ", ".join(f"{shape} {str(dtype).removeprefix('torch.')}" for shape, dtype in signature) or "nothing"
