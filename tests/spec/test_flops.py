"""FLOPs per token: what counts and what does not."""

from __future__ import annotations

import pytest

from plait.spec.experts import Experts
from plait.spec.flops import flops_per_token, matmul_parameters
from plait.spec.model import ModelSpec
from plait.spec.presets import PRESETS

T0 = ModelSpec(vocab=64, hidden=32, layers=4, heads=4, ffn=64, max_sequence=16)


@pytest.mark.parametrize(("mlp", "count"), [("swiglu", 43_008), ("gelu", 34_816)])
def test_matmul_parameters_count_every_matrix_of_the_mlp(mlp: str, count: int) -> None:
    assert matmul_parameters(T0.model_copy(update={"mlp": mlp})) == count


def test_tied_and_untied_models_cost_the_same() -> None:
    tied = T0.model_copy(update={"tied": True})
    assert flops_per_token(tied, 16) == flops_per_token(T0, 16)
    assert 6 * tied.parameter_count() != 6 * T0.parameter_count()


def test_norms_biases_and_the_position_table_cost_nothing() -> None:
    more = {"norm": "layer", "positions": "learned", "qkv_bias": True, "out_bias": True, "mlp_bias": True}
    assert flops_per_token(T0.model_copy(update=more), 16) == flops_per_token(T0, 16)


def test_training_is_six_per_weight_and_the_causal_half_of_attention() -> None:
    attention = 6 * 16 * 32 * 4  # 2 products x 2 FLOPs x 3 passes, half of 16 keys, 32 channels, 4 layers
    assert flops_per_token(T0, 16).training == 6 * 43_008 + attention


def test_a_window_costs_its_own_keys_only() -> None:
    def attention(window: int | None) -> int:
        return flops_per_token(T0.model_copy(update={"window": window}), 1024).attention

    assert attention(1024) == attention(4096) == attention(None)
    assert attention(512) == attention(None) * 3 // 4  # the square's half less the half of the cut-off corner
    assert attention(1) < attention(16) < attention(512)


def test_a_token_costs_the_experts_that_it_meets_and_no_others() -> None:
    mixture = T0.model_copy(update={"moe": Experts(count=8, top_k=2, ffn=64)})
    assert matmul_parameters(mixture) == 68_608
    assert matmul_parameters(T0.model_copy(update={"moe": Experts(count=16, top_k=2, ffn=64)})) == 68_608 + 4 * 8 * 32


def test_attention_through_latents_costs_its_own_channels() -> None:
    spec = PRESETS["deepseek-v3"]
    assert flops_per_token(spec, 4096).attention == 4096 * 61 * 128 * (192 + 128)
