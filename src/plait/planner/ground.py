"""What stays the same while layouts are compared: a model, a stack and a cluster, as one value for caches."""

from __future__ import annotations

from dataclasses import dataclass

from plait.planner.shape import Shape, shape_of
from plait.planner.stack import Stack
from plait.spec.cluster import Cluster
from plait.spec.model import ModelSpec


@dataclass(frozen=True, eq=False)
class Ground:
    """Compared by identity: many thousand look-ups hash it."""

    shape: Shape
    stack: Stack
    cluster: Cluster

    @classmethod
    def of(cls, model: ModelSpec, stack: Stack, cluster: Cluster) -> Ground:
        return cls(shape_of(model), stack, cluster)
