"""What the means against memory cost and save, beside PyTorch's own: `python -m benchmarks.memory [--rounds N]`.

One process, one thread, the same model and batch on both sides; rounds take turns, in one order and then the other, and
ratios of processor time are taken within each round: their median counts. Gradients are compared before anything is
timed. It prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plait.models.decoder import Decoder
from plait.models.init import initialise
from plait.models.where import Where
from plait.parallel.recompute import recompute
from plait.parallel.tracker import Tracker
from plait.spec.model import ModelSpec
from plait.spec.run import RecomputeSpec

ROWS, SEQUENCE = 4, 256
BLOCKS = ModelSpec(
    vocab=257, hidden=384, layers=6, heads=6, kv_heads=2, head_dim=64, ffn=1024, max_sequence=SEQUENCE
)  # fmt: skip
VOCABULARIES = (8192, 16384)
LIMITS = {"full": 1.02, "selective": 1.08, "loss": 1.05}


class Checkpointed(nn.Module):
    """A block under torch's own recomputation, without the state of a generator that nobody uses."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: object) -> object:
        return checkpoint(self.inner, *inputs, use_reentrant=False, preserve_rng_state=False)


def decoder(spec: ModelSpec, how: RecomputeSpec) -> Decoder:
    model = Decoder(spec, "cpu")
    initialise(model, seed=1)
    recompute(model, how)
    return model.train()


def torchs_own(spec: ModelSpec) -> Decoder:
    model = decoder(spec, RecomputeSpec())
    for name, block in list(model.blocks.items()):
        model.blocks[name] = Checkpointed(block)
    return model


def step(model: Decoder) -> None:
    """One forward and backward; gradients stay."""
    tokens = torch.arange(ROWS * SEQUENCE).view(ROWS, SEQUENCE) % model.spec.vocab
    model.zero_grad()
    _, terms = model(tokens, Where.of(torch.arange(ROWS), SEQUENCE), tokens.roll(1, 1))
    (terms["loss"] / terms["count"]).backward()


def gradients(model: Decoder) -> Tensor:
    step(model)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def seconds(models: Mapping[str, Decoder], rounds: int) -> dict[str, list[float]]:
    """Processor time of a step of each, round by round, after one that is not timed."""
    first, *others = (gradients(model) for model in models.values())
    assert all(torch.allclose(first, other, rtol=1e-4, atol=1e-6) for other in others), "gradients differ"
    took: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds):
        for name in list(models)[:: 1 if turn % 2 == 0 else -1]:
            start = time.process_time()
            step(models[name])
            took[name].append(time.process_time() - start)
    return took


def ratio(these: Sequence[float], those: Sequence[float]) -> float:
    """The median over rounds."""
    return median(a / b for a, b in zip(these, those, strict=True))


def held(model: Decoder) -> tuple[int, int]:
    """Bytes from forward to backward, and at the peak; gradients are not counted."""
    with Tracker() as tracker, tracker.watch([model]):
        step(model)
    report = tracker.report(p.grad for p in model.parameters() if p.grad is not None)
    return report.between, report.peak


def blocks(rounds: int) -> dict[str, object]:
    """Full recompute against torch's, selective against none."""
    models = {
        "none": decoder(BLOCKS, RecomputeSpec()),
        "selective": decoder(BLOCKS, RecomputeSpec(mode="selective")),
        "full": decoder(BLOCKS, RecomputeSpec(mode="full")),
        "torch": torchs_own(BLOCKS),
    }
    took = seconds(models, rounds)
    kept = {name: held(model) for name, model in models.items()}
    one = held(decoder(BLOCKS.model_copy(update={"layers": 1}), RecomputeSpec()))
    entry = ROWS * SEQUENCE * BLOCKS.hidden * 4
    return {
        "seconds": {name: median(times) for name, times in took.items()},
        "full over torch": ratio(took["full"], took["torch"]),
        "selective over none": ratio(took["selective"], took["none"]),
        "full over none": ratio(took["full"], took["none"]),
        "selective keeps": kept["selective"][0] / kept["none"][0],
        "full's peak over inputs + a block": kept["full"][1] / (BLOCKS.layers * entry + one[1]),
        "bytes": {name: {"between": between, "peak": peak} for name, (between, peak) in kept.items()},
    }


def losses(rounds: int) -> dict[str, object]:
    """Head and loss in chunks against whole, at two vocabularies; the decoder has one block."""
    found: dict[str, object] = {}
    for vocabulary in VOCABULARIES:
        spec = BLOCKS.model_copy(update={"vocab": vocabulary, "layers": 1})
        models = {"plain": decoder(spec, RecomputeSpec()), "chunked": decoder(spec, RecomputeSpec(loss_chunk=256))}
        took = seconds(models, rounds)
        peaks = {name: held(model)[1] for name, model in models.items()}
        found[str(vocabulary)] = {
            "chunked over plain": ratio(took["chunked"], took["plain"]),
            "seconds": {name: median(times) for name, times in took.items()},
            "peak bytes": peaks,
        }
    return found


PARTS: Mapping[str, Callable[[int], dict[str, object]]] = {"blocks": blocks, "loss": losses}


def main() -> None:
    arguments = argparse.ArgumentParser(prog="python -m benchmarks.memory")
    arguments.add_argument("--rounds", type=int, default=15)
    rounds = arguments.parse_args().rounds
    torch.set_num_threads(1)
    print(json.dumps({"limits": LIMITS, **{name: part(rounds) for name, part in PARTS.items()}}, indent=1))


if __name__ == "__main__":
    main()
