"""`plait show`: pictures of a run that has not started: the layout, the schedule, the memory. It needs no torch."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from plait.cli.run import Json, Words, read_run


def show(
    what: Annotated[
        Literal["layout", "schedule", "memory"], typer.Argument(metavar="WHAT", show_default=False, help="The picture.")
    ],
    words: Words = None,
    as_json: Json = False,
) -> None:
    """Show who holds what (layout), the pipeline's timeline (schedule), or the bytes of each rank (memory)."""
    run = read_run(words)
    raise NotImplementedError(f"show {what} of {run}, json {as_json}")
