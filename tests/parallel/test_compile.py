"""A block of a split model is one graph for torch.compile: collectives are operators, and nothing breaks the trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.models.dropout import step_key
from plait.models.where import Where
from tests.fixtures import T0_GROUPED, run_of
from tests.launching import on_ranks
from tests.ranks import Rank

MODEL = T0_GROUPED.model_copy(update={"norm": "layer", "qkv_bias": True, "out_bias": True, "mlp_bias": True})


@pytest.mark.timeout(300)
def test_a_block_with_split_tokens_compiles_whole_and_equals_eager() -> None:
    def run(rank: int, world: int) -> dict[str, tuple[Tensor, Tensor]]:
        plain = run_of(MODEL, tp=2, sequence_parallel=True)
        double = plain.precision.model_copy(update={"compute": "float64"})
        mine = Rank.of(plain.model_copy(update={"precision": double}))
        decoder = mine.parallel.stages[0].module
        where = decoder.rotary(Where.of(torch.arange(2), 16, step_key(1, 1)), torch.float64)
        block = decoder.blocks["0"]
        eager, compiled = (outcome(block, made, where, rank) for made in (block, compile_whole(block)))
        return {name: (eager[name], compiled[name]) for name in eager}

    for outcomes in on_ranks(2, run, timeout=240):
        assert len(outcomes) == 2 + 12  # output, input gradient, and twelve parameters of the block
        for name, (eager, compiled) in outcomes.items():
            assert eager.abs().max() > 0, name
            torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-12, msg=name)


def compile_whole(block: nn.Module) -> Any:
    return torch.compile(block, fullgraph=True, backend="aot_eager")


def outcome(block: nn.Module, call: Any, where: Where, rank: int) -> dict[str, Tensor]:
    """Output (B, S/tp, d), and the gradients of a loss that is different on each rank."""
    generator = torch.Generator().manual_seed(rank)
    x, seed = (torch.randn(2, 8, MODEL.hidden, dtype=torch.float64, generator=generator) for _ in "xy")
    x.requires_grad_()
    y, _ = call(x, where)
    names, parameters = zip(*block.named_parameters(), strict=True)
    gradient, *found = torch.autograd.grad(y, (x, *parameters), seed)
    return {"output": y.detach(), "input": gradient, **dict(zip(names, found, strict=True))}
