"""Models by name: the built-in one, a tiny one per family for proofs and examples, and published sizes.

Numbers only. A published size is the one of its release (max_sequence is the released context length); dropout is 0
unless a run asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from plait.spec.model import ModelSpec, RopeScaling

_GPT2 = {
    "family": "gpt2",
    "norm": "layer",
    "positions": "learned",
    "mlp": "gelu_tanh",
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "tied": True,
}
_TINY = {"vocab": 64, "hidden": 32, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 64, "max_sequence": 64}
_LLAMA2 = {"family": "llama", "vocab": 32000, "max_sequence": 4096}
_LLAMA3 = {"family": "llama", "vocab": 128256, "kv_heads": 8, "max_sequence": 8192, "rope_theta": 500000.0}
_LLAMA31 = {"max_sequence": 131072, "rope_scaling": RopeScaling(kind="llama3", factor=8.0)}
_MISTRAL = {"family": "mistral", "vocab": 32000, "max_sequence": 32768, "window": 4096}
_QWEN = {"norm_eps": 1e-6, "rope_theta": 1000000.0}
_QWEN2 = {**_QWEN, "family": "qwen2", "vocab": 152064, "max_sequence": 32768, "qkv_bias": True}
_QWEN3 = {**_QWEN, "family": "qwen3", "vocab": 151936, "max_sequence": 40960, "qk_norm": True}
_MIXTRAL = {"family": "mixtral", "rope_theta": 1000000.0, "kv_heads": 8}
_QWEN3_MOE = {**_QWEN3, "family": "qwen3_moe", "kv_heads": 4, "head_dim": 128}
_YARN = {"kind": "yarn", "factor": 40.0, "original_max_positions": 4096}
_LATENT = {"kv_rank": 512, "kept": 128, "rotated": 64, "value": 128}
_DEEPSEEK2 = {
    **{"family": "deepseek_v2", "vocab": 102400, "max_sequence": 163840, "norm_eps": 1e-6},
    "rope_scaling": RopeScaling.model_validate({**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}),
}
_DEEPSEEK3 = {
    **{"family": "deepseek_v3", "vocab": 129280, "max_sequence": 163840, "norm_eps": 1e-6},
    "rope_scaling": RopeScaling.model_validate({**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}),
}
_V3_CHOICE = {"scores": "sigmoid", "bias": True, "group_score": "top2"}
_TINY_LATENT = {"kv_rank": 12, "kept": 8, "rotated": 4, "value": 6}


def _model(*bases: Mapping[str, object], **sizes: object) -> ModelSpec:
    return ModelSpec.model_validate({name: value for part in (*bases, sizes) for name, value in part.items()})


PRESETS: dict[str, ModelSpec] = {
    # A byte-level Llama: 256 bytes and the end of a document.
    "builtin": _model(vocab=257, hidden=128, layers=4, heads=4, kv_heads=2, ffn=384, max_sequence=128),
    "llama-tiny": _model(_TINY),
    "gpt2-tiny": _model(_GPT2, _TINY, kv_heads=4, ffn=128),
    "mistral-tiny": _model(_TINY, family="mistral", window=8),
    "qwen2-tiny": _model(_TINY, family="qwen2", qkv_bias=True, tied=True),
    "qwen3-tiny": _model(_TINY, family="qwen3", head_dim=16, qk_norm=True),
    "mixtral-tiny": _model(_TINY, family="mixtral", ffn=48, moe={"count": 4, "top_k": 2, "ffn": 48}),
    "qwen3-moe-tiny": _model(
        _TINY, family="qwen3_moe", head_dim=16, qk_norm=True, moe={"count": 8, "top_k": 3, "ffn": 24}
    ),
    "deepseek-v2-tiny": _model(
        {**_TINY, "kv_heads": 4},
        family="deepseek_v2",
        norm_eps=1e-6,
        latent=_TINY_LATENT,
        moe={
            **{"count": 8, "top_k": 3, "ffn": 24, "shared": 2, "first_dense": 1, "normalise": False, "scale": 1.5},
            **{"groups": 4, "top_groups": 2},
        },
    ),
    "deepseek-v3-tiny": _model(
        {**_TINY, "kv_heads": 4},
        family="deepseek_v3",
        norm_eps=1e-6,
        latent={**_TINY_LATENT, "q_rank": 16},
        moe={
            **{"count": 8, "top_k": 3, "ffn": 24, "shared": 1, "first_dense": 1, "scale": 2.5, **_V3_CHOICE},
            **{"groups": 2, "top_groups": 1},
        },
    ),
    # Radford et al. 2019; Brown et al. 2020, table 2.1
    "gpt2": _model(_GPT2, vocab=50257, hidden=768, layers=12, heads=12, ffn=3072, max_sequence=1024),
    "gpt3-175b": _model(_GPT2, vocab=50257, hidden=12288, layers=96, heads=96, ffn=49152, max_sequence=2048),
    # Touvron et al. 2023; Llama team 2024
    "llama2-7b": _model(_LLAMA2, hidden=4096, layers=32, heads=32, ffn=11008),
    "llama2-13b": _model(_LLAMA2, hidden=5120, layers=40, heads=40, ffn=13824),
    "llama2-70b": _model(_LLAMA2, hidden=8192, layers=80, heads=64, kv_heads=8, ffn=28672),
    "llama3-8b": _model(_LLAMA3, hidden=4096, layers=32, heads=32, ffn=14336),
    "llama3-70b": _model(_LLAMA3, hidden=8192, layers=80, heads=64, ffn=28672),
    "llama3-405b": _model(_LLAMA3, _LLAMA31, hidden=16384, layers=126, heads=128, ffn=53248),
    # Jiang et al. 2023; Qwen team 2024, 2025
    "mistral-7b": _model(_MISTRAL, hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336),
    "qwen2-7b": _model(_QWEN2, hidden=3584, layers=28, heads=28, kv_heads=4, ffn=18944),
    "qwen3-8b": _model(_QWEN3, hidden=4096, layers=36, heads=32, kv_heads=8, head_dim=128, ffn=12288),
    # Jiang et al. 2024; Qwen team 2025; DeepSeek-AI 2024 (both)
    "mixtral-8x7b": _model(
        _MIXTRAL, vocab=32000, hidden=4096, layers=32, heads=32, ffn=14336, max_sequence=32768,
        moe={"count": 8, "top_k": 2, "ffn": 14336},
    ),
    "mixtral-8x22b": _model(
        _MIXTRAL, vocab=32000, hidden=6144, layers=56, heads=48, ffn=16384, max_sequence=65536,
        moe={"count": 8, "top_k": 2, "ffn": 16384},
    ),
    "qwen3-30b-a3b": _model(
        _QWEN3_MOE, hidden=2048, layers=48, heads=32, ffn=6144, moe={"count": 128, "top_k": 8, "ffn": 768}
    ),
    "qwen3-235b-a22b": _model(
        _QWEN3_MOE, hidden=4096, layers=94, heads=64, ffn=12288, moe={"count": 128, "top_k": 8, "ffn": 1536}
    ),
    "deepseek-v2-lite": _model(
        _DEEPSEEK2, hidden=2048, layers=27, heads=16, ffn=10944, latent=_LATENT,
        moe={"count": 64, "top_k": 6, "ffn": 1408, "shared": 2, "first_dense": 1, "normalise": False},
    ),
    "deepseek-v2": _model(
        _DEEPSEEK2, hidden=5120, layers=60, heads=128, ffn=12288, latent={**_LATENT, "q_rank": 1536},
        moe={
            **{"count": 160, "top_k": 6, "ffn": 1536, "shared": 2, "first_dense": 1, "normalise": False},
            **{"scale": 16.0, "groups": 8, "top_groups": 3},
        },
    ),
    "deepseek-v3": _model(
        _DEEPSEEK3, hidden=7168, layers=61, heads=128, ffn=18432, latent={**_LATENT, "q_rank": 1536},
        moe={
            **{"count": 256, "top_k": 8, "ffn": 2048, "shared": 1, "first_dense": 3, "scale": 2.5, **_V3_CHOICE},
            **{"groups": 8, "top_groups": 4},
        },
    ),
}  # fmt: skip
