"""Windows: a source of training samples is anything with a length and `window(i)`; here, a stream cut into windows.

Window i holds tokens [i S, i S + S], one more than a sequence, so that each next-token pair of the stream is in exactly
one window. A source must not know seeds, epochs, batches or ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from plait.data.stream import Stream
from plait.spec.errors import DataError


class Window(NamedTuple):
    """One sample of S + 1 tokens. Token j is what token j - 1 is asked to predict.

    `trained` (S + 1,): False where token j may not be a label (None: everywhere it may). `beginnings` (S + 1,): True
    where token j is the first of a document, given only if documents are not to see each other.
    """

    tokens: NDArray[np.int64]
    trained: NDArray[np.bool_] | None = None
    beginnings: NDArray[np.bool_] | None = None


class Source(Protocol):
    """Numbered samples of one length. A mixture of sources is a source too: number -> (which, number there)."""

    def __len__(self) -> int: ...
    def window(self, index: int) -> Window: ...


@dataclass(frozen=True, eq=False)
class Windows:
    """A stream as a source of (len - 1) // sequence windows. Raises DataError if there is not even one."""

    stream: Stream
    sequence: int
    mask_documents: bool = False
    name: str = "data"

    def __post_init__(self) -> None:
        if len(self) < 1:
            raise DataError(
                f"{self.name}: {len(self.stream)} tokens available, {self.sequence + 1} needed for one sample "
                f"(batch.sequence {self.sequence}, and the token after it)",
                "give more data or a shorter batch.sequence"
                + (", or set data.validation=0" if self.name == "validation" else ""),
            )

    def __len__(self) -> int:
        return max(len(self.stream) - 1, 0) // self.sequence

    @property
    def dropped(self) -> int:
        """Tokens at the end that no window asks to predict; fewer than a sequence."""
        return len(self.stream) - 1 - len(self) * self.sequence

    def window(self, index: int) -> Window:
        assert 0 <= index < len(self), f"window {index} of {len(self)}"
        start, stop = index * self.sequence, (index + 1) * self.sequence + 1
        beginnings = self.stream.beginnings(start, stop) if self.mask_documents else None
        return Window(self.stream.tokens(start, stop), self.stream.labels_allowed(start, stop), beginnings)
