"""Both sides of every benchmark do the same work: equal gradients, and a floor that waits but sends nothing."""

from dataclasses import replace
from time import perf_counter, sleep

import pytest
import torch

from benchmarks.contest import CONTESTS, hold
from benchmarks.floor import Floor, Pipes
from benchmarks.peak import peak_bytes
from benchmarks.peers import PipeliningFloor, PlainLoop
from benchmarks.plait_side import Plait
from benchmarks.tensor_peer import llama_names
from benchmarks.work import TINY, Size
from plait.parallel.launch import World, launch
from plait.parallel.traffic import TrafficCounter
from plait.spec.errors import RankFailed

KINDS = [(name, contest) for name, (made, _) in CONTESTS.items() for contest in made]
SPLITS = {
    "dp": {"dp": 2},
    "zero 1": {"dp": 2, "zero": 1},
    "zero 2": {"dp": 2, "zero": 2},
    "zero 3": {"dp": 2, "zero": 3},
    "tp": {"tp": 2},
    "tp, sequence": {"tp": 2, "sequence_parallel": True},
    "pp": {"pp": 2, "micro_batches": 4},
}


MEETING = [make(1 if name == "one" else 2) for name, make in KINDS]
QUICK = {"pp-1f1b-4p-2"}  # the others take a minute together, most of it in the peers' own first step
SLOW_TO_IMPORT = pytest.mark.timeout(600)


def marks(contest):
    return [*([pytest.mark.proof] if contest.key not in QUICK else []), *([SLOW_TO_IMPORT] if contest.needs else [])]


def test_the_quick_contests_are_held():
    assert {contest.key for contest in MEETING} >= QUICK


@pytest.mark.parametrize("contest", [pytest.param(c, id=c.key, marks=marks(c)) for c in MEETING])
def test_both_sides_have_equal_gradients(contest):
    if contest.needs is not None:
        pytest.importorskip(contest.needs, reason="an optional peer: benchmarks/requirements-peers.txt")
    turns = hold(contest, contest.tiny, rounds=1, steps=1)
    assert max(turns.gradient_error.values()) <= 1e-5
    assert set(turns.gradient_error) == {s for s in contest.sides if s != "peer" and not s.startswith("floor")}
    assert all(len(times) == 1 and times[0] > 0 for times in turns.seconds.values())
    assert set(turns.peak_bytes) == ({"plait", "peer"} if contest.memory is not None else set())


def test_a_side_that_computes_something_else_is_refused():
    contest = CONTESTS["dp"][0][0](2)
    alone = replace(contest, sides=contest.sides | {"peer": lambda size, world, _: PlainLoop(size, world)})
    with pytest.raises(RankFailed, match="gradients of plait and peer differ most at"):
        hold(alone, TINY, rounds=1, steps=1)


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_a_floor_sends_nothing_that_plait_sends(split):
    pipes = Pipes(2)

    def sent(world: World) -> tuple[bool, bool]:
        counted = []
        for side in (Plait(TINY, TINY.run(**split), world), Floor(TINY, TINY.run(**split), world, pipes)):
            with TrafficCounter(side.mesh.axes()) as counter:
                side.backward()
            side.update()
            counted.append(bool(counter.rows()))
        return counted[0], counted[1]

    assert launch(2, sent, threads=1) == [(True, False)] * 2
    pipes.close()


def test_peak_memory_is_what_a_side_adds_at_its_highest_moment():
    mib = 2**20

    class Hungry:
        def __init__(self, size):
            self.held = torch.ones(8 * mib // 4)
            self.asked = 0 if size is TINY else 32 * mib // 4

        def backward(self):
            torch.ones(self.asked)

        def update(self):
            pass

    peaks = peak_bytes(2, lambda size, world, pipes: Hungry(size), Size())
    assert all(39.5 * mib <= peak <= 42 * mib for peak in peaks)


@pytest.mark.parametrize("made_by", ["plait", "peer"])
def test_the_floor_of_a_pipeline_keeps_its_bubble(made_by):
    pipes = Pipes(2)

    def spent(world: World) -> float:
        if made_by == "plait":
            floor = Floor(TINY, TINY.run(pp=2, micro_batches=4), world, pipes)
            model = next(iter(floor.parallel.stages.values())).module
        else:
            floor = PipeliningFloor(TINY, world, pipes, "1f1b", 4)
            model = floor.models[0]
        floor.backward()
        if world.rank == 0:
            model.rotary.register_forward_pre_hook(lambda *_: sleep(0.1))
        start = perf_counter()
        floor.backward()
        return perf_counter() - start

    # The last stage sleeps nowhere, but its last micro-batch comes out of four slow ones.
    assert launch(2, spent, threads=1)[1] >= 0.4
    pipes.close()


def test_the_llama_of_the_tensor_peer_has_the_same_tensors():
    assert set(llama_names(TINY.model)) == {tensor.name for tensor in TINY.model.parameters()}
