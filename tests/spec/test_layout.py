"""Ranks, coordinates and groups: what holds for every legal layout, and the rank maps that the literature prints."""

from __future__ import annotations

import time
from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.spec.errors import InvalidRun
from plait.spec.layout import AXES, AXIS_OF, GROUPS, SIZES, Coordinates, Layout
from tests.spec.drawn import few, layouts

# Group -> the coordinates that differ inside it, slowest first, where it is not the one of the same name.
VARYING = {
    "self": (),
    "copies": ("copy",),
    "dp_cp": ("replicate", "shard"),
    "stage": ("edp", "ep", "etp"),
    "tied": ("pp",),
}
DATA_OUTERMOST = ("dp", "pp", "cp", "tp")


def varying(layout: Layout, name: str, rank: int) -> tuple[int, ...]:
    return tuple(getattr(layout.coordinates(rank), c) for c in VARYING.get(name, (name,)))


@pytest.mark.parametrize("name", [name for name in GROUPS if name != "tied"])
@given(layout=layouts())
@few
def test_groups_of_a_name_share_out_the_world_in_equal_parts(name: str, layout: Layout) -> None:
    groups = layout.groups(name)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
    assert {len(group) for group in groups} == {layout.size(name)}


@given(layout=layouts())
@few
def test_a_tied_tensor_is_shared_by_first_and_last_stage_of_each_pipeline(layout: Layout) -> None:
    groups = layout.groups("tied")
    members = [rank for group in groups for rank in group]
    assert len(set(members)) == len(members) == layout.ranks_per_stage * layout.size("tied")
    assert {len(group) for group in groups} == {layout.size("tied")} == {min(2, layout.pp)}
    for group in groups:
        assert [layout.coordinates(rank).pp for rank in group] == sorted({0, layout.pp - 1})
        assert len({layout.coordinates(rank)._replace(pp=0) for rank in group}) == 1
    for rank in range(layout.world):
        assert layout.group("tied", rank) in groups
        assert layout.coordinates(layout.group("tied", rank)[0]) == layout.coordinates(rank)._replace(pp=0)


@pytest.mark.parametrize("name", [name for name in GROUPS if name not in ("tied", "world")])
@given(layout=layouts())
@few
def test_the_ranks_of_a_group_stand_in_the_order_of_their_own_coordinate_and_share_all_others(
    name: str, layout: Layout
) -> None:
    own = VARYING.get(name, (name,))
    every = list(product(*(range(layout.size({"copy": "copies"}.get(c, c))) for c in own)))
    for group in layout.groups(name):
        assert [varying(layout, name, rank) for rank in group] == every
        assert len({tuple(getattr(layout.coordinates(rank), c) for c in GROUPS[name]) for rank in group}) == 1


@pytest.mark.parametrize("order", list(permutations(AXES)))
def test_groups_keep_their_order_in_every_order_of_axes(order: tuple[str, ...]) -> None:
    layout = Layout(pp=2, dp=3, cp=4, tp=4, kv=2, ulysses=2, shard=6, ep=6, etp=4, order=order)
    for name in set(GROUPS) - {"world"}:
        for group in layout.groups(name):
            places = [varying(layout, name, rank) for rank in group]
            assert places == sorted(set(places)) and list(group) == sorted(group)
    assert layout.groups("world") == (tuple(range(96)),)


@given(layout=layouts())
@few
def test_rank_and_coordinates_are_inverse_and_the_last_axis_is_adjacent(layout: Layout) -> None:
    for rank in range(layout.world):
        at = layout.coordinates(rank)
        assert layout.rank(pp=at.pp, dp=at.dp, cp=at.cp, tp=at.tp) == rank
    last = layout.groups(layout.order[-1])[0]
    assert last == tuple(range(len(last)))


@given(layout=layouts())
@few
def test_factors_of_an_axis_make_it_up(layout: Layout) -> None:
    for rank in range(layout.world):
        at = layout.coordinates(rank)
        assert at.tp == at.kv * layout.size("copies") + at.copy
        assert at.cp == at.ring * layout.ulysses + at.ulysses
        assert at.replicate * layout.shard + at.shard == layout.group("dp_cp", rank).index(rank)


@given(layout=layouts())
@few
def test_experts_see_each_stage_as_edp_ep_etp_with_etp_fastest(layout: Layout) -> None:
    edp, ep, etp = (layout.size(name) for name in ("edp", "ep", "etp"))
    assert edp * ep * etp == layout.ranks_per_stage
    for stage in layout.groups("stage"):
        for index, rank in enumerate(stage):
            at = layout.coordinates(rank)
            assert index == (at.edp * ep + at.ep) * etp + at.etp


@given(layout=layouts(), data=st.data())
@few
def test_a_rank_stands_in_the_group_that_it_asks_for(layout: Layout, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, layout.world - 1))
    for name in set(GROUPS) - {"tied"}:
        assert rank in layout.group(name, rank)
        assert layout.group(name, rank) in layout.groups(name)


@pytest.mark.proof  # a wall clock; a busy machine is late
def test_a_layout_of_16384_ranks_knows_all_its_groups_within_a_second() -> None:
    def seconds(order: tuple[str, ...]) -> float:
        layout = Layout(pp=16, dp=128, tp=8, kv=8, shard=64, ep=8, order=order)
        start = time.process_time()
        assert sum(len(layout.groups(name)) for name in GROUPS) > 16384
        assert layout.coordinates(16383) == Coordinates(15, 127, 0, 7, 7, 0, 0, 0, 1, 63, 127, 7, 0)
        return time.process_time() - start

    assert min(map(seconds, (AXES, DATA_OUTERMOST))) < 1  # the better of two: the collector may pass through one


def test_every_group_has_a_size_and_an_axis_to_be_counted_under() -> None:
    assert set(SIZES) == set(AXIS_OF) == set(GROUPS)


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_world_has_no_coordinates(rank: int) -> None:
    with pytest.raises(IndexError, match=f"rank {rank} of a world of 8"):
        Layout(tp=4, dp=2, kv=4, shard=2).coordinates(rank)


@pytest.mark.parametrize(
    ("sizes", "key", "numbers", "fix"),
    [
        ({"tp": 4, "kv": 3}, "layout.kv", ("3", "4"), "2 or 4"),
        ({"cp": 4, "ulysses": 3}, "layout.ulysses", ("3", "4"), "2 or 4"),
        ({"dp": 6, "shard": 4}, "zero.shard", ("4", "6"), "3 or 6"),
        ({"dp": 6, "ep": 4}, "layout.ep", ("4", "6"), "3 or 6"),
        ({"dp": 3, "tp": 2, "etp": 2, "ep": 2}, "layout.ep", ("ep 2", "etp 2", "6"), "1 or 3"),
        ({"tp": 4, "etp": 2}, "layout.etp", ("2", "4"), "one of them"),
        ({"order": ("pp", "dp", "cp")}, "layout.order", ("4 axes",), "'tp'"),
        ({"order": ("pp", "dp", "tp", "tp")}, "layout.order", ("4 axes",), "'cp'"),
        ({"order": ("pp", "dp", "ep", "tp")}, "layout.order", ("'ep'",), "'cp'"),
        ({"dp": 2**40}, "layout", (str(2**40), str(2**20)), "fewer"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_both_numbers_and_the_nearest_that_do(
    sizes: dict[str, object], key: str, numbers: tuple[str, ...], fix: str
) -> None:
    with pytest.raises(InvalidRun) as refused:
        Layout(**sizes)
    [violation] = refused.value.violations
    assert violation.key == key and fix in violation.fix
    assert all(number in violation.problem for number in numbers)


def test_all_that_is_wrong_with_a_layout_is_said_together() -> None:
    with pytest.raises(InvalidRun) as refused:
        Layout(dp=6, tp=4, kv=3, cp=2, ulysses=4, shard=5, ep=5)
    assert [v.key for v in refused.value.violations] == ["layout.ulysses", "layout.kv", "zero.shard", "layout.ep"]


# --- worked examples -------------------------------------------------------------------------------------------------


def test_w20_tp_2_pp_4_dp_32_are_256_devices() -> None:
    assert Layout(tp=2, kv=2, pp=4, dp=32).world == 256


def test_w21_rank_map_of_64_devices_with_data_outermost() -> None:
    layout = Layout(tp=4, kv=4, pp=4, dp=4, order=DATA_OUTERMOST)
    assert [layout.group("tp", 4 * stage) for stage in range(4)] == [
        tuple(range(4 * stage, 4 * stage + 4)) for stage in range(4)
    ]
    assert [layout.coordinates(4 * stage).pp for stage in range(4)] == [0, 1, 2, 3]
    assert [rank for rank in range(64) if layout.coordinates(rank).dp == 0] == list(range(16))
    assert layout.group("pp", 0) == (0, 4, 8, 12)
    assert layout.group("dp", 0) == (0, 16, 32, 48)


def test_tensor_neighbours_are_adjacent_ranks_by_default() -> None:
    layout = Layout(tp=4, kv=4, pp=2, dp=2)
    assert layout.groups("tp") == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))
    assert layout.group("pp", 0) == (0, 8)
