"""`plait show`: pictures of a run, before it starts or beside what was measured. It needs no torch.

Only the picture that was asked for is imported, so that each is there at once.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from plait.checkpoint.picture import picture_checkpoint, way_round
from plait.checkpoint.shelf import candidates
from plait.cli.run import Json, Words, read_run, settled, with_options
from plait.spec.errors import BrokenCheckpoint, UsageError
from plait.spec.fit import fit
from plait.spec.load import RUN_FILE

PICTURES = ("layout", "schedule", "memory")  # `plait.report.<name>` defines `picture_<name>(run, layout)`
SPANS = "spans.jsonl"
WIDTH = 100  # columns, where no terminal says otherwise


class Picture(Protocol):
    """What every picture can do."""

    def as_dict(self) -> dict[str, Any]: ...

    def text(self, width: int) -> str: ...


@dataclass(frozen=True)
class Options:
    """What `plait show` takes."""

    what: Annotated[
        str,
        typer.Argument(metavar="layout|schedule|memory|RUN_DIR|CHECKPOINT", show_default=False, help="The picture."),
    ]
    words: Words = None
    world: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Ranks; default: the product of the axes.", show_default=False),
    ] = None
    as_json: Json = False
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a timeline as a self-contained page.", show_default=False)
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a timeline for Perfetto or chrome://tracing.", show_default=False),
    ] = None
    search: Annotated[
        bool, typer.Option("--search", help="Of schedule: search one for the run's stages, by their FLOP.")
    ] = False
    costs: Annotated[
        Path | None,
        typer.Option(metavar="RUN_DIR", help="With --search: the times that a run measured.", show_default=False),
    ] = None
    link: Annotated[
        float, typer.Option(min=0, metavar="X", help="With --search: time of a message between ranks, in its unit.")
    ] = 0.0
    limit: Annotated[
        float, typer.Option(min=0, metavar="X", help="With --search: most activations, as a share of 1F1B's.")
    ] = 1.0
    output: Annotated[
        Path | None,
        typer.Option("-o", metavar="FILE.csv", help="With --search: write it for schedule.file.", show_default=False),
    ] = None


def _show(options: Options) -> None:
    """Show who holds what (layout), the pipeline's timeline (schedule), or the bytes of each rank (memory).

    Of a run's directory: the planned timeline, and below it the measured one. Of a checkpoint: its tensors, where its
    run stood, and whether every byte of it is still as it was written (exit code 1 if not).
    """
    o = options
    if o.search:
        picture = _found(o)
    else:
        _refuse_without_search(o)
        picture = _planned(o.what, o.words, o.world) if o.what in PICTURES else _measured(o.what, o.words, o.world)
    for path, kind in ((o.html, "html"), (o.trace, "trace"), (o.output, "csv")):
        if path is not None:
            _write(picture, path, kind, o.what)
    print(json.dumps(picture.as_dict()) if o.as_json else picture.text(shutil.get_terminal_size((WIDTH, 0)).columns))
    if getattr(picture, "broken", ()):
        raise typer.Exit(1)


show = with_options(_show, Options)


def _found(o: Options) -> Picture:
    """The schedule that is found for a run."""
    if o.what != "schedule":
        raise UsageError(f"--search: {o.what} has no schedule to search", "plait show schedule --search")
    from plait.report.found import Asked, picture_found

    run = settled(read_run(o.words), o.world)
    return picture_found(run, fit(run, o.world), Asked(o.costs, o.link, o.limit))


def _refuse_without_search(o: Options) -> None:
    given = {"--costs": o.costs, "--link": o.link != Options.link, "--limit": o.limit != Options.limit, "-o": o.output}
    for option, value in given.items():
        if value:
            raise UsageError(f"{option} belongs to a search", f"plait show schedule --search {option} ...")


def _write(picture: Picture, path: Path, kind: str, what: str) -> None:
    if not hasattr(picture, kind):
        raise UsageError(f"--{kind}: {what} has no timeline", f"plait show schedule --{kind} {path}, or RUN_DIR")
    content = getattr(picture, kind)()
    option = "-o" if kind == "csv" else f"--{kind}"
    try:
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{option} {path}: cannot be written: {error}", "name a file in a folder that is there"
        ) from error


def _planned(what: str, words: Sequence[str] | None, world: int | None) -> Picture:
    run = settled(read_run(words), world)
    layout = fit(run, world)
    picture: Picture = getattr(import_module(f"plait.report.{what}"), f"picture_{what}")(run, layout)
    return picture


def _measured(folder: str, words: Sequence[str] | None, world: int | None) -> Picture:
    if not Path(folder).is_dir():
        known = ", ".join(PICTURES)
        raise UsageError(f"plait show {folder}: neither {known} nor a run's directory", "plait show --help")
    if words or world:
        raise UsageError(f"{folder} holds a run that has been: nothing can be overridden", f"plait show {folder}")
    found = candidates(Path(folder))
    if found == [Path(folder)]:
        return _checkpoint(Path(folder))
    if not (Path(folder) / SPANS).exists():
        raise UsageError(*_without_spans(Path(folder), found))
    from plait.report.measured import picture_run

    return picture_run(Path(folder))


def _checkpoint(folder: Path) -> Picture:
    try:
        return picture_checkpoint(folder)
    except BrokenCheckpoint as error:
        error.hint = error.hint or way_round(folder)
        raise


def _without_spans(folder: Path, found: Sequence[Path]) -> tuple[str, str]:
    """What a directory is that has no measured timeline, and what can be shown in its place."""
    newest = f"plait show {found[0]}" if found else ""
    if (folder / RUN_FILE).exists():
        ended = f"{folder} has no {SPANS}, which a run writes when it comes to its end"
        return ended, f"its newest checkpoint: {newest}" if newest else f"go on with plait train {folder}/run.toml"
    if found:
        return f"{folder} holds {len(found)} checkpoints, and one is shown at a time", newest
    return f"{folder}: neither a run's directory nor a checkpoint", "plait show --help"
