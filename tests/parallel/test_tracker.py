"""Bytes are counted from birth to death, once a storage; and what is counted is what was predicted."""

from __future__ import annotations

import time
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from plait.models.decoder import Decoder
from plait.models.dropout import step_key
from plait.models.init import initialise
from plait.models.layers import Linear
from plait.models.where import Where
from plait.parallel.late import Late, LateLinear
from plait.parallel.recompute import recompute
from plait.parallel.stage import DecoderStage, Tensors
from plait.parallel.tracker import StepBytes, Tracker, storage_bytes
from plait.planner.seat import Seat
from plait.planner.sized.kept import kept
from plait.report.memory import peak_activations
from plait.schedule import live
from plait.schedule.of_run import schedules
from plait.spec.fit import fit
from plait.spec.layout import Layout
from plait.spec.model import ModelSpec
from plait.spec.pipeline import SHAPES
from plait.spec.run import BatchSpec, DataSpec, PrecisionSpec, RecomputeSpec, RunSpec, ScheduleSpec
from plait.train.memory import Watch
from tests.fixtures import T0_GROUPED, run_of
from tests.launching import on_ranks
from tests.ranks import Rank

SPLIT = tuple(name for name, shape in SHAPES.items() if shape.split)
ROWS, SEQUENCE = 2, 64
BASE: dict[str, Any] = {
    "vocab": 300, "hidden": 64, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 192, "max_sequence": 64,
}  # fmt: skip
UNIT = ROWS * SEQUENCE * 64 * 4  # bytes of one activation between blocks


def test_a_storage_counts_once_from_its_birth_to_its_death() -> None:
    before = torch.ones(100)
    with Tracker() as tracker:
        a = before * 2  # 400 bytes
        b = a.view(10, 10).t()  # the same
        a = a + 1  # 800, and the first still has its view
        del a, b
        before.mul_(2)  # in place: nothing
        before.view(10, 10)
        c = torch.zeros(50)  # 200
    assert (tracker.report().peak, tracker.report([c]).peak) == (800, 800)
    with Tracker() as tracker:
        c = torch.zeros(50)
    assert (tracker.report().peak, tracker.report([c]).peak) == (200, 0)
    assert storage_bytes([before, before.view(10, 10), c]) == 600


def test_memory_that_comes_and_goes_under_a_tensor_is_a_buffer() -> None:
    weights = torch.ones(100)
    weights.untyped_storage().resize_(0)
    with Tracker([weights]) as tracker:
        weights.untyped_storage().resize_(400)
        weights.zero_()
        weights.untyped_storage().resize_(0)
        torch.ones(1)
    assert tracker.report().buffers == 400


def spec_of(**changes: Any) -> ModelSpec:
    return ModelSpec(**{**BASE, **changes})


def run_with(model: ModelSpec, compute: Any = "float32", documents: bool = False, **recomputed: Any) -> RunSpec:
    return RunSpec(
        model=model,
        batch=BatchSpec(global_size=ROWS, micro_size=ROWS, sequence=SEQUENCE),
        precision=PrecisionSpec(compute=compute),
        recompute=RecomputeSpec(**recomputed),
        data=DataSpec(source="synthetic", mask_documents=documents),
    )


def measured(run: RunSpec) -> StepBytes:
    """Forward and backward of the whole model, of a second micro-batch: the gradients of a first one are there."""
    model = Decoder(run.model, "cpu", getattr(torch, run.precision.compute))
    initialise(model, seed=1, randomise=True)
    recompute(model, run.recompute)
    model.train()
    tokens = torch.arange(ROWS * SEQUENCE).view(ROWS, SEQUENCE) % run.model.vocab
    where = Where.of(torch.arange(ROWS), SEQUENCE, step_key(1, 1))
    if run.data.mask_documents:
        where = where._replace(documents=torch.zeros_like(tokens), positions=where.positions.expand(ROWS, SEQUENCE))

    def micro_batch() -> None:
        terms = model(tokens, where, tokens)[1]
        sum(value for value in terms.values() if value.requires_grad).backward()

    micro_batch()
    with Tracker() as tracker, tracker.watch([model]):
        micro_batch()
    return tracker.report()


# --- what the means save ----------------------------------------------------------------------------------------------


def test_w25_full_recompute_keeps_the_inputs_of_blocks_and_adds_one_block_s_working_set() -> None:
    full = measured(run_with(spec_of(layers=8), mode="full"))
    assert all(block.kept == UNIT for block in full.blocks.values())
    working = measured(run_with(spec_of(layers=1))).blocks[0].peak  # its input, what it keeps, and backward's own
    assert full.peak <= 8 * UNIT + 1.1 * working
    plain = measured(run_with(spec_of(layers=8)))
    assert full.between < 0.15 * plain.between


def test_selective_recompute_keeps_at_least_30_percent_less() -> None:
    plain, selective = (measured(run_with(spec_of(), mode=mode)) for mode in ("none", "selective"))
    assert selective.between <= 0.7 * plain.between
    assert all(selective.blocks[layer].kept <= 0.7 * plain.blocks[layer].kept for layer in plain.blocks)


def test_the_peak_of_a_loss_in_chunks_does_not_grow_with_tokens_times_vocabulary() -> None:
    """From 3000 to 12000 words it grows by the table's gradient and the logits of a chunk, and not by 128 rows."""
    few, many = 3000, 12000

    def growth(chunk: int) -> int:
        peaks = [measured(run_with(spec_of(vocab=vocab), loss_chunk=chunk)).peak for vocab in (few, many)]
        return peaks[1] - peaks[0]

    table, row = (many - few) * 64 * 4, (many - few) * 4  # bytes: of a weight's gradient, of a token's logits
    assert growth(8) <= 2 * table + 4 * 8 * row
    assert growth(0) >= 3 * ROWS * SEQUENCE * row


# --- the prediction ---------------------------------------------------------------------------------------------------

HELD, PEAK = 0.002, 0.02  # relative errors
MODELS: dict[str, dict[str, Any]] = {
    "rms": {},
    "layer norm, gelu, learned positions": {"norm": "layer", "mlp": "gelu", "positions": "learned", "mlp_bias": True},
    "qk norm": {"qk_norm": True},
    "relu": {"mlp": "relu"},
    "squared relu": {"mlp": "relu2"},
    "dropout": {"attention_dropout": 0.1, "dropout": 0.1},
    "dropout of all heads": {"attention_dropout": 0.1, "positions": "learned", "kv_heads": 4},
    "window": {"window": 9},
    "vocabulary": {"vocab": 3000, "z_loss": 0.1},
}
HOW: tuple[dict[str, Any], ...] = (
    {}, {"mode": "selective"}, {"mode": "full"}, {"mode": "full", "layers": 2}, {"mode": ("norm",)},
    {"mode": ("attention",)}, {"loss_chunk": 32, "mode": "full"}, {"documents": True},
)  # fmt: skip


@pytest.mark.quick(6)
@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", MODELS)
def test_predicted_activations_are_those_that_are_counted(name: str, compute: str) -> None:
    for how in HOW:
        model = spec_of(**MODELS[name])
        run = run_with(model.model_copy(update={"z_loss": 0.0}) if "loss_chunk" in how else model, compute, **how)
        counted, predicted = measured(run), kept(Seat(run, Layout(), 0), 0, splits=False)
        assert predicted.held == pytest.approx(counted.between, rel=HELD), how
        peak = max(predicted.forward, predicted.held + predicted.whole)
        assert peak == pytest.approx(counted.peak, rel=PEAK), how


@pytest.mark.quick(2)
@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "sequence_parallel": True},
        {"tp": 2, "pp": 2, "micro_batches": 4},
        {"pp": 2, "schedule": "gpipe", "micro_batches": 4},
    ],
    ids=str,
)
def test_ranks_of_a_split_run_hold_what_show_memory_says(layout: dict[str, Any], mode: Any) -> None:
    model = T0_GROUPED.model_copy(update={"hidden": 64, "ffn": 192, "vocab": 300})
    run = run_of(model, **layout).model_copy(update={"recompute": RecomputeSpec(mode=mode)})

    def step(rank: int, world: int) -> StepBytes:
        mine = Rank.of(run)
        watch = Watch(mine.parallel, mine.mesh.device)
        with watch():
            mine.backward()
        assert watch.step is not None
        return watch.step

    sizes = fit(run)
    picture = peak_activations(run, sizes, schedules(run, sizes.dp)[0])
    for rank, counted in enumerate(on_ranks(sizes.world, step)):
        predicted = picture[sizes.coordinates(rank).pp]
        assert 0.98 * predicted.in_flight <= counted.between <= counted.peak
        # At 32 tokens the gradient of a weight, whose moment varies, is a tenth of a peak.
        assert counted.peak == pytest.approx(predicted.peak, rel=0.07)


# --- between B and W --------------------------------------------------------------------------------------------------

WIDER = T0_GROUPED.model_copy(update={"hidden": 64, "ffn": 192, "vocab": 300, "layers": 4})


def second_figure(run: RunSpec) -> list[int]:
    """What the checker says that each pipeline rank holds from B to W at its peak, in bytes."""
    layout = fit(run)
    schedule = schedules(run, layout.dp)[0]
    seats = [Seat(run, layout, layout.rank(pp=pp)) for pp in schedule.owner]
    of = [kept(seat, stage, splits=True) for stage, seat in enumerate(seats)]
    held = live(schedule, [stage.between for stage in of], [stage.late for stage in of])
    return [rank.weight for rank in held]


def recomputed(run: RunSpec, mode: Any) -> RunSpec:
    return run.model_copy(update={"recompute": RecomputeSpec(mode=mode)})


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "how", [{"mode": "full"}, {}, {"mode": "selective"}, {"mode": "full", "loss_chunk": 8}], ids=str
)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}], ids=str)
def test_what_is_there_between_b_and_w_is_the_checkers_second_figure(
    layout: dict[str, Any], compute: Any, how: dict[str, Any], tmp_path: Path
) -> None:
    """All B before all W: then nothing else waits, and the tracker sees every byte, not only those asked for."""
    order = tmp_path / "order.csv"
    order.write_text("F0,B0,F1,B1,F2,B2,F3,B3,W0,W1,W2,W3\n")
    run = run_of(WIDER, micro_batches=4, **layout).model_copy(
        update={
            "schedule": ScheduleSpec(file=str(order)),
            "recompute": RecomputeSpec(**how),
            "precision": PrecisionSpec(compute=compute),
        }
    )

    def step(rank: int, world: int) -> tuple[int, int]:
        mine = Rank.of(run)
        (stage,) = mine.parallel.stages.values()
        found: list[int] = []

        def held() -> int:
            time.sleep(0.02)  # a thread of the transport lets go of its tensors a little later
            return tracker.held(x for tensors in mine.parallel.states.held().values() for x in tensors)

        def weighed(micro: int) -> None:
            found.append(held())
            plain(micro)
            found.append(held())

        plain, stage.backward_weight = stage.backward_weight, weighed  # type: ignore[method-assign]
        with Tracker(mine.parallel.states.come_and_go()) as tracker:
            mine.backward()
        return found[0], found[-1]

    for before, after in on_ranks(fit(run).world, step):
        assert before - after == pytest.approx(second_figure(run)[0], rel=HELD)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_linears_of_every_schedule_leave_for_w_what_the_checker_counts(mode: Any) -> None:
    """Each linear's input and its output's gradient, to the byte, at the peak of every pipeline rank."""
    runs = [recomputed(run_of(WIDER, pp=2, micro_batches=4, schedule=name), mode) for name in SPLIT]

    def step(rank: int, world: int) -> list[int]:
        return [most_left_for_w(run) for run in runs]

    for run, *counted in zip(runs, *on_ranks(2, step), strict=True):
        assert counted == second_figure(run) and min(counted) > 0


def most_left_for_w(run: RunSpec) -> int:
    """Bytes of the products that wait on this rank, at their peak in a step."""
    mine, plain = Rank.of(run), DecoderStage.backward_input
    found = [0]

    def watched(stage: DecoderStage, micro: int, gradients: Tensors) -> Tensors:
        returned = plain(stage, micro, gradients)
        waiting = [p for one in mine.parallel.stages.values() for kept in one._products.values() for p in kept]
        found.append(storage_bytes(x for product in waiting for x in (product.x, product.grad)))
        return returned

    with mock.patch.object(DecoderStage, "backward_input", watched):
        mine.backward()
    return max(found)


def test_what_is_left_for_w_holds_nothing_of_the_graph_that_it_comes_from() -> None:
    """A linear's input knows how it was made, up to what the stage received, and that knows its gradient."""
    late = Late(lambda parameter, gradient: None)
    linear = LateLinear(Linear(4, 4, bias=False, make={"device": "cpu", "dtype": torch.float32}), late)
    received = torch.ones(1, 2, 4, requires_grad=True)
    alive = weakref.ref(received)
    with late.keeping() as products:
        linear(received * 2).sum().backward()
    del received
    assert len(products) == 1 and alive() is None
