"""Blocks of attention: kernels that give a block's output beside its log-sum-exp.

A block's softmax is over the keys of the block alone. Two blocks of one query merge exactly: their weights are the
exponentials of their log-sum-exps (Liu et al. 2023, ring attention; Dao et al. 2022 for the backward from the whole
log-sum-exp). Nothing here communicates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

SCORES = 2**22  # elements of a matrix of scores that the plain kernel makes at once


# --- kernels: (B, h, T, D) queries against (B, kv, N, D) keys ---------------------------------------------------------

Keep = Callable[[slice], Tensor]  # queries of the tile -> what multiplies the probabilities (B, h, T, N): 0 or 1/(1-p)


@dataclass(frozen=True)
class Masks:
    """What a kernel must heed: causal in the tile's own order, keys that are seen (bool, broadcast to (B, h, T, N)),
    and dropout of probabilities."""

    causal: bool
    seen: Tensor | None
    keep: Keep | None
    scale: float


def forward(q: Tensor, k: Tensor, v: Tensor, masks: Masks) -> tuple[Tensor, Tensor]:
    """The block's output (B, h, T, V) and log-sum-exp (B, h, T); output 0 and -inf where a query sees no key."""
    if _has_flash(q, v, masks):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, masks.causal, attn_mask=_added(masks, q.dtype), scale=masks.scale
        )
        if masks.seen is not None:
            lse = lse.masked_fill(~masks.seen.any(-1), -math.inf)
        return out, lse
    parts = [_plain_forward(q[:, :, rows], k, v, masks, rows) for rows in _rows(q, k)]
    out, lse = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: tuple[Tensor, Tensor, Tensor], masks: Masks
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v from that of the whole output. `whole`: the output and log-sum-exp over all blocks, and the
    sum over channels of output times its gradient."""
    out, lse, delta = whole
    if _has_flash(q, v, masks):
        grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad.to(q.dtype), q, k, v, out.to(q.dtype), lse, 0.0, masks.causal,
            attn_mask=_added(masks, q.dtype), scale=masks.scale,
        )  # fmt: skip
        return grad_q, grad_k, grad_v
    parts = []
    for rows in _rows(q, k):
        block = grad[:, :, rows], q[:, :, rows], k, v
        parts.append(_plain_backward(block, lse[:, :, rows], delta[:, :, rows], masks, rows))
    return torch.cat([p[0] for p in parts], dim=2), sum(p[1] for p in parts), sum(p[2] for p in parts)  # type: ignore[return-value]


def _has_flash(q: Tensor, v: Tensor, masks: Masks) -> bool:
    """torch's flash kernel for the CPU: one size of head, no dropout that we could give it."""
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and masks.keep is None


def _added(masks: Masks, dtype: torch.dtype) -> Tensor | None:
    """The mask as what is added to scores."""
    if masks.seen is None:
        return None
    return torch.zeros_like(masks.seen, dtype=dtype).masked_fill_(~masks.seen, -math.inf)


def _grouped(grad: Tensor, like: Tensor) -> Tensor:
    """The gradient of kv heads, from one for each query head."""
    times = grad.shape[1] // like.shape[1]
    return grad.unflatten(1, (-1, times)).sum(2) if times > 1 else grad


def _rows(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Queries a few at a time, so that no matrix of scores is large."""
    at_once = max(1, SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    for start in range(0, q.shape[2], at_once):
        yield slice(start, min(start + at_once, q.shape[2]))


def _scores(q: Tensor, k: Tensor, masks: Masks, rows: slice) -> Tensor:
    """Scaled scores (B, h, t, N) in float32 or wider, -inf where a key is not seen."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = _by_group(q, k.mT).to(wide) * masks.scale
    if masks.seen is not None:
        seen = masks.seen if masks.seen.shape[-2] == 1 else masks.seen[..., rows, :]
        scores = scores.masked_fill(~seen, -math.inf)
    if masks.causal:
        places = torch.arange(k.shape[2], device=q.device)
        scores = scores.masked_fill(places > places[rows, None], -math.inf)
    return scores


def _by_group(a: Tensor, b: Tensor) -> Tensor:
    """a (B, h, ·, ·) times b (B, kv, ·, ·), each kv head with its query heads."""
    product: Tensor = a.unflatten(1, (b.shape[1], -1)) @ b.unsqueeze(2)
    return product.flatten(1, 2)


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, masks: Masks, rows: slice) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, masks, rows)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.clamp(min=torch.finfo(lse.dtype).min)[..., None]).exp()
    if masks.keep is not None:
        weights = weights * masks.keep(rows)
    return _by_group(weights.to(v.dtype), v), lse


def _plain_backward(
    block: tuple[Tensor, Tensor, Tensor, Tensor], lse: Tensor, delta: Tensor, masks: Masks, rows: slice
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v = block
    weights = (_scores(q, k, masks, rows) - lse[..., None]).exp()
    grad_weights = _by_group(grad.to(v.dtype), v.mT).to(weights.dtype)
    used = weights
    if masks.keep is not None:
        keep = masks.keep(rows)
        used, grad_weights = weights * keep, grad_weights * keep
    grad_scores = (weights * (grad_weights - delta[..., None]) * masks.scale).to(q.dtype)
    grad_k = _grouped(grad_scores.mT @ q, k)
    grad_v = _grouped(used.to(grad.dtype).mT @ grad, v)
    return _by_group(grad_scores, k), grad_k, grad_v
