"""A model as the planner needs it: few kinds of block, each with its matrices and vectors, counted on one rank.

Everything is read off `ModelSpec.parameters()` and the table of cuts in `placement`; no size is stated again. A rank's
share is the largest one (piece 0), which is the one that memory and time wait for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from plait.placement.cuts import CUTS, piece
from plait.placement.stages import even
from plait.spec.model import ModelSpec, TensorSpec
from plait.spec.pipeline import owners

# Roles whose tensors a token is multiplied with. Experts are those of one token, by top_k.
MATRICES = {"q", "kv", "column", "row", "latent", "router", "expert_column", "expert_row"}


class Split(NamedTuple):
    """The degrees that cut a tensor, and nothing else of a layout."""

    tp: int = 1
    kv: int = 1  # of tp: ranks with different key/value heads
    ep: int = 1
    etp: int = 1


class Place(NamedTuple):
    """How a pipeline's stages lie on its positions: `chunks` on each, round or (`folded`) down and up again."""

    pp: int = 1
    chunks: int = 1
    folded: bool = False
    layers: tuple[int, ...] = ()  # blocks of each stage; none: as even as can be

    @property
    def owners(self) -> tuple[int, ...]:
        """The position of each stage."""
        return owners(self.pp, self.chunks, self.folded)


@dataclass(frozen=True)
class Matrix:
    """One product of a block: (out, in) of the whole weight, and which of the two tp cuts."""

    role: str
    out: int
    inner: int
    expert: bool


@dataclass(frozen=True, eq=False)
class Block:
    """One kind of block. Compared by identity, as its shape is."""

    tensors: tuple[TensorSpec, ...]
    matrices: tuple[Matrix, ...]
    has_experts: bool

    def elements(self, split: Split) -> tuple[int, int]:
        """Elements of trained weights on rank 0 of a split: (cut over tp at most, of experts cut over ep·etp)."""
        return _block_elements(self, split)


@dataclass(frozen=True, eq=False)
class Shape:
    """The model: kinds of block, the kind of each layer, and what stands before and after the blocks."""

    spec: ModelSpec
    kinds: tuple[Block, ...]
    layers: tuple[int, ...]  # kind of each block
    embedding: tuple[TensorSpec, ...]
    head: tuple[TensorSpec, ...]

    def count(self, layers: Iterable[int]) -> tuple[int, ...]:
        """How many blocks of each kind are among these layers."""
        found = [0] * len(self.kinds)
        for layer in layers:
            found[self.layers[layer]] += 1
        return tuple(found)

    def kinds_of_stages(self, stages: int, layers: tuple[int, ...] = ()) -> tuple[tuple[int, ...], ...]:
        """How many blocks of each kind each stage has, of `layers` blocks each; none: as even as can be."""
        return _kinds_of_stages(self, stages, layers)

    def kinds_of_positions(self, place: Place) -> tuple[tuple[int, ...], ...]:
        """How many blocks of each kind each pipeline position has, in all its stages."""
        return _kinds_of_positions(self, place)

    def embedding_elements(self, split: Split) -> int:
        return _outside_elements(self, split, "embedding")

    def head_elements(self, split: Split, with_embedding: bool) -> int:
        """Elements of final norm and output projection; a tied table counts where the embedding is elsewhere."""
        return _outside_elements(self, split, "head" if with_embedding or not self.spec.tied else "head and table")

    @property
    def gated(self) -> bool:
        return self.spec.mlp == "swiglu"


@lru_cache(maxsize=256)
def shape_of(spec: ModelSpec) -> Shape:
    """The shape of a model."""
    kinds: dict[tuple[tuple[str, tuple[int, ...]], ...], int] = {}
    blocks: list[Block] = []
    layers: list[int] = []
    by_layer: dict[int, list[TensorSpec]] = {}
    for tensor in spec.parameters():
        if tensor.layer is not None and tensor.kind == "weight":
            by_layer.setdefault(tensor.layer, []).append(tensor)
    for layer in range(spec.layers):
        tensors = tuple(by_layer[layer])
        signature = tuple((t.role, t.shape) for t in tensors)
        if signature not in kinds:
            kinds[signature] = len(blocks)
            blocks.append(_block(tensors))
        layers.append(kinds[signature])
    outside = [t for t in spec.parameters() if t.layer is None and t.kind == "weight"]
    return Shape(
        spec,
        tuple(blocks),
        tuple(layers),
        tuple(t for t in outside if t.part == "embedding"),
        tuple(t for t in outside if t.part == "head"),
    )


@lru_cache(maxsize=4096)
def _kinds_of_stages(shape: Shape, stages: int, layers: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    counts = layers or even(len(shape.layers), stages)
    return tuple(shape.count(range(*edge)) for edge in pairwise(accumulate(counts, initial=0)))


@lru_cache(maxsize=4096)
def _kinds_of_positions(shape: Shape, place: Place) -> tuple[tuple[int, ...], ...]:
    held: list[list[tuple[int, ...]]] = [[] for _ in range(place.pp)]
    each = shape.kinds_of_stages(place.pp * place.chunks, place.layers)
    for kinds, owner in zip(each, place.owners, strict=True):
        held[owner].append(kinds)
    return tuple(tuple(map(sum, zip(*mine, strict=True))) for mine in held)


def _block(tensors: tuple[TensorSpec, ...]) -> Block:
    matrices = tuple(
        Matrix(t.role, t.shape[-2], t.shape[-1], t.role.startswith("expert_"))
        for t in tensors
        if t.role in MATRICES and len(t.shape) > 1
    )
    return Block(tensors, matrices, any(matrix.expert for matrix in matrices))


@lru_cache(maxsize=4096)
def _block_elements(block: Block, split: Split) -> tuple[int, int]:
    return _elements(block.tensors, split)


@lru_cache(maxsize=4096)
def _outside_elements(shape: Shape, split: Split, which: str) -> int:
    tensors = shape.embedding if which == "embedding" else shape.head
    return _elements((*tensors, *(shape.embedding[:1] if which == "head and table" else ())), split)[0]


def _elements(tensors: tuple[TensorSpec, ...], split: Split) -> tuple[int, int]:
    dense = experts = 0
    for tensor in tensors:
        if tensor.role.startswith("expert_"):
            count = piece(tensor.shape[0], split.ep, 0)[1]
            rows = piece(tensor.shape[1 if tensor.role == "expert_column" else 2], split.etp, 0)[1]
            experts += count * rows * tensor.shape[2 if tensor.role == "expert_column" else 1]
            continue
        cut = CUTS[tensor.role]
        size = tensor.size
        if cut.dim is not None:
            whole = tensor.shape[cut.dim]
            size = size // whole * piece(whole, split.kv if cut.over == "kv" else split.tp, 0)[1]
        dense += size
    return dense, experts
