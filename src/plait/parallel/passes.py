"""What passes through plait's own blocks and heads take on one rank, and what an optimizer's update does.

Nothing is split here and no module is replaced: a rank of tensor parallelism is a block of fewer heads and a narrower
ffn. Seconds in plain values, for `probe.py`; what they mean is worked out in `planner/passes.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.models.decoder import Block, Head
from plait.models.layers import Factory
from plait.models.rotary import Rotary
from plait.models.where import Where
from plait.spec.model import ModelSpec

Clock = Callable[[Callable[[], object]], float]  # seconds of one call, the fastest of some


class Trial(NamedTuple):
    """A block (vocab 0) or a head of a small model, and the rows that pass through it."""

    hidden: int
    heads: int
    ffn: int
    rows: int
    sequence: int
    vocab: int = 0

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            vocab=self.vocab or 8, hidden=self.hidden, layers=1, heads=self.heads, ffn=self.ffn,
            max_sequence=self.sequence, kv_heads=self.heads, head_dim=32,
        )  # fmt: skip


# Of few and of many tokens, whole and as one rank of several has it, wide and narrow.
BLOCKS = (
    Trial(64, 2, 64, 1, 8), Trial(256, 8, 704, 1, 64), Trial(256, 8, 704, 4, 128), Trial(256, 2, 176, 4, 64),
    Trial(256, 1, 88, 8, 128), Trial(512, 16, 1408, 1, 128),
)  # fmt: skip
HEADS = (Trial(64, 2, 64, 1, 8, 64), Trial(256, 8, 64, 2, 64, 2048), Trial(256, 8, 64, 4, 64, 8192))
MORE_BLOCKS = (Trial(512, 16, 1408, 4, 256), Trial(1024, 32, 2816, 1, 128), Trial(128, 4, 352, 4, 64))
UPDATED = 2**21  # elements


def passes(clock: Clock, quick: bool) -> list[dict[str, Any]]:
    """Seconds of forward and of backward of each trial."""
    found = []
    for trial in (*BLOCKS, *HEADS, *(() if quick else MORE_BLOCKS)):
        forward, backward = _timed(trial, clock)
        found.append({**trial._asdict(), "forward": forward, "backward": backward})
    return found


def _timed(trial: Trial, clock: Clock) -> tuple[float, float]:
    """Backward is what both together take beyond forward."""
    spec, make = trial.spec, Factory(device="cpu", dtype=torch.float32)
    x = torch.randn(trial.rows, trial.sequence, trial.hidden, requires_grad=True)
    gradient = torch.randn_like(x)
    if trial.vocab:
        return _head(Head(spec, make), x, spec, clock)
    block = Block(spec, 0, make)
    _fill(block.parameters())
    where = Rotary(spec)(Where.of(torch.arange(trial.rows), trial.sequence), x.dtype)
    forward = clock(lambda: block(x, where))
    both = clock(lambda: torch.autograd.backward(block(x, where)[0], gradient))
    return forward, both - forward


def _head(head: Head, x: Tensor, spec: ModelSpec, clock: Clock) -> tuple[float, float]:
    """Norm, projection and loss: with the logits whole, for what they cost."""
    _fill(head.parameters())
    labels = torch.randint(spec.vocab, x.shape[:2])
    forward = clock(lambda: head(x, labels))
    both = clock(lambda: head(x, labels)[1]["loss"].backward())
    return forward, both - forward


def _fill(parameters: Iterable[Tensor]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.normal_(std=0.02)


def update(clock: Clock) -> dict[str, Any]:
    """An update of AdamW as training does it."""
    weight = torch.zeros(UPDATED, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return {"elements": UPDATED, "seconds": clock(optimizer.step)}
