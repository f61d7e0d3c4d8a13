"""Which layers form which pipeline stage, and which pp rank owns it. Every layer belongs to exactly one stage."""

from __future__ import annotations

from dataclasses import dataclass

from plait.placement.cuts import piece
from plait.spec.layout import Layout
from plait.spec.model import ModelSpec, TensorSpec


@dataclass(frozen=True)
class StageMap:
    """`layers[s]` are the blocks of stage s; `owner[s]` is the pp coordinate that runs it.

    The embedding stands in stage 0, the head in the last one, a tied table in both.
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


def stage_map(model: ModelSpec, layout: Layout, chunks: int = 1) -> StageMap:
    """Contiguous stages, the first ones a layer longer where layers do not divide; stage s is run by pp rank s % pp."""
    stages = layout.pp * chunks
    layers = tuple(range(*piece(model.layers, stages, stage)) for stage in range(stages))
    return StageMap(layers, tuple(stage % layout.pp for stage in range(stages)))
