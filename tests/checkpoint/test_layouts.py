"""Saved at one layout and loaded at another: every bit of the states, and the losses of an unbroken run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.checkpoint.manifest import read_manifest
from plait.checkpoint.save import Saver
from plait.checkpoint.shelf import folder_of
from plait.checkpoint.source import Source
from plait.data import Samples, Synthetic, batch, rows_of
from plait.parallel.weights import gather_buffers, gather_whole, pieces_held
from plait.proof.draw import draw_run
from plait.spec.experts import Experts
from plait.spec.fit import fit, violations
from plait.spec.model import ModelSpec
from plait.spec.run import OptimSpec, RunSpec, TrainSpec
from plait.train.states import facts_of, states_of, take_up
from tests.launching import on_ranks
from tests.ranks import Rank

STEPS, MORE = 2, 3


def drawn(number: int) -> tuple[RunSpec, RunSpec]:
    """Two runs of one model, batch and optimizer that differ in layout, schedule and ZeRO stage."""
    tries = (draw_run(7, 1000 * number + at) for at in range(1000))
    models = (run.model_copy(update={"model": with_experts(run) if number % 2 else run.model}) for run in tries)
    first, other, at = next(run for run in models if not violations(run)), None, 0
    optim = (OptimSpec(lr=1e-3, schedule="constant", clip=0.5), OptimSpec(name="sgd", momentum=0.9, lr=1e-2, clip=0.0))
    train = TrainSpec(seed=number, steps=STEPS + MORE)
    shared = {"optim": optim[number % 3 == 0], "train": train, "precision": float64(first)}
    first = first.model_copy(update=shared)
    while other is None:
        at += 1
        layout = draw_run(11 + number, at)
        changed = {"layout": layout.layout, "schedule": layout.schedule, "zero": layout.zero}
        dice = random.Random(f"{number} {at}")
        sizes = [n for n in (1, 2, 3, 4, 6) if first.batch.global_size % ((layout.layout.dp or 1) * n) == 0]
        if not sizes:
            continue
        changed["batch"] = first.batch.model_copy(update={"micro_size": dice.choice(sizes)})
        found = first.model_copy(update=changed)
        other = None if violations(found) else found
    return first, other


def with_experts(run: RunSpec) -> ModelSpec:
    """The run's model with a router that keeps a bias and a load, if it has no experts."""
    moe = run.model.moe or Experts(count=8, top_k=2, ffn=12, shared=1, first_dense=0)
    kept = {"bias": True, "bias_rate": 0.01, "balance": "previous", "balance_coef": 0.01}
    return run.model.model_copy(update={"moe": moe.model_copy(update=kept), "mlp_bias": False})


def float64(run: RunSpec) -> Any:
    wide = {"compute": "float64", "grad_accumulate": "float64", "grad_reduce": "float64"}
    return run.precision.model_copy(update=wide)


def trained(mine: Rank, numbers: range) -> list[float]:
    run = mine.run
    samples = Samples(Synthetic(run.model.vocab, run.batch.sequence, run.train.seed), run.train.seed, shuffle=False)
    rows = rows_of(run.batch.global_size, mine.mesh.at.dp, mine.mesh.layout.dp)
    losses = []
    for number in numbers:
        sums = mine.step.backward(number, batch(samples, number - 1, run.batch.global_size, rows))
        mine.step.update(sums)
        losses.append(sums.loss)
    return losses


def whole(mine: Rank) -> dict[str, dict[str, Tensor]]:
    """Every state, gathered on rank 0."""
    owned = pieces_held(mine.parallel.placements, mine.run.zero.stage > 0)
    found = {
        state: gather_whole([p for p in parts if p[0].placement.tensor.kind == "weight"], owned, mine.mesh)
        for state, parts in states_of(mine.step).items()
    }
    return found | {"buffers": gather_buffers(mine.parallel.buffers, mine.parallel.placements, mine.mesh)}


def save(mine: Rank, shelf: Path, number: int) -> None:
    saver = Saver(shelf, mine.mesh.group("world", "checkpoint"), keep=2)
    saver.start(states_of(mine.step), facts_of(mine.step, number, None, "synthetic"))
    saver.wait()


def passes(first: RunSpec, other: RunSpec, shelf: Path, steps: tuple[int, int] = (STEPS, MORE)) -> None:
    before, after = range(1, steps[0] + 1), range(steps[0] + 1, sum(steps) + 1)

    def write(rank: int, world: int) -> tuple[Any, list[float]]:
        mine = Rank.of(first)
        trained(mine, before)
        save(mine, shelf, steps[0])
        return whole(mine), trained(mine, after)

    def read(rank: int, world: int) -> tuple[Any, list[float]]:
        mine = Rank.of(other, randomise=False)
        with Source(read_manifest(folder_of(shelf, steps[0]))) as source:
            take_up(mine.step, source)
        mine.step.states.publish()
        return whole(mine), trained(mine, after)

    states, unbroken = on_ranks(fit(first).world, write)[0]
    found, losses = on_ranks(fit(other).world, read)[0]
    assert found.keys() == states.keys() and len(states) == (4 if first.optim.name == "adamw" else 3)
    for state, tensors in states.items():
        assert found[state].keys() == tensors.keys()
        assert all(torch.equal(found[state][name], value) for name, value in tensors.items()), state
    assert losses == [pytest.approx(loss, rel=1e-10) for loss in unbroken]


@pytest.mark.parametrize("number", (1,))
def test_states_survive_a_change_of_layout_bitwise_and_losses_go_on(number: int, tmp_path: Path) -> None:
    passes(*drawn(number), tmp_path)


@pytest.mark.proof
@pytest.mark.timeout(3000)
def test_two_hundred_pairs_of_layouts(tmp_path: Path) -> None:
    for number in range(4, 204):
        passes(*drawn(number), tmp_path / str(number))
