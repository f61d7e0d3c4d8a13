"""Hugging Face configs as ModelSpecs: round trips, and refusals that name the key."""

from __future__ import annotations

import pytest

from plait.spec.errors import InvalidRun
from plait.spec.families import FAMILIES, from_hf_config, to_hf_config
from plait.spec.model import ModelSpec, RopeScaling
from plait.spec.presets import PRESETS

LLAMA = to_hf_config(PRESETS["llama-tiny"])
MIXTRAL = to_hf_config(PRESETS["mixtral-tiny"])
QWEN3_MOE = to_hf_config(PRESETS["qwen3-moe-tiny"])
DEEPSEEK2 = to_hf_config(PRESETS["deepseek-v2-tiny"])
DEEPSEEK3 = to_hf_config(PRESETS["deepseek-v3-tiny"])
GPT2 = to_hf_config(PRESETS["gpt2-tiny"])
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_the_way_out_and_back(name: str) -> None:
    assert from_hf_config(to_hf_config(PRESETS[name])) == PRESETS[name]


def test_every_family_has_a_tiny_preset() -> None:
    assert {PRESETS[f"{family.replace('_', '-')}-tiny"].family for family in FAMILIES} == set(FAMILIES)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}},
    ],
)
def test_both_spellings_of_rope_scaling_are_one(rope: dict[str, object]) -> None:
    spec = from_hf_config({**LLAMA, **rope})
    assert spec.rope_theta == 500000.0
    assert spec.rope_scaling == RopeScaling(kind="llama3", factor=8.0, original_max_positions=8192)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({**LLAMA, "model_type": "mamba"}, "mamba"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config"),
        ({**LLAMA, "hidden_act": "relu"}, "hidden_act"),
        ({**LLAMA, "hidden_size": None}, "hidden_size"),
        ({**LLAMA, "num_key_value_heads": 3}, "kv_heads"),
        ({**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position_embeddings"),
        ({**MIXTRAL, "num_local_experts": None}, "num_local_experts"),
        ({**MIXTRAL, "router_jitter_noise": 0.1}, "router_jitter_noise"),
        ({**QWEN3_MOE, "mlp_only_layers": [0]}, "mlp_only_layers"),
        ({**DEEPSEEK2, "norm_topk_prob": True}, "norm_topk_prob"),
        ({**DEEPSEEK3, "scoring_func": "softmax"}, "scoring_func"),
        ({**DEEPSEEK3, "num_key_value_heads": 2}, "kv_heads"),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 1}}, "rope_scaling.beta"),
        ({**GPT2, "embd_pdrop": 0.5}, "embd_pdrop"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({**GPT2, "rope_theta": 10000.0}, "rope_theta"),
        ({**to_hf_config(PRESETS["qwen2-tiny"]), "use_sliding_window": True}, "use_sliding_window"),
        ({**to_hf_config(PRESETS["qwen3-tiny"]), "layer_types": ["full_attention", "linear"]}, "layer_types"),
    ],
)
def test_what_plait_cannot_build_is_refused_by_name(config: dict[str, object], key: str) -> None:
    with pytest.raises(InvalidRun, match=key):
        from_hf_config(config)


def test_all_refusals_are_listed_together() -> None:
    with pytest.raises(InvalidRun) as refusal:
        from_hf_config({**LLAMA, "hidden_act": "relu", "vocab_size": None, "alibi": True})
    assert {v.key for v in refusal.value.violations} == {"hidden_act", "vocab_size", "alibi"}


def test_keys_a_file_may_lack_have_their_family_s_meaning() -> None:
    def without(config: dict[str, object], *keys: str) -> ModelSpec:
        return from_hf_config({key: value for key, value in config.items() if key not in keys})

    assert without(LLAMA, "num_key_value_heads").kv_heads == 4
    assert without(LLAMA, "head_dim").head_dim == 8
    assert without(LLAMA, "rope_theta").rope_theta == 10000.0
    assert without(GPT2, "n_inner").ffn == 4 * 32
    assert without(GPT2, "tie_word_embeddings").tied
    mistral = to_hf_config(PRESETS["mistral-tiny"])
    assert without(mistral, "sliding_window").window == 4096
    assert from_hf_config({**mistral, "sliding_window": None}).window is None
    assert without(to_hf_config(PRESETS["qwen3-tiny"]), "head_dim").head_dim == 128


@pytest.mark.parametrize(
    ("preset", "change", "key"),
    [
        ("llama-tiny", {"window": 8}, "model.window"),
        ("llama-tiny", {"qkv_bias": True}, "model.qkv_bias"),
        ("llama-tiny", {"qk_norm": True}, "model.qk_norm"),
        ("llama-tiny", {"mlp": "gelu"}, "model.mlp"),
        ("gpt2-tiny", {"norm": "rms"}, "model.norm"),
        ("gpt2-tiny", {"head_dim": 16}, "model.head_dim"),
        ("mixtral-tiny", {"ffn": 64}, "model.ffn"),
        ("mixtral-tiny", {"moe": PRESETS["mixtral-tiny"].moe.model_copy(update={"shared": 1})}, "model.moe"),
        (
            "deepseek-v3-tiny",
            {"moe": PRESETS["deepseek-v3-tiny"].moe.model_copy(update={"capacity": 1.0})},
            "model.moe",
        ),
    ],
)
def test_a_field_that_a_family_cannot_express_is_refused_by_name(
    preset: str, change: dict[str, object], key: str
) -> None:
    with pytest.raises(InvalidRun, match=key):
        to_hf_config(PRESETS[preset].model_copy(update=change))


def test_groups_count_only_where_the_method_says_so() -> None:
    greedy = from_hf_config({**DEEPSEEK2, "topk_method": "greedy"}).moe
    limited = from_hf_config(DEEPSEEK2).moe
    assert greedy is not None and limited is not None
    assert (greedy.groups, greedy.top_groups, limited.groups, limited.top_groups) == (1, 1, 4, 2)


def test_what_only_training_sees_is_left_out_of_the_config() -> None:
    spec = PRESETS["mixtral-tiny"]
    assert spec.moe is not None
    trained = spec.model_copy(update={"moe": spec.moe.model_copy(update={"balance_coef": 0.01, "z_coef": 0.001})})
    assert to_hf_config(trained) == to_hf_config(spec)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({**LLAMA, "model_type": ["llama"]}, r"model_type: \['llama'\] is not a family that plait knows"),
        ({**LLAMA, "hidden_size": "32"}, "hidden_size: is '32': input should be a valid integer"),
        ({**LLAMA, "num_attention_heads": 2.5}, "num_attention_heads: is 2.5"),
        ({**LLAMA, "hidden_act": ["silu"]}, r"hidden_act: is \['silu'\]"),
        ({**LLAMA, "rope_theta": "big"}, "rope_theta: is 'big'"),
        ({**LLAMA, "rope_scaling": "x"}, "rope_scaling: is 'x', where a table is needed"),
        ({**LLAMA, "rope_parameters": 3}, "rope_parameters: is 3, where a table is needed"),
        ({**LLAMA, "rope_scaling": {"rope_type": ["linear"]}}, r"\['linear'\] is a kind"),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": "2"}}, "rope_scaling.factor: is '2'"),
        (
            {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8,
                                       "beta_fast": "x"}},
            "rope_scaling.beta_fast: is 'x'",
        ),
        ({**GPT2, "n_embd": {}, "n_inner": None}, "n_embd: is {}"),
        ({**MIXTRAL, "num_local_experts": "8"}, "num_local_experts: is '8'"),
    ],
)  # fmt: skip
def test_a_value_of_a_wrong_type_is_refused_under_its_own_key(config: dict[str, object], why: str) -> None:
    with pytest.raises(InvalidRun, match=why) as refused:
        from_hf_config(config)
    assert "pydantic" not in str(refused.value)


def test_a_family_that_no_row_describes_has_no_config() -> None:
    with pytest.raises(InvalidRun, match=r"model\.family: 'foo' is not a family that plait knows"):
        to_hf_config(PRESETS["llama-tiny"].model_copy(update={"family": "foo"}))
