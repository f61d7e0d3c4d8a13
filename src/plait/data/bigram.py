"""The score of a bigram table: what a model must beat to have learnt more than which token follows which."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from plait.data.stream import Stream

BLOCK = 1 << 20


def bigram_counts(stream: Stream, vocab: int) -> NDArray[np.int64]:
    """(vocab, vocab): how often token b follows token a."""
    counts = np.zeros(vocab * vocab, np.int64)
    for start in range(0, len(stream) - 1, BLOCK):
        tokens = stream.tokens(start, min(start + BLOCK + 1, len(stream)))
        counts += np.bincount(tokens[:-1] * vocab + tokens[1:], minlength=vocab * vocab)
    return counts.reshape(vocab, vocab)


def bigram_score(train: Stream, validation: Stream, vocab: int) -> float:
    """Mean loss, in nats per token, on `validation` of the table counted on `train` with one added to each count.

    With byte tokens that is nats per byte. Memory and time grow with vocab squared.
    """
    seen = bigram_counts(train, vocab)
    asked = bigram_counts(validation, vocab)
    log_likelihood = np.log(seen + 1.0) - np.log(seen.sum(axis=1, keepdims=True) + float(vocab))
    return float(-(asked * log_likelihood).sum() / asked.sum())
