"""Gradients are sums over the whole batch, reduced once, counted once in the norm, and equal on every replica."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.parallel.gradients import local_norm_squared
from plait.parallel.mesh import Mesh
from plait.parallel.traffic import TrafficCounter
from plait.spec.layout import Layout
from plait.spec.run import BatchSpec, LayoutSpec, OptimSpec, RunSpec
from tests.fixtures import T0, T0_GROUPED, T0_TIED, assert_equals_one_device, run_of
from tests.launching import on_ranks
from tests.ranks import Rank, gradients_of, hold, one_number, rows_of_numbers

LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2}, {"pp": 2}, {"dp": 2}, {"tp": 2, "pp": 2}, {"tp": 2, "sequence_parallel": True}, {"tp": 4},
]  # fmt: skip


def numbers_run(**layout: int) -> RunSpec:
    rows = layout.get("dp", 1) * layout.pop("micro_batches", 1)
    return RunSpec(layout=LayoutSpec(**layout), batch=BatchSpec(global_size=rows, micro_size=1, sequence=5))


def test_a_rank_with_few_labels_does_not_weigh_more() -> None:
    """5 tokens of gradient 1 on one rank, 1 of gradient 4 on the other: 9/6, where a mean of means says 2.5."""

    def run(rank: int, world: int) -> tuple[float, float]:
        step, w = one_number(numbers_run(dp=2))
        sums = step.backward(1, rows_of_numbers([[1] * 5, [4] + [-1] * 4][rank], first=rank))
        assert w.grad is not None
        return w.grad.item(), sums.loss

    assert on_ranks(2, run) == [(1.5, 1.5), (1.5, 1.5)]


def test_a_micro_batch_with_few_labels_does_not_weigh_more() -> None:
    """Token losses {4} and {1, 1, 1} in two micro-batches: 7/4, where a mean of means says 2.5."""
    step, w = one_number(numbers_run(micro_batches=2))
    sums = step.backward(1, rows_of_numbers([4] + [-1] * 4, [1, 1, 1, -1, -1]))
    assert w.grad is not None
    assert (sums.loss, w.grad.item(), sums.labels) == (1.75, 1.75, 4)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_data_parallel_ranks_with_uneven_labels_equal_one_device(micro_batches: int) -> None:
    assert_equals_one_device(run_of(T0, dp=2, micro_batches=micro_batches))


def test_each_gradient_element_is_reduced_once_a_step_whatever_the_accumulation() -> None:
    def run(rank: int, world: int) -> tuple[float, float]:
        mine = Rank.of(run_of(T0, dp=2, micro_batches=4))
        with TrafficCounter(mine.mesh.axes()) as counter:
            mine.backward()
        ((calls, sent),) = [row[2:] for row in counter.rows() if row[:2] == ("dp", "all_reduce")]
        return calls, sent

    labels = 8  # one int64 count, and a rank of two sends 2·S·(2-1)/2 = S bytes
    assert on_ranks(2, run) == [(2, T0.parameter_count() * 4 + labels)] * 2


def test_gradients_leave_in_buckets_while_backward_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.parallel.gradients.BUCKET_ELEMENTS", 4000)

    def run(rank: int, world: int) -> tuple[int, int]:
        mine = Rank.of(run_of(T0, dp=2, micro_batches=2))
        sent_before_flush = 0
        flush = mine.step.gradients.flush

        def watched(stage: int) -> None:
            nonlocal sent_before_flush
            sent_before_flush = sum(b.transfer is not None for b in mine.step.gradients.buckets[stage])
            flush(stage)

        mine.step.gradients.flush = watched  # type: ignore[method-assign]
        mine.backward()
        return sent_before_flush, len(mine.step.gradients.buckets[0])

    for sent, buckets in on_ranks(2, run):
        assert sent == buckets > 4


def test_many_small_buckets_equal_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.parallel.gradients.BUCKET_ELEMENTS", 1000)
    assert_equals_one_device(run_of(T0_TIED, pp=2, dp=2, micro_batches=2))


def test_a_parameter_that_no_micro_batch_used_here_counts_as_zero() -> None:
    """Rank 0 alone uses the second weight: rank 1 waits for nobody, and both get rank 0's gradient of it."""

    def run(rank: int, world: int) -> list[list[float]]:
        mesh = Mesh(Layout(dp=2))
        both = [nn.Parameter(torch.ones(2)) for _ in "ab"]
        gradients = gradients_of(mesh, *(hold(mesh, p, name) for name, p in zip("ab", both, strict=True)))
        gradients.zero()
        gradients.arm(0)
        (both[0].sum() + both[1].sum() * 3 if rank == 0 else both[0].sum()).backward()
        gradients.flush(0)
        gradients.finish()
        return [p.grad.tolist() for p in both if p.grad is not None]

    assert on_ranks(2, run) == [[[2.0, 2.0], [3.0, 3.0]]] * 2


def test_the_norm_counts_a_copy_once_and_every_shard() -> None:
    """A replicated gradient of norm 3 and two halves of norm √8: 5. Counted twice: √34; one half only: √17."""

    def run(rank: int, world: int) -> float:
        mesh = Mesh(Layout(tp=2))
        copied, cut = (nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (1, 2))
        gradients = gradients_of(mesh, hold(mesh, copied, "copied"), hold(mesh, cut, "cut", dim=0))
        for parameter, value in ((copied, 3.0), (cut, 2.0)):
            parameter.grad = torch.full_like(parameter, value)
        share = local_norm_squared(gradients)
        torch.distributed.all_reduce(share)
        return math.sqrt(share.item())

    assert on_ranks(2, run) == [pytest.approx(5.0, rel=1e-12)] * 2


def test_the_norm_is_one_number_in_every_layout_and_clipping_to_half_of_it_halves_it() -> None:
    def of(layout: dict[str, Any], clip: float) -> tuple[float, float]:
        """The raw norm, and the norm of what is left after an update that clips."""

        def run(rank: int, world: int) -> tuple[float, float]:
            plain = run_of(T0_GROUPED, **layout)
            precision = plain.precision.model_copy(update={"compute": "float64"})
            optim = OptimSpec(name="sgd", lr=0.0, schedule="constant", clip=clip)
            mine = Rank.of(plain.model_copy(update={"precision": precision, "optim": optim}))
            sums = mine.backward()
            mine.step.update(sums)
            share = local_norm_squared(mine.step.gradients)
            torch.distributed.all_reduce(share)
            return sums.norm, math.sqrt(share.item())

        results = on_ranks(math.prod(v for v in layout.values() if v is not True), run)
        assert len(set(results)) == 1, "every rank has the same norm, bit for bit"
        return results[0]

    norm, unclipped = of({}, 0.0)
    assert unclipped == pytest.approx(norm, rel=1e-12)
    for layout in LAYOUTS:
        assert of(layout, norm / 2) == (pytest.approx(norm, rel=1e-10), pytest.approx(norm / 2, rel=1e-10)), layout


def test_replicas_are_bitwise_equal_after_updates_with_uneven_labels() -> None:
    def run(rank: int, world: int) -> list[Tensor]:
        mine = Rank.of(run_of(T0, dp=4, micro_batches=1))
        for number in (1, 2, 3):
            mine.step.update(mine.backward(number))
        return [weight for _, weight in mine.weights()]

    first, *others = on_ranks(4, run)
    assert all(torch.equal(a, b) for weights in others for a, b in zip(first, weights, strict=True))
    assert sum(weight.numel() for weight in first) == T0.parameter_count()


def test_copies_over_tp_stay_bitwise_equal_beside_shards_of_unequal_size() -> None:
    """The order in which a ring adds up an element depends on the size of the whole, which differs between shards."""

    def run(rank: int, world: int) -> Tensor:
        mesh = Mesh(Layout(tp=2, dp=4))
        generator = torch.Generator().manual_seed(mesh.at.dp)
        alike, cut = nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(3100 - 200 * mesh.at.tp))
        gradients = gradients_of(mesh, hold(mesh, alike, "alike"), hold(mesh, cut, "cut", dim=0))
        gradients.zero()
        gradients.arm(0)
        (alike @ torch.randn(1000, generator=generator) + cut.sum()).backward()
        gradients.flush(0)
        gradients.finish()
        assert alike.grad is not None
        return alike.grad.clone()

    first, *others = on_ranks(8, run)
    assert all(torch.equal(first, copy) for copy in others)


def test_the_two_places_of_a_tied_table_stay_bitwise_equal_over_ten_updates() -> None:
    def run(rank: int, world: int) -> Tensor:
        mine = Rank.of(run_of(T0_TIED, pp=2, dp=2))
        for number in range(1, 11):
            mine.step.update(mine.backward(number))
        table = next(w for p, w in mine.weights() if p.tensor.name == "embedding.tokens.weight")
        return table.clone()

    first, *others = on_ranks(4, run)
    assert all(torch.equal(first, table) for table in others)
