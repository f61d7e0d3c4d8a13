"""`plait verify`: the same steps in plain PyTorch on one device and on the layout, compared; exit 1 where they differ.

Torch is imported inside the command, so that its help needs none.
"""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from plait.cli.run import Json, Words, read_run


def verify(
    words: Words = None,
    dtype: Annotated[
        Literal["float64", "float32"], typer.Option(help="Compute, accumulation, reduction and master dtype alike.")
    ] = "float64",
    full: Annotated[bool, typer.Option("--full", help="Do not shrink the run to the smallest legal sizes.")] = False,
    random: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Draw N legal runs and check each.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="S", help="Seed of the draws of --random.")] = 0,
    as_json: Json = False,
) -> None:
    """Prove that a split computes what one device computes: loss, every gradient, norm, weights after 3 SGD steps."""
    run = read_run(words)
    raise NotImplementedError(f"verify {run} {dtype} full {full} random {random} seed {seed}, json {as_json}")
