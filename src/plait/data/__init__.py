"""Text -> tokens -> the global batch of step n, in an order that no layout changes.

documents (files to texts) -> tokenizer -> build (the token cache) -> stream -> windows -> samples (the batch);
`open_data` joins them.
"""

from plait.data.bigram import bigram_score
from plait.data.open import Data, open_data
from plait.data.samples import IGNORED, Batch, Samples, announce_repetition, batch, batches_in, rows_of
from plait.data.synthetic import Synthetic
from plait.data.windows import Source, Window, Windows

__all__ = [
    "IGNORED",
    "Batch",
    "Data",
    "Samples",
    "Source",
    "Synthetic",
    "Window",
    "Windows",
    "announce_repetition",
    "batch",
    "batches_in",
    "bigram_score",
    "open_data",
    "rows_of",
]
