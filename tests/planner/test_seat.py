"""Bytes of a rank: model states against the papers' figures, and what one micro-batch keeps of each stage."""

from __future__ import annotations

from typing import Any

import pytest

from plait.planner.seat import Seat
from plait.planner.sized.kept import Kept, kept
from plait.spec.fit import fit
from plait.spec.layout import Layout
from plait.spec.model import ModelSpec
from plait.spec.presets import PRESETS
from plait.spec.run import BatchSpec, DType, LayoutSpec, OptimSpec, PrecisionSpec, RecomputeSpec, RunSpec, ZeroSpec

PARAMETERS = 7.5e9  # of the ZeRO paper's example (Rajbhandari et al. 2020, figure 1)
T0 = ModelSpec(vocab=64, hidden=32, layers=4, heads=4, ffn=64, max_sequence=16)


def bytes_per_parameter(stage: int, dp: int, accumulate: DType = "float16") -> float:
    """Of one rank, with fp16 weights, for a model whose tensors 64 ranks share without padding."""
    precision = PrecisionSpec(compute="float16", grad_accumulate=accumulate)
    run = RunSpec(model=PRESETS["llama2-7b"], zero=ZeroSpec(stage=stage), precision=precision)
    seat = Seat(run, Layout(dp=dp, shard=dp), rank=dp - 1)
    return sum(seat.states().values()) / run.model.parameter_count()


def test_w2_mixed_precision_adam_keeps_16_bytes_per_parameter_120_gb_on_one_device() -> None:
    assert bytes_per_parameter(0, 1) * PARAMETERS == pytest.approx(120e9)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_w3_zero_stages_over_64_devices(stage: int, gigabytes: float) -> None:
    assert bytes_per_parameter(stage, 64) * PARAMETERS / 1e9 == pytest.approx(gigabytes, rel=0.003)


@pytest.mark.parametrize(("stage", "limit"), [(1, 4), (2, 2)])
def test_w3_many_devices_leave_what_is_not_shared(stage: int, limit: int) -> None:
    assert bytes_per_parameter(stage, 4096) == pytest.approx(limit, rel=0.005)


def test_float32_accumulation_adds_two_bytes_per_gradient() -> None:
    assert bytes_per_parameter(0, 1, "float32") == 18


@pytest.mark.parametrize(
    ("compute", "optim", "each"),
    [
        ("float32", OptimSpec(), {"weights": 4, "gradients": 4, "master": 0, "moments": 8}),
        ("float64", OptimSpec(), {"weights": 8, "gradients": 8, "master": 0, "moments": 16}),
        ("bfloat16", OptimSpec(), {"weights": 2, "gradients": 4, "master": 4, "moments": 8}),
        ("float32", OptimSpec(name="sgd"), {"weights": 4, "gradients": 4, "master": 0, "moments": 0}),
        ("float32", OptimSpec(name="sgd", momentum=0.9), {"weights": 4, "gradients": 4, "master": 0, "moments": 4}),
    ],
)
def test_each_kind_of_state_has_the_bytes_of_its_dtype(compute: DType, optim: OptimSpec, each: dict[str, int]) -> None:
    run = RunSpec(model=T0, precision=PrecisionSpec(compute=compute), optim=optim)
    for rank in range(2):
        assert Seat(run, Layout(tp=2, kv=2), rank).states() == {kind: size * 22_816 for kind, size in each.items()}


def test_padding_of_uneven_slices_is_memory_too() -> None:
    run = RunSpec(model=T0, zero=ZeroSpec(stage=3))
    sizes = [32 * 64, *[sum(t.size for t in T0.parameters() if t.layer == layer) for layer in range(T0.layers)]]
    rows = sum(-(-size // 3) for size in (*sizes, 32 * 64 + 32))  # embedding, each block, head
    assert [Seat(run, Layout(dp=3, shard=3), rank).states()["weights"] for rank in range(3)] == [4 * rows] * 3
    assert 3 * rows > T0.parameter_count()


def test_stages_of_a_pipeline_share_the_states_of_the_model() -> None:
    seats = [Seat(RunSpec(model=T0), Layout(pp=4), rank) for rank in range(4)]
    assert sum(seat.states()["weights"] for seat in seats) == 4 * 45_344


# --- activations ------------------------------------------------------------------------------------------------------


def kept_by(run: RunSpec, stage: int = 0) -> Kept:
    layout = fit(run, run.layout.pp)
    return kept(Seat(run, layout, layout.rank(pp=stage)), stage, splits=False)


def test_logits_count_twice_more_while_the_loss_is_differentiated_and_a_chunk_at_a_time_in_chunks() -> None:
    batch = BatchSpec(global_size=1, micro_size=1, sequence=4096)
    model = PRESETS["llama3-8b"].model_copy(update={"layers": 1})
    run = RunSpec(model=model, batch=batch, precision=PrecisionSpec(compute="bfloat16"))
    whole = kept_by(run)
    chunked = kept_by(run.model_copy(update={"recompute": RecomputeSpec(loss_chunk=256)}))
    logits = 4096 * 128_256 * 4  # log-probabilities are kept; two gradients as large stand beside them
    assert whole.whole >= 2 * logits
    gradient = 128_256 * 4096 * 4  # of the table, which a loss in chunks makes in forward
    assert whole.held - logits == pytest.approx(chunked.held - gradient, rel=0.2)
    assert chunked.whole < whole.whole / 3


def test_recompute_leaves_the_input_of_each_block_and_only_of_the_first_blocks_where_so_asked() -> None:
    def held(blocks: int, **recompute: Any) -> int:
        """Of the first of two stages of so many layers each."""
        return kept_by(
            RunSpec(
                model=T0.model_copy(update={"layers": 2 * blocks}),
                layout=LayoutSpec(pp=2),
                batch=BatchSpec(global_size=2, micro_size=2, sequence=16),
                recompute=RecomputeSpec(**recompute),
            )
        ).held

    unit = 2 * 16 * 32 * 4
    block = held(4) - held(3)
    assert held(4, mode="full") - held(3, mode="full") == unit
    assert held(4, mode="full", layers=1) == held(4) - block + unit
