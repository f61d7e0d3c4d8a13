"""Memory against published formulas, hand-counted parameters, and what 43 runs on one node really allocated."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from plait.planner.ground import Ground
from plait.planner.job import Job
from plait.planner.memory import LINES, block_bytes, live_stages, memory, states
from plait.planner.published.rows import Published, interpreted
from plait.planner.shape import Split, shape_of
from plait.planner.stack import known_stacks, load_stack
from plait.spec.cluster import load_cluster
from plait.spec.model import ModelSpec
from plait.spec.presets import PRESETS

ROWS = Path(__file__).parent / "data" / "published_runs.csv"
T0 = ModelSpec(
    vocab=64, hidden=32, layers=4, heads=4, kv_heads=4, head_dim=8, ffn=64, max_sequence=16,
)  # fmt: skip
M0 = T0.model_validate({**T0.model_dump(), "moe": {"count": 8, "top_k": 2, "ffn": 64}})
GIB, MIB = 2**30, 2**20


@cache
def node_runs() -> tuple[Published, ...]:
    """The single-node B200 runs with the bytes that were allocated (SimuMax, b200_release_v1.2)."""
    rows, _ = interpreted(ROWS)
    return tuple(row for row in rows if "SimuMax" in row.source)


def parameters(model: ModelSpec, split: Split) -> int:
    """On rank 0, everything in one stage."""
    shape = shape_of(model)
    blocks = sum(sum(shape.kinds[kind].elements(split)) for kind in shape.layers)
    return blocks + shape.embedding_elements(split) + shape.head_elements(split, with_embedding=True)


def ground(model: ModelSpec, stack: str = "megatron", **habits: object) -> Ground:
    return Ground.of(model, load_stack(stack).model_copy(update=habits), load_cluster("h100-dgx"))


@pytest.mark.parametrize(("split", "count"), [(Split(tp=2, kv=2, ep=4), 60_704), (Split(tp=4, kv=4, ep=1), 203_040)])
def test_experts_are_divided_by_their_own_axes_and_norms_and_routers_by_none(split: Split, count: int) -> None:
    assert parameters(M0, split) == count
    assert parameters(M0, Split()) == M0.parameter_count() == 218_400


def test_norms_are_not_divided_by_tp_and_there_are_two_per_block_and_one_more() -> None:
    assert parameters(T0, Split(tp=2, kv=2)) == 22_816
    norms = sum(t.size for t in T0.parameters() if t.role == "norm")
    assert norms == (2 * T0.layers + 1) * T0.hidden


def test_weights_alone_are_four_or_two_bytes_a_parameter() -> None:
    elements = (70_000_000_000, 0)
    assert states(Job(compute="float32"), load_stack("plait"), elements)[0] == 280e9
    assert states(Job(compute="float16"), load_stack("plait"), elements)[0] == 140e9


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_zero_divides_what_its_stage_divides(stage: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5e9 parameters, 16 bytes each, 64 ranks, 16-bit gradients."""
    stack = load_stack("plait").model_copy(update={"grad_bytes": 2})
    job = Job(dp=64, zero=stage, compute="float16")
    assert sum(states(job, stack, (7_500_000_000, 0))) / 1e9 == pytest.approx(gigabytes, abs=0.05)


BLOCK = ModelSpec.model_validate(
    {
        **{"vocab": 128256, "hidden": 4096, "layers": 1, "heads": 32, "ffn": 16384, "max_sequence": 4096},
        **{"mlp": "gelu", "norm": "layer", "dropout": 0.1, "attention_dropout": 0.1},
    }
)


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "mode", "gib"),
    [(1, False, "none", 3.031), (8, False, "none", 0.516), (8, True, "none", 0.379), (8, True, "selective", 0.066)],
)
def test_a_block_keeps_what_korthikanti_et_al_count(tp: int, sequence_parallel: bool, mode: str, gib: float) -> None:
    """arXiv 2205.05198, table 2: s·b·h·(34 + 5as/h), its parts over tp, and without the scores."""
    of = ground(BLOCK, attention="unfused")
    job = Job(tp=tp, sequence=4096, sequence_parallel=sequence_parallel)
    dropped = () if mode == "none" else ("attention",)
    assert block_bytes(of, of.shape.kinds[0], job, dropped) / GIB == pytest.approx(gib, abs=0.001)


def test_full_recompute_keeps_a_blocks_input_and_works_on_one_block() -> None:
    of = ground(BLOCK, attention="unfused")
    stage = memory(of, Job(sequence=4096, recompute="full")).stages[0]
    assert stage.activations / GIB == pytest.approx(0.031, abs=0.001)
    assert (stage.activations + stage.recomputed) / GIB == pytest.approx(3.031, abs=0.001)


def test_activations_grow_with_the_batch_in_proportion() -> None:
    of = ground(BLOCK)
    each = [memory(of, Job(sequence=4096, micro=n, batch=n)).stages[0].activations for n in (1, 2, 4)]
    assert each == [each[0], 2 * each[0], 4 * each[0]]


def test_logits_are_a_line_of_their_own_on_the_last_stage_and_tp_divides_them() -> None:
    of = ground(PRESETS["llama3-8b"], logit_bytes=4.0)
    first, last = memory(of, Job(pp=2, sequence=4096, batch=4)).stages
    assert first.logits == 0
    assert last.logits / GIB == pytest.approx(1.957, abs=0.001)
    assert memory(of, Job(tp=4, sequence=4096)).stages[0].logits == pytest.approx(last.logits / 4)


@pytest.mark.parametrize(("micro_batches", "held"), [(8, [4, 3, 2, 1]), (2, [2, 2, 2, 1])])
def test_a_stage_of_1f1b_holds_the_micro_batches_between_it_and_the_last(micro_batches: int, held: list[int]) -> None:
    job = Job(pp=4, batch=micro_batches, sequence=16)
    assert [live_stages(job, pp) for pp in range(4)] == held


@pytest.mark.parametrize("name", known_stacks())
def test_lines_sum_to_the_total_under_every_stack(name: str) -> None:
    job = Job(tp=2, pp=2, dp=2, zero=load_stack(name).zero, batch=8, sequence=4096)
    for stage in memory(ground(PRESETS["llama3-8b"], name), job).stages:
        assert stage.total == pytest.approx(sum(getattr(stage, line) for line in LINES))
        assert min(stage) >= 0


def test_forty_three_runs_allocated_what_is_planned_within_two_percent() -> None:
    errors = {}
    assert len(node_runs()) == 43
    for row in node_runs():
        planned = max(stage.allocated for stage in memory(row.ground, row.job).stages)
        errors[row.id] = planned / (float(row.cells["peak_mem_gib"]) * GIB) - 1
    assert max(abs(error) for error in errors.values()) <= 0.02, errors
    assert sum(abs(error) for error in errors.values()) / len(errors) <= 0.01


def test_the_position_that_holds_most_is_the_one_that_was_measured_to() -> None:
    """DeepSeek's two stages are far apart: the peak of each position is stated in the source's notes, in MiB."""
    for row in node_runs():
        if row.job.pp == 2 and not row.dense:
            first, last = (stage.allocated / MIB for stage in memory(row.ground, row.job).stages)
            notes = row.cells["notes"]
            assert first == pytest.approx(float(notes.split("rank0=")[1].split()[0]), rel=0.03)
            assert last == pytest.approx(float(notes.split("last=")[1].split()[0]), rel=0.03)


def test_what_waits_for_its_weight_gradients_is_priced_where_more_waits_than_was_kept() -> None:
    """Under full recompute a block keeps its input, and from B to W each linear's input and output gradient: of 32
    channels, 64 between, 4 heads of 8. On the last position the projection onto 64 words waits too."""
    each = 4 * ((32 + 32) + (3 * 32 + 32) + (32 + 64) + (2 * 64 + 32))
    job = Job(
        pp=2, batch=8, sequence=16, schedule="1f1b", recompute="full", recompute_layers=-1, compute="float32"
    )  # fmt: skip
    for pp, held, late, head in ((0, 2, 1, 0), (1, 2, 2, 4 * (32 + 64))):
        plain, parted = (memory(ground(T0), job._replace(schedule=name)).stages[pp] for name in ("gpipe", "zb-h1"))
        kept = 4 * 32 * 2 * 16
        assert plain.activations == 8 * kept
        assert parted.activations == held * kept + late * ((2 * each + head) * 16 - kept)
