"""A mixture's block on one device beside Hugging Face's: `python -m benchmarks.experts [--rounds N] [--tokens N]`.

Mixtral's and Qwen3-MoE's blocks with their `eager` and `grouped_mm` experts, and the bare matrix products that all of
them must make. One process, one thread, the same weights and tokens; outputs and gradients are compared before
anything is timed, rounds take turns, and the least processor time of each counts. It prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from plait.models.decoder import Decoder
from plait.models.init import initialise
from plait.models.moe import MoE
from plait.models.where import Where
from plait.spec.experts import Experts
from plait.spec.model import ModelSpec

HIDDEN, FFN, EXPERTS, TOP_K = 256, 512, 8, 2
LIMITS = {"faster than the faster peer": 1.05, "over the bare products": 1.25}
MIXTRAL = {"num_local_experts": EXPERTS, "intermediate_size": FFN}
QWEN3 = {"num_experts": EXPERTS, "moe_intermediate_size": FFN, "norm_topk_prob": True}
PEERS: Mapping[str, tuple[type[nn.Module], type, Mapping[str, object]]] = {
    "mixtral": (MixtralSparseMoeBlock, MixtralConfig, MIXTRAL),
    "qwen3_moe": (Qwen3MoeSparseMoeBlock, Qwen3MoeConfig, QWEN3),
}
Run = Callable[[Tensor], Tensor]


def ours() -> MoE:
    moe = Experts(count=EXPERTS, top_k=TOP_K, ffn=FFN)
    spec = ModelSpec(vocab=8, hidden=HIDDEN, layers=1, heads=4, ffn=FFN, max_sequence=8, moe=moe)
    model = Decoder(spec, "cpu")
    initialise(model, seed=1)
    found = model.get_submodule("blocks.0.mlp")
    assert isinstance(found, MoE)
    return found


@torch.no_grad()
def theirs(family: str, experts: str, like: MoE) -> nn.Module:
    """Their block with our weights."""
    kind, config_kind, fields = PEERS[family]
    config = config_kind(hidden_size=HIDDEN, num_experts_per_tok=TOP_K, hidden_act="silu", **fields)
    config._experts_implementation = experts
    block = kind(config).float()
    assert like.experts.gate is not None
    block.gate.weight.copy_(like.router.weight)
    block.experts.gate_up_proj.copy_(torch.cat((like.experts.gate, like.experts.up), dim=1))
    block.experts.down_proj.copy_(like.experts.down)
    return block


def products(counts: list[int]) -> Run:
    """Forward and backward of the matrix products alone, at the sizes that routing gave: the floor of every block."""
    up, down = torch.randn(2 * FFN, HIDDEN), torch.randn(HIDDEN, FFN)
    inputs = [(torch.randn(n, HIDDEN), torch.randn(n, 2 * FFN), torch.randn(n, FFN)) for n in counts]

    def run(_: Tensor) -> Tensor:
        for x, wide, inner in inputs:
            x @ up.T, inner @ down.T  # forward
            x @ down, wide @ up, x.T @ inner, wide.T @ x  # backward: inputs, weights
        return torch.zeros(())

    return run


def trained(block: nn.Module, forward: Run) -> Run:
    """One forward and backward of a block."""

    def run(x: Tensor) -> Tensor:
        block.zero_grad()
        x = x.detach().requires_grad_()
        y = forward(x)
        y.square().sum().backward()
        assert x.grad is not None
        return torch.cat((y.detach().flatten(), x.grad.flatten()))

    return run


def compare(tokens: int, rounds: int) -> dict[str, object]:
    moe = ours()
    x = torch.randn(1, tokens, HIDDEN, generator=torch.Generator().manual_seed(0))
    where = Where.of(torch.arange(1), tokens)
    runs: dict[str, Run] = {"plait": trained(moe, lambda x: moe(x, where)[0])}
    for family in PEERS:
        for experts in ("eager", "grouped_mm"):
            block = theirs(family, experts, moe)
            runs[f"{family} {experts}"] = trained(block, lambda x, block=block: block(x))  # type: ignore[misc]
    with torch.no_grad():
        counts = [int(n) for n in moe(x, where)[1]["load.0"]]
    meant = runs["plait"](x)
    for name, run in runs.items():
        error = ((run(x) - meant).abs().max() / meant.abs().max()).item()
        assert error < 1e-4, f"{name} computes something else: {error:.3g}"
    runs["products"] = products(counts)
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.process_time()
            run(x)
            best[name] = min(best[name], time.process_time() - start)
    peers = [seconds for name, seconds in best.items() if name not in ("plait", "products")]
    return {
        "tokens": tokens,
        "milliseconds": {name: 1000 * seconds for name, seconds in best.items()},
        "faster than the faster peer": min(peers) / best["plait"],
        "over the bare products": best["plait"] / best["products"],
    }


def main() -> None:
    arguments = argparse.ArgumentParser(prog="python -m benchmarks.experts")
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--tokens", type=int, default=2048)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    print(json.dumps({"limits": LIMITS, **compare(given.tokens, given.rounds)}, indent=1))


if __name__ == "__main__":
    main()
