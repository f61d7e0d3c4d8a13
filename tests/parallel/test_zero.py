"""Gradients are sums over the whole batch, counted once in the norm, equal on every replica, whatever is sharded."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.parallel.mesh import Mesh
from plait.parallel.traffic import TrafficCounter
from plait.parallel.zero import local_norm_squared
from plait.placement import Placement
from plait.spec.layout import Layout
from plait.spec.run import BatchSpec, LayoutSpec, OptimSpec, PrecisionSpec, RunSpec
from tests.fixtures import T0, T0_GROUPED, T0_TIED, assert_equals_one_device, run_of
from tests.launching import on_ranks
from tests.ranks import Rank, gradients_of, hold, one_number, rows_of_numbers

LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2}, {"pp": 2}, {"dp": 2}, {"tp": 2, "pp": 2}, {"tp": 2, "sequence_parallel": True}, {"tp": 4},
]  # fmt: skip


def numbers_run(**layout: int) -> RunSpec:
    rows = layout.get("dp", 1) * layout.pop("micro_batches", 1)
    batch, precision = BatchSpec(global_size=rows, micro_size=1, sequence=5), PrecisionSpec(compute="float64")
    return RunSpec(layout=LayoutSpec(**layout), batch=batch, precision=precision)


def test_a_rank_with_few_labels_does_not_weigh_more() -> None:
    """5 tokens of gradient 1 on one rank, 1 of gradient 4 on the other: 9/6, where a mean of means says 2.5."""

    def run(rank: int, world: int) -> tuple[float, float]:
        step, _ = one_number(numbers_run(dp=2))
        sums = step.backward(1, rows_of_numbers([[1] * 5, [4] + [-1] * 4][rank], first=rank))
        return gradients_of(step.states)["w"].item(), sums.loss

    assert on_ranks(2, run) == [(1.5, 1.5), (1.5, 1.5)]


def test_a_micro_batch_with_few_labels_does_not_weigh_more() -> None:
    """Token losses {4} and {1, 1, 1} in two micro-batches: 7/4, where a mean of means says 2.5."""
    step, _ = one_number(numbers_run(micro_batches=2))
    sums = step.backward(1, rows_of_numbers([4] + [-1] * 4, [1, 1, 1, -1, -1]))
    assert (sums.loss, gradients_of(step.states)["w"].item(), sums.labels) == (1.75, 1.75, 4)


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
    monkeypatch.setattr("plait.placement.buffer.BUCKET_ELEMENTS", 4000)

    def run(rank: int, world: int) -> tuple[int, int]:
        mine = Rank.of(run_of(T0, dp=2, micro_batches=2))
        sent_before_flush = 0
        flush = mine.step.states.flush

        def watched(stage: int) -> None:
            nonlocal sent_before_flush
            sent_before_flush = sum(row._reducing is not None for row in mine.step.states.rows)
            flush(stage)

        mine.step.states.flush = watched  # type: ignore[method-assign]
        mine.backward()
        return sent_before_flush, len(mine.step.states.rows)

    for sent, buckets in on_ranks(2, run):
        assert sent == buckets > 4


def test_many_small_buckets_equal_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.placement.buffer.BUCKET_ELEMENTS", 1000)
    assert_equals_one_device(run_of(T0_TIED, pp=2, dp=2, micro_batches=2))


def test_a_parameter_that_no_micro_batch_used_here_counts_as_zero() -> None:
    """Rank 0 alone uses the second weight: rank 1 waits for nobody, and both get rank 0's gradient of it."""

    def run(rank: int, world: int) -> list[list[float]]:
        mesh = Mesh(Layout(dp=2))
        both = nn.ParameterDict({name: nn.Parameter(torch.ones(2)) for name in "ab"})
        states, _ = hold(mesh, both, numbers_run(dp=2))
        states.begin()
        states.arm(0)
        (both["a"].sum() + both["b"].sum() * 3 if rank == 0 else both["a"].sum()).backward()
        states.flush(0)
        states.finish()
        found = gradients_of(states)
        return [found[name].tolist() for name in "ab"]

    assert on_ranks(2, run) == [[[2.0, 2.0], [3.0, 3.0]]] * 2


def test_the_norm_counts_a_copy_once_and_every_shard() -> None:
    """A replicated gradient of norm 3 and two halves of norm √8: 5. Counted twice: √34; one half only: √17."""

    def run(rank: int, world: int) -> float:
        mesh = Mesh(Layout(tp=2))
        sizes = {"copied": (1, 3.0), "cut": (2, 2.0)}
        module = nn.ParameterDict(
            {n: nn.Parameter(torch.zeros(size, dtype=torch.float64)) for n, (size, _) in sizes.items()}
        )
        states, _ = hold(mesh, module, numbers_run(tp=2), cut=("cut",))
        states.begin()
        sum((module[name] * value).sum() for name, (_, value) in sizes.items()).backward()  # type: ignore[union-attr]
        states.flush(0)
        states.finish()
        share = local_norm_squared(states.gradients())
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
            share = local_norm_squared(mine.step.states.gradients())
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
        sizes = {"alike": 1000, "cut": 3100 - 200 * mesh.at.tp}
        module = nn.ParameterDict({name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()})
        with pytest.MonkeyPatch.context() as patch:  # a tensor cut so unevenly has no rule in the table
            patch.setattr(Placement, "rectangle", lambda p, rank: ((0, sizes[p.tensor.name]),))
            states, _ = hold(mesh, module, numbers_run(tp=2, dp=4), cut=("cut",))
        states.begin()
        states.arm(0)
        noise = torch.randn(1000, generator=generator, dtype=torch.float32)
        (module["alike"].float() @ noise + module["cut"].sum()).backward()
        states.flush(0)
        states.finish()
        return gradients_of(states)["alike"].clone()

    first, *others = on_ranks(8, run)
    assert all(torch.equal(first, copy) for copy in others)


def test_the_two_places_of_a_tied_table_stay_bitwise_equal_over_ten_updates() -> None:
    def run(rank: int, world: int) -> Tensor:
        mine = Rank.of(run_of(T0_TIED, pp=2, dp=2))
        for number in range(1, 11):
            mine.step.update(mine.backward(number))
        table = next(w for p, w in mine.weights() if p.placement.tensor.name == "embedding.tokens.weight")
        return table.clone()

    first, *others = on_ranks(4, run)
    assert all(torch.equal(first, table) for table in others)
