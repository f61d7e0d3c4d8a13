"""Random legal runs for `plait verify --random`: model shape × layout × schedule × dropout × masks, at tiny sizes.

A draw is a pure function of (seed, number). Whatever a later axis brings joins as one more choice here and one more
row of `FEATURES`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from plait.spec.fit import fit, violations
from plait.spec.model import ModelSpec
from plait.spec.pipeline import SHAPES, splits_backward, stage_count
from plait.spec.run import (
    RECOMPUTED_PARTS,
    BatchSpec,
    DataSpec,
    LayoutSpec,
    RecomputeSpec,
    RunSpec,
    ScheduleSpec,
    TrainSpec,
    ZeroSpec,
)

MOST_RANKS = 8
ORDERS = (("pp", "dp", "cp", "tp"), ("dp", "pp", "cp", "tp"), ("tp", "dp", "cp", "pp"))

# What a set of draws is asked to cover: name -> whether a run has it.
FEATURES: Mapping[str, Callable[[RunSpec], bool]] = {
    "tp > 1": lambda r: r.layout.tp > 1,
    "pp > 1": lambda r: r.layout.pp > 1,
    "dp > 1": lambda r: (r.layout.dp or 1) > 1,
    "three axes > 1": lambda r: min(r.layout.tp, r.layout.pp, r.layout.dp or 1) > 1,
    "sequence parallel": lambda r: r.layout.sequence_parallel and r.layout.tp > 1,
    **{f"schedule {name}": lambda r, name=name: r.schedule.name == name for name in SHAPES},  # type: ignore[misc]
    "accumulation": lambda r: r.batch.global_size > r.batch.micro_size * (r.layout.dp or 1),
    "other rank order": lambda r: r.layout.order != ORDERS[0],
    "tied": lambda r: r.model.tied,
    "tied over stages": lambda r: r.model.tied and r.layout.pp > 1,
    "kv < tp": lambda r: r.model.kv_heads < r.layout.tp,
    "grouped heads": lambda r: 1 < r.model.kv_heads < r.model.heads,
    "several stages per rank": lambda r: stage_count(r.schedule, 1) > 1,
    "backward apart": lambda r: splits_backward(r.schedule) and r.layout.pp > 1,
    "uneven layers": lambda r: r.model.layers % stage_count(r.schedule, r.layout.pp) > 0,
    "balanced layers": lambda r: r.schedule.layers == "balanced" and r.layout.pp > 1,
    "uneven vocabulary": lambda r: r.model.vocab % r.layout.tp > 0,
    "uneven ffn": lambda r: r.model.ffn % r.layout.tp > 0,
    "dropout": lambda r: r.model.dropout > 0,
    "attention dropout": lambda r: r.model.attention_dropout > 0,
    "learned positions": lambda r: r.model.positions == "learned",
    "layer norm": lambda r: r.model.norm == "layer",
    "gelu": lambda r: r.model.mlp != "swiglu",
    "biases": lambda r: r.model.out_bias,
    "qk norm": lambda r: r.model.qk_norm,
    "window": lambda r: r.model.window is not None,
    "recompute full": lambda r: r.recompute.mode == "full",
    "recompute parts": lambda r: bool(r.recompute.parts),
    "recompute some layers": lambda r: r.recompute.layers != "all",
    "chunked loss": lambda r: r.recompute.loss_chunk > 0,
    "chunked loss of split tokens": lambda r: (
        r.recompute.loss_chunk > 0 and r.layout.sequence_parallel and r.layout.tp > 1
    ),
    "z-loss": lambda r: r.model.z_loss > 0,
    "recompute with dropout": lambda r: r.recompute.mode != "none" and r.model.dropout > 0,
    "masked documents": lambda r: r.data.mask_documents,
    **{f"ZeRO {stage}": lambda r, stage=stage: r.zero.stage == stage for stage in range(4)},  # type: ignore[misc]
    "shards": lambda r: r.zero.stage > 0 and _shards(r) > 1,
    "hybrid shards": lambda r: r.zero.stage > 0 and _shards(r) < (r.layout.dp or 1),
    "sharded gradients": lambda r: r.zero.stage > 1 and _shards(r) > 1,
    "sharded gradients in a pipeline": lambda r: r.zero.stage > 1 and _shards(r) > 1 and r.layout.pp > 1,
    "uneven labels": lambda r: r.data.source == "synthetic",
}


def _shards(run: RunSpec) -> int:
    return run.zero.shard if isinstance(run.zero.shard, int) else run.layout.dp or 1


def draw_run(seed: int, number: int) -> RunSpec:
    """The `number`-th legal run of a seed; every third splits along all axes, since some bugs need them at once.

    The schedules take turns, so that each is drawn as often as the next.
    """
    name = list(SHAPES)[number % len(SHAPES)]
    dice = random.Random(f"plait {seed} {number}")
    while True:
        run = _draw(dice, _schedule(dice, name), every_axis=number % 3 == 0)
        if not violations(run):
            return run


def coverage(runs: list[RunSpec]) -> dict[str, float]:
    """Feature -> share of the runs that have it."""
    return {name: sum(has(run) for run in runs) / len(runs) for name, has in FEATURES.items()}


def _draw(dice: random.Random, schedule: ScheduleSpec, every_axis: bool) -> RunSpec:
    layout = _layout(dice, every_axis)
    micro, micro_batches = dice.choice((1, 1, 2, 3)), dice.choice((1, 2, 3, 4, 5))
    sequence = dice.choice((8, 12, 16)) if layout.sequence_parallel else dice.choice((7, 8, 11, 16))
    model = _model(dice, layout, sequence)
    layers = max(model.layers, stage_count(schedule, layout.pp) + dice.choice((0, 1)))
    run = RunSpec(
        model=model.model_copy(update={"layers": layers}),
        layout=layout,
        schedule=schedule,
        batch=BatchSpec(global_size=(layout.dp or 1) * micro * micro_batches, micro_size=micro, sequence=sequence),
        zero=_zero(dice, layout),
        data=DataSpec(source="synthetic", mask_documents=dice.random() < 0.3),
        train=TrainSpec(seed=dice.randrange(2**31)),
        recompute=_recompute(dice),
    )
    return run.model_copy(update={"model": run.model.model_copy(update={"z_loss": dice.choice((0.0, 0.0, 0.01))})})


def _recompute(dice: random.Random) -> RecomputeSpec:
    mode: Any = dice.choice(("none", "full", "full", "selective", (dice.choice(RECOMPUTED_PARTS),)))
    layers: Any = dice.choice(("all", "all", 1, 2)) if mode != "none" else "all"
    return RecomputeSpec(mode=mode, layers=layers, loss_chunk=dice.choice((0, 0, 0, 3, 5, 8, 100)))


def _layout(dice: random.Random, every_axis: bool) -> LayoutSpec:
    while True:
        tp, pp, dp = dice.choice((1, 2, 2, 3, 4)), dice.choice((1, 2, 2, 3, 4)), dice.choice((1, 2, 2, 3, 4))
        if tp * pp * dp <= MOST_RANKS and (min(tp, pp, dp) > 1 or not every_axis):
            break
    order = dice.choice((ORDERS[0], *ORDERS))
    return LayoutSpec(tp=tp, pp=pp, dp=dp, sequence_parallel=dice.random() < 0.6, order=order)


def _zero(dice: random.Random, layout: LayoutSpec) -> ZeroSpec:
    dp = layout.dp or 1
    shard: Any = dice.choice([n for n in range(1, dp + 1) if dp % n == 0]) if dice.random() < 0.5 else "all"
    return ZeroSpec(stage=dice.choice((0, 1, 2, 3)), shard=shard, keep=dice.random() < 0.3)


def _schedule(dice: random.Random, name: str) -> ScheduleSpec:
    chunks = dice.choice((None, 3)) if SHAPES[name].chosen else None
    return ScheduleSpec(name=name, chunks=chunks, layers=dice.choice(("even", "even", "balanced")))


def _model(dice: random.Random, layout: LayoutSpec, sequence: int) -> ModelSpec:
    def chance(share: float) -> bool:
        return dice.random() < share

    kv_heads = dice.choice((1, 1, 2, 3, 4) if layout.tp != 3 else (1, 1, 3))
    positions: Any = dice.choice(("rotary", "rotary", "learned"))
    return ModelSpec(
        vocab=dice.choice((29, 32, 61)),
        hidden=dice.choice((12, 20, 24)),
        layers=max(layout.pp, dice.choice((2, 3, 4, 5))),
        heads=kv_heads * dice.choice((1, 2, 4) if layout.tp != 3 else (1, 3, 6)),
        kv_heads=kv_heads,
        head_dim=dice.choice((2, 4, 6)),
        ffn=dice.choice((16, 21, 30)),
        max_sequence=sequence + dice.choice((0, 3)),
        norm=dice.choice(("rms", "layer")),
        positions=positions,
        mlp=dice.choice(("swiglu", "gelu", "gelu_tanh")),
        qk_norm=chance(0.3),
        qkv_bias=chance(0.5),
        out_bias=chance(0.5),
        mlp_bias=chance(0.5),
        window=dice.choice((None, None, 3, 6)),
        tied=chance(0.5),
        dropout=dice.choice((0.0, 0.1)),
        attention_dropout=dice.choice((0.0, 0.0, 0.2)),
    )


def one_line(run: RunSpec) -> str:
    """One line that names a drawn run."""
    layout, model = fit(run), run.model
    return (
        f"tp {layout.tp} pp {layout.pp} dp {layout.dp} {run.schedule.name} zero {run.zero.stage} layers {model.layers} "
        f"heads {model.heads}/{model.kv_heads} vocab {model.vocab}"
    )
