"""Bytes of model states, read off the placement records and held against the papers' figures."""

from __future__ import annotations

import pytest

from plait.placement import place
from plait.placement.activations import activations
from plait.placement.bytes import state_bytes
from plait.spec.layout import Layout
from plait.spec.model import ModelSpec
from plait.spec.presets import PRESETS
from plait.spec.run import BatchSpec, DType, OptimSpec, PrecisionSpec, RecomputeSpec, RunSpec, ZeroSpec

PARAMETERS = 7.5e9  # of the ZeRO paper's example (Rajbhandari et al. 2020, figure 1)
T0 = ModelSpec(vocab=64, hidden=32, layers=4, heads=4, ffn=64, max_sequence=16)


def bytes_per_parameter(stage: int, dp: int, accumulate: DType = "float16") -> float:
    """Of one rank, with fp16 weights, for a model whose tensors 64 ranks share without padding."""
    precision = PrecisionSpec(compute="float16", grad_accumulate=accumulate)
    run = RunSpec(model=PRESETS["llama2-7b"], zero=ZeroSpec(stage=stage), precision=precision)
    placements = place(run.model, Layout(dp=dp, shard=dp), run.zero)
    return sum(state_bytes(placements, run, rank=dp - 1).values()) / run.model.parameter_count()


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
    placements = place(T0, Layout(tp=2, kv=2), run.zero)
    for rank in range(2):
        assert state_bytes(placements, run, rank) == {kind: size * 22_816 for kind, size in each.items()}


def test_padding_of_uneven_slices_is_memory_too() -> None:
    run = RunSpec(model=T0, zero=ZeroSpec(stage=3))
    placements = place(T0, Layout(dp=3, shard=3), run.zero)
    sizes = [32 * 64, *[sum(t.size for t in T0.parameters() if t.layer == layer) for layer in range(T0.layers)]]
    rows = sum(-(-size // 3) for size in (*sizes, 32 * 64 + 32))  # embedding, each block, head
    assert [state_bytes(placements, run, rank)["weights"] for rank in range(3)] == [4 * rows] * 3
    assert 3 * rows > T0.parameter_count()


def test_stages_of_a_pipeline_share_the_states_of_the_model() -> None:
    run = RunSpec(model=T0)
    placements = place(T0, Layout(pp=4), run.zero)
    assert sum(state_bytes(placements, run, rank)["weights"] for rank in range(4)) == 4 * 45_344


# --- activations ------------------------------------------------------------------------------------------------------


def test_b85_logits_are_a_line_of_their_own_and_tensor_parallelism_divides_them() -> None:
    """4096 tokens over 128256 words: 1.957 GiB in fp32 on the stage with the head, and none in chunks of them."""
    batch = BatchSpec(global_size=1, micro_size=1, sequence=4096)
    run = RunSpec(model=PRESETS["llama3-8b"], batch=batch, precision=PrecisionSpec(compute="bfloat16"))
    whole = activations(run, Layout(), range(2), first=False, last=True)
    assert whole.logits / 2**30 == pytest.approx(1.957, abs=0.001)
    assert whole.loss == 2 * whole.logits  # log-probabilities are kept; two gradients as large stand beside them
    assert activations(run, Layout(tp=8, kv=8), range(2), first=False, last=True).logits == whole.logits / 8
    assert activations(run, Layout(), range(2), first=True, last=False).logits == 0
    chunked = run.model_copy(update={"recompute": RecomputeSpec(loss_chunk=256)})
    assert activations(chunked, Layout(), range(2), first=False, last=True).loss < whole.loss / 3


def test_recompute_leaves_the_input_of_each_block_and_only_of_the_first_blocks_where_so_asked() -> None:
    run = RunSpec(model=T0, batch=BatchSpec(global_size=2, micro_size=2, sequence=16))
    full = run.model_copy(update={"recompute": RecomputeSpec(mode="full")})
    first = run.model_copy(update={"recompute": RecomputeSpec(mode="full", layers=1)})
    plain, none, some = (activations(r, Layout(), range(4), first=True, last=False) for r in (run, full, first))
    unit = 2 * 16 * 32 * 4
    assert [block.kept for block in none.blocks] == [unit] * 4
    assert [block.kept for block in some.blocks] == [unit] + [block.kept for block in plain.blocks[1:]]
