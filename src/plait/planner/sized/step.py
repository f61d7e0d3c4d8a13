"""A rank's step in sizes: its program, action by action, and the most bytes that there were.

Messages, micro-batches in flight and what B leaves for W live as long as in `parallel/pipeline.py` and `stage.py`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any, NamedTuple

from plait.planner.seat import Seat
from plait.planner.sized import ops
from plait.planner.sized.blocks import forward
from plait.planner.sized.layers import product
from plait.planner.sized.stage import Late, Stage
from plait.planner.sized.states import Rows, units_of
from plait.planner.sized.tape import Leaf, Sized, Tape
from plait.planner.steady import activations_extrapolated, counted_lengths, numbers_per_token
from plait.schedule.actions import (
    BW,
    DROP,
    FB,
    RECV,
    REDUCE,
    SEND,
    SENDS_IN_FLIGHT,
    Action,
    B,
    F,
    Message,
    W,
    completing,
)
from plait.spec.layout import Layout
from plait.spec.pipeline import splits_backward
from plait.spec.run import RunSpec


class Peak(NamedTuple):
    """The most bytes at one time: activations, and what comes and goes with weights and gradients."""

    activations: int
    buffers: int


class Live(NamedTuple):
    """A micro-batch between its forward and its backward."""

    received: Leaf | None
    roots: list[Sized]
    seeds: list[Sized]


def peak(seat: Seat) -> Peak:
    """Of one step of a rank, on the kernels of a CPU and over NCCL."""
    run, layout, micro_batches = seat.run, seat.layout, seat.micro_batches
    lengths = counted_lengths(run, layout, seat.rank, micro_batches)
    found = [_Step(replace(seat, run=_shortened(run, layout, length))).run() for length in lengths]
    peaks = found[0].activations, found[-1].activations
    return Peak(activations_extrapolated(run, layout, lengths, peaks, micro_batches), found[-1].buffers)


def _shortened(run: RunSpec, layout: Layout, micro_batches: int) -> RunSpec:
    """The run with so many micro-batches in a step."""
    size = micro_batches * run.batch.micro_size * layout.dp
    return run.model_copy(update={"batch": run.batch.model_copy(update={"global_size": size})})


class _Step:
    def __init__(self, seat: Seat) -> None:
        self.seat, self.tape = seat, Tape()
        self.rows = Rows(seat, self.tape)
        self.late = Late() if splits_backward(seat.run.schedule) else None
        weights = self.rows.weights()
        self.stage = Stage(seat, self.tape, weights, self.late)
        self.units = {stage: units_of(self.rows, stage) for stage in seat.mine}
        self.live: dict[tuple[int, int], Live] = {}
        self.products: dict[tuple[int, int], list[Any]] = {}
        self.arrived: dict[Message, Sized] = {}
        self.leaving: dict[Message, Sized] = {}
        self.in_flight: deque[Sized] = deque()
        self.returned: Sized | None = None
        self.completing = completing(seat.program)
        self.handlers = {
            F: self._compute, B: self._compute, BW: self._compute, FB: self._compute, W: self._weights,
            SEND: self._send, RECV: self._receive, REDUCE: self._reduce, DROP: self._drop,
        }  # fmt: skip

    def run(self) -> Peak:
        seat, t = self.seat, self.tape
        batch = [t.new(seat.micro_batches * seat.tokens, ops.LONG) for _ in range(numbers_per_token(seat.run))]
        batch += [t.new(seat.tokens // seat.run.batch.micro_size, ops.LONG)] * (not seat.run.data.mask_documents)
        for action in seat.program:
            self.handlers[action.kind](action)
        self.in_flight.clear()
        self.rows.finish()
        batch.clear()
        return Peak(t.heap.most, self.rows.buffers.most)

    def _receive(self, action: Action) -> None:
        self.arrived[_message(action)] = self.tape.new(self._boundary, self.seat.widths.compute)

    def _reduce(self, action: Action) -> None:
        self.rows.flush(action.stage)

    def _drop(self, action: Action) -> None:
        self.rows.drop(action.stage)

    def _compute(self, action: Action) -> None:
        """Passes that nothing comes between: what each is given is held until all are over."""
        schedule = self.seat.schedule
        given = [[self.arrived.pop(message) for message in schedule.inputs(part)] for part in action.parts]
        made = []
        for part, tensors in zip(action.parts, given, strict=True):
            if part.kind is F:
                made.append(self._forward(part, *tensors))
            else:
                self._arm(part)
                made.append(self._backward(part, *tensors))
        for part in action.parts:
            x = made.pop(0)
            for message in schedule.outputs(part):
                assert x is not None
                (self.leaving if schedule.crosses(message) else self.arrived)[message] = x
            del x

    def _send(self, action: Action) -> None:
        self.in_flight.append(self.leaving.pop(_message(action)))
        while len(self.in_flight) > SENDS_IN_FLIGHT * self.seat.schedule.ranks:
            self.in_flight.popleft()

    def _arm(self, action: Action) -> None:
        if action in self.completing:
            self.rows.arm(action.stage)

    @property
    def _boundary(self) -> int:
        return self.seat.between * self.seat.run.model.hidden

    # --- passes of a stage, as in parallel/stage.py ---

    def _forward(self, action: Action, given: Sized | None = None) -> Sized | None:
        received = None
        if given is not None:
            received = Leaf(given.memory, given.elements, given.width, self, "input")
        x, terms = forward(self.stage, action.stage, received, self.units[action.stage])
        last = action.stage == self.seat.stages.last
        seeds = [self.tape.new(term.elements, term.width) for term in terms.values()]
        self.live[action.stage, action.micro] = Live(received, [*([] if last else [x]), *terms.values()], seeds)
        return None if last else x.detach()

    def _backward(self, action: Action, given: Sized | None = None) -> Sized | None:
        received, roots, seeds = self.live.pop((action.stage, action.micro))
        late = self.late if action.kind is B else None
        if late is not None:
            late.kept = self.products[action.stage, action.micro] = []
        self.tape.backward(roots, [*([given] if given is not None else []), *seeds])
        if late is not None:
            late.kept = None
        returned, self.returned = self.returned, None
        del received
        return returned

    def _weights(self, action: Action) -> None:
        self._arm(action)
        for weight, x, _, split in self.products.pop((action.stage, action.micro)):
            weight.gradients.add(weight.place, product(self.stage, weight, x, split))

    # --- the gradient of what was received ---

    def keeps(self, place: Any) -> bool:
        return False

    def add(self, place: Any, gradient: Sized) -> None:
        self.returned = gradient


def _message(action: Action) -> Message:
    assert action.message is not None, f"{action} carries no message"
    return action.message
