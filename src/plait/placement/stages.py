"""Which layers form which pipeline stage, and which pp rank owns it. Every layer belongs to exactly one stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, permutations

from plait.placement.cuts import piece
from plait.spec.flops import flops_per_token
from plait.spec.layout import Layout
from plait.spec.model import ModelSpec, TensorSpec
from plait.spec.pipeline import stage_owners
from plait.spec.run import RunSpec


@dataclass(frozen=True)
class StageMap:
    """`layers[s]` are the blocks of stage s; `owner[s]` is the pp coordinate that runs it.

    The embedding stands in stage 0, the head in the last one, a tied table in both; where one rank owns both, as in a
    V, it holds the table once.
    """

    layers: tuple[range, ...]
    owner: tuple[int, ...]

    @property
    def last(self) -> int:
        return len(self.layers) - 1

    def owned_by(self, pp: int) -> tuple[int, ...]:
        """The stages of one pp coordinate."""
        return tuple(stage for stage, owner in enumerate(self.owner) if owner == pp)

    def holding(self, tensor: TensorSpec) -> tuple[int, ...]:
        """The stages that hold a tensor: one, or first and last for a tied table."""
        if tensor.layer is not None:
            return tuple(stage for stage, layers in enumerate(self.layers) if tensor.layer in layers)
        first = 0 if tensor.part == "embedding" else self.last
        return tuple(dict.fromkeys((first, self.last) if tensor.also else (first,)))


def stages_of(run: RunSpec, layout: Layout) -> StageMap:
    """The stages of a run that fits its layout: as many, and owned by the ranks, as its schedule says."""
    owner, asked = stage_owners(run.schedule, layout.pp), run.schedule.layers
    if asked == "even":
        counts = even(run.model.layers, len(owner))
    elif asked == "balanced":
        counts = balanced(run.model.layers, owner, *_flops(run))
    else:
        counts = asked
    return StageMap(_ranges(counts), owner)


def stage_flops(run: RunSpec, stages: StageMap) -> tuple[float, ...]:
    """FLOP of each stage's forward for one token: its blocks and, in the last one, the head."""
    block, head = _flops(run)
    return tuple(block * len(layers) + head * (stage == stages.last) for stage, layers in enumerate(stages.layers))


def _flops(run: RunSpec) -> tuple[float, float]:
    """FLOP of a mean block's forward for one token, and of the head's."""
    head = 2 * run.model.vocab * run.model.hidden
    return (flops_per_token(run.model, run.batch.sequence).forward - head) / run.model.layers, head


def stage_map(model: ModelSpec, layout: Layout, chunks: int | None = None) -> StageMap:
    """Even stages that go round the pipeline ranks: stage s is run by pp rank s % pp."""
    stages = layout.pp * (chunks or 1)
    return StageMap(_ranges(even(model.layers, stages)), tuple(stage % layout.pp for stage in range(stages)))


def even(layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage, the first ones a layer longer where layers do not divide."""
    return tuple(stop - start for start, stop in (piece(layers, stages, stage) for stage in range(stages)))


def balanced(layers: int, owner: Sequence[int], block: float, head: float) -> tuple[int, ...]:
    """Layers per stage that make the busiest rank least busy, then the next, then the busiest stage.

    A block costs `block`, the head and the loss after the last one cost `head`; a look-up in the embedding is free.
    Every stage has at least one layer.
    """
    best = even(layers, len(owner))
    while True:
        moved = min(_one_layer_moved(best), key=lambda counts: _loads(counts, owner, block, head), default=best)
        if _loads(moved, owner, block, head) >= _loads(best, owner, block, head):
            return best
        best = moved


def _one_layer_moved(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for source, target in permutations(range(len(counts)), 2):
        if counts[source] > 1:
            yield tuple(count - (stage == source) + (stage == target) for stage, count in enumerate(counts))


def _loads(counts: Sequence[int], owner: Sequence[int], block: float, head: float) -> tuple[list[float], list[float]]:
    """The costs of the ranks and of the stages, largest first."""
    stages = [block * count for count in counts]
    stages[-1] += head
    ranks = [0.0] * (max(owner) + 1)
    for cost, rank in zip(stages, owner, strict=True):
        ranks[rank] += cost
    return sorted(ranks, reverse=True), sorted(stages, reverse=True)


def _ranges(counts: Sequence[int]) -> tuple[range, ...]:
    return tuple(range(*edge) for edge in pairwise(accumulate(counts, initial=0)))
