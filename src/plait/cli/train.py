"""`plait train`: the run itself, on local processes or as one rank of the job that torchrun started.

Torch is imported inside the command, so that its help needs none.
"""

from __future__ import annotations

from typing import Annotated

import typer

from plait.cli.run import Json, Words, read_run


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
    raise NotImplementedError(f"train {run} on {nproc} processes, json {as_json}")
