"""The smallest legal run with the same split: the same layout, schedule and features, tiny sizes that do not divide."""

from __future__ import annotations

from math import lcm
from typing import Any

from plait.spec.pipeline import stage_count
from plait.spec.run import RunSpec


def shrink(run: RunSpec) -> RunSpec:
    """A run of seconds that meets every mechanism that `run` does. Nothing grows beyond the original."""
    return run.model_copy(update={"model": run.model.model_copy(update=_model(run)), "batch": _batch(run)})


def _model(run: RunSpec) -> dict[str, Any]:
    model, layout = run.model, run.layout
    ratio = model.heads // model.kv_heads
    kv_heads = _least(model.kv_heads, [n for n in (1, 2, 4, 8, layout.tp) if _kv_fits(n, ratio, run)])
    heads = kv_heads * ratio
    head_dim = min(model.head_dim, 4)
    stages = stage_count(run.schedule, layout.pp)
    if model.latent is not None:
        kv_heads, heads, head_dim = heads, heads, model.latent.kept + model.latent.rotated
    return {
        "moe": None if model.moe is None else model.moe.model_copy(update=_experts(run)),
        "kv_heads": kv_heads,
        "heads": heads,
        "head_dim": head_dim,
        "hidden": min(model.hidden, 24),
        "ffn": min(model.ffn, max(21, layout.tp)),
        "vocab": min(model.vocab, max(61, layout.tp)),
        "layers": min(model.layers, stages + (1 if model.layers % stages else 0) if stages > 1 else 2),
        "max_sequence": min(model.max_sequence, _sequence(run)),
        "window": None if model.window is None else min(model.window, 5),
    }


def _experts(run: RunSpec) -> dict[str, Any]:
    """As many experts as the ranks and groups need, small ones."""
    moe, layout = run.model.moe, run.layout
    assert moe is not None
    count = _least(moe.count, [n for n in range(1, moe.count) if _count_fits(n, run)])
    return {
        "count": count,
        "top_k": min(moe.top_k, count * moe.top_groups // moe.groups),
        "ffn": min(moe.ffn, max(11, layout.etp, layout.tp)),
        "first_dense": min(moe.first_dense, 1),
    }


def _count_fits(count: int, run: RunSpec) -> bool:
    """Several experts on each rank and in each group, where the whole run has several."""
    moe = run.model.moe
    assert moe is not None
    parts = lcm(run.layout.ep, moe.groups)
    return count % parts == 0 and count >= min(moe.count, 2 * parts, 2 * moe.top_k)


def _kv_fits(kv_heads: int, ratio: int, run: RunSpec) -> bool:
    """As in the whole run: one kv head or several, and a rank with kv heads of its own or with copies."""
    tp, model = run.layout.tp, run.model
    legal = (kv_heads % tp == 0 or tp % kv_heads == 0) and kv_heads * ratio % tp == 0
    alike = (kv_heads < tp) == (model.kv_heads < tp) and (kv_heads == 1) == (model.kv_heads == 1)
    return legal and alike and model.kv_heads % kv_heads == 0


def _least(otherwise: int, candidates: list[int]) -> int:
    return min([otherwise, *candidates])


def _sequence(run: RunSpec) -> int:
    unit = lcm(run.layout.cp * 2, run.layout.cp * run.layout.tp)
    return min(run.batch.sequence, unit * (1 if unit >= 8 else 4))


def _batch(run: RunSpec) -> Any:
    dp = run.layout.dp or 1
    micro_batches = run.batch.micro_batches(dp)
    keep = min(micro_batches, 2 * run.layout.pp + 1)
    micro = min(run.batch.micro_size, 2)
    return run.batch.model_copy(
        update={"micro_size": micro, "global_size": dp * micro * keep, "sequence": _sequence(run)}
    )
