"""The picture of a layout: the rank map, groups, stages and cuts that a reader can check by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.placement.cuts import area
from plait.placement.place import place
from plait.report.layout import LayoutPicture, picture_layout
from plait.spec.fit import fit
from plait.spec.layout import AXES
from plait.spec.load import load

MT_NLG = (
    *("model.preset=gpt3-175b", "model.layers=105", "model.hidden=20480", "model.ffn=81920"),
    *("model.heads=128", "model.kv_heads=128", "model.head_dim=160"),
)


def pictured(*overrides: str, world: int | None = None) -> LayoutPicture:
    run = load(None, overrides)
    return picture_layout(run, fit(run, world))


def test_w21_with_data_outermost_a_replica_is_sixteen_neighbours() -> None:
    picture = pictured("layout.tp=4", "layout.pp=4", "layout.dp=4", 'layout.order=["dp", "pp", "cp", "tp"]')
    assert picture.replicas[0] == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))
    assert [replica[0][0] for replica in picture.replicas] == [0, 16, 32, 48]
    assert "replica 0  0-3      4-7      8-11     12-15" in picture.text(100)


def test_w18_on_64_nodes_each_stage_of_a_replica_is_one_node() -> None:
    picture = pictured("layout.tp=8", "layout.pp=8", "model.preset=gpt3-175b", world=512)
    assert len(picture.replicas) == 8
    for replica in picture.replicas:
        nodes = [{rank // 8 for rank in ranks} for ranks in replica]
        assert all(len(node) == 1 for node in nodes)
        assert len(set.union(*nodes)) == 8


def test_w19_mt_nlg_on_2240_devices_has_eight_replicas() -> None:
    picture = pictured("layout.tp=8", "layout.pp=35", *MT_NLG, world=2240)
    assert len(picture.replicas) == 8
    assert {len(row.layers) for row in picture.stages} == {3}


def test_w20_two_by_four_by_thirty_two_is_256_devices() -> None:
    picture = pictured("layout.tp=2", "layout.pp=4", "layout.dp=32", "batch.global_size=128")
    assert picture.as_dict()["world"] == 256
    assert "256 ranks" in picture.text(100)


@pytest.mark.parametrize(
    ("layers", "bounds"), [(32, [(0, 7), (8, 15), (16, 23), (24, 31)]), (24, [(0, 5), (6, 11), (12, 17), (18, 23)])]
)
def test_w22_layers_fall_to_four_stages_in_order(layers: int, bounds: list[tuple[int, int]]) -> None:
    picture = pictured("layout.pp=4", f"model.layers={layers}")
    assert [(row.layers[0], row.layers[-1]) for row in picture.stages] == bounds
    assert "uneven" not in picture.text(100)


def test_uneven_stages_are_pointed_at() -> None:
    picture = pictured("layout.pp=4", "model.layers=6")
    assert [len(row.layers) for row in picture.stages] == [2, 2, 1, 1]
    assert "uneven stages: 6 layers on 4 stages, 1 or 2 each" in picture.text(100)


@given(st.permutations(AXES), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_every_rank_stands_in_exactly_one_place(order: list[str], pp: int, tp: int, dp: int) -> None:
    picture = pictured(f"layout.order={order}", f"layout.pp={pp}", f"layout.tp={tp}", f"layout.dp={dp}")
    placed = [rank for replica in picture.replicas for ranks in replica for rank in ranks]
    assert sorted(placed) == list(range(pp * tp * dp))
    for groups in picture.groups.values():
        assert len({len(group) for group in groups}) == 1


@pytest.mark.parametrize(("tied", "twice"), [("false", 0), ("true", 257 * 128)])
def test_parameters_of_the_stages_add_up_to_the_model(tied: str, twice: int) -> None:
    overrides = (f"model.tied={tied}", "layout.pp=4")
    total = sum(row.parameters_largest for row in pictured(*overrides).stages)
    assert total == load(None, overrides).model.parameter_count() + twice


def test_parameters_per_rank_are_those_of_the_placement_records() -> None:
    run = load(None, ["layout.pp=2", "layout.tp=4", "layout.dp=2"])
    layout = fit(run)
    placements = place(run.model, layout, run.zero).values()
    rows = picture_layout(run, layout).stages
    held: dict[int, set[int]] = {row.pp: set() for row in rows}
    for rank in range(layout.world):
        pp = layout.coordinates(rank).pp
        held[pp].add(sum(area(p.rectangle(rank)) for p in placements if p.held_by(rank)))
    assert held[0] != {min(held[0])}, "an odd vocabulary must make ranks differ here"
    assert [(r.parameters_smallest, r.parameters_largest) for r in rows] == [(min(s), max(s)) for s in held.values()]


def test_a_tied_table_and_copied_heads_are_pointed_at() -> None:
    text = pictured("layout.pp=3", "layout.tp=4", "model.tied=true").text(100)
    assert "tied: embedding.tokens.weight = head.projection.weight, held by stages 0 and 2" in text
    assert "kv heads: 2 pieces over tp 4, each on 2 ranks of a tp group" in text


def test_a_role_says_its_cut_its_gradient_sum_and_its_copies() -> None:
    picture = pictured("layout.tp=4", "layout.dp=2", "layout.sequence_parallel=true")
    rows = {row.role: row for row in picture.roles}
    kv, norm, column = rows["kv"], rows["norm"], rows["column"]
    assert (kv.dim, kv.over, kv.parts, kv.gradient_sum_over, kv.copies) == (0, "kv", 2, ("dp_cp", "copies"), 4)
    assert (norm.dim, norm.over, norm.gradient_sum_over, norm.copies) == (None, None, ("dp_cp", "tp"), 8)
    assert (column.over, column.parts, column.gradient_sum_over, column.copies) == ("tp", 4, ("dp_cp",), 2)
    assert column.tensors == ("blocks.*.mlp.gate.weight", "blocks.*.mlp.up.weight")
    assert sum(row.count for row in picture.roles) == len(load().model.parameters())


def test_equal_groups_stand_in_one_row_and_single_ranks_in_none() -> None:
    groups = pictured("layout.tp=2", "layout.dp=2").groups
    assert groups["tp = kv"] == ((0, 1), (2, 3))
    assert groups["dp = dp_cp = shard"] == ((0, 2), (1, 3))
    assert not any("pp" in name or "copies" in name for name in groups)


def test_a_large_world_stays_on_one_screen() -> None:
    lines = pictured("layout.tp=4", "layout.pp=4", "layout.dp=64", "batch.global_size=256").text(100).splitlines()
    assert len(lines) < 50
    assert any(line.startswith("replica 63") for line in lines)


def test_one_rank_has_no_groups() -> None:
    assert "none: every axis is 1" in pictured().text(100)


def test_experts_are_shown_with_both_of_their_cuts_and_a_ring_with_its_balance() -> None:
    degrees = ("layout.cp=2", "layout.tp=2", "layout.dp=2", "layout.ep=2", "layout.etp=2")
    picture = pictured("model.preset=mixtral-tiny", "batch.sequence=64", *degrees)
    roles = {row.role: row for row in picture.roles}
    assert (roles["expert_column"].dim, roles["expert_column"].over, roles["expert_column"].parts) == (0, "ep", 2)
    assert roles["expert_column"].second == (1, "etp", 2) and roles["expert_row"].second == (2, "etp", 2)
    assert roles["expert_column"].gradient_sum_over == ("edp",) and roles["router"].gradient_sum_over == ("dp_cp", "tp")
    text = picture.text(120)
    assert "dim 0 over ep 2, dim 1 over etp 2" in text
    assert "zigzag 1.00 × the mean in the worst step" in text and "contiguous 2.00" in text
