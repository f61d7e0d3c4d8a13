"""`count(run, world, ranks)`: the trainer's own step for some ranks of a world of any size, counted, not modelled.

Each rank runs in a process of its own, on fake tensors (shapes without memory) and a process group that
moves nothing; collectives are counted where torch dispatches them. What a step sends is affine in its micro-batches,
so a step of one and a step that fills the pipeline give a long one exactly.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from plait.data import Batch
from plait.models.decoder import Decoder
from plait.parallel import collectives as comm
from plait.parallel.mesh import Mesh
from plait.parallel.parallelize import parallelize
from plait.parallel.traffic import TrafficCounter
from plait.parallel.world import alone
from plait.spec.fit import fit
from plait.spec.layout import Layout
from plait.spec.pipeline import chunks_of
from plait.spec.run import RunSpec
from plait.train.step import Step

Rows = dict[tuple[str, str], tuple[float, float]]  # (axis, operation) -> (calls, bytes sent)


@dataclass(frozen=True)
class Count:
    """One step of one rank: bytes of its model states by kind; by axis and operation, its calls and the bytes it sends.

    `micro_batches` are those of the run, `counted` the numbers of those that were run.
    """

    rank: int
    states: Mapping[str, int]
    collectives: Mapping[str, Mapping[str, Mapping[str, int]]]
    micro_batches: int
    counted: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def count(run: RunSpec, world: int, ranks: Sequence[int], backend: str = "nccl") -> list[Count]:
    """Count a step of each of `ranks`, as if `backend` moved their tensors. Raises InvalidRun for an impossible run."""
    layout = fit(run, world)
    run = run.model_copy(update={"layout": run.layout.model_copy(update={"dp": layout.dp})})
    torch.set_num_threads(1)
    with get_context("fork").Pool(min(len(ranks), os.cpu_count() or 1), maxtasksperchild=1) as pool:
        return pool.starmap(_count, [(run, layout, rank, backend) for rank in ranks], chunksize=1)


def _count(run: RunSpec, layout: Layout, rank: int, backend: str) -> Count:
    micro_batches = run.batch.global_size // (layout.dp * run.batch.micro_size)
    full = layout.pp * chunks_of(run.schedule)  # as many as a pipeline ever holds
    lengths = (1, full) if micro_batches > full > 1 and run.schedule.file is None else (micro_batches,)
    with alone(rank, layout.world):
        mesh = Mesh(layout, "cpu", backend)
        steps = [_step(run, mesh, length) for length in lengths]
    (first, states), (last, _) = steps[0], steps[-1]
    times = (micro_batches - lengths[0]) / (lengths[-1] - lengths[0]) if len(lengths) > 1 else 0.0
    collectives: dict[str, dict[str, dict[str, int]]] = {}
    for key in sorted(last):
        calls, sent = (a + (b - a) * times for a, b in zip(first[key], last[key], strict=True))
        collectives.setdefault(key[0], {})[key[1]] = {"calls": round(calls), "bytes": round(sent)}
    return Count(rank, states, collectives, micro_batches, lengths)


def _step(run: RunSpec, mesh: Mesh, micro_batches: int) -> tuple[Rows, dict[str, int]]:
    """A step of so many micro-batches."""
    rows, length = micro_batches * run.batch.micro_size, run.batch.sequence
    batch = run.batch.model_copy(update={"global_size": rows * mesh.layout.dp})
    run = run.model_copy(update={"batch": batch})
    with FakeTensorMode(), mock.patch.object(comm, "read", lambda x: [1.0] * x.numel()):
        empty = lambda tensor, rectangle: torch.empty([stop - start for start, stop in rectangle])  # noqa: E731
        parallel = parallelize(Decoder(run.model), mesh, run, empty)
        step = Step(run, mesh, parallel)
        tokens = torch.zeros(rows, length, dtype=torch.int64)
        mine = Batch(tokens, tokens, torch.arange(rows), torch.arange(length), None)
        with TrafficCounter(mesh.axes()) as counter:
            step.update(step.backward(1, mine))
        moments = [x for state in step.optimizer.state.values() for x in state.values() if x.ndim]
        states = parallel.states.bytes_held() | {"moments": sum(x.numel() * x.element_size() for x in moments)}
    return {(axis, operation): (calls, sent) for axis, operation, calls, sent in counter.rows()}, states
