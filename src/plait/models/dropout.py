"""Dropout without a random number generator: an element lives or dies by a hash of its global coordinates.

There is no state to keep or restore. A slice's mask is the slice of the mask, recompute repeats it, and which device
asks makes no difference. The hash mixes 32 bits inside int64 and multiplies by less than 2^31, so nothing overflows
and eager, compiled, CPU and GPU agree bit for bit.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from plait.models.where import Where

_LOW = 0xFFFFFFFF
_PLACES = ("attention", "residual1", "residual2")


def step_key(seed: int, step: int) -> int:
    """`Where.key` of a training step: 62 bits of blake2b(seed, step)."""
    digest = hashlib.blake2b(f"dropout {seed} {step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def site_number(layer: int | None, place: str) -> int:
    """A number of its own for each dropout of the network; the embedding's layer is None and its number 0."""
    return 0 if layer is None else 1 + layer * len(_PLACES) + _PLACES.index(place)


class Dropout(nn.Module):
    """Zero elements of x (B, S, d) with probability p, and scale the rest by 1/(1-p). Channels are never a slice."""

    def __init__(self, p: float, site: int) -> None:
        super().__init__()
        self.p, self.site = p, site

    def forward(self, x: Tensor, where: Where) -> Tensor:
        if self.p == 0 or not self.training:
            return x
        rows = fold(fold(site_state(where.key, self.site), where.samples)[:, None], where.indices)  # (B, S)
        columns = torch.arange(x.shape[-1], device=x.device)
        return x.masked_fill(dropped(rows, columns, self.p), 0.0) * (1 / (1 - self.p))


def site_state(key: Tensor, site: int) -> Tensor:
    """Hash state () from which every element of one site in one step is told apart."""
    return fold(fold(torch.zeros_like(key), key), torch.full_like(key, site))


def dropped(rows: Tensor, columns: Tensor, p: float) -> Tensor:
    """Which elements die: bool (*rows, columns), from row states (any shape) and column numbers (n,)."""
    # Only the last mix runs on every element.
    state = rows[..., None] ^ _mix(columns + 1)
    return _mix(state) < round(p * 2**32)


def fold(state: Tensor, number: Tensor) -> Tensor:
    """Stir a number >= 0 (62 bits) into a 32-bit state; shapes broadcast."""
    return _mix(_mix(state ^ (number & _LOW)) ^ (number >> 32))


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit numbers in which every input bit moves every output bit (murmur-style finaliser)."""
    x = x ^ (x >> 16)  # a new tensor, which the rest may overwrite
    x *= 0x7FEB352D
    x &= _LOW
    x ^= x >> 15
    x *= 0x31848BAB
    x &= _LOW
    x ^= x >> 14
    return x
