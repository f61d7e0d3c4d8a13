"""Random samples for proofs: tokens, uneven label masks and documents as a pure function of (seed, sample number).

Equal data on every rank would hide a mean of means, so rows keep very different shares of their labels, some none.
Nothing here is text, and nothing is read from disk.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import numpy as np

from plait.data.windows import Window


@dataclass(frozen=True)
class Synthetic:
    """A source of random windows over `vocab` tokens.

    `masks`: each row keeps a random share of its labels, and one row in eight keeps none; `empty`: sample numbers that
    keep none whatever the draw (use it unshuffled: a range over one step makes a whole batch without a label).
    `documents`: a document begins at about every eighth token.
    """

    vocab: int
    sequence: int
    seed: int
    masks: bool = True
    documents: bool = False
    empty: Container[int] = ()
    size: int = 1 << 20

    def __len__(self) -> int:
        return self.size

    def window(self, index: int) -> Window:
        draw = np.random.Generator(np.random.Philox(key=np.array([self.seed, index], np.uint64)))
        length = self.sequence + 1
        tokens = draw.integers(0, self.vocab, length, dtype=np.int64)
        share, chances = draw.random(), draw.random((2, length))
        trained = chances[0] < share if share >= 1 / 8 else np.zeros(length, bool)
        if not self.masks:
            trained[:] = True
        if index in self.empty:
            trained[:] = False
        return Window(tokens, trained, chances[1] < 1 / 8 if self.documents else None)
