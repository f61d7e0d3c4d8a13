"""`plait convert`: a checkpoint as a Hugging Face directory, or such a directory as a checkpoint; tensor by tensor.

No rank is started: what is written depends on the values alone, not on the layout that they came from.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from plait.checkpoint.picture import way_round
from plait.checkpoint.shelf import candidates, newest
from plait.cli.run import Json, need_torch, to_json
from plait.spec.errors import BrokenCheckpoint, DataError
from plait.spec.units import format_bytes

DType = Literal["float32", "bfloat16", "float16", "float64"]


def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A checkpoint, a run's directory, or theirs.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The directory to make.")],
    dtype: Annotated[
        DType | None,
        typer.Option(help="Of the weights for Hugging Face; default: what the run computed in.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint as a Hugging Face directory, or read such a directory into a checkpoint."""
    need_torch("plait convert")
    from plait.train.huggingface import export, is_huggingface, take_in

    if is_huggingface(source):
        with _hinted(lambda: f"take it again from where {source} came from"):
            names = take_in(source, target)
    else:
        with _hinted(lambda: way_round(candidates(source)[0])):
            manifest = newest(source)
        print(f"step {manifest.facts.step}, from {manifest.folder}", file=sys.stderr)
        with _hinted(lambda: way_round(manifest.folder)):
            names = export(manifest, target, dtype)
    sizes = {name: (target / name).stat().st_size for name in names}
    told = "\n".join(f"{target / name}  {format_bytes(size)}" for name, size in sizes.items())
    print(to_json({"target": str(target), "files": sizes}) if as_json else told)


@contextmanager
def _hinted(way: Callable[[], str]) -> Iterator[None]:
    """What is broken or does not belong together gets a way out where it has none."""
    try:
        yield
    except (BrokenCheckpoint, DataError) as error:
        error.hint = error.hint or way()
        raise
