"""Hypothesis strategies: small models with every kind of tensor, each with layouts that fit it. No torch."""

from __future__ import annotations

from math import gcd

from hypothesis import strategies as st

from plait.spec.layout import AXES, Layout
from plait.spec.model import ModelSpec
from plait.spec.nearest import divisors


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """Odd sizes, grouped heads, biases and norms of both kinds, tied or not."""
    kv_heads = draw(st.sampled_from((1, 2, 3, 4)))
    switch = st.booleans()
    return ModelSpec(
        vocab=draw(st.sampled_from((29, 61, 64))),
        hidden=draw(st.sampled_from((6, 8))),
        layers=draw(st.integers(1, 7)),
        heads=kv_heads * draw(st.sampled_from((1, 2, 4))),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from((2, 4))),
        ffn=draw(st.sampled_from((12, 21))),
        max_sequence=5,
        norm=draw(st.sampled_from(("rms", "layer"))),
        positions=draw(st.sampled_from(("rotary", "learned"))),
        mlp=draw(st.sampled_from(("swiglu", "gelu"))),
        qk_norm=draw(switch), qkv_bias=draw(switch), out_bias=draw(switch), mlp_bias=draw(switch), tied=draw(switch),
    )  # fmt: skip


@st.composite
def layouts_for(draw: st.DrawFn, model: ModelSpec) -> Layout:
    """A layout that fits the model, of at most 96 ranks."""
    kv = model.kv_heads
    tp = draw(st.sampled_from([n for n in divisors(model.heads) if gcd(n, kv) in (n, kv)][:4]))
    pp = draw(st.integers(1, min(4, model.layers)))
    dp, cp = draw(st.sampled_from(((1, 1), (2, 1), (1, 2), (3, 1), (2, 2))))
    return Layout(
        pp=pp, dp=dp, cp=cp, tp=tp, kv=gcd(tp, kv), shard=draw(st.sampled_from(divisors(dp * cp))),
        sequence_parallel=draw(st.booleans()), order=tuple(draw(st.permutations(AXES))),
    )  # fmt: skip
