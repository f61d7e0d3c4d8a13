"""The pipelines that sleep: plait's orders are no longer and hold no more than the peer's, by the peer's own lists."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from benchmarks.contest import PIPELINES, Turns, sleeping
from benchmarks.peers import SCHEDULES
from benchmarks.sleeping import Naps, Order, by_the_book, summed, theirs
from benchmarks.table import table
from benchmarks.verdict import judge
from plait.schedule import Schedule, generate

NAPS = Naps()
ASLEEP = [(name, each) for name, each in PIPELINES if name != "gpipe"]


def peers_order(name: str, shape: Schedule) -> Schedule:
    """The list that the peer makes for a pipeline of this shape: of its stages it asks the place, and nothing else."""
    made = SCHEDULES[name]
    if not issubclass(made, PipelineScheduleMulti):
        return by_the_book(shape)
    held = [
        Mock(num_stages=shape.stages, group_size=shape.ranks, group_rank=0, stage_index=stage, submod=nn.Module())
        for stage in shape.held_by(0)
    ]
    return theirs(made(held, shape.micro_batches, loss_fn=summed), shape.owner)


@pytest.mark.parametrize(("name", "each"), ASLEEP)
@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.proof)])
def test_an_order_is_no_longer_and_holds_no_more_than_the_peers(name: str, each: int, ranks: int) -> None:
    shape = generate(name, ranks, each * ranks)
    ours, other = (Order.of(order, NAPS) for order in (shape, peers_order(name, shape)))
    assert ours.seconds <= other.seconds + 1e-9
    assert all(mine <= yours for mine, yours in zip(ours.live, other.live, strict=True))


def test_the_peers_list_is_read_whole() -> None:
    shape = generate("dualpipe-v", 2, 4)
    read = peers_order("dualpipe-v", shape)
    assert [[str(action) for action in program] for program in read.programs] == [
        [str(action) for action in program] for program in shape.programs
    ]


def test_a_row_of_the_table_has_both_simulated_times_and_both_peaks() -> None:
    contest = sleeping("zb-v", 2)(4)
    seconds = {"plait": [0.52] * 7, "peer": [0.65] * 7}
    orders = {"plait": Order(0.51, (7, 8, 8, 8)), "peer": Order(0.53, (9, 8, 8, 8))}
    written = table([judge(contest, Turns(seconds, seconds, {"plait": 0.0}, orders=orders), NAPS, steps=1)])
    assert "| zb-v, 8 micro-batches | 4 | ScheduleZBVZeroBubble | 520 | 650 | 510 / 530 | 1.25" in written
    assert "| 8 / 9 | 7 |" in written
    assert "every stage sleeps F 10 ms, B 10 ms, W 10 ms, messages of 64 KB" in written
