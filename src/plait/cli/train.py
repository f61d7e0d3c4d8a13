"""`plait train`: the run itself, on local processes or as one rank of the job that torchrun started.

Torch is imported inside the command, so that its help needs none.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from plait.cli.run import Json, Words, need_torch, read_run, settled, to_json
from plait.spec.errors import UsageError
from plait.spec.fit import fit
from plait.spec.load import dump
from plait.spec.run import RunSpec

MOST_UNASKED = 64  # local ranks


def train(
    words: Words = None,
    nproc: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Local processes; default: the product of the axes.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a model on any split. Under torchrun the same command joins the job that is there."""
    run = read_run(words)
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
    from plait.parallel.launch import launch
    from plait.parallel.world import device_kind, joined_world, run_here
    from plait.train.job import closing
    from plait.train.job import train as train_rank

    device = device_kind(run.train.device)
    joined = joined_world(device)
    first = joined is None or joined.rank == 0
    folder = _make_folder(run) if first else None
    if joined is not None:
        summary = run_here(joined, train_rank, run, folder)
    else:
        summary = launch(layout.world, train_rank, run, folder, device=device)[0]
    if summary is not None:
        print(to_json(summary.as_dict()) if as_json else "\n".join(closing(summary)))


def _make_folder(run: RunSpec) -> Path:
    """The run's directory, with the complete run in it. A name of ours is free; one that was given may be there."""
    given = run.train.run_dir
    stem = Path(given or f"runs/{time.strftime('%Y%m%d-%H%M%S')}")
    folder, number = stem, 1
    while given is None and folder.exists():
        number += 1
        folder = stem.with_name(f"{stem.name}-{number}")
    if (folder / "metrics.jsonl").exists():
        raise UsageError(f"train.run_dir: {folder} already holds a run", "name another directory, or remove it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.toml").write_text(dump(run), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"train.run_dir: {folder} cannot be written: {error}") from error
    print(f"run directory: {folder}", file=sys.stderr)
    return folder
