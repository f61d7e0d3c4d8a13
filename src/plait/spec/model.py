"""The network as data: `ModelSpec`, and `parameters()`, the one listing of every tensor's global name, shape and role.

The model, the placement, the planner and the Hugging Face import all read this listing; none of them states a name or
a shape again. It holds no torch, knows no device and no layout, and does not draw or load a weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from pydantic import model_validator

from plait.spec.base import Spec
from plait.spec.errors import Violation
from plait.spec.experts import Experts, expert_rows, expert_violations
from plait.spec.latent import Latent, latent_rows, latent_violations

Part = Literal["embedding", "block", "head"]

# What a tensor is for. How it is cut over an axis follows from its role (placement/), and so does its first value
# (models/init.py). A bias has the role of its weight, except where the weight is cut along dim 1 and the bias is not.
ROLES = {
    "embedding": "token table (V, d), rows by token",
    "positions": "learned position table (S, d)",
    "norm": "scale or shift of a norm over hidden (d,)",
    "q": "query projection, rows by query head (H*D, d), and its bias",
    "kv": "key or value projection, rows by kv head (KV*D, d), and its bias",
    "qk_norm": "scale of the norm of one head's queries or keys (D,)",
    "column": "first matrix of an MLP, split by output (ffn, d), and its bias",
    "row": "matrix that leads back to hidden, split by input (d, n)",
    "row_bias": "bias added once after a row matrix's partial sums (d,)",
    "head": "output projection (V, d), rows by token",
    "latent": "projection down to a vector that all heads share (r, d)",
    "router": "scores of the experts (E, d)",
    "router_bias": "what the choice of experts adds to their scores (E,), a buffer",
    "router_load": "share of choices that each expert got in the step before (E,), a buffer",
    "expert_column": "first matrices of all experts of a layer, each split by output (E, ffn, d)",
    "expert_row": "last matrices of all experts of a layer, each split by input (E, d, ffn)",
}

BUFFERS = ("router_bias", "router_load")  # roles of what is kept and not trained


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One logical tensor of the model under its global name.

    `home` is the module parameter that holds it: tensors with the same home (q, k, v; gate, up) are stacked along
    dim 0 in listing order. `also` is the second place of a tied tensor. `layer` is None outside the blocks.
    """

    name: str
    shape: tuple[int, ...]
    role: str
    layer: int | None
    part: Part
    home: str
    also: str | None = None
    kind: Literal["weight", "buffer"] = "weight"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class RopeScaling(Spec):
    """How rotary frequencies are stretched beyond the length a model was first trained on.

    "linear" divides every frequency by `factor`; "llama3" only the low ones, with a ramp between the two wavelengths
    original_max_positions / low_freq_factor and / high_freq_factor; "yarn" (Peng et al. 2023) with a ramp between the
    channels that turn beta_fast and beta_slow times in original_max_positions, and queries and keys grow by its mscale.
    """

    kind: Literal["llama3", "linear", "yarn"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def growth(self, mscale: float) -> float:
        """YaRN's factor of attention for a context `factor` times as long."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    @property
    def table_factor(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.kind != "yarn":
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return self.growth(self.mscale) / self.growth(self.mscale_all_dim)
        return self.growth(1.0)


class ModelSpec(Spec):
    """A decoder-only transformer. Sizes are global; `kv_heads` defaults to `heads`, `head_dim` to hidden / heads."""

    family: str = "llama"  # row of spec/families.py: the names it has at Hugging Face
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    max_sequence: int
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    positions: Literal["rotary", "learned"] = "rotary"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    mlp: Literal["swiglu", "gelu", "gelu_tanh", "relu", "relu2"] = "swiglu"
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    window: int | None = None  # a token attends to itself and the window - 1 tokens before it
    latent: Latent | None = None  # attention through latents; then kv_heads = heads
    moe: Experts | None = None  # experts in place of the MLP; `ffn` is that of the blocks which keep it
    tied: bool = False
    dropout: float = 0.0  # after the embedding and before each residual addition
    attention_dropout: float = 0.0  # on attention probabilities
    z_loss: float = 0.0  # weight of log² of each token's summed exponentials, added to its loss
    init_std: float | None = None  # None: 1/sqrt(global fan-in), embeddings 0.02

    @model_validator(mode="before")
    @classmethod
    def _fill_head_sizes(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        hidden, heads = given.get("hidden"), given.get("heads")
        filled = dict(given)
        if isinstance(heads, int):
            filled.setdefault("kv_heads", heads)
            latent = given.get("latent")
            sizes = dict(latent) if isinstance(latent, Latent | dict) else {}
            if isinstance(sizes.get("kept"), int) and isinstance(sizes.get("rotated"), int):
                filled.setdefault("head_dim", sizes["kept"] + sizes["rotated"])
            elif isinstance(hidden, int) and heads > 0 and hidden % heads == 0:
                filled.setdefault("head_dim", hidden // heads)
        return filled

    @property
    def value_dim(self) -> int:
        """Channels of one head's value."""
        return self.head_dim if self.latent is None else self.latent.value

    def has_experts(self, layer: int) -> bool:
        """Whether block `layer` has experts in place of the MLP."""
        moe = self.moe
        return moe is not None and layer >= moe.first_dense and (layer + 1) % moe.every == 0

    def parameters(self) -> tuple[TensorSpec, ...]:
        """Every weight and persistent buffer, in model order: embedding, blocks 0 … layers-1, head."""
        return _listing(self)

    def homes(self) -> dict[str, tuple[TensorSpec, ...]]:
        """The listing grouped by the module parameter that holds each tensor, in stacking order."""
        return _homes(self)

    def parameter_count(self) -> int:
        """Number of trained elements; a tied tensor counts once."""
        return sum(t.size for t in self.parameters() if t.kind == "weight")


@lru_cache(maxsize=64)
def _listing(spec: ModelSpec) -> tuple[TensorSpec, ...]:
    blocks = (t for layer in range(spec.layers) for t in _block(spec, layer))
    return (*_embedding(spec), *blocks, *_head(spec))


@lru_cache(maxsize=64)
def _homes(spec: ModelSpec) -> dict[str, tuple[TensorSpec, ...]]:
    homes: dict[str, tuple[TensorSpec, ...]] = {}
    for tensor in spec.parameters():
        homes[tensor.home] = (*homes.get(tensor.home, ()), tensor)
    return homes


def _embedding(spec: ModelSpec) -> Iterator[TensorSpec]:
    name = "embedding.tokens.weight"
    also = "head.projection.weight" if spec.tied else None
    yield TensorSpec(name, (spec.vocab, spec.hidden), "embedding", None, "embedding", name, also)
    if spec.positions == "learned":
        name = "embedding.positions.weight"
        yield TensorSpec(name, (spec.max_sequence, spec.hidden), "positions", None, "embedding", name)


def _block(spec: ModelSpec, layer: int) -> Iterator[TensorSpec]:
    at = f"blocks.{layer}"

    def tensor(name: str, shape: tuple[int, ...], role: str, home: str | None = None) -> TensorSpec:
        kind: Literal["weight", "buffer"] = "buffer" if role in BUFFERS else "weight"
        return TensorSpec(f"{at}.{name}", shape, role, layer, "block", f"{at}.{home or name}", None, kind)

    for name, shape, role in _norm("attention_norm", spec):
        yield tensor(name, shape, role)
    yield from (tensor(*row) for row in _attention(spec))
    for name, shape, role in _norm("mlp_norm", spec):
        yield tensor(name, shape, role)
    if spec.moe is not None and spec.has_experts(layer):
        yield from (tensor(*row) for row in expert_rows(spec.moe, spec.hidden, spec.mlp == "swiglu"))
    else:
        yield from (tensor(*row) for row in _mlp(spec))


def _attention(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...], str, str]]:
    """Rows of (name, shape, role, home) inside a block."""
    if spec.latent is not None:
        yield from latent_rows(spec.latent, spec.hidden, spec.heads)
    else:
        yield from _projections(spec)
    yield from _row("attention.out", (spec.hidden, spec.heads * spec.value_dim), spec.out_bias)


def _projections(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...], str, str]]:
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    for kind in ("weight", "bias") if spec.qkv_bias else ("weight",):
        for name, rows, role in (("q", q, "q"), ("k", kv, "kv"), ("v", kv, "kv")):
            shape = (rows, spec.hidden) if kind == "weight" else (rows,)
            yield f"attention.{name}.{kind}", shape, role, f"attention.qkv.{kind}"
    if spec.qk_norm:
        for name in ("attention.q_norm.weight", "attention.k_norm.weight"):
            yield name, (spec.head_dim,), "qk_norm", name


def _mlp(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...], str, str]]:
    """Rows of (name, shape, role, home) inside a block."""
    for kind in ("weight", "bias") if spec.mlp_bias else ("weight",):
        for name in ("gate", "up") if spec.mlp == "swiglu" else ("up",):
            shape = (spec.ffn, spec.hidden) if kind == "weight" else (spec.ffn,)
            yield f"mlp.{name}.{kind}", shape, "column", f"mlp.up.{kind}"
    yield from _row("mlp.down", (spec.hidden, spec.ffn), spec.mlp_bias)


def _row(name: str, shape: tuple[int, int], bias: bool) -> Iterator[tuple[str, tuple[int, ...], str, str]]:
    yield f"{name}.weight", shape, "row", f"{name}.weight"
    if bias:
        yield f"{name}.bias", shape[:1], "row_bias", f"{name}.bias"


def _norm(name: str, spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...], str]]:
    yield f"{name}.weight", (spec.hidden,), "norm"
    if spec.norm == "layer":
        yield f"{name}.bias", (spec.hidden,), "norm"


def _head(spec: ModelSpec) -> Iterator[TensorSpec]:
    for name, shape, role in _norm("head.norm", spec):
        yield TensorSpec(name, shape, role, None, "head", name)
    if not spec.tied:
        name = "head.projection.weight"
        yield TensorSpec(name, (spec.vocab, spec.hidden), "head", None, "head", name)


def violations(spec: ModelSpec) -> list[Violation]:
    """Every reason why this model alone cannot be built, each with its two numbers and the nearest legal value."""
    found = [
        Violation(f"model.{name}", f"is {value}, but at least 1 is needed", "use 1 or more")
        for name in ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "max_sequence")
        if (value := getattr(spec, name)) < 1
    ]
    if spec.heads >= 1 and spec.kv_heads >= 1 and spec.heads % spec.kv_heads:
        nearest = min(
            (n for n in range(1, spec.heads + 1) if spec.heads % n == 0), key=lambda n: abs(n - spec.kv_heads)
        )
        problem = f"{spec.kv_heads} kv heads do not divide {spec.heads} query heads"
        found.append(Violation("model.kv_heads", problem, f"nearest that does: {nearest}"))
    if spec.positions == "rotary" and spec.head_dim % 2:
        problem = f"rotary positions pair the channels of a head, and {spec.head_dim} is odd"
        found.append(Violation("model.head_dim", problem, f"use {spec.head_dim + 1}"))
    for name in ("dropout", "attention_dropout"):
        if not 0.0 <= (value := getattr(spec, name)) < 1.0:
            found.append(Violation(f"model.{name}", f"is {value}, outside 0 … 1 (1 excluded)", "use 0.1"))
    if spec.latent is not None:
        found += latent_violations(spec.latent, spec.heads, spec.kv_heads, spec.head_dim)
        found += _latent_clashes(spec)
    if spec.moe is not None:
        found += expert_violations(spec.moe, spec.layers)
        if spec.mlp_bias:
            found.append(Violation("model.mlp_bias", "is true, and experts have no biases", "set it to false"))
    return found + _scalar_violations(spec)


def _latent_clashes(spec: ModelSpec) -> list[Violation]:
    """Parts of attention that latents have no place for."""
    found = [
        Violation(f"model.{name}", "is true, and attention through latents has none", "set it to false")
        for name in ("qk_norm", "qkv_bias")
        if getattr(spec, name)
    ]
    if spec.positions != "rotary":
        found.append(Violation("model.positions", f"is {spec.positions!r}, and latents rotate", "use 'rotary'"))
    return found


def _scalar_violations(spec: ModelSpec) -> list[Violation]:
    found = []
    if spec.window is not None and spec.window < 1:
        found.append(Violation("model.window", f"is {spec.window}, but a token must see at least 1", "use 1 or more"))
    if not spec.z_loss >= 0:
        found.append(Violation("model.z_loss", f"is {spec.z_loss}, below 0", "use 1e-4, or 0"))
    for name, value in (("norm_eps", spec.norm_eps), ("rope_theta", spec.rope_theta), ("init_std", spec.init_std)):
        if value is not None and not value > 0:
            found.append(Violation(f"model.{name}", f"is {value}, but must be above 0"))
    scaling = spec.rope_scaling
    if scaling is not None and scaling.factor < 1:
        found.append(Violation("model.rope_scaling.factor", f"is {scaling.factor}, below 1", "use 1 or more"))
    if scaling is not None and scaling.kind == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
        problem = f"{scaling.high_freq_factor} is not above low_freq_factor {scaling.low_freq_factor}"
        found.append(Violation("model.rope_scaling.high_freq_factor", problem))
    return found
