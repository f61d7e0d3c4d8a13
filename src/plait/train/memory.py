"""What a rank holds: model states by kind, and what its first step needed beside them. Counted, not modelled.

On CUDA the total is the allocator's; on a CPU it is the sum of what was counted, since a process's resident set also
holds the interpreter, and pages that nobody uses any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from plait.parallel.parallelize import Parallel
from plait.parallel.tracker import StepBytes, Tracker, storage_bytes
from plait.spec.units import format_bytes


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank. `activations` is their peak, `between` the most that waited for backward while nothing worked,
    `buffers` the most in gathered weights and gradients on their way; `blocks` is by layer."""

    weights: int
    gradients: int
    master: int
    moments: int
    buffers: int
    activations: int
    between: int
    total: int
    blocks: Mapping[int, Mapping[str, int]]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        blocks = [{"block": layer, **of_block} for layer, of_block in self.blocks.items()]
        return {**asdict(self), "blocks": blocks}


KINDS = ("weights", "gradients", "master", "moments", "buffers", "activations")
MOST_RANKS = 8  # that are told one by one


def in_words(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each rank, or, of many, for the one that holds most."""
    most = max(range(len(ranks)), key=lambda rank: int(ranks[rank]["total"]))
    told = range(len(ranks)) if len(ranks) <= MOST_RANKS else [most]
    return [f"rank {rank}: {_sum_in_words(ranks[rank])}" for rank in told]


def _sum_in_words(memory: Mapping[str, Any]) -> str:
    parts = " + ".join(f"{kind} {format_bytes(memory[kind])}" for kind in KINDS if memory[kind])
    return f"{parts}; total {format_bytes(memory['total'])}"


class Watch:
    """Counts one backward pass over all micro-batches; `step` is what it found."""

    def __init__(self, parallel: Parallel, device: torch.device) -> None:
        self.parallel, self.device = parallel, device
        self.step: StepBytes | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Count what happens inside, the first time."""
        if self.step is not None:
            yield
            return
        states = self.parallel.states
        tracker = Tracker(states.come_and_go())
        with tracker, tracker.watch(stage.module for stage in self.parallel.stages.values()):
            yield
        self.step = tracker.report(x for tensors in states.held().values() for x in tensors)

    def memory(self, optimizer: torch.optim.Optimizer) -> RankMemory:
        """What this rank holds after a step."""
        step = self.step or StepBytes(0, 0, 0, {})
        held = self.parallel.states.bytes_held()
        moments = storage_bytes(x for of in optimizer.state.values() for x in of.values() if _is_moment(x))
        counted = sum(held.values()) + moments + step.buffers + step.peak
        on_cuda = self.device.type == "cuda"
        return RankMemory(
            weights=held["weights"],
            gradients=held["gradients"],
            master=held["master"],
            moments=moments,
            buffers=step.buffers,
            activations=step.peak,
            between=step.between,
            total=torch.cuda.max_memory_allocated(self.device) if on_cuda else counted,
            blocks={layer: asdict(block) for layer, block in step.blocks.items()},
        )


def _is_moment(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0  # a step counter is a scalar
