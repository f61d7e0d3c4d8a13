"""Small models and a small batch whose numbers are known by heart, and the proof of a run over them. No rank code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from plait.data import Samples
from plait.data.windows import Window
from plait.proof.compare import Verdict
from plait.proof.verify import check, proof_run
from plait.spec.experts import Experts
from plait.spec.model import ModelSpec
from plait.spec.run import BatchSpec, DataSpec, LayoutSpec, RunSpec, ScheduleSpec, ZeroSpec

# 45 344 parameters: 2 048 embedding, 4 × (4 096 attention + 6 144 mlp + 64 norm), 32 last norm, 2 048 head.
T0 = ModelSpec(vocab=64, hidden=32, layers=4, heads=4, kv_heads=4, head_dim=8, ffn=64, max_sequence=16)
T0_GROUPED = T0.model_copy(update={"kv_heads": 2})  # 41 248 parameters
T0_RATIO_4 = T0.model_copy(update={"heads": 8, "kv_heads": 2, "head_dim": 4})
T0_TIED = T0.model_copy(update={"tied": True})  # 43 296 parameters

# 218 400 parameters, 68 608 of them multiplied with a token: each mlp is 8 experts of which a token meets 2.
M0 = T0.model_copy(update={"moe": Experts(count=8, top_k=2, ffn=64)})

SEQUENCE, ROWS = 16, 8
MASK = tuple(range(1, 16, 2))  # row i keeps its first 1, 3, … 15 labels: 64 in all, and 16 against 48 by halves


@dataclass(frozen=True)
class B8:
    """8 rows of tokens (7i + 3j² + j) mod vocab, over and over; row i keeps its first `keep[i]` labels."""

    vocab: int = 64
    keep: tuple[int, ...] = MASK

    def __len__(self) -> int:
        return ROWS

    def window(self, index: int) -> Window:
        j = np.arange(SEQUENCE + 1)
        return Window((7 * index + 3 * j**2 + j) % self.vocab, (j >= 1) & (j <= self.keep[index]))


def mixture(model: ModelSpec = M0, **moe: Any) -> ModelSpec:
    """The mixture with some of its fields changed."""
    assert model.moe is not None
    return model.model_copy(update={"moe": model.moe.model_copy(update=moe)})


def run_of(
    model: ModelSpec = T0,
    *,
    micro_batches: int = 2,
    schedule: str = "1f1b",
    rows: int = ROWS,
    zero: int = 0,
    shard: Any = "all",
    keep: bool = False,
    **layout: Any,
) -> RunSpec:
    """A run of `rows` rows in so many micro-batches per data-parallel rank; `layout` as in the run file."""
    dp = layout.get("dp", 1)
    micro_size, rest = divmod(rows, dp * micro_batches)
    assert rest == 0, f"{rows} rows over {dp} ranks and {micro_batches} micro-batches"
    return RunSpec(
        model=model,
        layout=LayoutSpec(**layout),
        schedule=ScheduleSpec(name=schedule),
        zero=ZeroSpec(stage=zero, shard=shard, keep=keep),
        batch=BatchSpec(global_size=rows, micro_size=micro_size, sequence=SEQUENCE),
        data=DataSpec(source="synthetic"),
    )


def prove(
    run: RunSpec, keep: tuple[int, ...] = MASK, dtype: str = "float64", plant: Callable[[], None] | None = None
) -> Verdict:
    """The comparison of a run with one device, on B8 with the labels of `keep`."""
    ready = proof_run(run, dtype)
    return check(ready, Samples(B8(run.model.vocab, keep), ready.train.seed, shuffle=False), plant)


def assert_equals_one_device(run: RunSpec, keep: tuple[int, ...] = MASK, dtype: str = "float64") -> Verdict:
    """Loss, gradients, norm and weights after 3 steps of SGD as on one device, else what differs is said."""
    verdict = prove(run, keep, dtype)
    assert verdict.ok, verdict.complaint
    return verdict
