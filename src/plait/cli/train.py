"""`plait train`: the run itself, on local processes or as one rank of the job that torchrun started.

Torch is imported inside the command, so that its help needs none.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.checkpoint.shelf import newest
from plait.cli.run import Json, Words, changed_by, need_torch, read_run, settled, to_json
from plait.spec.errors import RankFailed, UsageError
from plait.spec.families import from_hf_config
from plait.spec.fit import fit
from plait.spec.load import RUN_FILE, dump
from plait.spec.model import ModelSpec
from plait.spec.run import RunSpec

if TYPE_CHECKING:
    from plait.train.metrics import Summary
    from plait.train.resume import Start

MOST_UNASKED = 64  # local ranks


def train(
    words: Words = None,
    nproc: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Local processes; default: the product of the axes.", show_default=False),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="DIR",
            show_default=False,
            help="Begin with the model and weights of a Hugging Face directory or a checkpoint.",
        ),
    ] = None,
    restarts: Annotated[
        int, typer.Option(min=0, metavar="N", help="Start failed local ranks again, from the newest checkpoint.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Train a model on any split. Under torchrun the same command joins the job that is there.

    Exit codes: 0 done, 1 a rank failed, 2 a mistake in what was asked, 3 training stopped itself (a loss that is not
    finite), 130 and 143 stopped and saved after Ctrl-C and SIGTERM.
    """
    theirs = None if start is None else _model_in(start)
    run = read_run(words, theirs)
    if theirs is not None:
        _refuse_another_model(run.model, ModelSpec.model_validate(theirs), start)
    world = (
        int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else nproc
    )  # torchrun has set the one, the user the other
    run = settled(run, world)
    layout = fit(run, world, train=True)  # every mistake in the run is told before torch is even imported
    if world is None and layout.world > MOST_UNASKED:
        raise UsageError(
            f"{layout.world} ranks are asked for, and without a word at most {MOST_UNASKED} are forked on one machine",
            f"start it under torchrun, or insist with --nproc {layout.world}",
        )
    need_torch("plait train")
    from plait.parallel.world import device_kind, joined_world, run_here
    from plait.train.job import closing
    from plait.train.job import train as train_rank
    from plait.train.resume import Start

    device = device_kind(run.train.device)
    joined = joined_world(device)
    if joined is not None and restarts:
        raise UsageError("--restarts starts local ranks again, and these are torchrun's", "torchrun --max-restarts")
    first = joined is None or joined.rank == 0
    folder = _make_folder(run) if first else None
    how = Start(start, changed_by(words))
    if joined is not None:
        summary = run_here(joined, train_rank, run, folder, how)
    else:
        summary = _launch(Job(run, layout.world, folder, how, device), restarts)
    if summary is not None:
        print(to_json(summary.as_dict()) if as_json else "\n".join(closing(summary)))


@dataclass(frozen=True)
class Job:
    """What is started, and started again, on local ranks."""

    run: RunSpec
    world: int
    folder: Path | None
    start: Start
    device: str


def _model_in(start: Path) -> Mapping[str, Any]:
    """The model of a Hugging Face directory or a checkpoint, as the table of a run file."""
    if (start / "config.json").exists():
        try:
            return from_hf_config(json.loads((start / "config.json").read_text("utf-8"))).model_dump()
        except ValueError as error:
            raise UsageError(f"{start / 'config.json'}: not JSON: {error}") from error
    found: Mapping[str, Any] = newest(start).facts.run["model"]
    return found


def _refuse_another_model(mine: ModelSpec, theirs: ModelSpec, start: Path | None) -> None:
    """Raise UsageError where the weights that a run shall begin with do not have the shapes of its own.

    A tied table may become two.
    """
    theirs = theirs.model_copy(update={"tied": mine.tied})
    shapes = [{tensor.name: tensor.shape for tensor in model.parameters()} for model in (mine, theirs)]
    if shapes[0] == shapes[1]:
        return
    other = theirs.model_dump()
    differ = [f"{key} {value}, there {other[key]}" for key, value in mine.model_dump().items() if value != other[key]]
    raise UsageError(
        f"--from {start}: its weights are not of the run's model: {'; '.join(differ)}",
        "leave [model] out of the run, or say the same there",
    )


def _launch(job: Job, restarts: int) -> Summary | None:
    """The job on forked ranks; one that failed goes on from its newest checkpoint, `restarts` times at most."""
    from plait.parallel.launch import launch
    from plait.train.job import train as train_rank

    again = job.run.train.model_copy(update={"resume": "auto", "run_dir": str(job.folder)})
    for failures in range(restarts + 1):
        run = job.run if failures == 0 else job.run.model_copy(update={"train": again})
        try:
            return launch(job.world, train_rank, run, job.folder, job.start, device=job.device)[0]
        except RankFailed as error:
            if failures == restarts or error.exit_code != RankFailed.exit_code:
                raise
            print(f"{error.message}: restart {failures + 1} of {restarts}", file=sys.stderr, flush=True)
    raise AssertionError("a launch returns or raises")


def _make_folder(run: RunSpec) -> Path:
    """The run's directory, with the complete run in it unless another is: that is replaced by the job that may write
    there. A name of ours is free; one that was given may be there."""
    given = run.train.run_dir
    stem = Path(given or f"runs/{time.strftime('%Y%m%d-%H%M%S')}")
    folder, number = stem, 1
    while given is None and folder.exists():
        number += 1
        folder = stem.with_name(f"{stem.name}-{number}")
    if run.train.resume is None and (folder / "metrics.jsonl").exists():
        hint = "train.resume=auto goes on with it; else name another directory, or remove it"
        raise UsageError(f"train.run_dir: {folder} already holds a run", hint)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / RUN_FILE).exists():
            (folder / RUN_FILE).write_text(dump(run), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"train.run_dir: {folder} cannot be written: {error}") from error
    print(f"run directory: {folder}", file=sys.stderr)
    return folder
