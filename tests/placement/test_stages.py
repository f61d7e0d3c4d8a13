"""Layers to stages: every one exactly once, balanced, in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.placement import place, stage_map
from plait.placement.cuts import area
from plait.spec.layout import Layout
from plait.spec.model import ModelSpec
from plait.spec.run import ZeroSpec
from tests.spec.drawn import few

T0 = ModelSpec(vocab=64, hidden=32, layers=4, heads=4, ffn=64, max_sequence=16)


def layers_of(layers: int, pp: int, chunks: int = 1) -> list[list[int]]:
    model = T0.model_copy(update={"layers": layers})
    return [list(stage) for stage in stage_map(model, Layout(pp=pp), chunks).layers]


@given(st.integers(1, 4), st.integers(1, 8), st.integers(0, 100))
@few
def test_every_layer_belongs_to_exactly_one_stage(chunks: int, pp: int, more: int) -> None:
    stages = layers_of(pp * chunks + more, pp, chunks)
    assert [layer for stage in stages for layer in stage] == list(range(pp * chunks + more))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1 and all(stages)


@pytest.mark.parametrize(
    ("layers", "pp", "sizes"),
    [(30, 4, [8, 8, 7, 7]), (7, 3, [3, 2, 2]), (10, 3, [4, 3, 3]), (61, 4, [16, 15, 15, 15]), (5, 2, [3, 2])],
)
def test_b34_layers_that_do_not_divide_are_all_kept(layers: int, pp: int, sizes: list[int]) -> None:
    assert [len(stage) for stage in layers_of(layers, pp)] == sizes


def test_b34_virtual_stages_keep_every_layer_too() -> None:
    assert [len(stage) for stage in layers_of(30, 4, chunks=2)] == [4, 4, 4, 4, 4, 4, 3, 3]


def test_b34_the_parameters_of_all_stages_are_those_of_one_device() -> None:
    model = T0.model_copy(update={"layers": 5})
    placements = place(model, Layout(pp=2), ZeroSpec())
    held = [sum(area(p.rectangle(rank)) for p in placements.values() if p.held_by(rank)) for rank in range(2)]
    block = 4_096 + 6_144 + 64
    assert held == [2_048 + 3 * block, 2 * block + 32 + 2_048]
    assert sum(held) == model.parameter_count()


def test_w22_layers_of_32_and_24_over_4_stages() -> None:
    assert [(s[0] + 1, s[-1] + 1) for s in layers_of(32, 4)] == [(1, 8), (9, 16), (17, 24), (25, 32)]
    assert [(s[0], s[-1]) for s in layers_of(24, 4)] == [(0, 5), (6, 11), (12, 17), (18, 23)]


def test_stages_go_round_the_pipeline_ranks() -> None:
    stages = stage_map(T0.model_copy(update={"layers": 8}), Layout(pp=4), chunks=2)
    assert stages.owner == (0, 1, 2, 3, 0, 1, 2, 3)
    assert (stages.owned_by(1), stages.last) == ((1, 5), 7)


def test_the_ends_hold_what_stands_outside_the_blocks() -> None:
    model = T0.model_copy(update={"positions": "learned"})
    stages = stage_map(model, Layout(pp=3))
    ends = {t.name: stages.holding(t) for t in model.parameters() if t.layer is None}
    assert ends == {
        "embedding.tokens.weight": (0,),
        "embedding.positions.weight": (0,),
        "head.norm.weight": (2,),
        "head.projection.weight": (2,),
    }
