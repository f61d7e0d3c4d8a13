"""Rotary positions: the tables of cosines and sines for a run of positions, and the rotation of queries and keys.

The tables follow from `where.positions` at each forward pass of a stage. They are never a buffer: a cast of the model
cannot round them, and a model built on meta has none to forget.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from plait.models.where import Where
from plait.spec.model import ModelSpec, RopeScaling


class Rotary(nn.Module):
    """Tables of rotary embedding (Su et al. 2021), with the frequency scaling of the spec."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim if spec.latent is None else spec.latent.rotated
        self.theta, self.scaling = spec.rope_theta, spec.rope_scaling

    def forward(self, where: Where, dtype: torch.dtype) -> Where:
        """`where` with its tables, in fp32 or wider; angles are taken in float64, since 8191 x 1.0 must not round."""
        angles = where.positions.double()[..., None] * self.frequencies(where.positions.device)  # (.., S, D/2)
        table = torch.promote_types(dtype, torch.float32)
        factor = self.scaling.table_factor if self.scaling is not None else 1.0
        cos, sin = ((t * factor).to(table).unsqueeze(-2) for t in (angles.cos(), angles.sin()))
        return where._replace(rotary=(cos, sin))

    def frequencies(self, device: torch.device) -> Tensor:
        """Radians per position of each channel pair, (D/2,) float64."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device) / self.head_dim
        frequencies = self.theta**-exponents
        return frequencies if self.scaling is None else _scale(frequencies, self.scaling, self.theta)


class NoRotary(nn.Module):
    """Stands in for `Rotary` where positions are learned."""

    def forward(self, where: Where, dtype: torch.dtype) -> Where:
        return where


def _scale(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    slow = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slow
    if scaling.kind == "yarn":
        kept = _yarn_kept(len(frequencies), scaling, theta).to(frequencies)
        return (1 - kept) * slow + kept * frequencies
    # Llama 3.1: turns within the original context decide; few are slowed down, many are kept, with a ramp between.
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * slow + kept * frequencies


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Turn channel pairs (c, c + D/2) of x (B, S, heads, D) by their angle, computed in the tables' precision."""
    cos, sin = tables
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def _yarn_kept(pairs: int, scaling: RopeScaling, theta: float) -> Tensor:
    """How far each channel pair keeps its frequency: 1 before the pair that turns beta_fast times, 0 after beta_slow's.

    Peng et al. 2023, section 3.2, with the rounding of its code.
    """

    def pair(turns: float) -> float:
        return pairs * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / math.log(theta)

    low = max(math.floor(pair(scaling.beta_fast)), 0)
    high = min(math.ceil(pair(scaling.beta_slow)), 2 * pairs - 1)
    ramp = (torch.arange(pairs, dtype=torch.float64) - low) / (max(high - low, 0.001))
    return 1 - ramp.clamp(0, 1)
