"""Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values of all heads grow from one small vector.

The latents are computed whole wherever heads are spread; `spread` is where the one rotated key of a token meets all
heads. The core is that of every other attention.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from plait.models.attention import Core
from plait.models.layers import Factory, FusedLinear, Linear, norm
from plait.models.rotary import rotate
from plait.models.where import Where
from plait.spec.model import ModelSpec

_EPS = 1e-6  # of the norms of latents, whatever norm_eps says (DeepSeek's code and Hugging Face's)


class LatentAttention(nn.Module):
    """x (B, S, d) -> (B, S, d)."""

    def __init__(self, spec: ModelSpec, layer: int, make: Factory) -> None:
        super().__init__()
        assert spec.latent is not None
        self.latent = latent = spec.latent
        if latent.q_rank is not None:
            self.q_down: nn.Module = Linear(spec.hidden, latent.q_rank, False, make)
            self.q_latent_norm: nn.Module = norm("rms", latent.q_rank, _EPS, make)
        else:
            self.q_down, self.q_latent_norm = nn.Identity(), nn.Identity()
        self.q = Linear(latent.q_rank or spec.hidden, spec.heads * spec.head_dim, False, make)
        self.kv_down = FusedLinear(spec.hidden, (latent.kv_rank, latent.rotated), False, make)
        self.kv_latent_norm = norm("rms", latent.kv_rank, _EPS, make)
        self.kv = Linear(latent.kv_rank, spec.heads * (latent.kept + latent.value), False, make)
        self.spread = nn.Identity()
        self.core = Core(spec.window, spec.attention_dropout, layer, scale=_scale(spec))
        self.out = Linear(spec.heads * latent.value, spec.hidden, spec.out_bias, make)

    def forward(self, x: Tensor, where: Where) -> Tensor:
        kept, rotated, value = self.latent.kept, self.latent.rotated, self.latent.value
        assert where.rotary is not None, "a block needs the tables that Decoder.rotary fills in"
        small, k_rotated = self.kv_down(x)
        q = self.q(self.q_latent_norm(self.q_down(x))).unflatten(-1, (-1, kept + rotated))  # (B, S, h, D)
        kv = self.kv(self.kv_latent_norm(small)).unflatten(-1, (-1, kept + value))  # (B, S, h, kept + value)
        q_kept, q_rotated = q.split((kept, rotated), dim=-1)
        k_kept, v = kv.split((kept, value), dim=-1)
        q_rotated = rotate(self._halves(q_rotated), where.rotary)
        k_rotated = rotate(self._halves(self.spread(k_rotated).unsqueeze(-2)), where.rotary)  # (B, S, 1, rotated)
        q = torch.cat((q_kept, q_rotated), dim=-1)
        k = torch.cat((k_kept, k_rotated.expand(-1, -1, k_kept.shape[-2], -1)), dim=-1)
        y: Tensor = self.out(self.core(q, k, v, where).flatten(-2))
        return y

    def _halves(self, x: Tensor) -> Tensor:
        """Channels that pair as neighbours, laid out as those that pair as halves; queries and keys alike."""
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if self.latent.interleaved else x


def _scale(spec: ModelSpec) -> float:
    """1/sqrt(D), grown by YaRN's factor for all channels, as DeepSeek does."""
    scaling = spec.rope_scaling
    grown = scaling.growth(scaling.mscale_all_dim) if scaling is not None and scaling.mscale_all_dim else 1.0
    return float(spec.head_dim**-0.5 * grown**2)
