"""First values of weights: a pure function of (seed, parameter name, place in the global tensor).

Every tensor is drawn in fixed tiles, each by a counter-based generator of its own, so that any rectangle can be drawn
without the rest and comes out bitwise the same however the tensor is cut. Values are float32 on the CPU; other dtypes
and devices are copies of them.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from plait.models.decoder import Decoder, logical_tensors
from plait.spec.model import ModelSpec, TensorSpec

Rectangle = tuple[tuple[int, int], ...]  # (start, stop) along each dim
Values = npt.NDArray[np.float32]
Filler = Callable[[np.random.Generator, tuple[int, ...]], Values]

_TILE = {1: (65536,), 2: (256, 256), 3: (1, 256, 256)}  # part of the format of a seed: another size is another start
_EMBEDDING_STD = 0.02


def draw(
    tensor: TensorSpec, spec: ModelSpec, seed: int, rectangle: Rectangle | None = None, randomise: bool = False
) -> Tensor:
    """Values of one logical tensor, or of a rectangle of it, float32 on the CPU.

    Matrices are normal with std 1/sqrt(fan-in of the whole tensor), embeddings 0.02 (`spec.init_std` overrides both),
    norm weights 1, biases 0. `randomise`, for proofs: norm weights uniform in 0.5 … 1.5 and biases normal, since a
    constant hides a missing gradient.
    """
    fill = _filler(tensor, spec, randomise)
    whole = tuple((0, size) for size in tensor.shape)
    wanted = rectangle or whole
    values = np.empty([stop - start for start, stop in wanted], np.float32)
    digest = hashlib.blake2b(f"weights {seed} {tensor.name}".encode(), digest_size=16).digest()
    for corner in _tiles(wanted):
        # The tile's coordinates fill the last words of the counter; the words before them count inside the tile.
        counter = [0] * (4 - len(corner)) + list(corner)
        generator = np.random.Generator(np.random.Philox(key=np.frombuffer(digest, "<u8"), counter=counter))
        sides = zip(corner, _TILE[len(corner)], strict=True)
        tile = _overlap(tuple((i * side, (i + 1) * side) for i, side in sides), whole)
        drawn = fill(generator, tuple(stop - start for start, stop in tile))
        common = _overlap(tile, wanted)
        values[_slices(common, wanted)] = drawn[_slices(common, tile)]
    return torch.from_numpy(values)


@torch.no_grad()
def initialise(model: Decoder, seed: int, randomise: bool = False) -> None:
    """Fill a whole Decoder, or a stage of one that is cut along no other axis, in place."""
    held = logical_tensors(model.spec, {**dict(model.named_parameters()), **dict(model.named_buffers())})
    for tensor in model.spec.parameters():
        if tensor.name in held:
            held[tensor.name].copy_(draw(tensor, model.spec, seed, randomise=randomise))


def _filler(tensor: TensorSpec, spec: ModelSpec, randomise: bool) -> Filler:
    if tensor.kind == "buffer":
        return _buffer(tensor, randomise)
    if len(tensor.shape) == 1:
        bias = tensor.name.endswith(".bias")
        if randomise:
            return _normal(1.0) if bias else _around_one
        return _constant(0.0 if bias else 1.0)
    table = tensor.role in ("embedding", "positions")
    return _normal(spec.init_std or (_EMBEDDING_STD if table else 1 / math.sqrt(tensor.shape[-1])))


def _buffer(tensor: TensorSpec, randomise: bool) -> Filler:
    """An even load, and no bias of routers; a small one in proofs, where it must leave scores their say."""
    if tensor.role == "router_load":
        return _constant(1 / tensor.shape[0])
    return _normal(0.1) if randomise else _constant(0.0)


def _normal(std: float) -> Filler:
    return lambda generator, shape: generator.standard_normal(shape, np.float32) * np.float32(std)


def _constant(value: float) -> Filler:
    return lambda generator, shape: np.full(shape, value, np.float32)


def _around_one(generator: np.random.Generator, shape: tuple[int, ...]) -> Values:
    return generator.random(shape, np.float32) + np.float32(0.5)


def _tiles(wanted: Rectangle) -> Iterator[tuple[int, ...]]:
    """Coordinates, in tiles, of every tile that the rectangle touches."""
    sides = _TILE[len(wanted)]
    return itertools.product(
        *(range(start // side, -(-stop // side)) for (start, stop), side in zip(wanted, sides, strict=True))
    )


def _overlap(a: Rectangle, b: Rectangle) -> Rectangle:
    return tuple((max(i, k), min(j, m)) for (i, j), (k, m) in zip(a, b, strict=True))


def _slices(part: Rectangle, within: Rectangle) -> tuple[slice, ...]:
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(part, within, strict=True))
