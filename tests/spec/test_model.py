"""The listing of tensors: counts, names, homes, and what a ModelSpec refuses."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from plait.spec.experts import Experts
from plait.spec.latent import Latent
from plait.spec.model import ROLES, ModelSpec, RopeScaling, violations
from plait.spec.presets import PRESETS

T0 = ModelSpec(vocab=64, hidden=32, layers=4, heads=4, ffn=64, max_sequence=16)


M0 = T0.model_copy(update={"moe": Experts(count=8, top_k=2, ffn=64)})


def changed(**fields: object) -> ModelSpec:
    return T0.model_copy(update=fields)


@pytest.mark.parametrize(
    ("spec", "count"), [(T0, 45_344), (changed(kv_heads=2), 41_248), (changed(tied=True), 43_296), (M0, 218_400)]
)
def test_the_fixtures_have_their_parameter_counts(spec: ModelSpec, count: int) -> None:
    assert spec.parameter_count() == count


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2", 124_439_808),
        ("gpt3-175b", 174_604_259_328),
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("mistral-7b", 7_241_732_096),
        ("qwen2-7b", 7_615_616_512),
        ("qwen3-8b", 8_190_735_360),
        ("mixtral-8x7b", 46_702_792_704),
        ("mixtral-8x22b", 140_620_634_112),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("deepseek-v2-lite", 15_706_484_224),
        ("deepseek-v2", 235_741_434_880),
        ("deepseek-v3", 671_026_404_352),
    ],
)
def test_presets_have_the_parameter_counts_of_their_releases(name: str, count: int) -> None:
    assert PRESETS[name].parameter_count() == count


def test_two_norms_per_block_and_one_at_the_end_are_listed() -> None:
    # At tp 2 everything but norms is halved: 22 816 parameters per rank, where forgetting a norm per block gives fewer.
    norms = [t for t in T0.parameters() if t.role == "norm"]
    assert len(norms) == 2 * T0.layers + 1
    assert sum(t.size if t.role == "norm" else t.size // 2 for t in T0.parameters()) == 22_816


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_legal_and_lists_each_name_once_with_a_known_role(name: str) -> None:
    spec = PRESETS[name]
    names = [t.name for t in spec.parameters()]
    assert violations(spec) == []
    assert len(names) == len(set(names))
    assert {t.role for t in spec.parameters()} <= set(ROLES)


def test_a_home_holds_its_tensors_in_stacking_order() -> None:
    homes = changed(kv_heads=2).homes()
    assert [(t.name, t.shape) for t in homes["blocks.3.attention.qkv.weight"]] == [
        ("blocks.3.attention.q.weight", (32, 32)),
        ("blocks.3.attention.k.weight", (16, 32)),
        ("blocks.3.attention.v.weight", (16, 32)),
    ]
    assert [t.name for t in homes["blocks.0.mlp.up.weight"]] == ["blocks.0.mlp.gate.weight", "blocks.0.mlp.up.weight"]


def test_a_tied_head_is_the_second_place_of_the_embedding() -> None:
    tied = {t.name: t.also for t in changed(tied=True).parameters()}
    assert tied["embedding.tokens.weight"] == "head.projection.weight"
    assert "head.projection.weight" not in tied
    assert all(t.also is None for t in T0.parameters())


def test_head_sizes_left_out_follow_from_hidden_and_heads() -> None:
    assert (T0.kv_heads, T0.head_dim) == (4, 8)
    with pytest.raises(ValidationError, match="head_dim"):
        ModelSpec(vocab=64, hidden=30, layers=1, heads=4, ffn=64, max_sequence=16)


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(ValidationError, match="hiden"):
        ModelSpec.model_validate({**T0.model_dump(), "hiden": 32})


def test_a_spec_survives_its_own_dump() -> None:
    spec = changed(rope_scaling=RopeScaling(kind="llama3", factor=8.0), window=4)
    assert ModelSpec.model_validate(spec.model_dump()) == spec


def test_all_violations_are_listed_together_with_numbers_and_a_way_out() -> None:
    wrong = changed(
        **{"kv_heads": 3, "head_dim": 7, "layers": 0, "dropout": 1.0, "window": 0, "norm_eps": 0.0},
        **{"rope_scaling": RopeScaling(kind="llama3", factor=0.5, low_freq_factor=4.0)},
    )
    found = {v.key: v for v in violations(wrong)}
    assert set(found) == {
        *("model.kv_heads", "model.head_dim", "model.layers", "model.dropout", "model.window", "model.norm_eps"),
        *("model.rope_scaling.factor", "model.rope_scaling.high_freq_factor"),
    }
    assert "3" in found["model.kv_heads"].problem and "4" in found["model.kv_heads"].problem
    assert found["model.kv_heads"].fix.endswith("2")


def test_learned_positions_allow_an_odd_head() -> None:
    assert violations(changed(head_dim=7, positions="learned")) == []


def test_experts_stand_in_the_blocks_after_the_dense_ones() -> None:
    spec = PRESETS["deepseek-v3-tiny"]
    assert [spec.has_experts(layer) for layer in range(spec.layers)] == [False, True, True, True]
    names = {t.name for t in spec.parameters()}
    assert "blocks.0.mlp.gate.weight" in names and "blocks.0.mlp.router.weight" not in names
    assert "blocks.1.mlp.experts.down" in names and "blocks.1.mlp.shared.gate.weight" in names
    assert [t.kind for t in spec.parameters() if t.role == "router_bias"] == ["buffer"] * 3


def test_a_head_of_latents_is_as_large_as_its_two_parts() -> None:
    latent = {"kv_rank": 8, "kept": 6, "rotated": 4, "value": 5}
    spec = ModelSpec.model_validate({**T0.model_dump(exclude={"head_dim"}), "latent": latent})
    assert (spec.head_dim, spec.value_dim) == (10, 5)
    assert violations(spec) == []


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"top_k": 9}, "model.moe.top_k"),
        ({"groups": 3}, "model.moe.groups"),
        ({"groups": 4, "top_groups": 5}, "model.moe.top_groups"),
        ({"groups": 4, "top_k": 3}, "model.moe.top_k"),
        ({"groups": 8, "top_groups": 8, "group_score": "top2"}, "model.moe.group_score"),
        ({"first_dense": 4}, "model.moe.first_dense"),
        ({"bias_rate": 0.1}, "model.moe.bias_rate"),
        ({"capacity": 0.0}, "model.moe.capacity"),
        ({"count": 0}, "model.moe.count"),
        ({"z_coef": -1.0}, "model.moe.z_coef"),
    ],
)
def test_experts_that_cannot_be_are_refused_by_key(changes: dict[str, object], key: str) -> None:
    assert M0.moe is not None
    found = violations(changed(moe=M0.moe.model_copy(update=changes)))
    assert [v.key for v in found] == [key]


def test_latents_refuse_what_they_have_no_place_for() -> None:
    latent = Latent(kv_rank=8, kept=6, rotated=3, value=5)
    found = violations(changed(latent=latent, kv_heads=2, qk_norm=True, positions="learned"))
    assert {v.key for v in found} == {
        *("model.latent.rotated", "model.head_dim", "model.kv_heads", "model.qk_norm", "model.positions")
    }
