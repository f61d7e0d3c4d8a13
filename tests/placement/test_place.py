"""The placement records: every tensor whole exactly once, copies counted as they are, slices without gap or overlap."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.placement import Placement, place
from plait.placement.cuts import CUTS, Rectangle, area, piece
from plait.placement.place import homes
from plait.spec.layout import Layout
from plait.spec.model import ROLES, ModelSpec
from plait.spec.presets import PRESETS
from plait.spec.run import ZeroSpec
from tests.placement.drawn import layouts_for, models
from tests.spec.drawn import few

T0 = ModelSpec(vocab=64, hidden=32, layers=4, heads=4, ffn=64, max_sequence=16)
ZERO = ZeroSpec()


@st.composite
def placed(draw: st.DrawFn) -> tuple[ModelSpec, Layout, dict[str, Placement]]:
    model = draw(models())
    layout = draw(layouts_for(model))
    return model, layout, place(model, layout, ZERO)


def rectangles(placement: Placement, layout: Layout) -> dict[int, Rectangle]:
    """Rank -> what it holds, of the ranks that hold something."""
    return {rank: placement.rectangle(rank) for rank in range(layout.world) if placement.held_by(rank)}


def elements(placements: dict[str, Placement], rank: int) -> int:
    return sum(area(p.rectangle(rank)) for p in placements.values() if p.held_by(rank))


@given(placed())
@few
def test_first_copies_tile_every_tensor_exactly_once(case: tuple[ModelSpec, Layout, dict[str, Placement]]) -> None:
    model, layout, placements = case
    assert list(placements) == [t.name for t in model.parameters()]
    for tensor in model.parameters():
        placement = placements[tensor.name]
        times = np.zeros(tensor.shape, int)
        for rank, rectangle in rectangles(placement, layout).items():
            if placement.first_copy(rank):
                times[tuple(slice(*edge) for edge in rectangle)] += 1
        assert (times == 1).all(), tensor.name


@given(placed())
@few
def test_elements_of_first_copies_are_the_models_parameter_count(
    case: tuple[ModelSpec, Layout, dict[str, Placement]],
) -> None:
    model, layout, placements = case
    spoken = sum(
        area(rectangle)
        for placement in placements.values()
        for rank, rectangle in rectangles(placement, layout).items()
        if placement.first_copy(rank)
    )
    assert spoken == model.parameter_count()


@given(placed())
@few
def test_copies_are_the_ranks_that_hold_an_identical_rectangle(
    case: tuple[ModelSpec, Layout, dict[str, Placement]],
) -> None:
    _, layout, placements = case
    for placement in placements.values():
        held = rectangles(placement, layout)
        assert set(Counter(held.values()).values()) == {placement.copies}, placement.tensor.name
        assert Counter(r for rank, r in held.items() if placement.first_copy(rank)) == Counter(set(held.values()))


@given(placed())
@few
def test_a_gradient_is_summed_over_ranks_that_hold_the_same_rectangle_only(
    case: tuple[ModelSpec, Layout, dict[str, Placement]],
) -> None:
    _, layout, placements = case
    for placement in placements.values():
        held = rectangles(placement, layout)
        assert placement.partial[0] == "dp_cp" and len(set(placement.partial)) == len(placement.partial)
        for name in placement.partial:
            for rank, rectangle in held.items():
                assert {held[peer] for peer in layout.group(name, rank)} == {rectangle}, (placement.tensor.name, name)


@given(placed())
@few
def test_a_rank_holds_the_parameters_of_its_stages_and_no_other(
    case: tuple[ModelSpec, Layout, dict[str, Placement]],
) -> None:
    model, layout, placements = case
    found = homes(placements, layout.world - 1)
    stacked = [p.tensor.name for parts in found.values() for p in parts]
    assert sorted(stacked) == sorted(n for n, p in placements.items() if p.held_by(layout.world - 1))
    for home, parts in found.items():
        assert [p.tensor for p in parts] == list(model.homes()[home])
        assert len({p.shape(layout.world - 1)[1:] for p in parts}) == 1  # so that they can be stacked along dim 0


@given(st.integers(0, 10_000), st.integers(1, 300))
@few
def test_pieces_are_contiguous_and_differ_by_at_most_one(size: int, parts: int) -> None:
    edges = [piece(size, parts, index) for index in range(parts)]
    assert (edges[0][0], edges[-1][1]) == (0, size)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(edges))
    lengths = [stop - start for start, stop in edges]
    assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)


def test_every_role_of_tensor_has_a_cut() -> None:
    assert set(CUTS) == set(ROLES)


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny", "mistral-tiny", "qwen2-tiny", "qwen3-tiny"])
def test_norms_and_biases_do_not_decay(name: str) -> None:
    for tensor_name, placement in place(PRESETS[name], Layout(), ZERO).items():
        is_vector = tensor_name.endswith(".bias") or "norm" in tensor_name
        assert placement.decays is not is_vector, tensor_name


def test_a_layout_for_other_kv_heads_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="kv 1 is not that of 4 kv heads"):
        place(T0, Layout(tp=2), ZERO)


# --- worked examples and cases ---------------------------------------------------------------------------------------


def local_shape(model: ModelSpec, tp: int, name: str) -> tuple[int, ...]:
    """The shape on the last rank of tp ranks. Weights are (out, in): a column split cuts dim 0."""
    return place(model, Layout(tp=tp, kv=tp), ZERO)[name].shape(tp - 1)


def test_w13_a_column_split_of_4096_by_16384_over_2_leaves_shards_of_4096_by_8192() -> None:
    model = ModelSpec(vocab=64, hidden=4096, layers=1, heads=32, ffn=16384, max_sequence=16)
    assert local_shape(model, 2, "blocks.0.mlp.up.weight") == (8192, 4096)  # outputs are (batch, 8192)
    assert local_shape(model, 2, "blocks.0.mlp.down.weight") == (4096, 8192)  # so the row split's input fits them


def test_w14_a_column_split_of_8192_by_8192_over_8_leaves_shards_of_8192_by_1024() -> None:
    model = ModelSpec(vocab=64, hidden=8192, layers=1, heads=64, ffn=64, max_sequence=16)
    assert local_shape(model, 8, "blocks.0.attention.q.weight") == (1024, 8192)
    assert local_shape(model, 8, "blocks.0.attention.out.weight") == (8192, 1024)


def test_b35_an_odd_vocabulary_is_cut_in_balanced_pieces_without_padding() -> None:
    model = T0.model_copy(update={"vocab": 61})
    for tp, rows in ((2, [31, 30]), (4, [16, 15, 15, 15])):
        placements = place(model, Layout(tp=tp, kv=tp), ZERO)
        for name in ("embedding.tokens.weight", "head.projection.weight"):
            assert [placements[name].shape(rank) for rank in range(tp)] == [(n, 32) for n in rows]
            assert placements[name].rectangle(tp - 1)[0][1] == 61


def test_b80_b81_norms_are_whole_on_each_of_two_tensor_ranks_so_t0_holds_22816_parameters_on_each() -> None:
    placements = place(T0, Layout(tp=2, kv=2), ZERO)
    assert [elements(placements, rank) for rank in range(2)] == [22_816, 22_816]
    norms = [p for p in placements.values() if p.tensor.role == "norm"]
    assert (len(norms), {p.copies for p in norms}) == (9, {2})
    assert elements(placements, 0) + elements(placements, 1) - sum(area(p.rectangle(1)) for p in norms) == 45_344


def test_kv_heads_fewer_than_tensor_ranks_are_copied_and_their_gradients_summed_over_the_copies() -> None:
    model = T0.model_copy(update={"kv_heads": 2})
    k = place(model, Layout(tp=4, kv=2), ZERO)["blocks.0.attention.k.weight"]
    assert [k.rectangle(rank)[0] for rank in range(4)] == [(0, 8), (0, 8), (8, 16), (8, 16)]
    assert (k.copies, k.partial) == (2, ("dp_cp", "copies"))


def test_sequence_parallel_makes_gradients_of_norms_and_row_biases_partial_over_tensor_ranks() -> None:
    model = PRESETS["gpt2-tiny"]
    for split in (False, True):
        placements = place(model, Layout(tp=2, kv=2, sequence_parallel=split), ZERO)
        partial = {p.tensor.role for p in placements.values() if "tp" in p.partial}
        assert partial == ({"norm", "positions", "row_bias"} if split else set())


def test_a_tied_table_is_held_by_the_ends_of_the_pipeline_and_counted_once() -> None:
    model = T0.model_copy(update={"tied": True})
    table = place(model, Layout(pp=4, tp=2, kv=2), ZERO)["embedding.tokens.weight"]
    assert (table.holders, table.stages, table.copies, table.partial) == ((0, 3), (0, 3), 2, ("dp_cp", "tied"))
    assert [rank for rank in range(8) if table.held_by(rank)] == [0, 1, 6, 7]
    assert place(model, Layout(tp=2, kv=2), ZERO)["embedding.tokens.weight"].partial == ("dp_cp",)
