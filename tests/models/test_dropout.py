"""Dropout masks are pure functions of global coordinates, and look like coin tosses."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from plait.models.attention import Core
from plait.models.dropout import Dropout, site_number, step_key
from plait.models.where import Where

B, S, D = 4, 64, 128


def where(step: int = 0, first_sample: int = 0) -> Where:
    return Where.of(torch.arange(first_sample, first_sample + B), S, step_key(1, step))


def mask(where: Where, p: float = 0.5, site: int = 1) -> Tensor:
    """1 where an element lives."""
    return (Dropout(p, site)(torch.ones(len(where.samples), len(where.indices), D), where) > 0).double()


def attention_mask(where: Where, heads: int = 4, first_head: int = 0, layer: int = 0) -> Tensor:
    """Probabilities themselves (B, h, S, S): values that pick out one key each, through uniform attention."""
    rows, tokens = len(where.samples), len(where.indices)
    q = torch.zeros(rows, tokens, heads, tokens)
    picks = torch.eye(tokens)[None, :, None, :].expand(rows, tokens, heads, tokens)
    return Core(None, 0.5, layer, first_head)(q, q, picks, where).transpose(1, 2)


def test_the_mask_of_a_slice_is_the_slice_of_the_mask() -> None:
    whole = mask(where())
    part = where().narrow(16, 8)._replace(samples=torch.arange(2, 4))
    assert torch.equal(mask(part), whole[2:, 16:24])


def test_the_attention_mask_of_some_heads_and_samples_is_the_slice_of_the_mask() -> None:
    whole = attention_mask(where())
    part = where()._replace(samples=torch.arange(1, 3))
    assert torch.equal(attention_mask(part, heads=2, first_head=2), whole[1:3, 2:])
    assert not torch.equal(attention_mask(part, heads=2, first_head=0), whole[1:3, 2:])


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_a_mask_drops_its_share_and_keeps_the_mean(p: float) -> None:
    dropped = 1 - mask(where(), p).mean().item()
    assert abs(dropped - p) < 4 * (p * (1 - p) / (B * S * D)) ** 0.5
    scaled = Dropout(p, 1)(torch.ones(B, S, D), where())
    assert scaled.unique().tolist() == pytest.approx([0.0, 1 / (1 - p)])


def test_no_row_column_or_sample_drops_more_than_chance() -> None:
    kept = mask(where())
    for dims, count in (((0, 1), B * S), ((0, 2), B * D), ((1, 2), S * D), ((2,), D)):
        spread = (kept.mean(dims) - 0.5).abs().max().item()
        assert spread < 5 * 0.5 / count**0.5


def independent(a: Tensor, b: Tensor) -> bool:
    a, b = a.flatten() - 0.5, b.flatten() - 0.5
    return bool((a * b).mean().abs() * 4 < 4 / a.numel() ** 0.5)


def test_masks_of_layers_sites_steps_seeds_and_samples_are_independent() -> None:
    sites = [site_number(None, "embedding")]
    sites += [site_number(layer, place) for layer in range(3) for place in ("attention", "residual1", "residual2")]
    assert len(set(sites)) == len(sites)
    masks = [mask(where(), site=site) for site in sites]
    masks += [mask(where(step)) for step in (1, 2, 1_000_000)]
    masks += [mask(where(first_sample=first)) for first in (B, 2**32, 2**33)]
    masks += [mask(where()._replace(key=torch.tensor(step_key(2, 0))))]
    for a, b in itertools.combinations(masks, 2):
        assert independent(a, b)


def test_neighbours_in_a_mask_are_independent() -> None:
    kept = mask(where())
    for dim in range(3):
        for lag in (1, 2, 3):
            first, second = kept.narrow(dim, 0, kept.shape[dim] - lag), kept.narrow(dim, lag, kept.shape[dim] - lag)
            assert independent(first, second)


def test_attention_masks_drop_their_share_independently_by_layer_head_and_query() -> None:
    causal = torch.ones(S, S, dtype=torch.bool).tril()
    kept = (attention_mask(where()) > 0).double()[..., causal]
    other = (attention_mask(where(), layer=1) > 0).double()[..., causal]
    assert abs(kept.mean().item() - 0.5) < 4 * 0.5 / kept.numel() ** 0.5
    assert independent(kept, other)
    for a, b in itertools.combinations(kept.unbind(1), 2):
        assert independent(a, b)


def test_evaluation_and_p_zero_leave_values_alone() -> None:
    x = torch.randn(B, S, D)
    assert Dropout(0.0, 1)(x, where()) is x
    assert Dropout(0.5, 1).eval()(x, where()) is x


def test_a_mask_is_the_same_in_every_dtype() -> None:
    x = torch.ones(B, S, D)
    masks = [Dropout(0.3, 1)(x.to(dtype), where()) != 0 for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[1], masks[2])


def test_dropped_elements_get_no_gradient_and_infinities_stay_dropped() -> None:
    x = torch.full((B, S, D), torch.inf, requires_grad=True)
    y = Dropout(0.5, 1)(x, where())
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert torch.equal(y == 0, x.grad == 0)
    assert not y.isnan().any()
