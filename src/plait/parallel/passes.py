"""What a forward and a backward of plait's own stages take on one rank, and what an optimizer's update does.

Nothing is split here and no module is replaced: a rank of tensor parallelism is a model of fewer heads and a narrower
ffn. Stages are small models as training has them, gradients summed in their buffers. Seconds in plain values, for
`probe.py`; what they mean is worked out in `planner/passes.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from plait.models.decoder import Decoder
from plait.models.where import Where
from plait.parallel.mesh import Mesh
from plait.parallel.parallelize import parallelize
from plait.parallel.stage import Denominators, Micro
from plait.spec.model import ModelSpec
from plait.spec.run import RunSpec

Clock = Callable[..., list[float]]  # seconds of each of some calls that follow each other, over and over


class Trial(NamedTuple):
    """A small model of several blocks, and the rows that pass through it."""

    hidden: int
    heads: int
    ffn: int
    rows: int
    sequence: int
    vocab: int = 512
    layers: int = 4

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            vocab=self.vocab, hidden=self.hidden, layers=self.layers, heads=self.heads, ffn=self.ffn,
            max_sequence=self.sequence, kv_heads=self.heads, head_dim=32,
        )  # fmt: skip


# Of few and of many tokens, whole and as one rank of several has it, wide and narrow, of many words.
TRIALS = (
    Trial(64, 2, 64, 1, 8), Trial(256, 8, 704, 1, 16), Trial(256, 2, 176, 2, 16), Trial(256, 8, 704, 1, 64),
    Trial(256, 8, 704, 2, 128), Trial(256, 2, 176, 4, 64), Trial(256, 1, 88, 4, 128), Trial(512, 16, 1408, 1, 128),
    Trial(256, 8, 704, 2, 32, vocab=4096, layers=1),
)  # fmt: skip
MORE_TRIALS = (
    Trial(512, 16, 1408, 2, 256), Trial(1024, 32, 2816, 1, 128), Trial(128, 4, 352, 4, 64),
    Trial(128, 4, 352, 4, 64, vocab=16384, layers=1),
)  # fmt: skip
UPDATED = 2**21  # elements


def passes(mesh: Mesh, clock: Clock, quick: bool) -> list[dict[str, Any]]:
    """Seconds of forward and of backward of each trial. `mesh` has data-parallel ranks only; they do not meet here."""
    found = []
    for trial in TRIALS if quick else TRIALS + MORE_TRIALS:
        forward, backward = _timed(trial, mesh, clock)
        found.append({**trial._asdict(), "forward": forward, "backward": backward})
    return found


def _timed(trial: Trial, mesh: Mesh, clock: Clock) -> list[float]:
    run = RunSpec(model=trial.spec)
    parallel = parallelize(Decoder(run.model), mesh, run)
    stage, labels = parallel.stages[0], torch.randint(trial.vocab, (trial.rows, trial.sequence))
    alone = Denominators({"loss": torch.tensor(labels.numel())}, mesh.group("self"))
    parallel.states.begin()
    stage.begin([Micro(labels, labels, Where.of(torch.arange(trial.rows), trial.sequence))], alone)
    return clock(lambda: stage.forward(0, ()), lambda: stage.backward(0, ()))


def update(clock: Clock) -> dict[str, Any]:
    """An update of AdamW as training does it."""
    weight = torch.zeros(UPDATED, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return {"elements": UPDATED, "seconds": clock(optimizer.step)[0]}
