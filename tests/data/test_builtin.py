"""The built-in corpus and the bigram table that a model must beat on it."""

from pathlib import Path

import numpy as np
import pytest

from plait.data import batch, batches_in, bigram_score, open_data
from plait.spec.run import DataSpec
from tests.data.fixtures import stream_of


def test_a_bigram_table_scores_what_counting_by_hand_gives() -> None:
    train, validation = stream_of([[0, 1, 0, 1, 2]]), stream_of([[0, 1, 2]])
    # after 0: 1 twice; after 1: 0 and 2 once each; one is added to each of 3
    assert bigram_score(train, validation, 3) == pytest.approx(-(np.log(3 / 5) + np.log(2 / 5)) / 2)


def test_counting_in_blocks_loses_no_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    train, validation = (stream_of([np.random.default_rng(i).integers(0, 9, 1000).tolist()]) for i in range(2))
    whole = bigram_score(train, validation, 9)
    monkeypatch.setattr("plait.data.bigram.BLOCK", 7)
    assert bigram_score(train, validation, 9) == pytest.approx(whole, rel=1e-12)


def test_the_builtin_corpus_is_ready_to_train_on(tmp_path: Path) -> None:
    data = open_data(DataSpec(cache=str(tmp_path)), 128, seed=1, vocab=257)
    assert data.validation is not None and data.vocab == 257
    assert len(data.train) > 40_000 and batches_in(data.validation, 32) > 40
    assert "standard library" in data.summary and str(tmp_path) in data.summary
    score = data.bigram()
    assert score is not None and 2.3 < score < 2.6  # 2.460 with Python 3.11; it moves a little between versions
    text = data.decode(batch(data.train, 0, 8).tokens.flatten().tolist())
    assert "self" in text
    assert data.encode("def") == [100, 101, 102]
