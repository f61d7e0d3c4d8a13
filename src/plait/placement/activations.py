"""Bytes of activations: what one micro-batch keeps from forward to backward on a rank of a stage, and the peak.

Term by term what autograd saves of each module (Korthikanti et al. 2022, section 4, for the modules as they are in
`models/`), each storage once. The tracker of `parallel/` measures the same; a test holds one against the other.
Experts are counted as if routing were even. Small things (indices of tokens, states of kernels) are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from plait.placement.bytes import SIZES
from plait.spec.layout import Layout
from plait.spec.run import RunSpec

# Device -> whether its RMSNorm is one kernel; in pieces it keeps what it normalised too, in fp32.
FUSED_NORM: Mapping[str, bool] = {"cuda": True, "cpu": False, "auto": False}


class Inner(NamedTuple):
    """Tensors of an MLP's inner size: `kept`, kept where the activation is computed `again`, and had `beside` those at
    the peak of its backward."""

    kept: int
    again: int
    beside: int


# SwiGLU keeps gate, up, silu(gate) and the product; the others input and result, but ReLU its result alone.
INNER: Mapping[str, Inner] = {
    "swiglu": Inner(4, 2, 2),
    "gelu": Inner(2, 1, 1),
    "gelu_tanh": Inner(2, 1, 1),
    "relu": Inner(1, 1, 2),
    "relu2": Inner(2, 1, 3),
}


@dataclass(frozen=True)
class Block:
    """Of one block and one micro-batch: bytes `kept`, those that backward finds (`plain`: what is computed again
    included), what it has beside them at its peak, and all that there is while attention is computed."""

    kept: int
    plain: int
    working: int
    attention: int


@dataclass(frozen=True)
class Activations:
    """Of one stage on one rank: `input` is what enters the first block and all blocks share, `head` what the last norm
    keeps, `logits` what the loss does; `loss` is what the head's forward and backward have beside them at their peak;
    `late` is kept from B to W where a schedule parts them: each linear's input and its output's gradient.
    """

    input: int
    blocks: tuple[Block, ...]
    head: int
    logits: int
    loss: int
    late: int

    @property
    def held(self) -> int:
        """Bytes that one micro-batch keeps from its forward to its backward."""
        return self.input + sum(block.kept for block in self.blocks) + self.head + self.logits

    @property
    def beside(self) -> int:
        """The most bytes beside those that are held: in the head, or while some block's backward runs."""
        most, freed = self.loss, self.head + self.logits
        for block in reversed(self.blocks):
            freed += block.kept
            most = max(most, max(block.plain + block.working, block.attention) - freed)
        return most


def activations(run: RunSpec, layout: Layout, layers: Sequence[int], first: bool, last: bool) -> Activations:
    """Of the stage with these layers; `first` has the embedding, `last` the head."""
    sizes = _Sizes(run, layout)
    recomputed = len(layers) if run.recompute.layers == "all" else run.recompute.layers
    blocks = tuple(_block(sizes, layer, index < recomputed) for index, layer in enumerate(layers))
    head, logits, loss = _head(sizes) if last else (0, 0, 0)
    late = len(layers) * _late(sizes) + (_late_head(sizes) if last else 0)
    return Activations(_input(sizes, first), blocks, head, logits, loss, late)


class _Sizes:
    """The sizes that all terms are made of, on one rank and of one micro-batch."""

    def __init__(self, run: RunSpec, layout: Layout) -> None:
        self.run, self.model, self.tp = run, run.model, layout.tp
        self.rows, self.sequence = run.batch.micro_size, run.batch.sequence // layout.cp
        self.tokens = self.rows * self.sequence
        self.between = self.tokens // (layout.tp if layout.sequence_parallel else 1)  # tokens between matrices
        self.width = SIZES[run.precision.compute]
        self.wide = max(self.width, SIZES["float32"])
        self.fused_norm = FUSED_NORM[run.train.device]
        self.heads, self.kv = run.model.heads // layout.tp, run.model.kv_heads // layout.kv
        self.dropped: tuple[str, ...] = ()

    @cached_property
    def hidden(self) -> int:
        """One activation between matrices."""
        return self.between * self.model.hidden * self.width


def _input(s: _Sizes, first: bool) -> int:
    """The tables of rotary positions, and the mask of the embedding's dropout. The activation is block 0's."""
    rows = s.rows if s.run.data.mask_documents else 1
    tables = rows * s.sequence * s.model.head_dim * s.wide if s.model.positions == "rotary" else 0
    return tables + (s.between * s.model.hidden if first and s.model.dropout else 0)


def _block(s: _Sizes, layer: int, recomputed: bool) -> Block:
    recompute = s.run.recompute
    plain = _kept(s, layer, ())
    working = _working(s)
    if recomputed and recompute.mode == "full":
        return Block(s.hidden, plain, working, _in_attention(s))
    parts = recompute.parts if recomputed else ()
    found = _kept(s, layer, tuple(part for part in parts if part != "activation"))
    return Block(_kept(s, layer, parts), found, working, _in_attention(s))


def _kept(s: _Sizes, layer: int, dropped: tuple[str, ...]) -> int:
    """What a block keeps, its input included and its result not."""
    masks = 2 * s.between * s.model.hidden if s.model.dropout else 0
    feed_forward = _experts(s) if s.model.has_experts(layer) else _mlp(s, s.model.ffn, "activation" in dropped)
    return 2 * _norm(s, "norm" in dropped) + _attention(s, dropped) + masks + feed_forward


def _norm(s: _Sizes, dropped: bool) -> int:
    """A norm over hidden: its input, its statistics, and its result, which the next matrix keeps."""
    if dropped:
        return s.hidden
    return s.hidden + _inside_norm(s, s.between, s.model.hidden, s.model.norm)


def _inside_norm(s: _Sizes, vectors: int, size: int, kind: str) -> int:
    """Input and statistics of a norm over vectors of `size`."""
    elements = vectors * size
    if kind == "layer":
        return elements * s.width + 2 * vectors * s.width
    if s.fused_norm:
        return elements * s.width + vectors * s.wide
    entered = elements * s.wide  # the input itself, or its copy in fp32
    return entered + elements * s.wide + vectors * s.wide


def _mlp(s: _Sizes, ffn: int, dropped: bool, tokens: int | None = None) -> int:
    """Results of the first matrices, and what the activation keeps and gives."""
    one = (s.tokens if tokens is None else tokens) * -(-ffn // s.tp) * s.width
    inner = INNER[s.model.mlp]
    return (inner.again if dropped else inner.kept) * one


def _experts(s: _Sizes) -> int:
    """Routing in fp32, and for each choice: the token, the expert's inner activations, its result in two orders."""
    moe = s.model.moe
    assert moe is not None
    chosen = s.tokens * moe.top_k
    routing = s.tokens * (2 * moe.count * s.wide + (s.model.hidden * s.wide if s.width < s.wide else 0))
    moved = 3 * chosen * s.model.hidden * s.width
    shared = _mlp(s, moe.shared * moe.ffn, False) if moe.shared else 0
    return routing + moved + _mlp(s, moe.ffn, False, chosen) + shared


def _attention(s: _Sizes, dropped: tuple[str, ...]) -> int:
    """Projections, norms of heads, rotated queries and keys, and what the core keeps; the result is its own."""
    model, t, w = s.model, s.tokens, s.width
    if model.latent is not None:
        return _latent(s)
    q, kv = t * s.heads * model.head_dim * w, t * s.kv * model.head_dim * w
    fused, turned = q + 2 * kv, (q + kv if model.positions == "rotary" or model.qk_norm else 0)
    inside = 0
    if model.qk_norm and "norm" not in dropped:
        inside = sum(_inside_norm(s, t * heads, model.head_dim, "rms") for heads in (s.heads, s.kv))
        inside -= turned if s.width == s.wide or s.fused_norm else 0  # the queries and keys themselves: in `fused`
    if not model.attention_dropout:
        return fused + turned + inside + q + t * s.heads * s.wide + _mask(s)
    if "attention" in dropped:
        return fused + turned + inside
    return 3 * q + inside + q + _probabilities(s)


def _mask(s: _Sizes) -> int:
    """What a fused core is given where causality alone does not say who sees whom."""
    window = s.model.window
    if s.run.data.mask_documents:
        return s.rows * s.sequence**2 * s.width
    return s.sequence**2 * s.width if window is not None and window < s.sequence else 0


def _probabilities(s: _Sizes) -> int:
    """What a core keeps that drops probabilities: who sees whom, softmax, who dies, and what is left."""
    square = s.sequence**2
    seen = square * (s.rows if s.run.data.mask_documents else 1)
    return seen + s.rows * s.heads * square * (s.wide + 1 + s.width)


def _latent(s: _Sizes) -> int:
    """Latents before and after their norms, queries, keys and values of all heads, and the core's result."""
    latent, t = s.model.latent, s.tokens
    assert latent is not None
    ranks = (latent.q_rank or 0) + latent.kv_rank
    per_head = 3 * (latent.kept + latent.rotated) + latent.kept + 3 * latent.value
    return t * s.width * (3 * ranks + latent.rotated + s.heads * per_head) + t * s.heads * s.wide


def _working(s: _Sizes) -> int:
    """The gradients of the block's result, on both sides of the MLP's activation, and of its second matrix."""
    model = s.model
    ffn = -(-model.ffn // s.tp)
    return s.hidden + INNER[model.mlp].beside * s.tokens * ffn * s.width + ffn * model.hidden * s.width


def _in_attention(s: _Sizes) -> int:
    """From the block's input to the probabilities that are dropped: they are there as scores, after softmax, and as
    three times eight bytes of the hash that decides."""
    if not s.model.attention_dropout:
        return 0
    square = s.rows * s.heads * s.sequence**2
    scores = 2 * s.wide + (s.width if s.width < s.wide else 0)
    laid_out = 3 * s.tokens * s.heads * s.model.head_dim * s.width  # queries, and keys and values for each of them
    return _norm(s, False) + _attention(s, ("attention",)) + laid_out + square * (24 + scores)


def _late(s: _Sizes) -> int:
    """Inputs and output gradients of a block's linears, experts left out."""
    model, t, w = s.model, s.tokens, s.width
    q, kv, ffn = s.heads * model.head_dim, s.kv * model.head_dim, -(-model.ffn // s.tp)
    gated = 2 if model.mlp == "swiglu" else 1
    inputs = 2 * s.hidden + t * (q + ffn) * w
    return inputs + t * (q + 2 * kv + gated * ffn + 2 * model.hidden) * w


def _late_head(s: _Sizes) -> int:
    """Input and output gradient of the projection onto the vocabulary; of a loss in chunks forward made the product."""
    return 0 if s.run.recompute.loss_chunk else s.hidden + s.tokens * -(-s.model.vocab // s.tp) * s.width


def _head(s: _Sizes) -> tuple[int, int, int]:
    """(what the norm keeps, what the loss keeps, what the loss has beside them)."""
    chunk = s.run.recompute.loss_chunk
    columns = -(-s.model.vocab // s.tp)
    norm = _inside_norm(s, s.between, s.model.hidden, s.model.norm)
    at_once = min(chunk, s.tokens) if chunk else s.tokens
    logits = at_once * columns * s.wide
    table = columns * s.model.hidden  # of which the gradient is made here
    apart = s.tp == 1 and s.model.z_loss > 0  # the z-loss keeps logits, and has gradients, of its own
    kept = logits * (1 + apart)
    moved = 3 * s.tokens * s.model.hidden * s.width if s.tp > 1 else 0  # input gathered, its gradient in pieces
    if not chunk:
        return norm + s.hidden, kept, max(logits * ((2 if s.tp == 1 else 1) + apart), table * s.width + moved)
    several = table * s.width if at_once < s.tokens else 0
    return norm, s.hidden + table * s.wide, max(2 * kept + logits, logits + several + moved)
