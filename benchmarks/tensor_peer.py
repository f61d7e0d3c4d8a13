"""torch.distributed.tensor.parallel with its full documented plan, on the Llama that the plan is written for.

Source: PyTorch's tutorial on tensor parallelism and the docstrings of `torch.distributed.tensor.parallel`. Everything
that the tutorial shows is on: sharded embedding and head, SequenceParallel norms, and loss_parallel. The model is
plain PyTorch with separate wq, wk, wv and w1, w3, as the plan needs them, and precomputed rotary tables.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from benchmarks.work import Size, adamw
from plait.models.init import draw
from plait.parallel.launch import World
from plait.spec.model import ModelSpec
from plait.spec.run import TrainSpec

Tables = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Head counts are read from the projections' outputs, so shards of the heads work unchanged."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(spec.hidden, spec.hidden, bias=False) for _ in range(4))

    def forward(self, x: Tensor, tables: Tables) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))  # (B, S, heads, D)
        q, k, v = (t.transpose(1, 2) for t in (turned(q, tables), turned(k, tables), v))
        y: Tensor = self.wo(self.attend(q, k, v).transpose(1, 2).flatten(-2))
        return y

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, heads, S, D) each."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.w1 = nn.Linear(spec.hidden, spec.ffn, bias=False)
        self.w2 = nn.Linear(spec.ffn, spec.hidden, bias=False)
        self.w3 = nn.Linear(spec.hidden, spec.ffn, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return y


class TransformerBlock(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, spec: ModelSpec, attention: type[Attention]) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(spec.hidden, spec.norm_eps) for _ in range(2))
        self.attention, self.feed_forward = attention(spec), FeedForward(spec)

    def forward(self, x: Tensor, tables: Tables) -> Tensor:
        x = x + self.attention(self.attention_norm(x), tables)
        y: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return y


class Llama(nn.Module):
    """Tokens (B, S) -> logits (B, S, V)."""

    def __init__(self, spec: ModelSpec, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(spec.vocab, spec.hidden)
        self.layers = nn.ModuleList(TransformerBlock(spec, attention) for _ in range(spec.layers))
        self.norm = nn.RMSNorm(spec.hidden, spec.norm_eps)
        self.output = nn.Linear(spec.hidden, spec.vocab, bias=False)
        self.tables = rotary_tables(spec)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.tables)
        y: Tensor = self.output(self.norm(x))
        return y


def rotary_tables(spec: ModelSpec) -> Tables:
    """cos and sin, (S, 1, D/2)."""
    frequencies = spec.rope_theta ** -(torch.arange(0, spec.head_dim, 2).double() / spec.head_dim)
    angles = torch.outer(torch.arange(spec.max_sequence).double(), frequencies).unsqueeze(1)
    return angles.cos().float(), angles.sin().float()


def turned(x: Tensor, tables: Tables) -> Tensor:
    """Channel pairs (c, c + D/2) of x (B, S, heads, D), rotated."""
    cos, sin = tables
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


MODEL_PLAN: dict[str, ParallelStyle] = {
    "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}
LAYER_PLAN: dict[str, ParallelStyle] = {
    "attention_norm": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
    "attention.wq": ColwiseParallel(),
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "ffn_norm": SequenceParallel(),
    "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "feed_forward.w1": ColwiseParallel(),
    "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    "feed_forward.w3": ColwiseParallel(),
}

# plait's names of a block's tensors -> the Llama's.
NAMES = {
    "attention_norm": "attention_norm", "mlp_norm": "ffn_norm", "attention.q": "attention.wq",
    "attention.k": "attention.wk", "attention.v": "attention.wv", "attention.out": "attention.wo",
    "mlp.gate": "feed_forward.w1", "mlp.up": "feed_forward.w3", "mlp.down": "feed_forward.w2",
}  # fmt: skip
ENDS = {"embedding.tokens": "tok_embeddings", "head.norm": "norm", "head.projection": "output"}


def llama_names(spec: ModelSpec) -> dict[str, str]:
    """plait's name of every tensor -> the Llama's."""
    names = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in ENDS.items()}
    for layer in range(spec.layers):
        names |= {f"blocks.{layer}.{ours}.weight": f"layers.{layer}.{theirs}.weight" for ours, theirs in NAMES.items()}
    return names


def split(model: Llama, mesh: DeviceMesh) -> Llama:
    """The plan, applied."""
    parallelize_module(model, mesh, MODEL_PLAN)
    for layer in model.layers:
        parallelize_module(layer, mesh, LAYER_PLAN)
    return model


@torch.no_grad()
def with_first_weights(model: Llama, spec: ModelSpec) -> Llama:
    """The Llama with the weights that every side begins with."""
    weights = dict(model.named_parameters())
    for tensor in spec.parameters():
        weights[llama_names(spec)[tensor.name]].copy_(draw(tensor, spec, TrainSpec().seed))
    return model


class TensorParallel:
    """The Llama split over all ranks, every rank with the whole batch."""

    def __init__(self, size: Size, world: World) -> None:
        self.spec, self.batch = size.model, size.batch()
        model = with_first_weights(Llama(self.spec), self.spec)
        self.model = split(model, init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",)))
        self.optimizer = adamw(self.model.parameters())

    def backward(self) -> None:
        self.optimizer.zero_grad()
        logits = self.model(self.batch.tokens)
        with loss_parallel():
            F.cross_entropy(logits.flatten(0, 1), self.batch.labels.flatten()).backward()

    def update(self) -> None:
        self.optimizer.step()

    def gradients(self) -> dict[str, Tensor]:
        held = dict(self.model.named_parameters())
        return {ours: whole(held[theirs].grad).clone() for ours, theirs in llama_names(self.spec).items()}


def whole(gradient: Tensor | None) -> Tensor:
    """All of a DTensor, with its partial sums taken."""
    assert isinstance(gradient, DTensor)
    return gradient.full_tensor()
