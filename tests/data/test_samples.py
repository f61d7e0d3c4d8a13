"""Samples and global batches: every pair once per epoch, and no layout in sight."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from plait.data import (
    IGNORED,
    Batch,
    Samples,
    Source,
    Synthetic,
    Window,
    Windows,
    announce_repetition,
    batch,
    batches_in,
    open_data,
    rows_of,
)
from plait.spec.errors import DataError
from tests.data.fixtures import jsonl_spec, stream_of, toy_samples, write_jsonl


def pairs(found: Batch) -> list[tuple[int, int]]:
    """(token, label) of every valid label."""
    valid = found.labels != IGNORED
    return list(zip(found.tokens[valid].tolist(), found.labels[valid].tolist(), strict=True))


@pytest.mark.parametrize("length", [1000, 993, 994, 17])
def test_every_next_token_pair_of_a_long_document_is_trained_once_per_epoch(length: int) -> None:
    windows = Windows(stream_of([range(length)]), 16)
    samples = Samples(windows, seed=3)
    for epoch in range(2):
        rows = [batch(samples, epoch * len(samples) + n, 1) for n in range(len(samples))]
        found = sorted(pair for row in rows for pair in pairs(row))
        assert found == [(i, i + 1) for i in range(length - 1 - windows.dropped)]
    assert windows.dropped < 16 and windows.dropped == (length - 1) % 16


def test_the_dropped_tail_is_stated(tmp_path: Path) -> None:
    spec = jsonl_spec(write_jsonl(tmp_path / "x.jsonl", ["a" * 49]), tmp_path / "c")
    assert "train: 50 tokens = 3 windows of 16 and a tail of 1 left out" in open_data(spec, 16, 0).summary


def test_no_pair_is_trained_across_masked_documents_and_all_others_are() -> None:
    lengths = range(1, 41)
    begins = np.cumsum([0, *lengths])
    documents = [range(begins[i], begins[i + 1]) for i in range(40)]
    samples = Samples(Windows(stream_of(documents), 20, mask_documents=True), seed=1)
    found = sorted(pair for n in range(len(samples)) for pair in pairs(batch(samples, n, 1)))
    assert found == [(i, i + 1) for i in range(len(samples) * 20) if i + 1 not in begins]


def test_positions_restart_and_documents_are_numbered_at_each_boundary() -> None:
    stream = stream_of([range(8), range(8, 16), range(16, 33)])
    found = batch(Samples(Windows(stream, 16, mask_documents=True), 0, shuffle=False), 0, 2)
    assert found.documents is not None
    assert found.positions.tolist() == [[*range(8), *range(8)], [*range(16)]]
    assert found.documents.tolist() == [[0] * 8 + [1] * 8, [0] * 16]
    assert found.labels[0].tolist() == [1, 2, 3, 4, 5, 6, 7, IGNORED, 9, 10, 11, 12, 13, 14, 15, IGNORED]


def test_a_window_that_opens_inside_a_document_starts_at_position_0() -> None:
    found = batch(Samples(Windows(stream_of([range(6), range(6, 9)]), 4, mask_documents=True), 0, shuffle=False), 1, 1)
    assert found.documents is not None
    assert found.tokens.tolist() == [[4, 5, 6, 7]]
    assert found.positions.tolist() == [[0, 1, 0, 1]] and found.documents.tolist() == [[0, 0, 1, 1]]


def test_without_masking_positions_run_through_and_there_are_no_documents() -> None:
    found = batch(Samples(Windows(stream_of([range(4), range(4, 17)]), 16), 0), 0, 1)
    assert found.positions.tolist() == list(range(16)) and found.documents is None
    assert found.labels.tolist() == [list(range(1, 17))]


def test_labels_are_shifted_before_any_split() -> None:
    found = batch(Samples(Windows(stream_of([range(17)]), 16), 0), 0, 1)
    halves = found.labels[0].split(8)  # what two context ranks would hold
    assert [half.tolist() for half in halves] == [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16]]


def test_label_masks_come_along(tmp_path: Path) -> None:
    records = [{"text": "question: answer", "spans": [[10, 16]]}]
    spec = jsonl_spec(write_jsonl(tmp_path / "x.jsonl", records), tmp_path / "c", mask_field="spans")
    data = open_data(spec, 16, 0)
    found = batch(data.train, 0, 1)
    assert data.decode([label for _, label in pairs(found)]) == "answer\n<end>\n"
    assert found.valid_labels() == 7


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(ranks: int) -> None:
    samples = Samples(Windows(stream_of([range(1000)]), 16), seed=5)
    for step in (0, 7, 30):
        whole = batch(samples, step, 8)
        parts = [batch(samples, step, 8, rows_of(8, rank, ranks)) for rank in range(ranks)]
        for field in ("tokens", "labels", "samples"):
            assert torch.equal(torch.cat([getattr(part, field) for part in parts]), getattr(whole, field))


def test_data_parallel_ranks_share_no_row_and_replicas_of_a_rank_read_the_same() -> None:
    def ids(step: int, rank: int) -> list[int]:
        samples = Samples(Windows(stream_of([range(1000)]), 16), seed=5)  # each process opens its own
        return [int(i) for i in batch(samples, step, 8, rows_of(8, rank, 2)).tokens.flatten()]

    for step in range(7):  # 56 of 62 windows: within one epoch
        assert not set(ids(step, 0)) & set(ids(step, 1))
        assert ids(step, 0) == ids(step, 0) and ids(step, 1) == ids(step, 1)
    seen = Counter(i for step in range(7) for rank in range(2) for i in ids(step, rank))
    assert set(seen.values()) == {1} and len(seen) == 7 * 8 * 16


def test_micro_batches_are_the_batch_cut_by_rows() -> None:
    for masked in (False, True):
        samples = Samples(Windows(stream_of([range(i * 9, i * 9 + 9) for i in range(40)]), 16, masked), 2)
        whole = batch(samples, 1, 8)
        micro = [whole.rows(i, i + 2) for i in range(0, 8, 2)]
        assert torch.equal(torch.cat([m.labels for m in micro]), whole.labels)
        for i, part in enumerate(micro):
            alone = batch(samples, 1, 8, slice(2 * i, 2 * i + 2))
            assert all(x is y is None or torch.equal(x, y) for x, y in zip(part, alone, strict=True))


def test_epochs_reshuffle() -> None:
    samples = Samples(Windows(stream_of([range(1000)]), 16), seed=1)
    orders = [[samples.index(epoch * len(samples) + n) for n in range(len(samples))] for epoch in range(3)]
    assert all(sorted(order) == list(range(62)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0] and orders[0] != sorted(orders[0])


def test_the_seed_changes_the_order_and_nothing_else_does() -> None:
    windows = Windows(stream_of([range(1000)]), 16)
    first, again, other = (batch(Samples(windows, seed), 2, 8).tokens for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_another_batch_size_reads_the_same_samples_in_the_same_order() -> None:
    samples = Samples(Windows(stream_of([range(1000)]), 16), 4)
    small = torch.cat([batch(samples, step, 4).tokens for step in range(6)])
    assert torch.equal(small, torch.cat([batch(samples, step, 8).tokens for step in range(3)]))


def test_less_than_one_sample_is_an_error_with_available_and_needed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="train: 3 tokens available, 17 needed"):
        Windows(stream_of([range(3)]), 16, name="train")
    spec = jsonl_spec(write_jsonl(tmp_path / "x.jsonl", ["a" * 100]), tmp_path / "c", validation=0.05)
    with pytest.raises(DataError, match="validation: 5 tokens available, 17 needed") as error:
        open_data(spec, 16, 0)
    assert "data.validation=0" in error.value.hint


def test_data_smaller_than_a_batch_is_repeated_and_said() -> None:
    samples = Samples(Windows(stream_of([range(49)]), 16), seed=0)
    assert len(samples) == 3
    said = announce_repetition(samples, steps=2, global_size=8)
    assert said is not None and "2 steps of 8 need 16 samples, the data has 3: it is read 5.3 times" in said
    assert announce_repetition(samples, steps=1, global_size=3) is None
    numbers = batch(samples, 0, 8)
    assert [samples.epoch(int(n)) for n in numbers.samples] == [0, 0, 0, 1, 1, 1, 2, 2]
    firsts = numbers.tokens[:, 0].tolist()
    assert sorted(firsts[:3]) == sorted(firsts[3:6]) == [0, 16, 32]


def test_an_evaluation_counts_each_window_once_and_fills_up_with_rows_without_labels() -> None:
    samples = Samples(Windows(stream_of([range(81)]), 16), seed=9, repeat=False)
    assert batches_in(samples, 4) == 2
    found = [batch(samples, step, 4) for step in range(2)]
    assert sorted(pair for b in found for pair in pairs(b)) == [(i, i + 1) for i in range(80)]
    assert [int((row != IGNORED).sum()) for row in found[1].labels] == [16, 0, 0, 0]


def test_a_single_long_document_is_split_by_tokens_and_said(tmp_path: Path) -> None:
    spec = jsonl_spec(write_jsonl(tmp_path / "x.jsonl", ["abcdefghij" * 100]), tmp_path / "c", validation=0.1)
    data = open_data(spec, 16, 0)
    assert data.validation is not None and len(data.validation) == 6 and len(data.train) == 56
    assert "validation is the last 10.0% of the tokens" in data.summary


def test_held_out_documents_are_not_trained_on(tmp_path: Path) -> None:
    texts = [f"{i:03}" * 7 for i in range(300)]
    spec = jsonl_spec(write_jsonl(tmp_path / "x.jsonl", texts), tmp_path / "c", validation=0.2)
    data = open_data(spec, 21, 0)
    assert data.validation is not None

    def documents(samples: Samples) -> set[str]:
        stream = samples.source.stream  # type: ignore[attr-defined]
        return set(data.decode(stream.tokens(0, len(stream)).tolist()).split("\n<end>\n")[:-1])

    trained, held = documents(data.train), documents(data.validation)
    assert not trained & held and trained | held == set(texts) and 30 < len(held) < 90
    labels = [batch(data.validation, step, 16).valid_labels() for step in range(batches_in(data.validation, 16) + 1)]
    assert sum(labels) == len(data.validation) * 21 and labels[-1] == 0  # each once, and nothing after that


def test_sources_with_weights_can_be_mixed_without_touching_the_sampler() -> None:
    class Mixture:
        """Two parts of the first source to one of the second, which repeats when it is short."""

        def __init__(self, *sources: Source) -> None:
            self.sources = sources

        def __len__(self) -> int:
            return 3 * (len(self.sources[0]) // 2)

        def window(self, index: int) -> Window:
            block, place = divmod(index, 3)
            which, number = (0, 2 * block + place) if place < 2 else (1, block)
            return self.sources[which].window(number % len(self.sources[which]))

    mixed = Samples(Mixture(Windows(stream_of([range(1000)]), 16), Windows(stream_of([range(2000, 2050)]), 16)), 3)
    firsts = torch.cat([batch(mixed, step, 3).tokens[:, 0] for step in range(31)])
    assert int((firsts < 1000).sum()) == 62 and int((firsts >= 2000).sum()) == 31
    assert len(set(firsts[firsts < 1000].tolist())) == 62


def test_the_toy_batch_has_64_valid_labels() -> None:
    found = batch(toy_samples(), 0, 8)
    assert found.tokens.shape == (8, 16) and found.valid_labels() == 64
    assert (found.labels != IGNORED).sum(1).tolist() == [1, 3, 5, 7, 9, 11, 13, 15]
    assert found.tokens[2].tolist() == [(14 + 3 * j * j + j) % 64 for j in range(16)]
    assert batch(toy_samples(masked=False), 3, 8).valid_labels() == 8 * 15


def test_synthetic_rows_are_pure_and_have_uneven_labels() -> None:
    samples = Samples(Synthetic(vocab=13, sequence=32, seed=4), 4, shuffle=False)
    whole = batch(samples, 3, 64)
    assert torch.equal(batch(samples, 3, 64, range(8, 16)).labels, whole.labels[8:16])
    assert int(whole.tokens.min()) == 0 and int(whole.tokens.max()) == 12
    counts = (whole.labels != IGNORED).sum(1)
    assert int((counts == 0).sum()) >= 2 and len(set(counts.tolist())) > 15 and int(counts.max()) > 25
    assert torch.equal(
        whole.tokens[:, 1:][whole.labels[:, :-1] != IGNORED], whole.labels[:, :-1][whole.labels[:, :-1] != IGNORED]
    )


def test_a_synthetic_step_can_be_left_without_any_label() -> None:
    samples = Samples(Synthetic(13, 32, 4, empty=range(8, 16)), 4, shuffle=False)
    assert [batch(samples, step, 8).valid_labels() > 0 for step in range(3)] == [True, False, True]


def test_synthetic_documents_are_masked_like_real_ones() -> None:
    found = batch(Samples(Synthetic(13, 64, 4, masks=False, documents=True), 4, shuffle=False), 0, 16)
    assert found.documents is not None
    last_of_document = found.documents[:, 1:] != found.documents[:, :-1]
    assert torch.equal(found.labels[:, :-1] == IGNORED, last_of_document) and bool(last_of_document.any())
