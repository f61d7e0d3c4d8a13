"""Pipelines whose stages sleep: what is left of the clock when compute costs nothing is the schedule and its executor.

F, B and W of every stage are sleeps of the same length, so that 4 or 8 ranks fit on few cores; 64 KB go to each
neighbour. Beside each sleep stands a product of one weight, so that gradients show whether both sides computed the
same. plait runs its own executor over such stages; torch.distributed.pipelining runs its own over a module whose
backward sleeps B and whose weight gradient, handed to it by `dw_builder`, sleeps W. A joint backward sleeps twice on
both sides.

Neither side has to be believed about its order: the peer's `pipeline_order` is read as a schedule of plait's, simulated
and counted like our own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import sleep
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from benchmarks.peers import SCHEDULES, collected
from plait.parallel.launch import World
from plait.parallel.mesh import Mesh
from plait.parallel.pipeline import Pipeline
from plait.parallel.stage import Signature, Tensors
from plait.schedule import Action, Costs, Kind, Schedule, check, generate, live, lower, simulate
from plait.spec.layout import Layout

# The peer's name of a pass -> plait's kind.
PASSES = {"F": Kind.F, "I": Kind.B, "W": Kind.W, "B": Kind.BW}


@dataclass(frozen=True)
class Naps:
    """Seconds of each pass of each stage, and numbers in a message."""

    f: float = 0.010
    b: float = 0.010
    w: float = 0.010
    message: int = 2**14

    def as_dict(self) -> dict[str, Any]:
        """For the result file."""
        return asdict(self)

    def weight(self, stage: int) -> Tensor:
        """(1,) the one weight of a stage."""
        return torch.tensor([1.0 + stage / 16])

    def inputs(self, micro_batches: int) -> Tensor:
        """(micro-batches, message) what enters the first stage."""
        return torch.linspace(0.5, 1.5, micro_batches)[:, None].expand(-1, self.message).contiguous()


QUICK_NAPS = Naps(0.001, 0.001, 0.001, 8)


class Order(NamedTuple):
    """What a side's order of passes is worth before it runs: simulated seconds, and the most stage inputs that each
    rank holds from F to W."""

    seconds: float
    live: tuple[int, ...]

    @classmethod
    def of(cls, schedule: Schedule, naps: Naps) -> Order:
        """Of a compute-only schedule; transfers are free."""
        costs = Costs.equal(schedule.stages, naps.f, naps.b, naps.w)
        return cls(simulate(check(lower(schedule)), costs).step, tuple(rank.total for rank in live(schedule)))


class SleepingStage:
    """y = w x, as plait's executor wants it."""

    def __init__(self, naps: Naps, stage: int, micro_batches: Tensor, last: bool) -> None:
        boundary: Signature = (((naps.message,), torch.float32),)
        self.inputs, self.outputs = boundary if stage else (), () if last else boundary
        self.naps, self.micro_batches, self.last = naps, micro_batches, last
        self.weight, self.gradient = naps.weight(stage), torch.zeros(1)
        self._live: dict[int, Tensor] = {}
        self._late: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, micro: int, received: Tensors) -> Tensors:
        (x,) = received or (self.micro_batches[micro],)
        self._live[micro] = x
        sleep(self.naps.f)
        return () if self.last else (x * self.weight,)

    def backward(self, micro: int, gradients: Tensors) -> Tensors:
        returned = self.backward_input(micro, gradients)
        self.backward_weight(micro)
        return returned

    def backward_input(self, micro: int, gradients: Tensors) -> Tensors:
        x = self._live.pop(micro)
        (grad,) = gradients or (torch.ones_like(x),)  # the loss is the sum of what comes out
        self._late[micro] = x, grad
        sleep(self.naps.b)
        return (grad * self.weight,) if self.inputs else ()

    def backward_weight(self, micro: int) -> None:
        x, grad = self._late.pop(micro)
        sleep(self.naps.w)
        self.gradient += (x * grad).sum()


class SleepingPlait:
    """plait's executor over sleeping stages."""

    def __init__(self, naps: Naps, world: World, schedule: str, micro_batches: int) -> None:
        plain = generate(schedule, world.size, micro_batches)
        self.order, self.schedule = Order.of(plain, naps), check(lower(plain))
        x, last = naps.inputs(micro_batches), plain.stages - 1
        self.stages = {s: SleepingStage(naps, s, x, s == last) for s in plain.held_by(world.rank)}
        self.pipeline = Pipeline(self.stages, Mesh(Layout(pp=world.size), world.device))

    def backward(self) -> None:
        for stage in self.stages.values():
            stage.gradient.zero_()
        self.pipeline.run(self.schedule)

    def update(self) -> None:
        """Nothing: what is timed is the pipeline."""

    def gradients(self) -> dict[str, Tensor]:
        return collected({f"stage {index}": stage.gradient.clone() for index, stage in self.stages.items()})


class _Nap(torch.autograd.Function):
    """w x, and B; the weight's own gradient is made by the module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, module: SleepingModule) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.module = module
        sleep(module.naps.f)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        ctx.module.made = x, grad
        sleep(ctx.module.naps.b)
        return grad * weight if ctx.needs_input_grad[0] else None, None, None


class SleepingModule(nn.Module):
    """The same stage as a module. The peer calls `late` right after a backward; what that returns is its W."""

    def __init__(self, naps: Naps, stage: int) -> None:
        super().__init__()
        self.naps, self.weight = naps, nn.Parameter(naps.weight(stage))
        self.made: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Nap.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return y

    def late(self) -> Callable[[], None]:
        assert self.made is not None, "a backward comes first"
        x, grad = self.made
        self.made = None

        def weight_gradient() -> None:
            sleep(self.naps.w)
            assert self.weight.grad is not None
            self.weight.grad += (x * grad).sum()

        return weight_gradient


class SleepingPeer:
    """torch.distributed.pipelining over sleeping stages, sums of losses and gradients not scaled.

    Shapes are given, which spares it the passes in which it infers them.
    """

    def __init__(self, naps: Naps, world: World, schedule: str, micro_batches: int) -> None:
        shape = generate(schedule, world.size, micro_batches)
        held = shape.held_by(world.rank)
        self.modules = {stage: SleepingModule(naps, stage) for stage in held}
        one = naps.inputs(1).requires_grad_()
        stages = [
            PipelineStage(
                module, index, shape.stages, world.device, input_args=one, output_args=one, dw_builder=module.late
            )
            for index, module in self.modules.items()
        ]
        made = SCHEDULES[schedule]
        several = issubclass(made, PipelineScheduleMulti)
        self.schedule: Any = made(
            stages if several else stages[0],  # type: ignore[arg-type]
            micro_batches, loss_fn=summed, scale_grads=False,
        )  # fmt: skip
        self.x = naps.inputs(micro_batches)
        self.first, self.last = 0 in held, shape.stages - 1 in held
        self.order = Order.of(theirs(self.schedule, shape.owner) if several else by_the_book(shape), naps)

    def backward(self) -> None:
        for module in self.modules.values():
            module.weight.grad = torch.zeros(1)
        inputs, target = (self.x,) if self.first else (), self.x if self.last else None
        self.schedule.step(*inputs, target=target, losses=[] if self.last else None, return_outputs=False)

    def update(self) -> None:
        """Nothing: what is timed is the pipeline."""

    def gradients(self) -> dict[str, Tensor]:
        mine = {f"stage {s}": m.weight.grad.clone() for s, m in self.modules.items() if m.weight.grad is not None}
        return collected(mine)


def summed(y: Tensor, target: Tensor) -> Tensor:
    """The loss: the sum of what comes out."""
    return y.sum()


def theirs(schedule: PipelineScheduleMulti, owner: tuple[int, ...]) -> Schedule:
    """The order in which the peer runs its passes, as a compute-only schedule."""
    programs = tuple(
        tuple(_action(action) for action in schedule.pipeline_order[rank] if action is not None)
        for rank in range(max(owner) + 1)
    )
    return Schedule(type(schedule).__name__, schedule._n_microbatches, owner, programs)


def _action(action: Any) -> Action:
    if action.sub_actions:
        return Action.together(*map(_action, action.sub_actions))
    return Action(PASSES[action.computation_type.value], action.stage_index, action.microbatch_index)


def by_the_book(shape: Schedule) -> Schedule:
    """Schedule1F1B keeps no list: its source runs min(m, p - r) forwards, then a backward and a forward in turn."""
    programs = []
    for rank in range(shape.ranks):
        warm_up = min(shape.micro_batches, shape.ranks - rank)
        program = [Action(Kind.F, rank, micro) for micro in range(warm_up)]
        for micro in range(shape.micro_batches):
            program.append(Action(Kind.BW, rank, micro))
            if micro + warm_up < shape.micro_batches:
                program.append(Action(Kind.F, rank, micro + warm_up))
        programs.append(tuple(program))
    return Schedule("Schedule1F1B", shape.micro_batches, shape.owner, tuple(programs))
