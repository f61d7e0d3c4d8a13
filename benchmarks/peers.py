"""The peers over plait's own plain Decoder: a loop of PyTorch, DistributedDataParallel, and pipelining.

Each is used as its documentation says a fast run should be. What a peer does is written out here in full, so that
nobody has to trust a wrapper. Beside them stand the floors that plait has no part in; see floor.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, schedules
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks.floor import Arrival, Pipes
from benchmarks.work import Size, adamw, decoder, where
from plait.data import rows_of
from plait.models.decoder import Decoder, Head, PassThrough, logical_tensors
from plait.parallel.launch import World
from plait.placement.cuts import piece
from plait.spec.pipeline import stage_owners
from plait.spec.run import ScheduleSpec


class MeanLoss(nn.Module):
    """The decoder's mean loss over the rows given, as a module that DistributedDataParallel can wrap."""

    def __init__(self, model: Decoder, rows: int, sequence: int) -> None:
        super().__init__()
        self.model, self.where = model, where(rows, sequence)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        _, terms = self.model(tokens, self.where, labels)
        mean: Tensor = terms["loss"] / terms["count"]
        return mean


class PlainLoop:
    """PyTorch as it stands: forward, backward, fused AdamW, on this rank's rows alone."""

    def __init__(self, size: Size, world: World) -> None:
        rows = rows_of(size.rows, world.rank, world.size)
        self.batch, self.model = size.batch(rows.start, rows.stop), decoder(size)
        self.loss: nn.Module = MeanLoss(self.model, len(rows), size.sequence)
        self.optimizer = adamw(self.model.parameters())

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.batch.tokens, self.batch.labels).backward()

    def update(self) -> None:
        self.optimizer.step()

    def gradients(self) -> dict[str, Tensor]:
        return named_gradients(self.model)


class PlainFloor(PlainLoop):
    """The floor of data parallelism made without plait: the plain loop, and a copy of each gradient."""

    def __init__(self, size: Size, world: World) -> None:
        super().__init__(size, world)
        self.copies = [torch.full_like(p, 1e-3) for p in self.model.parameters()]

    def backward(self) -> None:
        super().backward()
        torch._foreach_copy_(self.copies, [p.grad for p in self.model.parameters() if p.grad is not None])


class PlainShard(PlainLoop):
    """The floor of tensor parallelism made without plait: one rank's share of heads, ffn and vocabulary, all tokens.

    It copies nothing for the collectives that it leaves out.
    """

    def __init__(self, size: Size, world: World) -> None:
        n = world.size
        shard = replace(size, heads=size.heads // n, ffn=size.ffn // n, vocab=size.vocab // n, head_dim=size.head_dim)
        super().__init__(shard, World(0, 1, 0, world.device))


class DataParallel(PlainLoop):
    """DistributedDataParallel. It averages over ranks, all of which have equally many labels: the mean of the batch.

    `gradient_as_bucket_view` spares a copy of all gradients, `static_graph` the search for unused parameters.
    """

    def __init__(self, size: Size, world: World, bucket_mb: int = 25) -> None:
        super().__init__(size, world)
        self.loss = DistributedDataParallel(
            self.loss, gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=bucket_mb
        )


class PipelineModule(nn.Module):
    """One stage of the decoder, in the shape that PipelineStage wants: tensor in, activations or logits out."""

    def __init__(self, model: Decoder, rows: int, sequence: int) -> None:
        super().__init__()
        self.model, self.where = model, where(rows, sequence)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.model.body(x, self.where)
        head = self.model.head
        y: Tensor = head.projection(head.norm(x)) if isinstance(head, Head) else x
        return y


# plait's name of a schedule -> the peer's. Both place stages alike: round the ranks, or in a V.
SCHEDULES: Mapping[str, type[PipelineScheduleSingle] | type[PipelineScheduleMulti]] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
    "dualpipe-v": ScheduleDualPipeV,
}


class Pipelining:
    """torch.distributed.pipelining over the same stages as plait's.

    The mean loss of each micro-batch, gradients scaled by their number (`scale_grads`): equal micro-batches make it the
    mean of the batch. Outputs are not returned, which spares the last stage from joining all logits.
    """

    def __init__(self, size: Size, world: World, schedule: str, micro_batches: int) -> None:
        owner = stage_owners(ScheduleSpec(name=schedule), world.size)
        held = [stage for stage, rank in enumerate(owner) if rank == world.rank]
        self.batch, self.first, self.last = size.batch(), 0 in held, len(owner) - 1 in held
        self.models = [cut(decoder(size), stage, len(owner)) for stage in held]
        rows = size.rows // micro_batches
        stages = [
            PipelineStage(PipelineModule(model, rows, size.sequence), index, len(owner), world.device)
            for index, model in zip(held, self.models, strict=True)
        ]
        made = SCHEDULES[schedule]
        if issubclass(made, PipelineScheduleMulti):
            self.schedule: Any = made(stages, micro_batches, loss_fn=token_mean)  # type: ignore[arg-type]
        else:
            self.schedule = made(stages[0], micro_batches, loss_fn=token_mean)
        self.optimizer = adamw(p for model in self.models for p in model.parameters())

    def backward(self) -> None:
        self.optimizer.zero_grad()
        inputs = (self.batch.tokens,) if self.first else ()
        target = self.batch.labels if self.last else None
        self.schedule.step(*inputs, target=target, losses=[] if self.last else None, return_outputs=False)

    def update(self) -> None:
        self.optimizer.step()

    def gradients(self) -> dict[str, Tensor]:
        return collected({name: g for model in self.models for name, g in named_gradients(model).items()})


class PipeliningFloor(Pipelining):
    """The floor of a pipeline made without plait: the peer itself, each message a byte through a pipe and a copy."""

    def __init__(self, size: Size, world: World, pipes: Pipes, schedule: str, micro_batches: int) -> None:
        super().__init__(size, world, schedule, micro_batches)
        self.pipes, self.rank = pipes, world.rank
        rows = size.rows // micro_batches
        self.stand_in = torch.full((rows, size.sequence, size.hidden), 1e-3)

    def backward(self) -> None:
        with mock.patch.object(schedules, "_batch_p2p", self.moved):
            super().backward()

    def moved(self, operations: list[dist.P2POp], desc: str | None = None) -> list[Arrival]:
        """What stands in for the peer's sends and receives."""
        arrivals = []
        for operation in operations:
            if operation.op is dist.isend:
                self.pipes.signal(self.rank, operation.peer)
            else:
                arrivals.append(self.pipes.arrival(operation.tensor, self.stand_in, operation.peer, self.rank))
        return arrivals


def token_mean(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of (B, S, V) logits."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def cut(model: Decoder, stage: int, stages: int) -> Decoder:
    """The blocks of one stage and the ends that belong to it."""
    layers = range(*piece(len(model.blocks), stages, stage))
    model.blocks = nn.ModuleDict({str(layer): model.blocks[str(layer)] for layer in layers})
    if stage > 0:
        model.embedding = PassThrough("embedding")
    if stage < stages - 1:
        model.head = PassThrough("head")
    return model


def named_gradients(model: Decoder) -> dict[str, Tensor]:
    """Copies of the gradients by global name."""
    held = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: gradient.clone() for name, gradient in logical_tensors(model.spec, held).items()}


def collected(mine: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all ranks together, on rank 0."""
    everyone: list[dict[str, Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {name: tensor for one in everyone for name, tensor in one.items()}
