"""The command `plait`: finds the command asked for, imports that one only, and turns exceptions into exit codes.

Nothing here may import torch, numpy or a package of plait beyond the exceptions: `plait --help` answers at once. Exit
codes: 0 well, 1 failed, 2 the user's mistake, 3 training stopped itself, 128 + n stopped by signal n (130: Ctrl-C).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from plait import __version__
from plait.spec.errors import PlaitError

# Command -> its line in the help. `plait.cli.<command>` defines a function of the same name.
COMMANDS = {
    "train": "Train a model on any split: local processes, or the job that torchrun started.",
    "verify": "Prove that a split computes what one device computes.",
    "plan": "Plan a run: which split fits, how fast, and how sure; no torch needed.",
    "measure": "Measure the machine at hand, as a cluster file for plait plan.",
    "convert": "Turn a checkpoint into a Hugging Face directory, or such a directory into a checkpoint.",
    "show": "Show who holds what, the pipeline's timeline, where the memory goes, or what a checkpoint holds.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (default: the process's own arguments) asks for; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"] or ["--help"]
    command = next((argument for argument in arguments if not argument.startswith("-")), "")
    try:
        return _application(command)(arguments, prog_name="plait", standalone_mode=False) or 0
    except PlaitError as error:
        if debug:
            raise
        return _report(error.message, error.hint, error.exit_code, getattr(error, "details", ""))
    except typer.TyperException as error:  # an unknown command or flag, a value of the wrong type
        help_of = f"plait {command} --help" if command in COMMANDS else "plait --help"
        return _report(" ".join(error.format_message().split()), help_of, error.exit_code)


def _application(asked: str) -> typer.Typer:
    """All commands by name; only the one asked for is imported, the others are lines in the help."""
    application = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    application.callback()(_plait)
    for name, line in COMMANDS.items():
        command = getattr(import_module(f"plait.cli.{name}"), name) if name == asked else _unasked
        application.command(name, short_help=line)(command)
    return application


def _unasked() -> None:
    raise AssertionError("a command that was not asked for cannot run")


def _version(asked: bool) -> None:
    if asked:
        print(f"plait {__version__}")
        raise typer.Exit


def _plait(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; stands anywhere.")] = False,
) -> None:
    """Train transformer language models split along every axis, and prove that the split equals one device.

    A run is a TOML file, changed by section.key=value; without a file it is the built-in run.
    """


def _report(message: str, hint: str, exit_code: int, details: str = "") -> int:
    print(message if exit_code > 128 else f"error: {message}", file=sys.stderr)  # to stop when asked is no error
    if details:
        print(details, file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
    return exit_code
