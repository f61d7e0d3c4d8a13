"""The peers of ZeRO over plait's own plain Decoder: PyTorch's `fully_shard`, and DeepSpeed.

Each is used as its documentation says a fast run should be. ShardedFloor is the floor that plait has no part in.
DeepSpeed is optional (benchmarks/requirements-peers.txt): it is imported only where one of its sides is made.
"""

from __future__ import annotations

import logging
import os
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from benchmarks.peers import PlainLoop
from benchmarks.work import Size, adamw
from plait.models.decoder import logical_tensors
from plait.parallel.launch import World

BUCKET = 2**22  # elements


class FullySharded(PlainLoop):
    """`fully_shard` of each block, then of the root, which holds embedding and head and stays gathered: its defaults.

    Blocks are freed after forward and gathered again in backward. On a device without streams only explicit
    prefetching with asynchronous calls overlaps with anything: each block gathers its neighbour while it computes.
    """

    def __init__(self, size: Size, world: World, ahead: bool = True) -> None:
        super().__init__(size, world)
        blocks: list[FSDPModule] = [fully_shard(block) for block in self.model.blocks.values()]
        root: FSDPModule = fully_shard(self.model)
        if ahead:
            for module in (root, *blocks):
                module._set_unshard_async_op(True)
            for before, after in pairwise([root, *blocks]):
                before.set_modules_to_forward_prefetch([after])
            for before, after in pairwise([root, *reversed(blocks)]):
                before.set_modules_to_backward_prefetch([after])
        self.optimizer = adamw(self.model.parameters())

    def gradients(self) -> dict[str, Tensor]:
        held = {name: p.grad.full_tensor() for name, p in self.model.named_parameters() if p.grad is not None}
        return {name: gradient.clone() for name, gradient in logical_tensors(self.model.spec, held).items()}


class DeepSpeed(PlainLoop):
    """deepspeed.initialize over torch's fused AdamW; it averages over ranks, which have equally many labels.

    Buckets hold about a block: its defaults (5e8 elements) would wait for the last gradient before they sum the first,
    and hold all of them. `overlap_comm` is left to its default, which is on for stage 3; it changes nothing on gloo.
    """

    def __init__(self, size: Size, world: World, stage: int) -> None:
        super().__init__(size, world)
        os.environ |= {"LOCAL_RANK": str(world.rank), "RANK": str(world.rank), "WORLD_SIZE": str(world.size)}
        import deepspeed

        deepspeed.utils.logger.setLevel(logging.ERROR)
        config = {
            "train_micro_batch_size_per_gpu": len(self.batch.samples),
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": stage,
                "reduce_bucket_size": BUCKET,
                "allgather_bucket_size": BUCKET,
                "stage3_prefetch_bucket_size": BUCKET,
            },
        }
        self.engine, *_ = deepspeed.initialize(
            model=self.loss, optimizer=adamw(self.model.parameters()), config=config, dist_init_required=False
        )

    def backward(self) -> None:
        self.engine.backward(self.engine(self.batch.tokens, self.batch.labels))

    def update(self) -> None:
        self.engine.step()

    def gradients(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_grad

        held = {name: safe_get_full_grad(p) for name, p in self.model.named_parameters()}
        return {name: gradient.clone() for name, gradient in logical_tensors(self.model.spec, held).items()}


class ShardedFloor(PlainLoop):
    """The floor of ZeRO made without plait: the plain loop, one copy of each gradient, and of the weights one (stage 3:
    two, for forward and backward); the optimizer updates one rank's share of each tensor.
    """

    def __init__(self, size: Size, world: World, stage: int) -> None:
        super().__init__(size, world)
        self.weights = [p.detach() for p in self.model.parameters()]
        self.copies = [torch.full_like(w, 1e-3) for w in self.weights]
        self.gathers = 2 if stage == 3 else 1
        self.shards = [nn.Parameter(w.flatten()[: -(-w.numel() // world.size)].clone()) for w in self.weights]
        self.optimizer = adamw(self.shards)

    def backward(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
        for _ in range(self.gathers):
            torch._foreach_copy_(self.copies, self.weights)
        self.loss(self.batch.tokens, self.batch.labels).backward()
        torch._foreach_copy_(self.copies, [p.grad for p in self.model.parameters() if p.grad is not None])

    def update(self) -> None:
        for shard, copy in zip(self.shards, self.copies, strict=True):
            shard.grad = copy.flatten()[: shard.numel()]
        self.optimizer.step()
