"""The global batch of step n: sample numbers to rows of tensors, a pure function of (seed, n) whatever the layout.

Sample number n = step * global_size + row counts all samples since the run began; it alone says which window a row
holds. Labels are shifted here, on the whole sequence, before anything is split. No rank, mesh or device is known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plait.data.order import shuffled
from plait.data.windows import Source, Window

IGNORED = -100  # the label that no loss counts


class Batch(NamedTuple):
    """Some rows of a global batch, on the CPU.

    tokens (rows, S) int64; labels (rows, S) int64, IGNORED where not trained; samples (rows,) int64 global sample
    numbers; positions int64, (S,) or (rows, S) where they restart at each document; documents (rows, S) int64, numbered
    from 0 within each row, or None where documents may see each other.
    """

    tokens: Tensor
    labels: Tensor
    samples: Tensor
    positions: Tensor
    documents: Tensor | None

    def rows(self, start: int, stop: int) -> Batch:
        """Rows [start, stop) of this batch: a micro-batch."""
        return Batch(
            self.tokens[start:stop],
            self.labels[start:stop],
            self.samples[start:stop],
            self.positions if self.positions.ndim == 1 else self.positions[start:stop],
            None if self.documents is None else self.documents[start:stop],
        )

    def columns(self, indices: Tensor) -> Batch:
        """Some tokens of every row, by their places in it."""
        return Batch(
            self.tokens[:, indices],
            self.labels[:, indices],
            self.samples,
            self.positions[..., indices],
            None if self.documents is None else self.documents[:, indices],
        )

    def to(self, device: torch.device) -> Batch:
        """The same rows on a device."""
        moved = [None if x is None else x.to(device, non_blocking=True) for x in self]
        return Batch(*moved)  # type: ignore[arg-type]

    def valid_labels(self) -> int:
        """How many labels are trained."""
        return int((self.labels != IGNORED).sum())


@dataclass(frozen=True, eq=False)
class Samples:
    """An endless, ordered supply of windows: sample number -> window.

    `shuffle`: each epoch is a permutation of its own of (seed, epoch); else the source's own order. `repeat` False:
    after one epoch rows come without valid labels, so that an evaluation counts every window exactly once.
    """

    source: Source
    seed: int
    shuffle: bool = True
    repeat: bool = True

    def __len__(self) -> int:
        """Windows in one epoch."""
        return len(self.source)

    def epoch(self, number: int) -> int:
        """The epoch, from 0, of a sample number."""
        return number // len(self)

    def index(self, number: int) -> int:
        """Which window of the source a sample number is."""
        epoch, position = divmod(number, len(self))
        return shuffled(position, len(self), self.seed, epoch) if self.shuffle else position

    def window(self, number: int) -> Window:
        """The window of a sample number."""
        found = self.source.window(self.index(number))
        if self.repeat or self.epoch(number) == 0:
            return found
        return found._replace(trained=np.zeros(len(found.tokens), bool))


def batch(samples: Samples, step: int, global_size: int, rows: range | slice = slice(None), before: int = 0) -> Batch:
    """The rows asked for of the global batch of `step` (from 0), of which the first begins `before` samples further on.

    Pure: every rank gets the same answer.
    """
    wanted: Sequence[int] = range(global_size)[rows] if isinstance(rows, slice) else rows
    assert wanted and min(wanted) >= 0 and max(wanted) < global_size, f"rows {rows} of a global batch of {global_size}"
    numbers = [before + step * global_size + row for row in wanted]
    windows = [samples.window(number) for number in numbers]
    tokens = np.stack([w.tokens for w in windows])  # (rows, S + 1)
    ignored = np.stack([_ignored(w) for w in windows])
    labels = np.where(ignored, IGNORED, tokens)[:, 1:]
    positions, documents = _places(windows)
    return Batch(
        torch.from_numpy(np.ascontiguousarray(tokens[:, :-1])),
        torch.from_numpy(np.ascontiguousarray(labels)),
        torch.tensor(numbers, dtype=torch.int64),
        torch.from_numpy(positions),
        None if documents is None else torch.from_numpy(documents),
    )


def rows_of(global_size: int, rank: int, ranks: int) -> range:
    """The rows of the global batch that data-parallel rank `rank` of `ranks` reads: equal blocks, in order."""
    assert global_size % ranks == 0, f"{global_size} rows over {ranks} ranks"
    size = global_size // ranks
    return range(rank * size, (rank + 1) * size)


def batches_in(samples: Samples, global_size: int) -> int:
    """How many global batches hold one epoch; the last may be filled up (see `Samples.repeat`)."""
    return -(-len(samples) // global_size)


def announce_repetition(samples: Samples, steps: int, global_size: int) -> str | None:
    """What to tell the user where `steps` ask for more samples than there are; None where they do not."""
    needed, available = steps * global_size, len(samples)
    if needed <= available:
        return None
    return (
        f"{steps} steps of {global_size} need {needed} samples, the data has {available}: "
        f"it is read {needed / available:.1f} times, in a new order each time"
    )


def _ignored(window: Window) -> NDArray[np.bool_]:
    """(S + 1,) True where a token is no label: masked out, or the first of a document that sees no other."""
    ignored = np.zeros(len(window.tokens), bool) if window.trained is None else ~window.trained
    return ignored if window.beginnings is None else ignored | window.beginnings


def _places(windows: list[Window]) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Positions and document numbers of the rows."""
    if windows[0].beginnings is None:
        return np.arange(len(windows[0].tokens) - 1), None
    beginnings = np.stack([w.beginnings for w in windows if w.beginnings is not None])[:, :-1]  # (rows, S)
    beginnings[:, 0] = True  # a window that opens inside a document starts at position 0 of what it sees
    here = np.arange(beginnings.shape[1])
    positions = here - np.maximum.accumulate(np.where(beginnings, here, 0), axis=1)
    return positions, np.cumsum(beginnings, axis=1, dtype=np.int64) - 1
