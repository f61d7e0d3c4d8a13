"""A split run equals one device: drawn runs on every commit, full grids and a hundred draws under `make proof`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from plait.proof.draw import FEATURES, draw_run
from plait.proof.many import verify_random
from plait.proof.shrink import shrink
from plait.proof.verify import check, proof_run, samples_of, verify
from plait.spec.errors import PlaitError
from plait.spec.fit import fit
from plait.spec.model import ModelSpec
from plait.spec.presets import PRESETS
from plait.spec.run import BatchSpec, LayoutSpec, RunSpec, ScheduleSpec
from tests.fixtures import T0_GROUPED, T0_TIED, run_of

DEGREES = (1, 2, 4)
# Nothing divides: 61 tokens over 2 and 4, ffn 21, 5 layers, 1 kv head; dropout everywhere.
ROUGH = ModelSpec(
    vocab=61, hidden=20, layers=5, heads=4, kv_heads=1, head_dim=4, ffn=21, max_sequence=8, norm="layer",
    qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True, dropout=0.1, attention_dropout=0.1,
)  # fmt: skip


def assert_equal(run: RunSpec, dtype: str) -> None:
    ready = proof_run(run, dtype)
    verdict = check(ready, samples_of(ready))
    assert verdict.ok, verdict.complaint
    assert verdict.compared == sum(tensor.kind == "weight" for tensor in run.model.parameters())


@pytest.mark.parametrize("number", range(3))
def test_a_drawn_run_equals_one_device_in_float64(number: int) -> None:
    assert_equal(draw_run(0, number), "float64")


@pytest.mark.parametrize("number", range(1))
def test_a_drawn_run_equals_one_device_in_float32(number: int) -> None:
    assert_equal(draw_run(1, number), "float32")


def rough_runs() -> Iterator[RunSpec]:
    """tp, pp, dp in 1, 2, 4 on at most 8 ranks × tokens whole or split × schedule × tied or not."""
    for tp, pp, dp in product(DEGREES, repeat=3):
        if tp * pp * dp <= 8:
            for split, schedule, tied in product((False, True)[: 1 + (tp > 1)], ("gpipe", "1f1b"), (False, True)):
                yield RunSpec(
                    model=ROUGH.model_copy(update={"tied": tied}),
                    layout=LayoutSpec(tp=tp, pp=pp, dp=dp, sequence_parallel=split),
                    schedule=ScheduleSpec(name=schedule),
                    batch=BatchSpec(global_size=dp * 3, micro_size=1, sequence=8),
                )


@pytest.mark.proof
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_every_layout_schedule_and_mode_equals_one_device(dtype: str) -> None:
    runs = list(rough_runs())
    assert len(runs) == 104
    complaints = []
    for run in runs:
        ready = proof_run(run, dtype)
        try:
            complaint = check(ready, samples_of(ready)).complaint
        except PlaitError as failure:
            complaint = failure.message
        if complaint:
            complaints.append(f"{fit(run)} {run.schedule.name} tied {run.model.tied}: {complaint}")
    assert not complaints, "\n".join(complaints)


@pytest.mark.proof
def test_a_hundred_drawn_runs_equal_one_device_and_cover_every_feature() -> None:
    report = verify_random(100, seed=11)
    assert report["ok"] and report["passed"] == report["drawn"] == 100, report["failures"]
    assert {name for name, share in report["coverage"].items() if share < 0.10} == set()
    assert set(report["coverage"]) == set(FEATURES) and report["coverage"]["three axes > 1"] >= 0.30


def test_a_large_run_is_shrunk_to_what_its_layout_needs_and_says_so() -> None:
    run = RunSpec(model=PRESETS["llama3-70b"], layout=LayoutSpec(tp=2, pp=2, sequence_parallel=True))
    verdict = verify(run)
    assert verdict is not None
    assert verdict.ok, verdict.complaint
    shrunk = verdict.run["model"]
    assert (shrunk["layers"], shrunk["vocab"], shrunk["heads"] // shrunk["kv_heads"]) == (2, 61, 8)
    assert verdict.run["layout"] == run.layout.model_dump(exclude_none=True) | {"dp": 1}


@pytest.mark.parametrize("name", ["gpt2-tiny", "qwen3-tiny", "mistral-tiny"])
def test_shrinking_keeps_the_features_of_a_run(name: str) -> None:
    for tp, pp in ((1, 1), (2, 2), (4, 1), (1, 4)):
        run = RunSpec(model=PRESETS[name], layout=LayoutSpec(tp=tp, pp=pp, dp=2, sequence_parallel=True))
        small = shrink(run)
        fit(small)
        for feature, has in FEATURES.items():
            if not feature.startswith("uneven"):
                assert has(small) == has(run), feature


def test_full_leaves_the_sizes_alone() -> None:
    verdict = verify(run_of(T0_TIED, pp=2), full=True)
    assert verdict.ok and verdict.run["model"]["hidden"] == 32 and verdict.run["model"]["layers"] == 4


def test_proof_takes_out_what_hides_constant_factors() -> None:
    ready = proof_run(run_of(T0_GROUPED), "float64")
    assert (ready.optim.name, ready.optim.clip, ready.optim.weight_decay) == ("sgd", 0.0, 0.0)
    assert ready.data.source == "synthetic"
    precision = ready.precision
    assert {precision.compute, precision.grad_accumulate, precision.grad_reduce} == {"float64"}
