"""The search: known decisions come out, bounds drop nothing that would win, and refusals say the way out."""

from __future__ import annotations

import time

import numpy as np
import pytest

from plait.planner.estimate import closed_form, estimate
from plait.planner.ground import Ground
from plait.planner.job import Job
from plait.planner.memory import memory, peaks, stage_bytes
from plait.planner.network import wires
from plait.planner.pace import TERMS
from plait.planner.pipeline import simulated
from plait.planner.search import NOISE, SLOW, Found, Sieve, Want, describe, search
from plait.planner.stack import load_stack
from plait.schedule import GENERATORS, Costs, PassSeconds, Size, generate, lower, simulate
from plait.spec.cluster import load_cluster
from plait.spec.errors import UsageError
from plait.spec.presets import PRESETS


def ground(model: str, cluster: str = "h100-dgx", stack: str = "megatron") -> Ground:
    return Ground.of(PRESETS[model], load_stack(stack), load_cluster(cluster))


@pytest.fixture(scope="module")
def found() -> Found:
    """Llama-3 70B on eight nodes."""
    return search(ground("llama3-70b"), Want(64, 128, 8192))


def test_tensor_groups_stay_inside_a_node(found: Found) -> None:
    assert all(plan.job.tp <= 8 for plan in found.plans)
    slower = {kind: by for kind, by, _ in found.losers}
    assert slower["tensor groups across nodes"] > 0.2


@pytest.mark.parametrize(("domain", "stride"), [(4, 1), (8, 4), (8, 8)])
def test_a_tensor_group_across_nodes_has_less_than_half_the_throughput_of_one_inside(domain: int, stride: int) -> None:
    """Eight ranks in one node of 8, against two nodes of 4, two ranks in each of four nodes, one in each of eight."""
    inside = load_cluster("h100-dgx")
    fast = inside.links[0].model_copy(update={"domain": domain})
    across = inside.model_copy(update={"links": (fast, inside.links[1])})
    model, stack = PRESETS["llama3-8b"], load_stack("plait")
    one, other = (Ground.of(model, stack, cluster) for cluster in (inside, across))
    size = 4096 * 8192 * 2
    assert wires(other, 8, stride).reduce(size) > 2 * wires(one, 8, 1).reduce(size)


def test_the_published_70b_layout_lies_on_the_plateau() -> None:
    """NVIDIA's recipe for 64 H100 in bfloat16: tp 4, pp 4, cp 2, five interleaved stages (dgxc-benchmarking 24.11)."""
    of = ground("llama3-70b")
    published = Job(
        tp=4,
        pp=4,
        dp=2,
        cp=2,
        chunks=5,
        schedule="interleaved",
        batch=128,
        sequence=8192,
        zero=1,
        sequence_parallel=True,
    )
    best = search(of, Want(64, 128, 8192), top=1).plans[0]
    assert closed_form(of, [published]).sum() <= 1.05 * closed_form(of, [best.job]).sum()


def test_every_plan_fits_and_the_plateau_is_ranked_by_headroom(found: Found) -> None:
    assert all(plan.memory.verdict == "fits" for plan in found.plans)
    best = min(plan.step for plan in found.plans)
    plateau = [plan for plan in found.plans if plan.step <= best * (1 + NOISE)]
    headroom = [plan.memory.headroom for plan in plateau]
    assert found.plans[: len(plateau)] == plateau
    assert headroom == sorted(headroom, reverse=True)


def test_bounds_drop_no_layout_that_would_have_been_best() -> None:
    of, want = ground("llama3-8b"), Want(16, 64, 4096)
    pruned, whole = Sieve(of, want, 1.5), Sieve(of, want, float("inf"))
    least = [closed_form(of, list(sieve.survivors())).sum(-1).min() for sieve in (pruned, whole)]
    assert least[0] == pytest.approx(least[1])
    assert pruned.reasons[SLOW].count > 0


def test_terms_sum_to_the_step_and_the_interval_holds_it(found: Found) -> None:
    for plan in found.plans:
        assert sum(plan.terms.values()) == pytest.approx(plan.step)
        assert plan.interval[0] < plan.step < plan.interval[1]


def test_recompute_changes_the_time_and_not_what_counts_as_useful() -> None:
    of = ground("llama3-8b")
    plain, again = (
        estimate(of, Job(dp=8, batch=64, sequence=4096, zero=1, recompute=mode)) for mode in ("none", "full")
    )
    assert again.step > 1.2 * plain.step
    assert plain.useful == again.useful
    assert again.mfu * again.step == pytest.approx(plain.mfu * plain.step)
    assert again.hfu / again.mfu == pytest.approx(4 / 3, abs=0.03)  # the head is not computed again
    assert plain.hfu == plain.mfu


def test_mfu_is_over_the_peaks_of_all_devices_and_the_dtype_of_the_products() -> None:
    of = ground("llama3-8b")
    plan = estimate(of, Job(dp=4, batch=64, sequence=4096, zero=1))
    peak = 4 * 989.4e12
    assert plan.mfu == pytest.approx(plan.useful * 4 / plan.step / peak)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 64), (8, 40)])
def test_few_simulated_rounds_continue_to_the_whole_pipeline(ranks: int, micro_batches: int) -> None:
    unequal = np.array([[1.0 + (stage == 1), 2.0 + 2 * (stage == 1)] for stage in range(ranks)])
    job = Job(pp=ranks, batch=micro_batches, sequence=16)
    forward, backward = (tuple(column.tolist()) for column in unequal.T)
    costs = Costs(f=forward, b=backward, w=(0.0,) * ranks)
    whole = simulate(lower(generate("1f1b", ranks, micro_batches)), costs).step
    assert simulated(job, unequal) == pytest.approx(whole, rel=1e-9)
    idle = GENERATORS["1f1b"].idle(Size(ranks, micro_batches), PassSeconds(1.0, 1.0, 1.0))
    assert simulated(job, np.array([[1.0, 2.0]] * ranks)) == pytest.approx(3 * micro_batches + idle)


def test_a_model_that_fits_nowhere_is_answered_with_the_nearest_miss_and_the_way_out() -> None:
    with pytest.raises(UsageError, match=r"needs [\d.]+ GiB a device, there are 79\.6") as refused:
        search(ground("llama3-405b"), Want(8, 8, 8192))
    assert "times as many devices" in refused.value.hint


def test_a_batch_that_no_split_divides_is_answered_with_one_that_does() -> None:
    with pytest.raises(UsageError, match="does not divide the batch of 7"):
        search(ground("llama3-8b", stack="fsdp"), Want(64, 7, 1024))


def test_reasons_are_kept_with_the_layout_that_came_nearest(found: Found) -> None:
    reasons = {one.reason: one for one in found.rejected}
    assert reasons["does not fit under recompute none"].nearest
    assert sum(one.count for one in found.rejected) + found.estimated <= found.examined


def test_thousands_are_examined_and_estimated_per_second_of_one_core() -> None:
    of = ground("llama3-8b")
    jobs = [Job(dp=8 * n, batch=512 * n, sequence=4096, zero=1) for n in range(1, 401)]
    closed_form(of, jobs[:1])
    begun = time.process_time()
    closed_form(of, jobs)
    for job in jobs:
        memory(of, job)
    assert len(jobs) / (time.process_time() - begun) >= 2000


def test_a_plan_describes_itself_in_one_line() -> None:
    line = describe(Job(tp=2, pp=4, dp=2, chunks=2, schedule="interleaved", recompute="full", zero=1))
    assert line == "tp 2, pp 4, dp 2, micro 1, zero 1, recompute full, interleaved × 2"


def test_longer_messages_and_more_ranks_never_make_a_term_negative() -> None:
    of = ground("deepseek-v3", "gb200-nvl72")
    jobs = [
        Job(tp=2, pp=4, dp=n, ep=8, batch=64 * n, sequence=4096, zero=1, sequence_parallel=True) for n in (4, 8, 16)
    ]
    assert (closed_form(of, jobs)[:, : TERMS.index("jitter")] >= 0).all()


@pytest.mark.parametrize(("model", "world", "batch"), [("llama3-70b", 64, 512), ("mixtral-8x7b", 16, 64)])
def test_peaks_of_a_search_are_the_totals_of_its_plans(model: str, world: int, batch: int) -> None:
    of = ground(model, stack="plait")
    jobs = list(Sieve(of, Want(world, batch, 4096), 1.5).survivors())[::41]
    for job in jobs:
        for pp in {0, job.pp - 1}:
            totals = [stage_bytes(of, job._replace(recompute=mode), pp).total for mode in ("none", "full")]
            assert peaks(of, job, pp, ("none", "full")) == pytest.approx(totals)


def test_blocks_that_are_dealt_out_unevenly_are_planned_where_they_stand() -> None:
    of = ground("llama3-8b", stack="plait")
    job = Job(pp=2, batch=4, sequence=1024, layers=(10, 22))
    even = job._replace(layers=())
    (first, second), (one, other) = memory(of, job).stages, memory(of, even).stages
    assert first.weights < one.weights and second.weights > other.weights
    assert first.weights + second.weights == one.weights + other.weights
    assert estimate(of, job).step > 1.1 * estimate(of, even).step
    folded = Job(pp=2, chunks=2, schedule="zb-v", batch=8, sequence=1024, layers=(1, 15, 10, 6))
    assert of.shape.kinds_of_positions(folded.place) == ((7,), (25,))
