"""Which tokens a context rank holds, and that zigzag order is even where contiguous order is not."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.placement.tokens import context_runs, imbalance, ring_chunks, ring_pairs, ring_runs, tokens_in
from plait.spec.fit import fit
from plait.spec.model import ModelSpec
from plait.spec.run import BatchSpec, DataSpec, LayoutSpec, RunSpec
from tests.spec.drawn import few

T0 = ModelSpec(vocab=64, hidden=32, layers=4, heads=4, ffn=64, max_sequence=16)


def run_of(sequence: int = 16, documents: bool = False, **layout: object) -> RunSpec:
    return RunSpec(
        model=T0,
        layout=LayoutSpec.model_validate(layout),
        batch=BatchSpec(sequence=sequence),
        data=DataSpec(mask_documents=documents),
    )


def held(run: RunSpec) -> list[list[int]]:
    layout = fit(run)
    return [tokens_in(context_runs(run, layout, cp)) for cp in range(layout.cp)]


def test_b23_zigzag_gives_a_rank_the_chunk_of_its_number_from_both_ends() -> None:
    assert held(run_of(cp=2)) == [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]
    assert held(run_of(cp=2, context_order="contiguous")) == [list(range(8)), list(range(8, 16))]


def test_ulysses_ranks_hold_consecutive_parts_of_their_ring_rank_s_tokens() -> None:
    assert held(run_of(cp=4, ulysses=2)) == [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert held(run_of(cp=4, ulysses=4)) == [list(range(4 * i, 4 * i + 4)) for i in range(4)]


@few
@given(st.sampled_from((1, 2, 3, 4)), st.sampled_from((1, 2, 3)), st.sampled_from((1, 2, 4)), st.booleans())
def test_every_token_is_held_once_and_all_ranks_hold_as_many(ring: int, ulysses: int, times: int, order: bool) -> None:
    sequence = 2 * ring * ulysses * times
    run = run_of(sequence, cp=ring * ulysses, ulysses=ulysses, context_order="zigzag" if order else "contiguous")
    run = run.model_copy(update={"model": T0.model_copy(update={"heads": 6, "kv_heads": 6})})
    ranks = held(run)
    assert sorted(token for tokens in ranks for token in tokens) == list(range(sequence))
    assert {len(tokens) for tokens in ranks} == {sequence // (ring * ulysses)}
    assert all(tokens == sorted(tokens) for tokens in ranks)


@pytest.mark.parametrize("ring", [2, 3, 4, 8])
def test_zigzag_is_even_in_every_step_and_contiguous_order_is_not(ring: int) -> None:
    sequence = 48 * ring
    zigzag, contiguous = (ring_pairs(ring_runs(sequence, ring, chunks)) for chunks in (2, 1))
    assert imbalance(zigzag) <= 1.02
    # Contiguous order: in step s the ranks below s have nothing to do; in all, the last does nearly twice the mean.
    assert imbalance(contiguous) == pytest.approx(ring)
    totals = [sum(step[rank] for step in contiguous) for rank in range(ring)]
    assert max(totals) * ring / sum(totals) > 1.45
    for pairs in (zigzag, contiguous):
        assert sum(map(sum, pairs)) == sequence * (sequence + 1) // 2


@pytest.mark.quick(2)
@pytest.mark.parametrize("ring", [2, 4])
@pytest.mark.parametrize("mean", [256, 1024])
def test_rows_of_random_documents_are_nearly_even_where_contiguous_ones_are_not(ring: int, mean: int) -> None:
    run = run_of(4096, documents=True, cp=ring)
    plain = run.model_copy(update={"data": DataSpec()})
    assert (ring_chunks(run), ring_chunks(plain)) == (4096 // 32 // ring, 2)
    dice = random.Random(mean)

    def load(chunks: int, documents: list[int]) -> list[int]:
        pairs = ring_pairs(ring_runs(4096, ring, chunks), documents=documents)
        return [sum(step[rank] for step in pairs) for rank in range(ring)]

    shares = []
    for _ in range(6):
        documents = [0]
        for _ in range(4095):
            documents.append(documents[-1] + (dice.random() < 1 / mean))
        shares.append([imbalance([load(chunks, documents)]) for chunks in (ring_chunks(run), 1)])
    even, uneven = (max(share) for share in zip(*shares, strict=True))
    assert even <= 1.15 < 1.3 < uneven


def test_a_window_and_documents_leave_only_the_pairs_that_are_seen() -> None:
    runs = ring_runs(12, 3, 2)
    documents = [0] * 5 + [1] * 7
    seen = {(q, k) for q in range(12) for k in range(q + 1) if q - k < 4 and documents[q] == documents[k]}
    pairs = ring_pairs(runs, window=4, documents=documents)
    assert sum(map(sum, pairs)) == len(seen)
    for step, row in enumerate(pairs):
        for rank, count in enumerate(row):
            queries, keys = set(tokens_in(runs[rank])), set(tokens_in(runs[(rank - step) % 3]))
            assert count == len({(q, k) for q, k in seen if q in queries and k in keys})
