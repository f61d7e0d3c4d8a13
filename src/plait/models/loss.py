"""Cross-entropy and z-loss as sums over tokens, beside the number of tokens they sum over; nobody here takes a mean.

The slot is given the projection, not the logits, so that a replacement may compute both in pieces.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.models.layers import Terms

IGNORED = -100


class CrossEntropy(nn.Module):
    """x (B, S, d), labels (B, S) -> sums over tokens in fp32 or wider, by name, all over the same "count".

    "loss" is the sum of token losses in nats, "count" that of valid labels, and "z_loss", where its weight is above 0,
    weight · Σ log²(Σ exp logits), which keeps logits from drifting (Chowdhery et al. 2022, section 5).
    """

    def __init__(self, z_loss: float = 0.0) -> None:
        super().__init__()
        self.z_loss = z_loss

    def forward(self, x: Tensor, projection: nn.Module, labels: Tensor) -> Terms:
        logits, labels = projection(x).flatten(0, -2), labels.flatten()
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        return self.terms(total, logits.logsumexp(-1) if self.z_loss else None, labels)

    def terms(self, total: Tensor, log_sums: Tensor | None, labels: Tensor) -> Terms:
        """The named sums, from that of token losses and each token's log of summed exponentials (N,)."""
        valid = labels != IGNORED
        terms = {"loss": total, "count": valid.sum()}
        if self.z_loss:
            assert log_sums is not None
            terms["z_loss"] = self.z_loss * log_sums.square().masked_fill(~valid, 0.0).sum()
        return terms
