"""A run from its first line to its last. `prepare` is the program on one screen, `steps` is its loop as an iterator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from plait.data import Data, batch, batches_in, open_data, rows_of
from plait.models.decoder import Decoder
from plait.parallel import collectives as comm
from plait.parallel.faults import strike
from plait.parallel.mesh import Mesh
from plait.parallel.parallelize import Parallel, parallelize
from plait.parallel.traffic import Traffic, TrafficCounter, total
from plait.parallel.world import World, device_kind, joined_world, on_device
from plait.placement.cuts import Rectangle
from plait.spec.errors import DataError, TrainingStopped, UsageError
from plait.spec.fit import fit
from plait.spec.flops import flops_per_token
from plait.spec.model import TensorSpec
from plait.spec.run import RunSpec
from plait.train.keep import Keeper, keeping
from plait.train.memory import Watch
from plait.train.metrics import Metrics, peak_flops
from plait.train.resume import ANEW, Resumed, Start, begin, places, resume
from plait.train.step import Step


@dataclass
class Training:
    """A run that is ready to step on this rank, after step `done`.

    `traffic`, and what `watch` counts, are known once the first step is done; `keeper` saves it, where it is to be
    saved; `notices` are what its start has to tell.
    """

    run: RunSpec
    world: World
    mesh: Mesh
    data: Data
    parallel: Parallel
    step: Step
    watch: Watch
    done: int = 0
    notices: tuple[str, ...] = ()
    keeper: Keeper | None = None
    traffic: Traffic | None = None


def prepare(run: RunSpec, world: World, start: Start = ANEW) -> Training:
    """Everything that a run needs, on this rank; `start` says what it begins with."""
    layout = fit(run, world.size, node=world.local_size)
    mesh = Mesh(layout, world.device)
    data = open_data(run.data, run.batch.sequence, run.train.seed, run.model.vocab)
    _same_data(data, mesh)
    paths, notices = places(run, mesh.group("world"))
    take_up = _beginning(paths, start, data)
    parallel = parallelize(Decoder(run.model), mesh, run, None if take_up is None else _nothing)
    step = Step(run, mesh, parallel)
    at = Resumed(0, ()) if take_up is None else take_up(step)
    watch = Watch(parallel, mesh.device)
    return Training(run, world, mesh, data, parallel, step, watch, at.step, (*notices, *at.notices))


def _beginning(paths: list[Path], start: Start, data: Data) -> Callable[[Step], Resumed] | None:
    """What takes the place of first values: a checkpoint of the run, else somebody's weights, else nothing does."""
    weights = start.weights
    if paths:
        return lambda step: resume(step, paths, data.fingerprint, start.changes)
    return None if weights is None else lambda step: Resumed(0, (begin(step, weights),))


def _nothing(tensor: TensorSpec, rectangle: Rectangle) -> Tensor:
    """First values of what a checkpoint will fill."""
    return torch.zeros([stop - start for start, stop in rectangle])


def _same_data(data: Data, mesh: Mesh) -> None:
    """Nodes may have caches and files of their own: all ranks must have found the same tokens."""
    found = comm.gather_bytes(data.fingerprint.encode(), mesh.group("world"))
    other = next((rank for rank, fingerprint in enumerate(found) if fingerprint != found[0]), None)
    if other is not None:
        raise DataError(f"rank {other} reads other tokens than rank 0", "give every node the same files (data.files)")


def steps(run: RunSpec) -> Iterator[Metrics]:
    """Train, one `Metrics` per optimizer step: the whole run in this process, or one rank of torchrun's job."""
    device = device_kind(run.train.device)
    world = joined_world(device)
    joins = world is not None and not dist.is_initialized()
    if world is not None and joins:
        world.join()
    try:
        training = prepare(run, world or World(0, 1, 0, on_device(device, 0)))
        with keeping(run, training.mesh, _kept_in(run), training.data.fingerprint) as training.keeper:
            yield from train_steps(training)
    except (Exception, KeyboardInterrupt):
        joins = False  # to leave in order would wait for ranks that do not come
        raise
    finally:
        if world is not None and joins:
            world.leave()


def _kept_in(run: RunSpec) -> Path | None:
    if run.checkpoint.every and run.train.run_dir is None:
        raise UsageError(f"checkpoint.every is {run.checkpoint.every}, and train.run_dir is not set", "set it")
    return Path(run.train.run_dir) if run.checkpoint.every and run.train.run_dir else None


def train_steps(training: Training) -> Iterator[Metrics]:
    """The loop over a prepared run. Raises Interrupted once a run that was asked to stop is saved."""
    run, step, keeper = training.run, training.step, training.keeper
    for number in range(training.done + 1, run.train.steps + 1):
        try:
            metrics = _one_step(training, number)
        except TrainingStopped:  # on all ranks: what was being saved is still good
            if keeper is not None:
                keeper.settle()
            raise
        due = number == run.train.steps or (run.train.eval_every and number % run.train.eval_every == 0)
        wanted = due and not step.stopping
        yield replace(metrics, eval_loss=evaluate(training, number)) if wanted else metrics
        if keeper is not None:
            keeper.after(step, number, metrics.loss, training.world)


def _one_step(training: Training, number: int) -> Metrics:
    run, mesh, step = training.run, training.mesh, training.step
    start = perf_counter()
    training.world.progress(number, "data")
    strike(mesh.rank, number, "data")
    rows = rows_of(run.batch.global_size, mesh.at.dp, mesh.layout.dp)
    mine = batch(training.data.train, 0, run.batch.global_size, rows, before=step.samples)

    training.world.progress(number, "forward")
    with _counted(training):
        with training.watch():
            sums = step.backward(number, mine)
        training.world.progress(number, "update")
        lr = step.update(sums)
    seconds = perf_counter() - start
    tokens = run.batch.global_size * run.batch.sequence
    peak = peak_flops(mesh.device, run.precision.compute)
    flops = flops_per_token(run.model, run.batch.sequence).training * tokens
    mfu = None if peak is None else flops / seconds / (peak * mesh.layout.world)
    scale = step.scale.value if step.scale.dynamic else None
    rates = seconds, tokens / seconds, mfu
    return Metrics(
        number, sums.loss, sums.norm, lr, sums.labels, step.updates, *rates,
        loss_scale=scale, auxiliary=dict(sums.auxiliary), experts=dict(sums.experts),
    )  # fmt: skip


@contextmanager
def _counted(training: Training) -> Iterator[None]:
    """Count the communication of the first step; later ones run without a look."""
    if training.traffic is not None:
        yield
        return
    with TrafficCounter(training.mesh.axes()) as counter:
        yield
    training.traffic = total(counter, training.mesh.group("world"))


def evaluate(training: Training, number: int) -> float | None:
    """Mean loss (nats/token) over the first `eval_batches` global batches held out; None where nothing is."""
    run, mesh, held_out = training.run, training.mesh, training.data.validation
    if held_out is None or run.train.eval_batches == 0:
        return None
    rows = rows_of(run.batch.global_size, mesh.at.dp, mesh.layout.dp)
    training.world.progress(number, "evaluate")
    strike(mesh.rank, number, "evaluate")
    loss, count = 0.0, 0
    for index in range(min(run.train.eval_batches, batches_in(held_out, run.batch.global_size))):
        total_loss, labels = training.step.evaluate(batch(held_out, index, run.batch.global_size, rows))
        if training.step.stopping:
            return None
        loss, count = loss + total_loss, count + labels
    return loss / count if count else None
