"""A run and a world make a layout, or every reason why not is said at once, with two numbers and the way out."""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd, prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.spec.errors import InvalidRun, Violation
from plait.spec.experts import Experts
from plait.spec.fit import fit, violations
from plait.spec.load import load
from plait.spec.model import ModelSpec
from plait.spec.nearest import divisors, nearest_divisors, nearest_multiples
from plait.spec.presets import PRESETS
from plait.spec.run import BatchSpec, LayoutSpec, RecomputeSpec, RunSpec, ScheduleSpec, ZeroSpec
from tests.spec.drawn import few

T0 = ModelSpec(vocab=64, hidden=32, layers=4, heads=4, ffn=64, max_sequence=16)


def run(model: dict[str, Any] | None = None, **sections: Any) -> RunSpec:
    return RunSpec(model=T0.model_copy(update=model or {}), **sections)


def by_key(found: Iterable[Violation]) -> dict[str, Violation]:
    return {v.key: v for v in found}


def only(found: list[Violation]) -> Violation:
    assert len(found) == 1, found
    return found[0]


# --- worked examples and cases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [("pp", "dp", "cp", "tp"), ("dp", "pp", "cp", "tp")])
def test_w18_tp_8_pp_8_on_512_devices_leaves_dp_8_with_a_node_for_each_stage(order: tuple[str, ...]) -> None:
    asked = run(PRESETS["llama3-70b"].model_dump(), layout=LayoutSpec(tp=8, pp=8, order=order))
    layout = fit(asked, 512)
    assert (layout.dp, layout.world) == (8, 512)
    nodes = [{rank // 8 for rank in stage} for stage in layout.groups("tp")]
    assert all(len(node) == 1 for node in nodes)  # one replica's stage is one node of 8
    replica = [rank for rank in range(512) if layout.coordinates(rank).dp == 3]
    assert len({rank // 8 for rank in replica}) == 8


def test_w19_mt_nlg_with_tp_8_pp_35_on_2240_devices_leaves_dp_8() -> None:
    sizes = {"hidden": 20480, "heads": 128, "kv_heads": 128, "head_dim": 160, "layers": 105, "ffn": 81920}
    asked = run(sizes, layout=LayoutSpec(tp=8, pp=35), batch=BatchSpec(global_size=1920, micro_size=1))
    assert fit(asked, 2240).dp == 8


def test_w20_tp_2_pp_4_dp_32_need_256_devices() -> None:
    asked = run(layout=LayoutSpec(tp=2, pp=4, dp=32), batch=BatchSpec(global_size=32, micro_size=1))
    assert fit(asked).world == fit(asked, 256).world == 256


def test_b99_all_that_is_wrong_is_listed_together_with_both_numbers_and_the_nearest_that_fit() -> None:
    asked = run(
        {"heads": 6, "kv_heads": 6, "hidden": 48, "moe": Experts(count=6, top_k=2, ffn=64)},
        layout=LayoutSpec(tp=4, pp=8, cp=3, ep=4),
        batch=BatchSpec(sequence=16),
    )
    with pytest.raises(InvalidRun) as refused:
        fit(asked)
    assert {v.key: v.fix for v in by_key(refused.value.violations).values()} == {
        "layout.tp": "use 3 or 6",
        "layout.ep": "use 3 or 6",
        "layout.pp": "use pp ≤ 4",
        "layout.cp": "use 2 or 4",
    }
    text = str(refused.value)
    for line in (
        "layout.tp: 4 does not divide heads 6",
        "layout.ep: ep 4 does not divide experts 6",
        "layout.pp: 8 stages are more than layers 4",
        "layout.cp: cp 3 does not divide sequence 16",
    ):
        assert line in text
    assert refused.value.exit_code == 2


# --- one reason each -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "key", "numbers", "fix"),
    [
        ({"model": {"heads": 6, "kv_heads": 6}, "layout": {"tp": 4}}, "layout.tp", ("4", "6"), "use 3 or 6"),
        ({"model": {"heads": 12, "kv_heads": 6}, "layout": {"tp": 4}}, "layout.tp", ("4", "6"), "use 3 or 6"),
        ({"model": {"heads": 12, "kv_heads": 4}, "layout": {"tp": 6}}, "layout.tp", ("6", "4"), "use 4 or 12"),
        ({"model": {"ffn": 3}, "layout": {"tp": 4}}, "layout.tp", ("4", "ffn 3"), "tp ≤ 3"),
        ({"model": {"vocab": 3}, "layout": {"tp": 4}}, "layout.tp", ("4", "vocab 3"), "tp ≤ 3"),
        ({"layout": {"pp": 5}}, "layout.pp", ("5", "4"), "pp ≤ 4"),
        ({"layout": {"pp": 2}, "schedule": {"name": "interleaved", "chunks": 3}}, "layout.pp", ("6", "4"), "pp ≤ 1"),
        ({"schedule": {"name": "interleaved", "chunks": 5}}, "layout.pp", ("5", "4"), "schedule.chunks ≤ 4"),
        ({"schedule": {"chunks": 2}}, "schedule.chunks", ("2", "1f1b holds 1"), "use 1"),
        ({"schedule": {"name": "zb-v", "chunks": 3}}, "schedule.chunks", ("3", "zb-v holds 2"), "use 2"),
        ({"schedule": {"layers": (1, 3)}, "layout": {"pp": 3}}, "schedule.layers", ("2", "3"), "give 3"),
        ({"schedule": {"layers": (1, 4)}, "layout": {"pp": 2}}, "schedule.layers", ("5", "4"), ""),
        ({"schedule": {"file": "no.csv"}}, "schedule.file", ("no.csv",), "CSV"),
        ({"layout": {"cp": 3}}, "layout.cp", ("3", "128"), "2 or 4"),
        (
            {"layout": {"tp": 4, "sequence_parallel": True}, "batch": {"sequence": 18}},
            *("layout.sequence_parallel", ("4", "18"), "16 or 20"),
        ),
        ({"layout": {"cp": 2, "ulysses": 4}}, "layout.ulysses", ("4", "2"), "use 2"),
        ({"layout": {"tp": 2, "cp": 4, "ulysses": 4}}, "layout.ulysses", ("8", "4"), "use 2"),
        ({"layout": {"dp": 2, "ep": 3}}, "layout.ep", ("3", "2"), "use 2"),
        ({"layout": {"tp": 4, "etp": 2}}, "layout.etp", ("2", "4"), "one of them"),
        ({"layout": {"order": ("pp", "dp", "tp")}}, "layout.order", ("4 axes",), "'cp'"),
        ({"layout": {"dp": 6}, "batch": {"global_size": 24}, "zero": {"shard": 4}}, "zero.shard", ("4", "6"), "3 or 6"),
        ({"layout": {"dp": 3}}, "batch.global_size", ("dp 3", "micro_size 4", "12", "32"), "24 or 36"),
        ({"batch": {"global_size": 2}}, "batch.global_size", ("4", "2"), "use 4"),
        ({"model": {"positions": "learned"}}, "batch.sequence", ("128", "16"), "≤ 16"),
        ({"schedule": {"name": "1f1b1"}}, "schedule.name", ("1f1b1",), "did you mean 1f1b?"),
        ({"schedule": {"name": "zigzag"}}, "schedule.name", ("zigzag",), "gpipe"),
        ({"optim": {"warmup": 300}}, "optim.warmup", ("300", "1"), "≤ 199"),
        ({"optim": {"warmup": 6, "schedule": "constant"}, "train": {"steps": 5}}, "optim.warmup", ("6", "5"), "≤ 5"),
        (
            {"optim": {"warmup": 5, "decay": 6, "schedule": "wsd"}, "train": {"steps": 10}},
            *("optim.warmup", ("5", "6", "10"), "≤ 4"),
        ),
        ({"optim": {"decay": 11, "schedule": "wsd"}, "train": {"steps": 10}}, "optim.decay", ("11", "10"), "≤ 10"),
        ({"optim": {"schedule": "wsd"}}, "optim.decay", ("0", "1"), "20"),
        ({"optim": {"decay": 5}}, "optim.decay", ("5", "cosine"), "wsd"),
        ({"optim": {"momentum": 0.9}}, "optim.momentum", ("0.9", "adamw"), "sgd"),
        ({"data": {"source": "text"}}, "data.files", ("0", "1"), "name the files"),
        ({"data": {"files": ("a.txt",)}}, "data.files", ("builtin", "1"), "'text'"),
        ({"data": {"mask_field": "mask"}}, "data.mask_field", ("builtin",), "jsonl"),
        (
            {"data": {"source": "tokens", "files": ("a.bin",), "mask_documents": True}},
            *("data.mask_documents", ("token file",), "data.tokenizer"),
        ),
        ({"data": {"source": "synthetic", "tokenizer": "t.json"}}, "data.tokenizer", ("no text",), "leave it out"),
    ],
)
def test_what_cannot_be_is_refused_with_its_numbers_and_the_way_out(
    changed: dict[str, dict[str, Any]], key: str, numbers: tuple[str, ...], fix: str
) -> None:
    sections = {
        name: type(section).model_validate(section.model_dump() | changed.get(name, {}))
        for name, section in run()
        if name != "model"
    }
    found = by_key(violations(run(changed.get("model"), **sections)))
    assert set(found) == {key}
    assert fix in found[key].fix
    assert all(number in found[key].problem for number in numbers), found[key]


def test_a_tied_table_needs_the_ends_of_a_schedule_file_on_one_rank_or_on_the_outer_two(tmp_path: Path) -> None:
    def found(*lines: str, tied: bool = True) -> list[Violation]:
        file = tmp_path / "order.csv"
        file.write_text("".join(f"{line}\n" for line in lines))
        asked = RunSpec(
            model=T0.model_copy(update={"tied": tied}),
            layout=LayoutSpec(pp=len(lines)),
            schedule=ScheduleSpec(file=str(file)),
            batch=BatchSpec(global_size=1, micro_size=1, sequence=8),
        )
        return violations(asked, len(lines))

    apart = ("F0/0,BW0/0", "F0/2,BW0/2", "F0/1,BW0/1")
    only_one = only(found(*apart))
    assert "first stage on rank 0 and the last on rank 1" in only_one.problem and "ranks 0 and 2" in only_one.fix
    assert not found(*apart, tied=False)
    assert not found("F0/0,BW0/0", "F0/1,BW0/1", "F0/2,BW0/2")
    assert not found("F0/0,F0/2,BW0/2,BW0/0", "F0/1,BW0/1")


@pytest.mark.parametrize(
    ("world", "layout", "numbers", "fix"),
    [
        (12, {"tp": 2, "pp": 4}, ("8", "12"), "use a world of 8 or 16, or axes whose product divides 12"),
        (4, {"tp": 2, "pp": 4}, ("8", "4"), "use a world of 8, or axes whose product divides 4"),
        (8, {"tp": 2, "dp": 2}, ("4", "8"), "start 4 ranks, or use dp 4"),
        (3, {"tp": 2, "dp": 2}, ("4", "3"), "start 4 ranks"),
        (0, {"tp": 2}, ("0", "1"), ""),
        (-4, {"tp": 2, "dp": 2}, ("-4", "1"), ""),
    ],
)
def test_a_world_that_the_axes_do_not_fill_is_refused(
    world: int, layout: dict[str, int], numbers: tuple[str, ...], fix: str
) -> None:
    found = only(violations(run(layout=LayoutSpec(**layout)), world))
    assert found.key == "layout" and found.fix == fix
    assert all(number in found.problem for number in numbers)


def test_a_wrong_world_hides_no_other_reason_and_invents_none() -> None:
    layout = LayoutSpec(tp=2, cp=2, ulysses=3, ep=3)
    found = by_key(violations(run(layout=layout, zero=ZeroSpec(shard=5), batch=BatchSpec(global_size=7)), 6))
    assert set(found) == {"layout", "layout.ulysses"}


def test_an_impossible_model_is_named_and_what_follows_from_it_is_not() -> None:
    found = violations(run({"heads": 0, "kv_heads": 0, "head_dim": 7}, layout=LayoutSpec(tp=3)))
    assert {v.key for v in found} == {"model.heads", "model.kv_heads", "model.head_dim"}


@pytest.mark.parametrize(
    ("asked", "key", "fix"),
    [
        (['recompute.mode=["norm", "activations"]'], "recompute.mode", "did you mean activation?"),
        (["recompute.mode=[]"], "recompute.mode", "use 'none', or of attention, norm, activation"),
        (["recompute.layers=2"], "recompute.layers", "leave it out, or set recompute.mode"),
    ],
)
def test_recompute_of_what_no_block_has_is_refused(asked: list[str], key: str, fix: str) -> None:
    found = only(violations(load(None, asked)))
    assert (found.key, found.fix) == (key, fix)


def test_float32_reductions_of_a_float64_run_are_the_wider_of_the_two() -> None:
    assert violations(load(None, ["precision.compute=float64"])) == []
    assert violations(load(None, ["precision.compute=float64", "precision.grad_reduce=float64"])) == []


def test_data_that_cannot_train_the_model_is_refused_for_training_only() -> None:
    small = load(None, ["model.preset=llama-tiny"])
    assert violations(small) == []  # it can be shown and proved
    vocab = only(violations(small, train=True))
    assert (vocab.key, vocab.fix) == ("model.vocab", "use 257, or data.source = 'synthetic'")
    assert "64" in vocab.problem and "257" in vocab.problem
    for way_out in ("data.source=synthetic", "data.tokenizer=t.json", "model.vocab=257"):
        assert violations(load(None, ["model.preset=llama-tiny", way_out]), train=True) == []


def test_text_cannot_be_sampled_from_tokens_that_no_tokenizer_reads() -> None:
    asked = ["train.sample=20", "data.source=tokens", 'data.files=["a.bin"]']
    assert only(violations(load(None, asked), train=True)).key == "train.sample"
    assert violations(load(None, [*asked, "data.tokenizer=t.json"]), train=True) == []


# --- what must not be refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("override", ["train.steps=1", "train.steps=5", "layout.tp=2", "layout.pp=4", "layout.dp=8"])
def test_the_builtin_run_takes_a_single_change_without_complaint(override: str) -> None:
    assert violations(load(None, [override]), train=True) == []


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_fits_one_device_and_every_tensor_degree_of_its_heads(name: str) -> None:
    model = PRESETS[name]
    for tp in (n for n in (1, 2, 4, 8) if model.heads % n == 0 and gcd(n, model.kv_heads) in (n, model.kv_heads)):
        layout = fit(RunSpec(model=model, layout=LayoutSpec(tp=tp), batch=BatchSpec(sequence=32)))
        assert (layout.kv, layout.size("copies")) == (min(tp, model.kv_heads), max(1, tp // model.kv_heads))


def test_dp_left_out_follows_from_the_world_and_is_1_without_one() -> None:
    asked = run(layout=LayoutSpec(tp=2, pp=2), batch=BatchSpec(global_size=32, micro_size=1))
    assert [fit(asked, world).dp for world in (None, 4, 8, 16)] == [1, 1, 2, 4]
    assert fit(asked, 8).shard == 2  # all of dp·cp


sizes = st.sampled_from((1, 2, 3, 4, 6, 8))


@given(st.tuples(sizes, sizes, sizes), sizes, sizes, sizes, st.sampled_from((None, 1, 6, 16, 48)))
@few
def test_a_run_fits_or_says_why_and_what_fits_fills_the_world(
    axes: tuple[int, int, int], heads: int, kv: int, chunks: int, world: int | None
) -> None:
    tp, pp, dp = axes
    model = {"heads": heads * kv, "kv_heads": kv, "hidden": 8 * heads * kv}
    asked = run(
        model,
        layout=LayoutSpec(tp=tp, pp=pp, dp=dp),
        schedule=ScheduleSpec(chunks=chunks),
        batch=BatchSpec(global_size=24, micro_size=1),
    )
    found = violations(asked, world)
    if found:
        with pytest.raises(InvalidRun) as refused:
            fit(asked, world)
        assert list(refused.value.violations) == found and all(v.key and v.problem for v in found)
    else:
        layout = fit(asked, world)
        assert layout.world == prod(axes) == (world or prod(axes))
        assert (tp // layout.kv) * layout.kv == tp and kv % layout.kv == 0


@given(st.integers(1, 5000), st.integers(1, 5000))
@few
def test_no_divisor_or_multiple_is_nearer_than_those_named(total: int, wanted: int) -> None:
    every = [n for n in range(1, total + 1) if total % n == 0]
    assert divisors(total) == every
    named = [int(n) for n in nearest_divisors(total, wanted).split(" or ")]
    assert named == [n for n in every if n <= wanted][-1:] + [n for n in every if n > wanted][:1]
    around = [n for n in (total // wanted * wanted, (total // wanted + 1) * wanted) if n]
    assert [int(n) for n in nearest_multiples(wanted, total).split(" or ")] == around


def test_a_huge_number_is_refused_as_fast_as_a_small_one() -> None:
    found = by_key(
        violations(run(layout=LayoutSpec(tp=10**9, pp=10**9, dp=10**9), batch=BatchSpec(sequence=10**9 + 7)))
    )
    assert {"layout", "layout.tp", "layout.pp", "batch.global_size"} <= set(found)


# --- shards inside a machine ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "node", "shard"),
    [
        ({"dp": 16}, 8, 8),
        ({"dp": 8, "tp": 2}, 8, 4),
        ({"dp": 4, "tp": 8}, 8, 1),
        ({"dp": 2, "pp": 4, "tp": 2}, 8, 2),
        ({"dp": 4, "pp": 2, "order": ("dp", "pp", "cp", "tp")}, 4, 2),
        ({"dp": 4}, None, 4),
    ],
)
def test_shards_of_a_node_are_the_data_parallel_ranks_that_stand_in_one(
    layout: dict[str, Any], node: int | None, shard: int
) -> None:
    asked = run(
        {"heads": 8}, layout=LayoutSpec(**layout), batch=BatchSpec(global_size=64), zero=ZeroSpec(stage=3, shard="node")
    )
    fitted = fit(asked, node=node)
    assert fitted.shard == shard
    ranks = fitted.group("shard", fitted.world - 1)
    assert node is None or len({rank // node for rank in ranks}) == 1


# --- ways out that lead out -------------------------------------------------------------------------------------------


def test_the_way_out_of_more_stages_than_layers_is_one_that_the_schedule_allows() -> None:
    v = run({"layers": 1}, layout=LayoutSpec(pp=2), schedule=ScheduleSpec(name="zb-v"))
    found = by_key(violations(v))["layout.pp"]
    assert found.problem == "4 stages are more than layers 1"
    assert "chunks" not in found.fix and "model.layers ≥ 4" in found.fix
    chosen = run({"layers": 1}, layout=LayoutSpec(pp=2), schedule=ScheduleSpec(name="interleaved", chunks=2))
    assert by_key(violations(chosen))["layout.pp"].fix == "use schedule.chunks ≤ 1"


def test_a_family_that_nobody_knows_is_refused_by_name() -> None:
    found = only(violations(run({"family": "foo"})))
    assert (found.key, found.problem) == ("model.family", "'foo' is not a family that plait knows")
    assert "llama" in found.fix


def test_a_part_that_is_recomputed_twice_is_refused() -> None:
    twice = run(recompute=RecomputeSpec(mode=("norm", "norm")))
    assert str(only(violations(twice))) == "recompute.mode: lists 'norm' 2 times (once will do)"
