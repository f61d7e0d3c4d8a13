"""`count(run, world, ranks)`: the trainer's own step for some ranks of a world of any size, counted, not modelled.

Each rank runs in a process of its own, on fake tensors (shapes without memory) and a process group that
moves nothing; collectives are counted where torch dispatches them, and bytes where tensors are born. Two short steps
stand for a long one (`planner/steady.py` says when).
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
from plait.planner.steady import activations_extrapolated, counted_lengths, extrapolated
from plait.proof.even import routed_evenly
from plait.spec.fit import fit
from plait.spec.layout import Layout
from plait.spec.run import RunSpec
from plait.train.memory import RankMemory, Watch
from plait.train.step import Step

Rows = dict[tuple[str, str], tuple[float, float]]  # (axis, operation) -> (calls, bytes sent)


@dataclass(frozen=True)
class Count:
    """One step of one rank: bytes of its model states by kind, and beside them at the peak `activations` (with what a
    backward pass works with) and `buffers` (gathered weights, gradients on their way); by axis and operation, its calls
    and the bytes it sends.

    `micro_batches` are those of the run, `counted` the numbers of those that were run.
    """

    rank: int
    states: Mapping[str, int]
    activations: int
    buffers: int
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
    micro_batches = run.batch.micro_batches(layout.dp)
    lengths = counted_lengths(run, layout, rank, micro_batches)
    with alone(rank, layout.world):
        mesh = Mesh(layout, "cpu", backend)
        steps = [_step(run, mesh, length) for length in lengths]
    (first, held), (last, most) = steps[0], steps[-1]
    collectives: dict[str, dict[str, dict[str, int]]] = {}
    for key in sorted(last):
        calls, sent = (
            round(extrapolated(lengths, found, micro_batches)) for found in zip(first[key], last[key], strict=True)
        )
        collectives.setdefault(key[0], {})[key[1]] = {"calls": calls, "bytes": sent}
    states = {kind: getattr(most, kind) for kind in ("weights", "gradients", "master", "moments")}
    peaks = held.activations, most.activations
    activations = activations_extrapolated(run, layout, lengths, peaks, micro_batches)
    return Count(rank, states, activations, most.buffers, collectives, micro_batches, lengths)


class _Shapes(FakeTensorMode):
    """Tensors without memory, of which those that a collective was given and returns are still the same."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = comm.GIVEN.get(func)
        if given is not None:
            return given(args, kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _step(run: RunSpec, mesh: Mesh, micro_batches: int) -> tuple[Rows, RankMemory]:
    """A step of so many micro-batches."""
    rows, length = micro_batches * run.batch.micro_size, run.batch.sequence
    batch = run.batch.model_copy(update={"global_size": rows * mesh.layout.dp})
    run = run.model_copy(update={"batch": batch})
    with _Shapes(), routed_evenly(), mock.patch.object(comm, "read", lambda x: [1.0] * x.numel()):
        empty = lambda tensor, rectangle: torch.empty([stop - start for start, stop in rectangle])  # noqa: E731
        parallel = parallelize(Decoder(run.model), mesh, run, empty)
        step = Step(run, mesh, parallel)
        tokens = torch.zeros(rows, length, dtype=torch.int64)
        places = torch.zeros(rows, length, dtype=torch.int64) if run.data.mask_documents else torch.arange(length)
        mine = Batch(tokens, tokens, torch.arange(rows), places, places if run.data.mask_documents else None)
        watch = Watch(parallel, mesh.device)
        with TrafficCounter(mesh.axes()) as counter:
            with watch():
                sums = step.backward(1, mine)
            step.update(sums)
        memory = watch.memory(step.optimizer)
    return {(axis, operation): (calls, sent) for axis, operation, calls, sent in counter.rows()}, memory
