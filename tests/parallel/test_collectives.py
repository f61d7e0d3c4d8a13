"""Collectives are their definitions, forward and backward, and nothing at all in a group of one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from plait.parallel import collectives as comm
from plait.parallel.collectives import Group
from plait.parallel.mesh import Mesh
from plait.spec.layout import Layout
from tests.launching import on_ranks

ALONE = Group("tp", (0,), 0)
SIZE = 3


def piece(rank: int) -> Tensor:
    """(2, 6, 5), different on each rank, integers so that sums are exact."""
    return torch.arange(60.0).view(2, 6, 5) * (rank + 1) + rank


def test_functional_pairs_are_their_definitions_along_the_sequence() -> None:
    def run(rank: int, world: int) -> list[Tensor]:
        group = Mesh(Layout(tp=SIZE)).group("tp")
        x = piece(rank)
        return [
            comm.finish_all_gather(comm.start_all_gather(x, group), group),
            comm.finish_reduce_scatter(comm.start_reduce_scatter(x, group), group),
            comm.finish_all_reduce(comm.start_all_reduce(x, group), group),
            comm.all_reduce(x, group, "max"),
            comm.sum_in_place(x.clone(), group).wait(),
        ]

    pieces = [piece(rank) for rank in range(SIZE)]
    total = torch.stack(pieces).sum(0)
    for rank, (gathered, scattered, summed, highest, in_place) in enumerate(on_ranks(SIZE, run)):
        assert torch.equal(gathered, torch.cat(pieces, dim=1))
        assert torch.equal(scattered, total.chunk(SIZE, dim=1)[rank])
        assert torch.equal(summed, total) and torch.equal(in_place, total)
        assert torch.equal(highest, torch.stack(pieces).amax(0))


def test_shards_of_a_sum_and_the_whole_of_shards_are_their_definitions() -> None:
    """Flat buffers; a shard may stand by itself or already be in its place."""

    def run(rank: int, world: int) -> list[Tensor]:
        group = Mesh(Layout(dp=SIZE)).group("dp")
        flat = piece(rank).flatten()
        summed = comm.sum_to_shards(flat.clone(), group).wait()
        apart = comm.gather_shards(torch.zeros(60), summed, group).wait()
        inside = torch.zeros(60)
        place = inside.chunk(SIZE)[rank].copy_(summed)
        return [summed, apart, comm.gather_shards(inside, place, group).wait()]

    total = torch.stack([piece(rank) for rank in range(SIZE)]).sum(0).flatten()
    for rank, (summed, apart, inside) in enumerate(on_ranks(SIZE, run)):
        assert torch.equal(summed, total.chunk(SIZE)[rank])
        assert torch.equal(apart, total) and torch.equal(inside, total)


def test_nothing_goes_to_gloo_under_a_name_that_its_threads_would_free_twice() -> None:
    """A coalesced operation's name is too long to live inside the string that both threads of a group write to."""

    def run(rank: int, world: int) -> set[str]:
        group = Mesh(Layout(tp=SIZE)).group("tp")
        x, ones = piece(rank).flatten(0, 1)[:SIZE].contiguous(), [1] * SIZE
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            comm.finish_all_gather(comm.start_all_gather(piece(rank), group), group)
            comm.finish_reduce_scatter(comm.start_reduce_scatter(piece(rank), group), group)
            comm.finish_shift(comm.start_shift(x, group), group)
            comm.finish_exchange(comm.start_exchange(x, ones, ones, group), group)
            comm.all_reduce(x, group)
            comm.sum_in_place(x, group).wait()
            comm.gather_shards(torch.zeros(x.numel()), comm.sum_to_shards(x.flatten(), group).wait(), group).wait()
        return {event.key for event in seen.key_averages() if event.key.startswith("c10d::")}

    for seen in on_ranks(SIZE, run):
        assert {"c10d::_allgather_base_", "c10d::alltoall_base_", "c10d::allreduce_"} <= seen
        assert not {name for name in seen if "coalesced" in name}


def test_a_group_of_one_is_the_identity_and_asks_torch_for_nothing() -> None:
    x = piece(0)
    assert comm.finish_all_gather(comm.start_all_gather(x, ALONE), ALONE) is x
    assert comm.finish_reduce_scatter(comm.start_reduce_scatter(x, ALONE), ALONE) is x
    assert comm.all_reduce(x, ALONE) is x and comm.sum_partial(x, ALONE) is x and comm.scatter_partial(x, ALONE) is x
    assert comm.sum_in_place(x, ALONE).wait() is x
    assert comm.gather_bytes(b"text", ALONE) == [b"text"]


def test_the_gradient_through_a_sum_is_not_multiplied_by_the_ranks() -> None:
    """y = Σ over ranks of w·x with w = 2 on both and x = 1, 3: y is 8, and dy/dw is 1 + 3 once copies are summed."""

    def run(rank: int, world: int) -> tuple[float, float, float]:
        group = Mesh(Layout(tp=2)).group("tp")
        w = torch.tensor([2.0], requires_grad=True)
        y = comm.sum_partial(w * [1.0, 3.0][rank], group)
        y.sum().backward()  # the loss is the same on each rank
        assert w.grad is not None
        own = w.grad.item()
        return y.item(), own, comm.all_reduce(w.grad, group).item()

    assert on_ranks(2, run) == [(8.0, 1.0, 4.0), (8.0, 3.0, 4.0)]


def test_the_gradient_of_a_scattered_sum_is_gathered_once() -> None:
    def run(rank: int, world: int) -> Tensor:
        group = Mesh(Layout(tp=2)).group("tp")
        x = piece(rank).requires_grad_()
        (comm.scatter_partial(x, group) * (rank + 1)).sum().backward()
        assert x.grad is not None
        return x.grad

    expected = torch.cat([torch.ones(2, 3, 5), torch.full((2, 3, 5), 2.0)], dim=1)
    assert all(torch.equal(gradient, expected) for gradient in on_ranks(2, run))


def test_messages_between_two_ranks_cross_without_waiting_for_each_other() -> None:
    def run(rank: int, world: int) -> Tensor:
        group = Mesh(Layout(pp=2)).group("pp")
        sent = comm.send(piece(rank), group, 1 - rank)
        received = comm.receive(torch.empty(2, 6, 5), group, 1 - rank).wait()
        sent.wait()
        return received

    assert [torch.equal(got, piece(1 - rank)) for rank, got in enumerate(on_ranks(2, run))] == [True, True]


def test_rank_0_gathers_pieces_of_different_length_and_every_rank_gets_every_report() -> None:
    sizes = [3, 1, 2]

    def run(rank: int, world: int) -> tuple[list[Tensor], list[bytes]]:
        group = Mesh(Layout(dp=3)).group("world")
        pieces = comm.gather_to_first(torch.full((sizes[rank],), float(rank)), sizes, group)
        return pieces, comm.gather_bytes(b"x" * sizes[rank], group)

    results = on_ranks(3, run)
    assert [p.tolist() for p in results[0][0]] == [[0.0] * 3, [1.0], [2.0] * 2]
    assert [pieces for pieces, _ in results[1:]] == [[], []]
    assert all(reports == [b"xxx", b"x", b"xx"] for _, reports in results)


def test_a_pipeline_has_a_communicator_for_each_direction() -> None:
    def run(rank: int, world: int) -> list[str]:
        mesh = Mesh(Layout(pp=2))
        groups = [mesh.group("pp", purpose) for purpose in ("activation", "gradient", "activation")]
        return [group.handle for group in groups]

    there, back, again = on_ranks(2, run)[0]
    assert there == again != back


@pytest.mark.parametrize("order", [("pp", "dp", "cp", "tp"), ("dp", "pp", "cp", "tp")])
def test_a_group_is_made_of_the_ranks_that_the_layout_names(order: tuple[str, ...]) -> None:
    layout = Layout(tp=2, pp=2, dp=2, order=order)

    def run(rank: int, world: int) -> dict[str, list[int]]:
        mesh, found = Mesh(layout), {}
        for name in ("tp", "pp", "dp", "tied", "world"):
            present = torch.zeros(world)
            present[rank] = 1
            comm.sum_in_place(present, mesh.group(name)).wait()
            found[name] = present.nonzero().flatten().tolist()
        return found

    for rank, found in enumerate(on_ranks(8, run)):
        assert found == {name: sorted(layout.group(name, rank)) for name in found}
