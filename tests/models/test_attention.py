"""What a query sees, and that every way of computing attention gives the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from plait.models.attention import Core, visible
from plait.models.where import Where

B, S, H, KV, D = 2, 12, 4, 2, 8
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 1 + [1] * 10 + [2]])


def where(documents: Tensor | None = None) -> Where:
    return Where.of(torch.arange(B), S)._replace(documents=documents)


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, S, n, D, dtype=torch.float64, generator=make) for n in (H, KV, KV))
    return q, k, v


def by_definition(window: int | None, documents: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, one query and head at a time."""
    q, k, v = qkv()
    y = torch.zeros_like(q)
    for b in range(B):
        for t in range(S):
            seen = [
                j
                for j in range(t + 1)
                if (window is None or t - j < window) and (documents is None or documents[b, j] == documents[b, t])
            ]
            for h in range(H):
                kv = h // (H // KV)
                weights = (k[b, seen, kv] @ q[b, t, h] / math.sqrt(D)).softmax(0)
                y[b, t, h] = weights @ v[b, seen, kv]
    return y


@pytest.mark.parametrize("window", [None, 1, 3, S])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("dropout", [0.0, 1e-15])
def test_the_core_equals_its_definition(window: int | None, documents: Tensor | None, dropout: float) -> None:
    # A dropout that drops nothing takes the path that has probabilities in hand.
    y = Core(window, dropout, layer=0)(*qkv(), where(documents))
    torch.testing.assert_close(y, by_definition(window, documents), rtol=0, atol=1e-12)


def test_documents_are_blocks_on_the_diagonal() -> None:
    seen = visible(where(DOCUMENTS), None)
    assert seen.shape == (B, 1, S, S)
    for b in range(B):
        blocks = [torch.ones(n, n).tril() for n in DOCUMENTS[b].bincount().tolist()]
        assert torch.equal(seen[b, 0].float(), torch.block_diag(*blocks))


def test_attention_dropout_is_unbiased() -> None:
    core = Core(None, 0.5, layer=0)
    runs = torch.stack([core(*qkv(), where()._replace(key=torch.tensor(key))) for key in range(2000)])
    error = (runs.mean(0) - by_definition(None, None)) / (runs.std(0) / math.sqrt(2000) + 1e-9)
    assert error.abs().max() < 6
    assert torch.equal(core.eval()(*qkv(), where()), Core(None, 0.0, layer=0)(*qkv(), where()))


def test_a_shard_of_the_heads_computes_its_part() -> None:
    q, k, v = qkv()
    whole = Core(None, 0.3, layer=2)(q, k, v, where())
    part = Core(None, 0.3, layer=2, first_head=2)(q[:, :, 2:], k[:, :, 1:], v[:, :, 1:], where())
    torch.testing.assert_close(part, whole[:, :, 2:], rtol=0, atol=1e-14)
