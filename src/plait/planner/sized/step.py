"""A rank's step in sizes: its program, action by action, and the most bytes that there were.

Messages live as long as in `parallel/pipeline.py`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import NamedTuple

from plait.planner.seat import Seat
from plait.planner.sized.passes import Passes
from plait.planner.sized.tape import Sized
from plait.planner.steady import activations_extrapolated, counted_lengths
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
        self.seat, self.passes = seat, Passes(seat, splits_backward(seat.run.schedule))
        self.tape, self.rows = self.passes.tape, self.passes.rows
        self.arrived: dict[Message, Sized] = {}
        self.leaving: dict[Message, Sized] = {}
        self.in_flight: deque[Sized] = deque()
        self.completing = completing(seat.program)
        self.handlers = {
            F: self._compute, B: self._compute, BW: self._compute, FB: self._compute, W: self._weights,
            SEND: self._send, RECV: self._receive, REDUCE: self._reduce, DROP: self._drop,
        }  # fmt: skip

    def run(self) -> Peak:
        seat, t = self.seat, self.tape
        batch = t.new(seat.batch, 1)
        for action in seat.program:
            self.handlers[action.kind](action)
        self.in_flight.clear()
        self.rows.finish()
        del batch
        return Peak(t.heap.most, self.rows.buffers.most)

    def _receive(self, action: Action) -> None:
        self.arrived[_message(action)] = self.passes.boundary()

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
                made.append(self.passes.forward(part, *tensors))
            else:
                self._arm(part)
                made.append(self.passes.backward(part, *tensors))
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

    def _weights(self, action: Action) -> None:
        self._arm(action)
        self.passes.weights(action)

    def _arm(self, action: Action) -> None:
        if action in self.completing:
            self.rows.arm(action.stage)


def _message(action: Action) -> Message:
    assert action.message is not None, f"{action} carries no message"
    return action.message
