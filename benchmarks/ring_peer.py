"""`ring-attention-pytorch` in the Llama of the tensor peer: the tokens of a row on several ranks, keys passed around.

Each rank has a contiguous part of every row: on a CPU the package computes all blocks of scores, so its striped order,
meant to balance those that a GPU leaves out, would change nothing. Its package is optional (requirements-peers.txt).

On a CPU the package (0.5.20, and those before it from 0.2.28 on) gives wrong gradients of keys and values: its backward
takes the pair that `ring_pass` returns, what arrived and what was sent, for the two gradients that arrived. There is
nothing to compare with that, so here it takes what arrived.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.tensor_peer import Attention, Llama, llama_names, with_first_weights
from benchmarks.work import Size, adamw
from plait.parallel.launch import World

BUCKET = 512  # queries and keys of a block: its module's default, and the fastest of 256, 512, 1024 and 2048 here


class RingAttention(Attention):
    """Attention of this rank's queries to the keys of all."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))  # it wants (B, S, heads, D)
        y: Tensor = ring_flash_attn(q, k, v, causal=True, bucket_size=BUCKET, ring_reduce_col=True)
        return y.transpose(1, 2)


class SumOfTokens(nn.Module):
    """The loss of this rank's tokens over those of one rank, which DistributedDataParallel averages to the mean."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens).flatten(0, 1), labels.flatten())


class Ring:
    """The Llama with its weights on every rank, and a contiguous part of each row."""

    def __init__(self, size: Size, world: World) -> None:
        self.spec, whole = size.model, size.batch()
        mine = slice(world.rank * size.sequence // world.size, (world.rank + 1) * size.sequence // world.size)
        self.tokens, self.labels = whole.tokens[:, mine].contiguous(), whole.labels[:, mine].contiguous()
        self.model = with_first_weights(Llama(self.spec, RingAttention), self.spec)
        cos, sin = self.model.tables
        self.model.tables = cos[mine], sin[mine]
        self.loss = DistributedDataParallel(SumOfTokens(self.model), gradient_as_bucket_view=True, static_graph=True)
        self.optimizer = adamw(self.model.parameters())

    def backward(self) -> None:
        from ring_attention_pytorch import ring_flash_attention
        from ring_attention_pytorch.ring import ring_pass

        def arrived(*asked: Any) -> Tensor:
            received: Tensor = ring_pass(*asked)[0]
            return received

        self.optimizer.zero_grad()
        with mock.patch.object(ring_flash_attention, "ring_pass", arrived):
            self.loss(self.tokens, self.labels).backward()

    def update(self) -> None:
        self.optimizer.step()

    def gradients(self) -> dict[str, Tensor]:
        held = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        return {ours: held[theirs].clone() for ours, theirs in llama_names(self.spec).items()}
