"""Facts of papers and explainers, and cases that other planners got wrong, each by its number, from the planner's code.

What other tests give by their numbers: W2, W3, B85 in tests/placement/test_bytes.py; W4 in parallel/test_sharded.py;
W7 to W10 and B92 in schedule/test_closed_forms.py; W18 to W22 in spec and report/test_layout.py; B80, B81 and B84 in
planner/test_memory.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from plait.planner.estimate import estimate
from plait.planner.ground import Ground
from plait.planner.job import Job
from plait.planner.network import wires
from plait.planner.pipeline import simulated
from plait.planner.search import Sieve, Want
from plait.planner.stack import load_stack
from plait.spec.cluster import load_cluster
from plait.spec.experts import Experts
from plait.spec.flops import flops_per_token
from plait.spec.model import ModelSpec
from plait.spec.presets import PRESETS

T0 = ModelSpec(vocab=64, hidden=32, layers=4, heads=4, ffn=64, max_sequence=16)


def ground(model: ModelSpec, cluster: str = "h100-dgx", stack: str = "megatron") -> Ground:
    return Ground.of(model, load_stack(stack), load_cluster(cluster))


@pytest.mark.parametrize(("ranks", "stride"), [(2, 1), (8, 1), (16, 1), (4, 8)])
def test_w5_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(ranks: int, stride: int) -> None:
    group, size = wires(ground(T0), ranks, stride), 2**30
    assert group.reduce(size) == 2 * group.gather(size)
    assert group.reduce(size) * group.bandwidth == pytest.approx(2 * size * (ranks - 1) / ranks)


@pytest.mark.parametrize(("micro_batches", "busy"), [(1, 0.125), (8, 0.533), (32, 0.821)])
def test_w6_gpipe_keeps_eight_stages_busy_for_so_much_of_the_time(micro_batches: int, busy: float) -> None:
    job = Job(pp=8, schedule="gpipe", batch=micro_batches, sequence=16)
    step = simulated(job, np.array([[1.0, 2.0]] * 8))
    assert 3 * micro_batches / step == pytest.approx(busy, abs=5e-4)


@pytest.mark.parametrize(("tied", "six_per_weight"), [(True, 259_776), (False, 272_064)])
def test_b87_tied_tables_change_six_per_weight_and_not_the_flops(tied: bool, six_per_weight: int) -> None:
    model = T0.model_copy(update={"tied": tied})
    assert 6 * model.parameter_count() == six_per_weight
    assert flops_per_token(model, 16) == flops_per_token(T0, 16)
    job = Job(batch=1, sequence=16, compute="bfloat16")
    assert estimate(ground(model), job).useful == flops_per_token(T0, 16).training * 16


def test_b89_a_mixture_is_worth_the_experts_that_a_token_meets() -> None:
    model = T0.model_copy(update={"moe": Experts(count=8, top_k=2, ffn=64)})
    assert flops_per_token(model, 16).training == 423_936
    assert 6 * model.parameter_count() == 1_310_400
    assert estimate(ground(model), Job(batch=1, sequence=16)).useful == 16 * 423_936


def test_b90_four_ranks_are_measured_against_four_dense_peaks() -> None:
    of = ground(PRESETS["llama3-8b"])
    assert of.cluster.device.peak("bfloat16") == 989.4e12  # and not the 1,978.9 of half-empty matrices
    one, four = (estimate(of, Job(dp=n, batch=4 * n, sequence=4096, zero=1)) for n in (1, 4))
    assert four.useful == one.useful
    assert four.mfu == pytest.approx(four.useful / four.step / 989.4e12)


def test_w31_mfu_counts_no_recompute_and_changes_with_the_time_alone() -> None:
    of = ground(PRESETS["llama3-8b"])
    plain, again = (estimate(of, Job(dp=8, batch=64, sequence=4096, zero=1, recompute=m)) for m in ("none", "full"))
    assert plain.mfu / again.mfu == pytest.approx(again.step / plain.step)
    assert plain.mfu == plain.hfu and again.hfu > again.mfu


def test_w1_seventy_billion_weights_are_280_or_140_gigabytes() -> None:
    from plait.planner.memory import states

    for compute, gigabytes in (("float32", 280), ("bfloat16", 140)):
        assert states(Job(compute=compute), load_stack("plait"), (70_000_000_000, 0))[0] == gigabytes * 1e9


def test_w23_w24_a_tensor_group_that_leaves_its_node_is_more_than_twice_as_slow() -> None:
    cluster = load_cluster("h100-dgx")
    assert cluster.links[0].bandwidth / cluster.links[1].bandwidth == 9  # per direction
    inside, across = (wires(ground(PRESETS["llama3-70b"]), 8, stride) for stride in (1, 8))
    assert across.reduce(2**26) > 2 * inside.reduce(2**26)


def test_w18_a_search_of_512_devices_finds_tp_8_pp_8_dp_8() -> None:
    sieve = Sieve(ground(PRESETS["llama3-70b"]), Want(512, 512, 4096), 1.5)
    assert any((job.tp, job.pp, job.dp) == (8, 8, 8) for job in sieve.splits())
