"""The search is never worse than a named schedule, keeps the limit, and finds what the named ones leave."""

from __future__ import annotations

import pytest

from plait.schedule import Costs, check, live, lower
from plait.schedule.search import Memory, Task, named, search, seconds
from plait.spec.errors import UsageError
from plait.spec.pipeline import owners

Pass = list[float]


def task(
    owner: tuple[int, ...], micro_batches: int, passes: tuple[Pass, Pass, Pass], limit: int, link: float = 0.0
) -> Task:
    """One unit of memory for each stage and micro-batch from F to W; `limit` units on each rank."""
    f, b, w = map(tuple, passes)
    stages = len(owner)
    memory = Memory((1,) * stages, (1,) * stages, (limit,) * (max(owner) + 1))
    return Task(owner, micro_batches, Costs(f, b, w, link=(link,) * (stages - 1)), memory)


def alike(*costs: float) -> tuple[Pass, Pass, Pass]:
    """F, B and W of each stage equally long."""
    return list(costs), list(costs), list(costs)


LINE4, LINE8, LOOP4 = owners(4, 1, False), owners(8, 1, False), owners(4, 2, False)
V4, V8 = owners(4, 2, True), owners(8, 2, True)
HEAD = alike(*[1.0] * 15, 2.0)  # the head makes the last stage twice as long

# Ten cases: a name, the task. 1F1B holds 4 or 8 units on a line, twice as many in half stages of a V.
CASES = {
    "4 ranks, slow links": task(LINE4, 8, alike(*[1.0] * 4), 6, link=0.5),
    "8 ranks, slow links": task(LINE8, 16, alike(*[1.0] * 8), 12, link=0.3),
    "4 ranks, unequal passes": task(LINE4, 8, ([1.0] * 4, [1.3] * 4, [0.7] * 4), 6),
    "8 ranks, unequal passes, slow links": task(LINE8, 16, ([1.0] * 8, [1.1] * 8, [0.7] * 8), 12, link=0.1),
    "a slow second stage": task(LINE4, 8, alike(1.0, 1.6, 1.0, 1.0), 5),
    "a loop of 4 ranks": task(LOOP4, 8, alike(*[1.0] * 8), 11),
    "a V of 4 ranks, 0.75 of 1F1B's memory": task(V4, 8, ([1.0] * 8, [1.2] * 8, [0.8] * 8), 6),
    "a V of 8 ranks, 0.75 of 1F1B's memory": task(V8, 16, alike(*[1.0] * 16), 12),
    "unequal stages in a V, 0.75 of 1F1B's memory": task(V8, 16, alike(*[0.8, 1.2] * 8), 12),
    "a V with a head, 0.75 of 1F1B's memory": task(V8, 16, HEAD, 12),
}


def best_named(asked: Task) -> float:
    """Seconds of the best named schedule of the same placement that keeps the limit."""
    fits = [s for s in named(asked.owner, asked.micro_batches) if asked.memory.allows(s)]
    return min(seconds(schedule, asked.costs) for schedule in fits)


def gain(asked: Task) -> float:
    """How much longer the best named schedule takes than what was found, which is checked for what it promises."""
    found = search(asked)
    schedule = check(lower(found.schedule))
    held = live(schedule, asked.memory.forward, asked.memory.weight)
    assert all(rank.total <= limit for rank, limit in zip(held, asked.memory.limit, strict=True))
    assert found.seconds == seconds(found.schedule, asked.costs) <= best_named(asked)
    return best_named(asked) / found.seconds - 1


@pytest.mark.parametrize("name", ["4 ranks, slow links", "a V of 4 ranks, 0.75 of 1F1B's memory"])
def test_a_found_schedule_is_at_least_3_percent_shorter(name: str) -> None:
    assert gain(CASES[name]) >= 0.03


@pytest.mark.proof
def test_8_of_10_found_schedules_are_at_least_3_percent_shorter_and_none_is_longer() -> None:
    gains = {name: gain(asked) for name, asked in CASES.items()}
    print(*(f"{gain:6.1%}  {name}" for name, gain in gains.items()), sep="\n")
    assert sum(gain >= 0.03 for gain in gains.values()) >= 8


@pytest.mark.parametrize("costs", [alike(1.0, 1.0), alike(1.0, 3.0), ([1.0, 2.0], [2.0, 1.0], [0.5, 0.5])])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("chunks", [1, 2])
def test_it_is_never_worse_than_a_named_schedule(
    costs: tuple[Pass, Pass, Pass], micro_batches: int, chunks: int
) -> None:
    f, b, w = (times * chunks for times in costs)
    assert gain(task(owners(2, chunks, folded=chunks == 2), micro_batches, (f, b, w), limit=6, link=0.25)) >= 0


def test_the_same_question_has_the_same_answer() -> None:
    asked = task(owners(2, 1, False), 4, alike(1.0, 1.5), 2, link=0.5)
    assert search(asked) == search(asked)


def test_a_limit_below_one_micro_batch_is_refused_with_what_is_needed() -> None:
    small = task(LINE4, 4, alike(*[1.0] * 4), 1)
    with pytest.raises(UsageError, match=r"limit of 0 lets no micro-batch come through[^$]*allow 1"):
        search(small._replace(memory=Memory((1,) * 4, (1,) * 4, (0,) * 4)))
