"""Random legal runs for `plait verify --random`: model shape × layout × schedule × dropout × masks, at tiny sizes.

A draw is a pure function of (seed, number). Whatever a later axis brings joins as one more choice here and one more
row of `FEATURES`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from plait.spec.experts import Experts
from plait.spec.fit import fit, violations
from plait.spec.latent import Latent
from plait.spec.model import ModelSpec
from plait.spec.nearest import divisors
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
    "cp > 1": lambda r: r.layout.cp > 1,
    "three axes > 1": lambda r: sum(n > 1 for n in (r.layout.tp, r.layout.pp, r.layout.dp or 1, r.layout.cp)) > 2,
    "sequence parallel": lambda r: r.layout.sequence_parallel and r.layout.tp > 1,
    **{f"schedule {name}": lambda r, name=name: r.schedule.name == name for name in SHAPES},  # type: ignore[misc]
    "accumulation": lambda r: r.batch.global_size > r.batch.micro_size * (r.layout.dp or 1),
    "other rank order": lambda r: r.layout.order != ORDERS[0],
    "tied": lambda r: r.model.tied,
    "tied over stages": lambda r: r.model.tied and r.layout.pp > 1,
    "kv < tp": lambda r: r.model.kv_heads < r.layout.tp,
    "grouped heads": lambda r: 1 < r.model.kv_heads < r.model.heads,
    "several stages per rank": lambda r: stage_count(r.schedule, 1) > 1,
    "backward apart": lambda r: splits_backward(r.schedule),
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
    "hybrid shards": lambda r: r.zero.stage > 0 and _shards(r) < _domain(r.layout),
    "sharded gradients": lambda r: r.zero.stage > 1 and _shards(r) > 1,
    "sharded gradients in a pipeline": lambda r: r.zero.stage > 1 and _shards(r) > 1 and r.layout.pp > 1,
    "ring": lambda r: _ring(r) > 1 and r.layout.context == "ring",
    "gather": lambda r: _ring(r) > 1 and r.layout.context == "gather",
    "ulysses": lambda r: r.layout.ulysses > 1,
    "contiguous order": lambda r: _ring(r) > 1 and r.layout.context_order == "contiguous",
    "masked documents over cp": lambda r: r.data.mask_documents and r.layout.cp > 1,
    "latent attention": lambda r: r.model.latent is not None,
    "experts": lambda r: r.model.moe is not None,
    "ep > 1": lambda r: r.model.moe is not None and r.layout.ep > 1,
    "etp > 1": lambda r: r.model.moe is not None and r.layout.etp > 1,
    "experts over cp": lambda r: r.model.moe is not None and r.layout.cp > 1,
    "spread experts": lambda r: r.model.moe is not None and max(r.layout.ep, r.layout.tp, r.layout.cp) > 1,
    "shared experts": lambda r: r.model.moe is not None and r.model.moe.shared > 0,
    "balance loss": lambda r: r.model.moe is not None and r.model.moe.balance_coef > 0,
    "spread sequences": lambda r: r.layout.cp * r.layout.tp > 1 and _balances_sequences(r),
    "router bias": lambda r: r.model.moe is not None and r.model.moe.bias_rate > 0,
    "capacity": lambda r: r.model.moe is not None and r.model.moe.capacity is not None,
    "uneven labels": lambda r: r.data.source == "synthetic",
}


def _shards(run: RunSpec) -> int:
    return run.zero.shard if isinstance(run.zero.shard, int) else _domain(run.layout)


def _domain(layout: LayoutSpec) -> int:
    """Ranks whose tokens meet the same weights."""
    return (layout.dp or 1) * layout.cp


def _ring(run: RunSpec) -> int:
    return run.layout.cp // run.layout.ulysses


def _balances_sequences(run: RunSpec) -> bool:
    moe = run.model.moe
    return moe is not None and moe.balance_coef > 0 and moe.balance == "sequence"


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
    sequence = _sequence(dice, layout)
    model = _model(dice, layout, sequence)
    model = model.model_copy(update=_variants(dice, model, layout))
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
    """Degrees of at most MOST_RANKS; `every_axis`: all but one of the four are 2, which is as many as there can be."""
    left_out = dice.choice(("cp", "cp", "cp", "tp", "pp", "dp"))
    while True:
        tp, pp, dp, cp = (dice.choice((1, 2, 2, 3, 4)) for _ in range(4))
        if every_axis:
            tp, pp, dp, cp = (1 if axis == left_out else 2 for axis in ("tp", "pp", "dp", "cp"))
        if tp * pp * dp * cp <= MOST_RANKS and cp != 3:
            break
    etp = dice.choice((1, tp))
    return LayoutSpec(
        tp=tp, pp=pp, dp=dp, cp=cp, etp=etp, ep=dice.choice(divisors(tp * dp * cp // etp)),
        ulysses=dice.choice(divisors(cp)), context=dice.choice(("ring", "gather")),
        context_order=dice.choice(("zigzag", "contiguous", "contiguous")),
        sequence_parallel=dice.random() < 0.6, order=dice.choice((ORDERS[0], *ORDERS)),
    )  # fmt: skip


def _sequence(dice: random.Random, layout: LayoutSpec) -> int:
    """A length that divides as the layout needs it, odd where it may be."""
    unit = (2 * layout.cp if layout.cp > 1 else 1) * (layout.tp if layout.sequence_parallel else 1)
    return dice.choice([n for n in (7, 8, 11, 12, 16, 24, 32) if n % unit == 0] or [unit])


def _zero(dice: random.Random, layout: LayoutSpec) -> ZeroSpec:
    shard: Any = dice.choice(divisors(_domain(layout))) if dice.random() < 0.5 else "all"
    return ZeroSpec(stage=dice.choice((0, 1, 2, 3)), shard=shard, keep=dice.random() < 0.3)


def _schedule(dice: random.Random, name: str) -> ScheduleSpec:
    chunks = dice.choice((None, 3)) if SHAPES[name].chosen else None
    return ScheduleSpec(name=name, chunks=chunks, layers=dice.choice(("even", "even", "balanced")))


def _model(dice: random.Random, layout: LayoutSpec, sequence: int) -> ModelSpec:
    def chance(share: float) -> bool:
        return dice.random() < share

    kv_heads = dice.choice((1, 1, 2, 3, 4) if layout.tp != 3 else (1, 1, 3))
    positions: Any = dice.choice(("rotary", "rotary", "learned"))
    head_dim = dice.choice((2, 4, 6))
    return ModelSpec(
        vocab=dice.choice((29, 32, 61)),
        hidden=dice.choice((12, 20, 24)),
        layers=max(layout.pp, dice.choice((2, 3, 4, 5))),
        heads=kv_heads * dice.choice((1, 2, 4) if layout.tp != 3 else (1, 3, 6)),
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=dice.choice((16, 21, 30)),
        max_sequence=sequence + dice.choice((0, 3)),
        norm=dice.choice(("rms", "layer")),
        positions=positions,
        mlp=dice.choice(("swiglu", "gelu", "gelu_tanh", "relu2")),
        # A norm over two numbers makes much of roundings: one in each product moves weights by 1e-10 in three steps.
        qk_norm=chance(0.4) and head_dim > 2,
        qkv_bias=chance(0.5),
        out_bias=chance(0.5),
        mlp_bias=chance(0.5),
        window=dice.choice((None, None, 3, 6)),
        tied=chance(0.5),
        dropout=dice.choice((0.0, 0.1)),
        attention_dropout=dice.choice((0.0, 0.0, 0.2)),
    )


def _variants(dice: random.Random, model: ModelSpec, layout: LayoutSpec) -> dict[str, Any]:
    """Experts in place of the MLP, latents in attention: what a model has instead of something else."""
    changes: dict[str, Any] = {}
    if dice.random() < 0.25:
        latent = Latent(q_rank=dice.choice((None, 7)), kv_rank=5, kept=dice.choice((3, 4)), rotated=2, value=4)
        changes |= {"latent": latent, "head_dim": latent.kept + latent.rotated, "kv_heads": model.heads}
        changes |= {"positions": "rotary", "qk_norm": False, "qkv_bias": False}
    if dice.random() < 0.6:
        changes |= {"moe": _experts(dice, layout), "mlp_bias": False}
    return changes


def _experts(dice: random.Random, layout: LayoutSpec) -> Experts:
    bias = dice.random() < 0.5
    groups = dice.choice((1, 2))
    return Experts(
        count=layout.ep * dice.choice((2, 4)) if layout.ep % 3 == 0 or layout.ep == 1 else max(4, layout.ep),
        top_k=dice.choice((1, 2)),
        ffn=dice.choice((8, 11)),
        shared=dice.choice((0, 1, 2)),
        first_dense=dice.choice((0, 0, 1)),
        scores=dice.choice(("softmax", "sigmoid")),
        normalise=dice.random() < 0.7,
        scale=dice.choice((1.0, 2.5)),
        groups=groups, top_groups=dice.choice((1, groups)), group_score="max",
        bias=bias, bias_rate=0.05 if bias else 0.0,
        balance=dice.choice(("sequence", "sequence", "previous")),
        balance_coef=dice.choice((0.0, 0.1, 0.1)), z_coef=dice.choice((0.0, 0.01)),
        capacity=dice.choice((None, None, 0.8)),
    )  # fmt: skip


def one_line(run: RunSpec) -> str:
    """One line that names a drawn run."""
    layout, model = fit(run), run.model
    axes = " ".join(f"{axis} {getattr(layout, axis)}" for axis in ("tp", "pp", "dp", "cp", "ep"))
    return (
        f"{axes} {run.schedule.name} zero {run.zero.stage} layers {model.layers} heads {model.heads}/{model.kv_heads} "
        f"vocab {model.vocab}"
    )
