"""What a token costs in floating-point operations, from the listing of tensors alone.

Model FLOPs: matrix products only, a multiply and an add counted as two. A look-up in a table is free, recompute is
never counted (it changes the time of a step, not its useful work), and causal attention costs half of the square.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.spec.model import ModelSpec, TensorSpec

_MATRICES = {"q", "kv", "column", "row", "head", "latent", "router", "expert_column", "expert_row"}


@dataclass(frozen=True)
class Flops:
    """FLOPs of the forward pass for one token: products with weights, and the two products inside attention."""

    weights: int
    attention: int

    @property
    def forward(self) -> int:
        return self.weights + self.attention

    @property
    def training(self) -> int:
        """Forward and backward; the backward pass is two products for each one of the forward pass."""
        return 3 * self.forward


def flops_per_token(spec: ModelSpec, sequence: int) -> Flops:
    """Mean over the tokens of a row of `sequence` tokens that is one document."""
    channels = spec.heads * (spec.head_dim + spec.value_dim)  # of the scores, and of the sum of values
    pairs = _keys_doubled(spec, sequence) * spec.layers * channels
    return Flops(weights=2 * matmul_parameters(spec), attention=pairs)


def matmul_parameters(spec: ModelSpec) -> int:
    """Elements of weights that a token is multiplied with: of its experts only; the head whether or not it is tied."""
    matrices = sum(_met(t, spec) for t in spec.parameters() if t.role in _MATRICES and len(t.shape) > 1)
    return matrices + (spec.vocab * spec.hidden if spec.tied else 0)


def _met(tensor: TensorSpec, spec: ModelSpec) -> int:
    if len(tensor.shape) < 3:
        return tensor.size
    assert spec.moe is not None, f"{tensor.name} is not of a mixture"
    return tensor.size // spec.moe.count * spec.moe.top_k


def _keys_doubled(spec: ModelSpec, sequence: int) -> int:
    """Twice the keys that a token sees on average: S of the causal half, w(2 - w/S) of a window w < S."""
    window = min(spec.window or sequence, sequence)
    return window * (2 * sequence - window) // sequence
