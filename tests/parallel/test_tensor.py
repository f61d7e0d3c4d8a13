"""Tensor parallelism piece by piece: what each replaced submodule is on its own, and what no rank may differ in."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.models.decoder import Decoder
from plait.models.dropout import step_key
from plait.models.where import Where
from plait.spec.model import ModelSpec
from plait.spec.run import RunSpec
from tests.fixtures import B8, ROWS, SEQUENCE, T0, T0_RATIO_4, assert_equals_one_device, run_of
from tests.launching import on_ranks
from tests.ranks import Rank

# LayerNorm with bias, and biases that are added after the sum of a row: all of them act on split tokens.
BIASED = T0.model_copy(update={"norm": "layer", "out_bias": True, "mlp_bias": True, "qkv_bias": True})


def test_a_row_split_before_a_gelu_would_be_wrong() -> None:
    """The reason for column, then row: the activation of a sum is not the sum of activations."""
    x, weight = torch.randn(4, 8, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)
    left, right = x[:, :4] @ weight[:, :4].T, x[:, 4:] @ weight[:, 4:].T
    assert torch.allclose(left + right, x @ weight.T)
    assert (F.gelu(left) + F.gelu(right) - F.gelu(x @ weight.T)).abs().max() > 0.1
    columns = torch.cat([F.gelu(x @ part.T) for part in weight.chunk(2)], dim=1)
    assert torch.allclose(columns, F.gelu(x @ weight.T))


@pytest.mark.parametrize("model", [BIASED, BIASED.model_copy(update={"norm": "rms", "tied": True})])
def test_norms_and_biases_of_split_tokens_equal_one_device(model: ModelSpec) -> None:
    """Proof gathers gradients and weights of both tp ranks, and refuses copies that differ in a single bit."""
    assert_equals_one_device(run_of(model, tp=2, sequence_parallel=True))


def test_norms_and_biases_of_split_tokens_are_bitwise_equal_on_both_ranks_after_20_steps() -> None:
    def run(rank: int, world: int) -> dict[str, Tensor]:
        mine = Rank.of(run_of(BIASED, tp=2, micro_batches=1, sequence_parallel=True))
        for number in range(1, 21):
            mine.step.update(mine.backward(number))
        return {p.placement.tensor.name: w.clone() for p, w in mine.weights() if p.copies == 2}

    first, second = on_ranks(2, run)
    assert len(first) == 4 * BIASED.layers + 2 + 2 * BIASED.layers  # norm weights and biases, row biases
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())


@pytest.mark.parametrize("model", [T0_RATIO_4, T0.model_copy(update={"kv_heads": 1})])
def test_fewer_kv_heads_than_ranks_equal_one_device(model: ModelSpec) -> None:
    assert_equals_one_device(run_of(model, tp=4, micro_batches=1))


# --- a vocabulary that does not divide --------------------------------------------------------------------------------

ODD = T0.model_copy(update={"vocab": 61})


def test_an_odd_vocabulary_equals_one_device() -> None:
    window = B8(61).window(4)
    assert window.trained is not None and 60 in window.tokens[window.trained], "the last token is a label in the data"
    verdict = assert_equals_one_device(run_of(ODD, tp=2))
    assert verdict.compared == len(ODD.parameters())


def test_uniform_logits_of_61_tokens_lose_ln_61_and_no_padding_is_held() -> None:
    """ln 62 or ln 64 would be the loss of a vocabulary padded to what two ranks divide."""

    def run(rank: int, world: int) -> tuple[float, int]:
        mine = Rank.of(run_of(ODD, tp=2))
        tables = [w for p, w in mine.weights() if p.placement.tensor.shape == (61, 32)]
        for piece, weight in mine.weights():
            if piece.placement.tensor.role == "head":
                weight.zero_()
        return mine.backward().loss, sum(len(table) // 32 for table in tables)

    losses, rows = zip(*on_ranks(2, run), strict=True)
    assert losses == (pytest.approx(math.log(61), abs=1e-6),) * 2
    assert sum(rows) == 2 * 61


# --- dropout ----------------------------------------------------------------------------------------------------------

HALF = T0.model_copy(update={"dropout": 0.5, "attention_dropout": 0.5})
STEPS, SITES = (1, 2), ("embedding.dropout", "blocks.0.dropout1", "blocks.0.dropout2", "blocks.1.dropout1")
CORES = ("blocks.0.attention.core", "blocks.1.attention.core")


def where_of(samples: range, step: int) -> Where:
    return Where.of(torch.tensor(samples), SEQUENCE, step_key(1, step))


def residual_mask(module: nn.Module, path: str, where: Where, tokens: int) -> Tensor:
    """(B, T, d): what a dropout between blocks lets through."""
    return module.get_submodule(path)(torch.ones(len(where.samples), tokens, T0.hidden), where) > 0


def attention_mask(module: nn.Module, path: str, where: Where, heads: int) -> Tensor:
    """(B, S, heads, S): which keys each query of each head still sees, read off values that are one-hot keys."""
    rows = len(where.samples)
    scores = torch.zeros(rows, SEQUENCE, heads, SEQUENCE)
    keys = torch.eye(SEQUENCE)[:, None, :].expand(rows, SEQUENCE, heads, SEQUENCE)
    return module.get_submodule(path)(scores, scores, keys, where) > 0


def masks_of(module: nn.Module, samples: range, tokens: int, heads: int) -> dict[tuple[str, int], Tensor]:
    module.train()
    found = {}
    for step in STEPS:
        where = where_of(samples, step)
        found |= {(path, step): residual_mask(module, path, where, tokens) for path in SITES}
        found |= {(path, step): attention_mask(module, path, where, heads) for path in CORES}
    return found


@pytest.mark.parametrize("split", [False, True])
def test_dropout_masks_of_ranks_are_slices_of_one_device_s_masks(split: bool) -> None:
    """So tp ranks agree where they hold the same tokens, and differ where tokens or heads differ; dp ranks differ."""
    run: RunSpec = run_of(HALF, tp=2, dp=2, sequence_parallel=split)
    tokens = SEQUENCE // 2 if split else SEQUENCE

    def record(rank: int, world: int) -> tuple[Any, dict[tuple[str, int], Tensor]]:
        mine = Rank.of(run)
        at = mine.mesh.at
        module = mine.parallel.stages[0].module
        return (at.dp, at.tp), masks_of(module, range(at.dp * 4, at.dp * 4 + 4), tokens, HALF.heads // 2)

    whole = masks_of(Decoder(HALF, "cpu"), range(ROWS), SEQUENCE, HALF.heads)
    for (dp, tp), masks in on_ranks(4, record):
        for (path, step), mask in masks.items():
            rows = whole[path, step][dp * 4 : dp * 4 + 4]
            part = rows.chunk(2, dim=2)[tp] if path in CORES else rows.chunk(2, dim=1)[tp] if split else rows
            assert torch.equal(mask, part), (path, step, dp, tp)


def test_masks_differ_between_sites_steps_samples_and_heads() -> None:
    whole = masks_of(Decoder(HALF, "cpu"), range(ROWS), SEQUENCE, HALF.heads)
    for paths in (SITES, CORES):
        different = {whole[path, step].numpy().tobytes() for path in paths for step in STEPS}
        assert len(different) == len(paths) * len(STEPS)
    residual, attention = whole[SITES[0], 1], whole[CORES[0], 1]
    assert not torch.equal(residual[0], residual[1]) and not torch.equal(residual[:, :8], residual[:, 8:])
    assert not torch.equal(attention[:, :, 0], attention[:, :, 1])
    assert residual.double().mean().item() == pytest.approx(0.5, abs=0.02)


def test_a_run_with_dropout_equals_one_device_with_the_same_dropout() -> None:
    assert_equals_one_device(run_of(HALF, tp=2, pp=2, dp=2, micro_batches=2, sequence_parallel=True))
