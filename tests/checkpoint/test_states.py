"""Every state comes back where it was: rows by rows under another split, bits under bf16, rates and samples in time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from plait.checkpoint.manifest import WEIGHT, read_manifest
from plait.checkpoint.save import Saver
from plait.checkpoint.shelf import folder_of
from plait.checkpoint.source import Source
from plait.parallel.launch import World, launch
from plait.placement.cuts import Rectangle, area
from plait.spec.fit import fit
from plait.spec.run import CheckpointSpec, DataSpec, OptimSpec, PrecisionSpec, RunSpec, TrainSpec
from plait.train.keep import keeping
from plait.train.loop import prepare, train_steps
from plait.train.rates import rate
from plait.train.states import facts_of, states_of, take_up
from plait.train.step import Step
from tests.fixtures import M0, T0, T0_RATIO_4, run_of
from tests.launching import on_ranks
from tests.ranks import Rank

# State -> what distinguishes its elements; a block's tensor -> where its rows begin. All are whole in float32.
STATES = {WEIGHT: 0.0, "exp_avg": 0.25, "exp_avg_sq": 0.5}
FIRST = {"attention.q": 1000, "attention.k": 2000, "attention.v": 3000, "mlp.gate": 4000, "mlp.up": 5000}
SPLITS: list[dict[str, Any]] = [
    {"tp": 2}, {}, {"tp": 4}, {"dp": 2, "zero": 3}, {"tp": 2, "dp": 2, "zero": 3}, {"tp": 2},
]  # fmt: skip


def marked(name: str, rectangle: Rectangle, state: str) -> Tensor:
    """Rows numbered through from where the tensor's begin: the same in every column."""
    first = next((first for part, first in FIRST.items() if part in name), 0)
    rows = torch.arange(*rectangle[0]) + first + STATES[state]
    return rows.view(-1, *(1 for _ in rectangle[1:])).expand([b - a for a, b in rectangle]).float()


def at_its_place(step: Step, act: Callable[[Tensor, Tensor], Any]) -> list[Any]:
    """`act(what is held, what belongs there)` for every rectangle of every state that this rank updates."""
    found = []
    for state, parts in states_of(step).items():
        for piece, part in parts:
            at = 0
            for rectangle in piece.rectangles(step.mesh.rank):
                held = part.detach()[at : at + area(rectangle)]
                found.append(act(held, marked(piece.placement.tensor.name, rectangle, state).reshape(-1)))
                at += area(rectangle)
    return found


def save(step: Step, shelf: Path, number: int) -> None:
    saver = Saver(shelf, step.mesh.group_beside("world"), keep=10)
    saver.start(states_of(step), facts_of(step, number, None, "none"))
    saver.wait()


def take(step: Step, shelf: Path, number: int) -> None:
    with Source(read_manifest(folder_of(shelf, number))) as source:
        take_up(step, source)
    step.states.publish()


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "model",
    [T0_RATIO_4, T0.model_copy(update={"qkv_bias": True, "mlp_bias": True, "norm": "layer"})],
    ids=["T0q", "biases"],
)
def test_b56_rows_of_q_k_v_gate_and_up_and_their_moments_are_where_they_were_in_every_split(
    model: Any, tmp_path: Path
) -> None:
    for number, layout in enumerate(SPLITS):
        run = run_of(model, **layout)

        def pass_on(rank: int, world: int, run: RunSpec = run, number: int = number) -> list[bool]:
            step = Rank.of(run, randomise=False).step
            if number == 0:
                mine = Rank.of(run, randomise=False)
                step = mine.step
                step.update(mine.backward())  # makes the moments
                at_its_place(step, lambda held, belongs: held.copy_(belongs))
            else:
                take(step, tmp_path, number - 1)
            save(step, tmp_path, number)
            assert set(states_of(step)) == set(STATES)
            return at_its_place(step, torch.equal)

        found = on_ranks(fit(run).world, pass_on)
        assert all(len(right) > 3 and all(right) for right in found), (layout, found)


def test_b60_float32_masters_and_moments_of_a_bf16_run_keep_every_bit(tmp_path: Path) -> None:
    run = run_of(T0, tp=2, zero=1).model_copy(update={"precision": PrecisionSpec(compute="bfloat16")})

    def twice(rank: int, world: int) -> list[bool]:
        mine = Rank.of(run)
        for number in (1, 2):
            mine.step.update(mine.backward(number))
        save(mine.step, tmp_path, 2)
        again = Rank.of(run).step
        take(again, tmp_path, 2)
        save(again, tmp_path, 3)
        return [bool((part == part.bfloat16()).all()) for parts in states_of(again).values() for _, part in parts]

    rounded = on_ranks(2, twice)
    assert not any(rounded[0]) and len(rounded[0]) > 3, "values that bf16 cannot hold"
    files = [
        {path.name.partition("-")[2]: path.read_bytes() for path in folder_of(tmp_path, number).glob("*.safetensors")}
        for number in (2, 3)
    ]
    assert files[0] == files[1] and len(files[0]) == 2


def a_run(folder: Path, every: int, **layout: Any) -> RunSpec:
    run = run_of(T0.model_copy(update={"layers": 1}), **layout)
    return run.model_copy(
        update={
            "train": TrainSpec(steps=100, run_dir=str(folder), resume="auto", eval_batches=0),
            "checkpoint": CheckpointSpec(every=every, keep=10),
        }
    )


def run_until(world: World, run: RunSpec, until: int, see: Callable[[Step, Any], Any]) -> list[Any]:
    """What `see(step, metrics)` finds after each step that the run has to make up to `until`, where it is left."""
    found: list[Any] = []
    training = prepare(run, world)
    with keeping(run, training.mesh, Path(str(run.train.run_dir)), training.data.fingerprint) as training.keeper:
        assert training.keeper is not None
        for metrics in train_steps(training):
            found.append(see(training.step, metrics))
            if metrics.step == until:
                training.keeper.saver.wait()
                break
    return found


def test_b64_the_first_update_after_a_resume_uses_the_rate_and_the_decay_of_its_number(tmp_path: Path) -> None:
    optim = OptimSpec(lr=1e-3, warmup=10, schedule="cosine", final=0.0, weight_decay=0.1)
    run = a_run(tmp_path, every=5).model_copy(update={"optim": optim})

    def see(step: Step, metrics: Any) -> tuple[int, float, list[float]]:
        decays = sorted({group["weight_decay"] for group in step.optimizer.param_groups})
        return metrics.updates, metrics.lr, decays

    used = [launch(1, run_until, run, until, see, threads=1, timeout_s=60)[0] for until in (6, 51, 52)]
    assert [found[0][0] for found in used] == [1, 6, 51]
    for number, lr, decays in (row for found in used for row in found):
        assert (lr, decays) == (rate(number, optim, 100), [0.0, 0.1])
    assert used[2][0][1] == pytest.approx(0.000569587, abs=5e-10) and used[1][0][1] == pytest.approx(6e-4)


def test_b62_every_rank_reads_on_in_the_data_after_a_first_and_a_second_resume_across_epochs(tmp_path: Path) -> None:
    """42 samples, 4 a step on 2 ranks, 25 steps: two epochs end, one within a step. Left after step 7 and after step
    13, saved every third."""
    file = tmp_path / "tokens.bin"
    np.random.default_rng(0).integers(0, 64, 42 * 16 + 1).astype("<u2").tofile(file)
    plain = Step.backward

    def read(name: str, until: int) -> list[list[Any]]:
        run = a_run(tmp_path / name, every=3, dp=2, rows=4)
        data = DataSpec(source="tokens", files=(str(file),), validation=0.0)

        def job(world: World) -> list[Any]:
            given: list[Any] = []
            Step.backward = lambda s, n, batch: given.append(batch.tokens.tolist()) or plain(s, n, batch)  # type: ignore
            run_until(world, run.model_copy(update={"data": data}), until, lambda step, metrics: None)
            return given

        return launch(2, job, threads=1, timeout_s=60)

    whole = read("whole", 25)
    seen = [str(row) for steps in zip(*whole, strict=True) for rows in steps for row in rows]
    assert len(seen) == 100 and len(set(seen[:42])) == 42
    assert set(seen[:42]) == set(seen[42:84]) and seen[:42] != seen[42:84]
    for until, first in ((7, 1), (13, 7), (25, 13)):
        assert read("parts", until) == [steps[first - 1 : until] for steps in whole]


# Written at the first, taken up at the second: B57's changes of layout, dense and with experts.
CHANGES: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (T0, {"tp": 2, "dp": 2, "zero": 1}, {"pp": 2, "dp": 2, "zero": 2}),
    (T0, {"tp": 2, "dp": 2, "zero": 1}, {"tp": 4}),
    (T0, {"tp": 2, "dp": 2, "zero": 1}, {}),
    (M0, {"dp": 2, "ep": 2}, {"dp": 2}),
    (M0, {"dp": 2}, {"dp": 4, "ep": 4}),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("model", "first", "other"), CHANGES)
def test_b57_five_steps_of_moments_survive_a_change_of_layout_and_five_more_are_those_of_the_unbroken_run(
    model: Any, first: dict[str, Any], other: dict[str, Any], tmp_path: Path
) -> None:
    from tests.checkpoint.test_layouts import float64, passes

    runs = [run_of(model, **layout) for layout in (first, other)]
    passes(*(run.model_copy(update={"precision": float64(run)}) for run in runs), tmp_path, (5, 5))
