"""Layers to stages: every one exactly once, balanced, in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.placement import place, stage_map, stages_of
from plait.placement.cuts import area
from plait.placement.stages import balanced
from plait.schedule.of_run import schedules
from plait.spec.fit import fit
from plait.spec.layout import Layout
from plait.spec.load import load
from plait.spec.model import ModelSpec
from plait.spec.pipeline import SHAPES, owners
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


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_placement_and_schedule_agree_on_who_owns_a_stage(name: str, pp: int) -> None:
    run = load(None, [f"schedule.name={name}", f"layout.pp={pp}", "model.layers=9"])
    owner = stages_of(run, Layout(pp=pp)).owner
    assert {schedule.owner for schedule in schedules(run, dp=1)} == {owner}


def test_in_a_v_one_rank_holds_the_first_and_the_last_stage_and_a_tied_table_once() -> None:
    run = load(None, ["schedule.name=zb-v", "layout.pp=2", "model.tied=true"])
    layout = Layout(pp=2)
    stages = stages_of(run, layout)
    assert (stages.owner, stages.owned_by(0)) == ((0, 1, 1, 0), (0, 3))
    table = place(run.model, layout, run.zero, stages)["embedding.tokens.weight"]
    assert (table.stages, table.holders, table.partial, table.copies) == ((0, 3), (0,), ("dp_cp",), 1)


def test_listed_layers_are_taken_as_they_are() -> None:
    run = load(None, ["layout.pp=3", "schedule.layers=[2,1,1]"])
    assert stages_of(run, fit(run)).layers == (range(2), range(2, 3), range(3, 4))


def test_a_head_as_long_as_two_blocks_is_paid_with_two_blocks() -> None:
    assert balanced(14, owners(4, 1, False), block=1.0, head=2.0) == (4, 4, 4, 2)
    assert balanced(14, owners(2, 2, True), block=1.0, head=2.0) in ((4, 4, 4, 2), (3, 4, 4, 3))


def test_the_built_in_run_is_balanced_by_flops() -> None:
    run = load(None, ["layout.pp=2", "model.layers=8", "model.vocab=4096", "schedule.layers=balanced"])
    counts = [len(stage) for stage in stages_of(run, Layout(pp=2)).layers]
    assert sum(counts) == 8 and counts[0] > counts[1]


@given(st.integers(1, 4), st.integers(1, 2), st.booleans(), st.integers(0, 12), st.floats(0, 4))
@few
def test_balanced_stages_keep_every_layer_and_no_rank_is_busier_than_with_even_ones(
    pp: int, chunks: int, folded: bool, more: int, head: float
) -> None:
    owner = owners(pp, chunks, folded)

    def busiest(counts: tuple[int, ...]) -> float:
        loads = [0.0] * pp
        for stage, count in enumerate(counts):
            loads[owner[stage]] += count + head * (stage == len(owner) - 1)
        return max(loads)

    layers = len(owner) + more
    counts = balanced(layers, owner, 1.0, head)
    assert sum(counts) == layers and min(counts) >= 1
    assert busiest(counts) <= busiest(
        tuple(map(len, stage_map(T0.model_copy(update={"layers": layers}), Layout(pp=len(owner))).layers))
    )
