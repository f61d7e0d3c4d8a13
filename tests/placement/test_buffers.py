"""Buffers hold every element of a rank once, shards tile them, and a piece says where it belongs in the whole."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.placement.buffer import _by_matrix, _rectangles, buffers
from plait.placement.cuts import area
from plait.placement.place import Placement, place
from plait.spec.layout import Layout
from plait.spec.model import ModelSpec
from plait.spec.run import ZeroSpec
from tests.placement.test_place import few, placed


@given(placed(), st.integers(0, 3), st.sampled_from(["element", "matrix"]))
@few
def test_the_shards_of_a_group_hold_every_element_of_every_rectangle_once(
    case: tuple[ModelSpec, Layout, dict[str, Placement]], stage: int, unit: str
) -> None:
    model, layout, _ = case
    placements = place(model, layout, ZeroSpec(stage=stage))
    for rank in {0, layout.world // 2, layout.world - 1}:
        held = [p for p in placements.values() if p.held_by(rank)]
        found: dict[str, list[tuple[int, int]]] = {p.tensor.name: [] for p in held}
        for buffer in buffers(placements, rank, unit):
            assert buffer.shards * buffer.length == buffer.size and buffer.padding >= 0
            assert all(a.stop <= b.start for a, b in itertools.pairwise(buffer.members))
            for shard in range(buffer.shards):
                for piece, at in buffer.pieces(shard):
                    assert shard * buffer.length <= at < at + piece.stop - piece.start <= (shard + 1) * buffer.length
                    found[piece.placement.tensor.name].append((piece.start, piece.stop))
        for placement in held:
            edges = sorted(found[placement.tensor.name])
            assert edges[0][0] == 0 and edges[-1][1] == area(placement.rectangle(rank))
            assert all(before[1] == after[0] for before, after in itertools.pairwise(edges))


@given(placed(), st.integers(1, 3))
@few
def test_no_border_cuts_a_matrix_where_whole_ones_are_needed(
    case: tuple[ModelSpec, Layout, dict[str, Placement]], stage: int
) -> None:
    model, layout, _ = case
    for buffer in buffers(place(model, layout, ZeroSpec(stage=stage)), layout.world - 1, "matrix"):
        for shard in range(buffer.shards):
            for piece, _ in buffer.pieces(shard):
                assert (piece.start, piece.stop) == (0, area(piece.placement.rectangle(layout.world - 1)))


@given(placed())
@few
def test_a_buffer_pads_less_than_one_element_a_shard(case: tuple[ModelSpec, Layout, dict[str, Placement]]) -> None:
    model, layout, _ = case
    for buffer in buffers(place(model, layout, ZeroSpec(stage=3)), 0):
        assert buffer.padding < buffer.shards


@given(placed(), st.integers(0, 3))
@few
def test_tp_ranks_cut_alike_what_they_hold_alike(
    case: tuple[ModelSpec, Layout, dict[str, Placement]], stage: int
) -> None:
    """What is summed over tp, copies or tied stages after ZeRO's reduction has the same pieces on all of them."""
    model, layout, _ = case
    placements = place(model, layout, ZeroSpec(stage=stage))

    def pieces(rank: int, group: str) -> list[tuple[str, int, int]]:
        shard = layout.coordinates(rank).shard if stage else None
        return [
            (piece.placement.tensor.name, piece.start, piece.stop)
            for buffer in buffers(placements, rank)
            for piece, _ in buffer.pieces(shard)
            if group in piece.placement.partial
        ]

    for rank in {layout.world // 2, layout.world - 1}:
        for group in ("copies", "tp", "tied"):
            first = layout.group(group, rank)[0]
            if group != "tied" or rank in layout.group("tied", rank):
                assert pieces(rank, group) == pieces(first, group)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_the_rectangles_of_a_flat_range_are_its_elements_in_order(sizes: list[int], data: st.DataObject) -> None:
    whole = tuple((lo, lo + size) for lo, size in zip((3, 0, 7), sizes, strict=False))
    flat = list(itertools.product(*(range(*edge) for edge in whole)))
    start = data.draw(st.integers(0, len(flat)))
    stop = data.draw(st.integers(start, len(flat)))
    rectangles = list(_rectangles(whole, start, stop))
    found = [at for rectangle in rectangles for at in itertools.product(*(range(*edge) for edge in rectangle))]
    assert found == flat[start:stop]
    assert len(rectangles) <= 2 * len(sizes) - 1


@pytest.mark.parametrize(
    ("sizes", "shards", "starts", "length"),
    [([4, 4, 4, 4], 2, [0, 4, 8, 12], 8), ([5, 1, 1, 5], 2, [0, 5, 6, 7], 6), ([9, 1, 1], 4, [0, 9, 10], 9)],
)
def test_whole_matrices_are_packed_in_order_into_the_shortest_shards(
    sizes: list[int], shards: int, starts: list[int], length: int
) -> None:
    assert _by_matrix(sizes, shards) == (starts, length)
