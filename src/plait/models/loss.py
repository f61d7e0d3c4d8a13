"""Cross-entropy as a sum over tokens, beside the number of tokens it sums over; the mean is taken by nobody here.

It is given the projection, not the logits, so that a replacement may compute both in pieces.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100


class CrossEntropy(nn.Module):
    """x (B, S, d), labels (B, S) -> the sum of token losses in nats (fp32 or wider), and the count of valid labels."""

    def forward(self, x: Tensor, projection: nn.Module, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = projection(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
        total = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return total, (labels != IGNORED).sum()
