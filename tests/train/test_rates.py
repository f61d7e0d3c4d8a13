"""The learning rate of update n is a pure function of the run, whatever the layout."""

from __future__ import annotations

import pytest

from plait.parallel.launch import World, launch
from plait.spec.model import ModelSpec
from plait.spec.run import BatchSpec, DataSpec, LayoutSpec, OptimSpec, RunSpec, TrainSpec
from plait.train.loop import prepare, train_steps
from plait.train.rates import rate

COSINE = OptimSpec(lr=1e-3, warmup=10, schedule="cosine", final=0.0)
KNOWN = {5: 5e-4, 10: 1e-3, 55: 5e-4, 100: 0.0}


@pytest.mark.parametrize(("update", "lr"), KNOWN.items())
def test_a_cosine_rises_over_its_warm_up_and_ends_at_zero(update: int, lr: float) -> None:
    assert rate(update, COSINE, 100) == pytest.approx(lr, abs=1e-12)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("dp", "micro_batches"), [(1, 4), (2, 2), (4, 1)])
def test_neither_ranks_nor_micro_batches_advance_the_rate(dp: int, micro_batches: int) -> None:
    run = RunSpec(
        model=ModelSpec(vocab=8, hidden=4, layers=1, heads=1, kv_heads=1, head_dim=4, ffn=4, max_sequence=4),
        layout=LayoutSpec(dp=dp),
        batch=BatchSpec(global_size=8, micro_size=8 // (dp * micro_batches), sequence=4),
        data=DataSpec(source="synthetic", validation=0.0),
        optim=COSINE,
        train=TrainSpec(steps=100),
    )

    def rates(world: World) -> list[tuple[int, float | None]]:
        return [(m.updates, m.lr) for m in train_steps(prepare(run, world))]

    used = launch(dp, rates, threads=1, timeout_s=60)[0]
    assert used == [(n, rate(n, COSINE, 100)) for n in range(1, 101)]
    assert {n: dict(used)[n] for n in KNOWN} == pytest.approx(KNOWN, abs=1e-12)


def test_a_rate_that_falls_at_the_end_stands_until_then() -> None:
    optim = OptimSpec(lr=1.0, warmup=2, schedule="wsd", decay=4, final=0.0)
    assert [rate(n, optim, 10) for n in range(1, 11)] == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0.0])


def test_a_line_falls_to_its_final_share_and_a_constant_does_not_fall() -> None:
    line = OptimSpec(lr=2.0, schedule="linear", final=0.5)
    assert [rate(n, line, 4) for n in range(1, 5)] == pytest.approx([1.75, 1.5, 1.25, 1.0])
    flat = OptimSpec(lr=2.0, schedule="constant", warmup=4)
    assert [rate(n, flat, 6) for n in range(1, 7)] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_the_last_update_stands_at_the_final_share_whatever_the_schedule(schedule: str) -> None:
    optim = OptimSpec(lr=3.0, schedule=schedule, warmup=3, decay=5, final=0.1)
    assert rate(20, optim, 20) == pytest.approx(0.3)
    assert rate(3, optim, 20) == 3.0
