"""The vocabulary of a pipeline: kinds, actions, messages between stages, and the schedule that lists them per rank.

Values only: nothing here orders, costs or runs anything. An action says *what* happens; where it stands in its rank's
program says *when*. The lowered program is the one that the executor runs, so these types hold what a handler needs to
know and no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple


class Kind(StrEnum):
    F = "F"  # forward of one micro-batch through one stage
    B = "B"  # gradient with respect to the stage's input
    W = "W"  # gradient with respect to the stage's weights
    BW = "BW"  # both gradients in one pass
    FB = "FB"  # F of one micro-batch run together with BW of another
    SEND = "SEND"  # start a send; nothing waits for it, but for one of long ago where very many are on their way
    RECV = "RECV"  # post a receive; its consumer waits, not the action itself
    DROP = "DROP"  # the stage's gathered weights may go (the next compute action of the stage gathers them again)
    REDUCE = "REDUCE"  # start to reduce over the stage's replicas what its gradients gathered since the last REDUCE


F, B, W, BW, FB, SEND, RECV, DROP, REDUCE = Kind  # plain names: looking up an enum's member is slow before 3.12
COMPUTE = (F, B, W, BW, FB)
SENDS_IN_FLIGHT = 2  # messages of a rank on their way, per pipeline rank: more than 1F1B ever has
WEIGHT_GRADIENTS = (W, BW)  # the single passes that make them


class Message(NamedTuple):
    """What a stage hands to a neighbour for one micro-batch: an activation to the next, a gradient to the previous."""

    source: int  # stage
    target: int  # stage
    micro: int

    @property
    def what(self) -> Literal["activation", "gradient"]:
        return "activation" if self.target > self.source else "gradient"

    def __str__(self) -> str:
        return f"{self.what} of micro-batch {self.micro} from stage {self.source} to {self.target}"


class Action(NamedTuple):
    """One entry of a rank's program. `micro` is 0 where it means nothing (DROP, REDUCE)."""

    kind: Kind
    stage: int
    micro: int = 0
    message: Message | None = None  # SEND and RECV: what travels; the other end is its other stage
    backward: Action | None = None  # FB: the BW that runs along with F(stage, micro)

    @classmethod
    def send(cls, message: Message) -> Action:
        return cls(SEND, message.source, message.micro, message)

    @classmethod
    def receive(cls, message: Message) -> Action:
        return cls(RECV, message.target, message.micro, message)

    @classmethod
    def together(cls, forward: Action, backward: Action) -> Action:
        """FB: an F and a BW, of any two stages of one rank."""
        return cls(FB, forward.stage, forward.micro, backward=backward)

    @property
    def parts(self) -> tuple[Action, ...]:
        """The single passes that a compute action stands for: (F, BW) for FB, itself for every other; else nothing."""
        if self.backward is not None:
            return Action(F, self.stage, self.micro), self.backward
        return (self,) if self.kind in COMPUTE else ()

    def __str__(self) -> str:
        if self.message is not None:
            source, target, micro = self.message
            ends = f"stage {source} to {target}" if self.kind is SEND else f"stage {target} from {source}"
            return f"{self.kind}({ends}, micro {micro})"
        if self.backward is not None:
            return f"FB({' + '.join(map(str, self.parts))})"
        return f"{self.kind}(stage {self.stage}" + (f", micro {self.micro})" if self.kind in COMPUTE else ")")


Program = tuple[Action, ...]


@lru_cache(maxsize=16)
def completing(program: Program) -> frozenset[Action]:
    """Each stage's last weight gradient before each of its reductions."""
    last: dict[int, Action] = {}
    found = set()
    for action in program:
        last |= {part.stage: part for part in action.parts if part.kind in WEIGHT_GRADIENTS}
        if action.kind is REDUCE:
            found.add(last[action.stage])
    return frozenset(found)


@dataclass(frozen=True)
class Schedule:
    """Every rank's program for one step. `owner[stage]` is the pipeline rank that holds the stage.

    Generators list compute actions only; `lower` adds the communication. `trains` is False for evaluation (F only).
    """

    name: str
    micro_batches: int
    owner: tuple[int, ...]
    programs: tuple[Program, ...]
    trains: bool = True

    @property
    def ranks(self) -> int:
        return len(self.programs)

    @cached_property
    def stages(self) -> int:
        return len(self.owner)

    def held_by(self, rank: int) -> tuple[int, ...]:
        """The stages of one rank, ascending."""
        return tuple(stage for stage, owner in enumerate(self.owner) if owner == rank)

    def inputs(self, action: Action) -> tuple[Message, ...]:
        """What the action consumes from neighbouring stages, those on the same rank included."""
        kind, stage, micro, _, backward = action
        if backward is not None:
            return tuple([message for part in action.parts for message in self.inputs(part)])
        if kind is F:
            return (Message(stage - 1, stage, micro),) if stage > 0 else ()
        returns = kind is B or kind is BW
        return (Message(stage + 1, stage, micro),) if returns and stage + 1 < self.stages else ()

    def outputs(self, action: Action) -> tuple[Message, ...]:
        """What the action produces for neighbouring stages, those on the same rank included."""
        kind, stage, micro, _, backward = action
        if backward is not None:
            return tuple([message for part in action.parts for message in self.outputs(part)])
        if kind is F:
            return (Message(stage, stage + 1, micro),) if stage + 1 < self.stages else ()
        returns = kind is B or kind is BW
        return (Message(stage, stage - 1, micro),) if returns and stage > 0 else ()

    def channel(self, message: Message) -> tuple[int, int]:
        """(sending rank, receiving rank). Equal where both stages share a rank: then nothing is sent.

        Messages of one channel are sent and received in one order, activations and gradients together, so a
        communicator per channel needs no tags and can never wait on itself.
        """
        source, target, _ = message
        return self.owner[source], self.owner[target]

    def crosses(self, message: Message) -> bool:
        """Whether the message has to travel between ranks."""
        source, target, _ = message
        return self.owner[source] != self.owner[target]
