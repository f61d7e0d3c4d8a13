"""One rank's whole job: train, tell the sinks, and say at the end what came of it. Only rank 0 speaks and writes."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from plait.data import announce_repetition
from plait.models.decoder import Decoder
from plait.models.hf import load_weights
from plait.models.sample import sample
from plait.parallel import collectives as comm
from plait.parallel.precision import DTYPES, Dtypes
from plait.parallel.weights import gather_buffers, gather_whole, pieces_held
from plait.parallel.world import World
from plait.schedule import Span, Timeline
from plait.schedule.trace import trace
from plait.spec.load import RUN_FILE, dump
from plait.spec.run import RunSpec
from plait.spec.units import format_bytes, format_count
from plait.train.keep import heeding_signals, keeping
from plait.train.loop import Training, prepare, train_steps
from plait.train.memory import in_words
from plait.train.metrics import Metrics, Summary, peak_memory
from plait.train.resume import ANEW, Start
from plait.train.sinks import Sink, open_sinks

PROMPT = "def "  # what a sample begins with


def train(world: World, run: RunSpec, folder: Path | None, start: Start = ANEW) -> Summary | None:
    """Train on this rank of the world; rank 0 gets the summary. `folder` is the run's directory, made already.

    `start` says what it begins with. Raises Interrupted once a run that was
    asked to stop is saved.
    """
    training = prepare(run, world, start)
    if world.rank == 0:
        for line in _opening(training):
            print(line, file=sys.stderr, flush=True)
    history: list[Metrics] = []
    with (
        keeping(run, training.mesh, folder, training.data.fingerprint) as training.keeper,
        _sinks(training, folder) as sinks,
        heeding_signals(training.step, world),
    ):
        if folder is not None and world.rank == 0:
            (folder / RUN_FILE).write_text(dump(run), encoding="utf-8")
        for metrics in train_steps(training):
            history.append(metrics)
            for sink in sinks:
                sink.write(metrics, peak_memory(training.mesh.device))
    _record_spans(training, folder)
    return _summary(training, history, folder)


@contextmanager
def _sinks(training: Training, folder: Path | None) -> Iterator[list[Sink]]:
    if training.world.rank > 0:
        yield []
        return
    with open_sinks(training.run, folder, training.done) as sinks:
        yield sinks


def _opening(training: Training) -> list[str]:
    """What a run says before its first step: sizes, split, precision, data."""
    run, layout, data = training.run, training.mesh.layout, training.data
    axes = " × ".join(f"{axis} {getattr(layout, axis)}" for axis in layout.order)
    micro_batches = training.step.schedule.micro_batches
    repetition = announce_repetition(data.train, run.train.steps, run.batch.global_size)
    return [
        f"model: {run.model.family}, {format_count(run.model.parameter_count())} parameters",
        f"layout: {layout.world} ranks = {axes}{', sequence parallel' if layout.sequence_parallel else ''}; "
        f"schedule {run.schedule.name}, {micro_batches} micro-batches of {run.batch.micro_size} × {run.batch.sequence}",
        f"precision: {Dtypes.of(run.precision)}",
        data.summary,
        *data.notices,
        *([repetition] if repetition else []),
        *training.notices,
    ]


def _record_spans(training: Training, folder: Path | None) -> None:
    """spans.jsonl, and trace.json for Perfetto: the last step's actions of every rank.

    One clock on one machine; each node has its own beyond.
    """
    mesh = training.mesh
    if not training.step.spans:  # nothing was left to do
        return
    mine = [span.row() for span in training.step.spans]
    everyone = comm.gather_bytes(json.dumps(mine).encode(), mesh.group("world"))
    if folder is None or mesh.rank > 0:
        return
    rows = [{"rank": rank, **span} for rank, content in enumerate(everyone) for span in json.loads(content)]
    (folder / "spans.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    measured = Timeline.of([Span.from_row(span) for span in json.loads(content)] for content in everyone)
    (folder / "trace.json").write_text(json.dumps(trace({"measured": measured})), encoding="utf-8")


def _summary(training: Training, history: list[Metrics], folder: Path | None) -> Summary | None:
    run, mesh = training.run, training.mesh
    memory = training.watch.memory(training.step.optimizer)
    mine = {"peak": peak_memory(mesh.device), "memory": memory.as_dict()}
    ranks = [json.loads(content) for content in comm.gather_bytes(json.dumps(mine).encode(), mesh.group("world"))]
    text = _sample(training) if run.train.sample else None
    if mesh.rank > 0:
        return None
    steady = history[1:] or history  # the first step is counted and warms up
    evaluated = history[-1].eval_loss if history else None
    return Summary(
        steps=training.done + len(history),
        loss_first=history[0].loss if history else math.nan,
        loss_last=history[-1].loss if history else math.nan,
        eval_loss=evaluated,
        tokens_per_second=len(steady) / sum(1 / m.tokens_per_second for m in steady) if history else math.nan,
        parameters=run.model.parameter_count(),
        layout=mesh.layout.model_dump(),
        world=mesh.layout.world,
        peak_memory_bytes=[rank["peak"] for rank in ranks],
        memory=[rank["memory"] for rank in ranks],
        collectives=training.traffic or {},
        run_dir=None if folder is None else str(folder),
        bigram_loss=training.data.bigram() if evaluated is not None else None,
        sample=text,
        first=training.done + 1,
    )


def _sample(training: Training) -> str | None:
    """Some text from the trained weights, gathered on rank 0 into a model of one device."""
    run, mesh, data = training.run, training.mesh, training.data
    owned = pieces_held(training.parallel.placements, sharded=run.zero.stage == 3)
    whole = gather_whole(training.parallel.states.weights(), owned, mesh, all_copies=False)
    whole |= gather_buffers(training.parallel.buffers, training.parallel.placements, mesh)
    if mesh.rank > 0:
        return None
    model = Decoder(run.model, mesh.device, DTYPES[run.precision.compute])
    load_weights(model, whole)
    prompt = torch.tensor([data.encode(PROMPT)], device=mesh.device)
    generator = torch.Generator(mesh.device).manual_seed(run.train.seed)
    return data.decode(sample(model, prompt, run.train.sample, 0.8, generator)[0].tolist())


def closing(summary: Summary) -> list[str]:
    """The end of a run in words."""
    done = f"{summary.steps} steps" if summary.first == 1 else f"steps {summary.first} to {summary.steps}"
    lines = [f"{done}, loss {summary.loss_first:.4f} to {summary.loss_last:.4f}"]
    if summary.eval_loss is not None:
        bigram = "" if summary.bigram_loss is None else f" (a bigram table: {summary.bigram_loss:.4f})"
        lines.append(f"validation loss {summary.eval_loss:.4f} nats/token{bigram}")
    peak = max(summary.peak_memory_bytes)
    lines.append(f"{format_count(summary.tokens_per_second)} tokens/s, at most {format_bytes(peak)} a rank")
    lines += in_words(summary.memory)
    if summary.run_dir is not None:
        lines.append(f"in {summary.run_dir}")
    if summary.sample is not None:
        lines += ["", summary.sample]
    return lines
