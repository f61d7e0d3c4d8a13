"""Each family equals transformers' own model at every position, and weights survive the way there and back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from plait.models.decoder import Decoder, logical_tensors
from plait.models.hf import NAMES, from_hf, load_weights, to_hf
from plait.models.init import draw
from plait.models.where import Where
from plait.spec.errors import DataError
from plait.spec.families import FAMILIES, from_hf_config, to_hf_config
from plait.spec.model import ModelSpec, RopeScaling
from plait.spec.presets import PRESETS

transformers = pytest.importorskip("transformers")
SEQUENCE = 24


def small(family: str, **changes: object) -> ModelSpec:
    """8 query heads on 2 kv heads where the family has them: a ratio that is neither head count."""
    heads = {"heads": 8, "kv_heads": 8 if family == "gpt2" else 2, "head_dim": 4, "hidden": 32}
    sizes = {"layers": 3, "vocab": 61, "max_sequence": 64, **heads, **changes}
    return ModelSpec.model_validate({**PRESETS[f"{family}-tiny"].model_dump(), **sizes})


LLAMA3_ROPE = RopeScaling(
    kind="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=32
)
YARN_PLAIN = RopeScaling(kind="yarn", factor=4.0, original_max_positions=16)
YARN = YARN_PLAIN.model_copy(update={"mscale": 0.7, "mscale_all_dim": 0.9})
QWEN3_MOE, DEEPSEEK2 = (PRESETS[f"{name}-tiny"].model_dump()["moe"] for name in ("qwen3-moe", "deepseek-v2"))
LATENT3 = PRESETS["deepseek-v3-tiny"].model_dump()["latent"]


def latent(family: str, **changes: object) -> ModelSpec:
    """Heads whose size follows from their latents."""
    return small(family, kv_heads=8, head_dim=12, **changes)


CASES = {
    "gpt2": small("gpt2"),
    "gpt2 exact gelu": small("gpt2", mlp="gelu"),
    "llama": small("llama"),
    "llama 3.1": small("llama", rope_theta=500.0, rope_scaling=LLAMA3_ROPE),
    "llama linear": small("llama", rope_scaling=RopeScaling(kind="linear", factor=2.0)),
    "llama biases": small("llama", qkv_bias=True, out_bias=True, mlp_bias=True),
    "mistral": small("mistral", window=8),
    "mistral without window": small("mistral", window=None),
    "qwen2": small("qwen2"),
    "qwen2 untied": small("qwen2", tied=False),
    "qwen3": small("qwen3", head_dim=16),
    "mixtral": small("mixtral"),
    "mixtral with a window": small("mixtral", window=8),
    "qwen3 moe": small("qwen3-moe"),
    "qwen3 moe, scores as they are": small("qwen3-moe", moe={**QWEN3_MOE, "normalise": False}),
    "deepseek v2": latent("deepseek-v2"),
    "deepseek v2 without groups": latent("deepseek-v2", moe={**DEEPSEEK2, "groups": 1, "top_groups": 1}),
    "deepseek v2 with yarn": latent("deepseek-v2", rope_scaling=YARN, rope_theta=500.0),
    "deepseek v3": latent("deepseek-v3"),
    "deepseek v3, channels as halves": latent("deepseek-v3", latent={**LATENT3, "interleaved": False}),
    "deepseek v3 with yarn": latent("deepseek-v3", rope_scaling=YARN, rope_theta=500.0),
    "llama with yarn": small("llama", rope_theta=500.0, rope_scaling=YARN_PLAIN),
}


def weights(spec: ModelSpec) -> dict[str, Tensor]:
    return {t.name: draw(t, spec, seed=5, randomise=True) for t in spec.parameters()}


def ours(spec: ModelSpec, tensors: dict[str, Tensor]) -> Decoder:
    model = Decoder(spec, device="cpu").eval()
    load_weights(model, tensors)
    return model


def theirs(spec: ModelSpec, tensors: dict[str, Tensor]) -> torch.nn.Module:
    config = to_hf_config(spec)
    kind = config.pop("model_type")
    config = transformers.AutoConfig.for_model(kind, **config)
    model, told = getattr(transformers, config.architectures[0]).from_pretrained(
        None, config=config, state_dict=to_hf(tensors, spec), attn_implementation="eager", output_loading_info=True
    )
    assert set(told["missing_keys"]) <= {"lm_head.weight"} and not told["unexpected_keys"]
    return model.float().eval()


def test_every_family_has_names_and_a_parity_case() -> None:
    assert set(NAMES) == set(FAMILIES) == {spec.family for spec in CASES.values()}


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_at_every_position(case: str) -> None:
    spec = CASES[case]
    tensors = weights(spec)
    tokens = torch.randint(0, spec.vocab, (2, SEQUENCE), generator=torch.Generator().manual_seed(0))
    mine = ours(spec, tensors).logits(tokens, Where.of(torch.arange(2), SEQUENCE))
    his = theirs(spec, tensors)(tokens).logits
    assert his.std() > 0.1
    assert (mine - his).abs().amax(dim=(0, 2)).max() <= 1e-4


@torch.no_grad()
@pytest.mark.parametrize("case", [case for case, spec in CASES.items() if spec.moe is None])
def test_in_bf16_logits_are_as_near_to_exact_ones_as_those_of_transformers(case: str) -> None:
    """Norm statistics, softmax and rotary tables in fp32; with experts a choice that rounding turns would decide."""
    spec = CASES[case]
    tensors = {name: tensor.bfloat16().float() for name, tensor in weights(spec).items()}
    tokens = torch.randint(0, spec.vocab, (4, SEQUENCE), generator=torch.Generator().manual_seed(0))
    where = Where.of(torch.arange(4), SEQUENCE)
    exact = ours(spec, tensors).double().logits(tokens, where)
    mine = ours(spec, tensors).bfloat16().logits(tokens, where).double()
    his = theirs(spec, tensors).bfloat16()(tokens).logits.double()
    assert 0 < (mine - exact).square().mean().sqrt() <= 1.1 * (his - exact).square().mean().sqrt()


@pytest.mark.parametrize("case", CASES)
def test_the_config_of_transformers_is_read_back_as_the_same_spec(case: str) -> None:
    config = to_hf_config(CASES[case])
    kind = config.pop("model_type")
    written = transformers.AutoConfig.for_model(kind, **config).to_dict()
    assert from_hf_config(written) == CASES[case]


@pytest.mark.parametrize("case", CASES)
def test_weights_survive_the_way_out_and_back_bitwise(case: str) -> None:
    spec = CASES[case]
    tensors = weights(spec)
    back = from_hf(to_hf(tensors, spec), spec)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    model = ours(spec, back)
    held = logical_tensors(spec, {**dict(model.named_parameters()), **dict(model.named_buffers())})
    assert all(torch.equal(held[name], tensors[name]) for name in tensors)


def test_a_file_of_the_bare_body_and_with_derived_buffers_is_read_too() -> None:
    spec = CASES["gpt2"]
    state = {name.removeprefix("transformer."): value for name, value in to_hf(weights(spec), spec).items()}
    state["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    assert from_hf(state, spec).keys() == {t.name for t in spec.parameters()}


def test_either_place_of_a_tied_tensor_will_do_and_a_contradiction_stops() -> None:
    spec = CASES["qwen2"]
    state = to_hf(weights(spec), spec)
    table = state["model.embed_tokens.weight"]
    both = {**state, "lm_head.weight": table.clone()}
    only_head = {name: value for name, value in both.items() if name != "model.embed_tokens.weight"}
    for given in (state, both, only_head):
        assert torch.equal(from_hf(given, spec)["embedding.tokens.weight"], table)
    with pytest.raises(DataError, match=r"differ.*model.tied"):
        from_hf({**state, "lm_head.weight": table + 1}, spec)


def test_missing_unknown_and_misshapen_tensors_stop_by_name() -> None:
    spec = CASES["llama"]
    state = to_hf(weights(spec), spec)
    with pytest.raises(DataError, match=r"lacks: model\.norm\.weight"):
        from_hf({name: value for name, value in state.items() if name != "model.norm.weight"}, spec)
    with pytest.raises(DataError, match=r"unknown tensors: model\.layers\.3\."):
        from_hf({**state, "model.layers.3.mlp.up_proj.weight": torch.ones(1)}, spec)
    with pytest.raises(DataError, match=r"k_proj.*\(8, 16\).*\(8, 32\)"):
        from_hf({**state, "model.layers.0.self_attn.k_proj.weight": torch.ones(8, 16)}, spec)
