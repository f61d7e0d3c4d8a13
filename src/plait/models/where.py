"""Where a tensor of activations stands in the global batch: which samples, which tokens, which step.

Masks, rotary angles and dropout all follow from these global numbers, so that the mask of a slice is the slice of the
mask. Nothing here knows why a tensor is a slice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Where(NamedTuple):
    """Global coordinates of activations (B, S, ...). All tensors are int64 except the rotary tables."""

    samples: Tensor  # (B,) number of each row among all rows of the run
    indices: Tensor  # (S,) place of each token in its row: causality, window, dropout
    positions: Tensor  # (S,) or (B, S) what the position embedding sees; restarts at each masked document
    documents: Tensor | None  # (B, S) document of each token within its row; None: every row is one document
    key: Tensor  # () hash of (seed, step), see dropout.step_key: all the randomness there is
    row_documents: Tensor | None = None  # (B, whole row) documents of all tokens, where those here are only some
    rotary: tuple[Tensor, Tensor] | None = None  # cos, sin (S, 1, D/2) or (B, S, 1, D/2), filled in by the Decoder

    @classmethod
    def of(cls, samples: Tensor, sequence: int, key: int = 0) -> Where:
        """Whole rows of `sequence` tokens, one document each."""
        indices = torch.arange(sequence, device=samples.device)
        return cls(samples, indices, indices, None, torch.tensor(key, device=samples.device))

    def narrow(self, start: int, length: int) -> Where:
        """The same rows, tokens start … start + length - 1 only."""
        return self._replace(
            indices=self.indices.narrow(0, start, length),
            positions=self.positions.narrow(-1, start, length),
            documents=None if self.documents is None else self.documents.narrow(-1, start, length),
            rotary=None if self.rotary is None else _narrow_tables(self.rotary, start, length),
        )


def _narrow_tables(tables: tuple[Tensor, Tensor], start: int, length: int) -> tuple[Tensor, Tensor]:
    cos, sin = tables
    return cos.narrow(-3, start, length), sin.narrow(-3, start, length)
