"""What a rank's stages do in sizes, as in `parallel/stage.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

from plait.planner.seat import Seat
from plait.planner.sized.blocks import forward
from plait.planner.sized.layers import product
from plait.planner.sized.stage import Late, Stage
from plait.planner.sized.states import Rows, units_of
from plait.planner.sized.tape import Leaf, Sized, Tape
from plait.schedule.actions import Action, B


class Live(NamedTuple):
    """A micro-batch between its forward and its backward."""

    received: Leaf | None
    roots: list[Sized]
    seeds: list[Sized]


class Passes:
    """Forward and backward of every stage of a rank; `splits` takes B and W apart."""

    def __init__(self, seat: Seat, splits: bool, fused_norm: bool = False) -> None:
        self.seat, self.tape = seat, Tape()
        self.rows = Rows(seat, self.tape)
        self.late = Late() if splits else None
        self.stage = Stage(seat, self.tape, self.rows.weights(), self.late, fused_norm)
        self.units = {stage: units_of(self.rows, stage) for stage in seat.mine}
        self.live: dict[tuple[int, int], Live] = {}
        self.products: dict[tuple[int, int], list[Any]] = {}
        self.returned: Sized | None = None

    def boundary(self) -> Sized:
        """A new tensor as stages send it."""
        return self.tape.new(self.seat.between * self.seat.run.model.hidden, self.seat.widths.compute)

    def forward(self, action: Action, given: Sized | None = None) -> Sized | None:
        received = None
        if given is not None:
            received = Leaf(given.memory, given.elements, given.width, self, "input")
        x, terms = forward(self.stage, action.stage, received, self.units[action.stage])
        last = action.stage == self.seat.stages.last
        seeds = [self.tape.new(term.elements, term.width) for term in terms.values()]
        self.live[action.stage, action.micro] = Live(received, [*([] if last else [x]), *terms.values()], seeds)
        return None if last else x.detach()

    def backward(self, action: Action, given: Sized | None = None) -> Sized | None:
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

    def weights(self, action: Action) -> None:
        for weight, x, _, split in self.products.pop((action.stage, action.micro)):
            weight.gradients.add(weight.place, product(self.stage, weight, x, split))

    # --- the gradient of what was received ---

    def keeps(self, place: Any) -> bool:
        return False

    def add(self, place: Any, gradient: Sized) -> None:
        self.returned = gradient
