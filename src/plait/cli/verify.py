"""`plait verify`: the same steps in plain PyTorch on one device and on the layout, compared; exit 1 where they differ.

Torch is imported inside the command, so that its help needs none.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from plait.cli.run import Json, Words, need_torch, read_run, settled, to_json, with_options
from plait.report.table import table
from plait.spec.errors import UsageError
from plait.spec.run import RunSpec
from plait.spec.units import format_bytes

if TYPE_CHECKING:
    from plait.proof.compare import Verdict

DType = Literal["float64", "float32"]


@dataclass(frozen=True)
class Options:
    """What `plait verify` takes."""

    words: Words = None
    dtype: Annotated[DType, typer.Option(help="Compute, accumulation, reduction and master dtype alike.")] = "float64"
    full: Annotated[bool, typer.Option("--full", help="Do not shrink the run to the smallest legal sizes.")] = False
    random: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Draw N legal runs and check each.", show_default=False)
    ] = None
    seed: Annotated[int, typer.Option(min=0, metavar="S", help="Seed of the draws of --random.")] = 0
    world: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Count a step of a world of N ranks instead.", show_default=False),
    ] = None
    ranks: Annotated[str, typer.Option(metavar="first,last", help="With --world: the ranks to count.")] = "first,last"
    as_json: Json = False


def _verify(options: Options) -> None:
    """Prove that a split computes what one device computes: loss, every gradient, norm, weights after 3 SGD steps.

    With --world N, run the trainer's own step of some ranks of a world of any size on tensors without memory, and
    count the bytes that they hold and send.
    """
    joined = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None  # torchrun has set it
    run = settled(read_run(options.words), options.world or joined)
    need_torch("plait verify")
    if options.world is not None:
        report = _count(run, options.world, options.ranks)
        print(to_json(report) if options.as_json else _count_text(report))
        return
    if options.random is not None:
        report = _random(options.random, options.seed, options.dtype)
        text = _random_text(report)
    else:
        from plait.proof.verify import verify as prove

        verdict = prove(run, options.dtype, options.full)
        if verdict is None:  # another rank of a torchrun job speaks
            return
        report, text = verdict.as_dict(), _text(verdict)
    print(to_json(report) if options.as_json else text)
    if not report["ok"]:
        raise typer.Exit(1)


verify = with_options(_verify, Options)


def _count(run: RunSpec, world: int, asked: str) -> dict[str, Any]:
    from plait.proof.count import count

    ranks = dict.fromkeys(_rank(word.strip(), world) for word in asked.split(","))
    return {"world": world, "ranks": [each.as_dict() for each in count(run, world, list(ranks))]}


def _rank(word: str, world: int) -> int:
    named = {"first": 0, "last": world - 1}
    if word not in named and not word.isdecimal():
        raise UsageError(f"--ranks: {word!r} is no rank", "numbers, first or last, with commas between them")
    rank = named[word] if word in named else int(word)
    if rank >= world:
        raise UsageError(f"--ranks: rank {rank} of a world of {world}", f"ranks are 0 to {world - 1}")
    return rank


def _count_text(report: dict[str, Any]) -> str:
    lines = []
    for each in report["ranks"]:
        held = {**each["states"], "buffers": each["buffers"], "activations": each["activations"]}
        states = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in held.items() if size)
        lines.append(f"rank {each['rank']} of {report['world']}, {each['micro_batches']} micro-batches: {states}")
        rows = [
            [axis, operation, str(row["calls"]), format_bytes(row["bytes"])]
            for axis, operations in each["collectives"].items()
            for operation, row in operations.items()
        ]
        lines += table(["axis", "operation", ">calls", ">sent a step"], rows)
    return "\n".join(lines)


def _random(count: int, seed: int, dtype: str) -> dict[str, Any]:
    from plait.parallel.world import joined_world
    from plait.proof.many import verify_random

    if joined_world() is not None:
        raise UsageError("plait verify --random forks its own ranks", "start it without torchrun")

    def told(number: int, line: str, complaint: str) -> None:
        print(f"{number + 1:>4}/{count}  {line}  {complaint or 'equal'}", file=sys.stderr, flush=True)

    return verify_random(count, seed, dtype, told)


def _text(verdict: Verdict) -> str:
    model, batch = verdict.run["model"], verdict.run["batch"]
    axes = {axis: verdict.layout[axis] for axis in verdict.layout["order"]}
    rows = (
        ("loss", f"{verdict.loss.split:.12g}", verdict.loss.error),
        ("gradient norm", f"{verdict.norm.split:.12g}", verdict.norm.error),
        (f"{verdict.compared} gradients", f"worst {verdict.gradients.name}", verdict.gradients.error),
        (f"weights after {verdict.steps} SGD steps", f"worst {verdict.weights.name}", verdict.weights.error),
    )
    return "\n".join(
        [
            "layout  " + "  ".join(f"{axis} {size}" for axis, size in axes.items()),
            f"run     {model['layers']} layers, hidden {model['hidden']}, heads {model['heads']}/{model['kv_heads']}, "
            f"vocabulary {model['vocab']}, {batch['global_size']} × {batch['sequence']} tokens, {verdict.dtype}",
            *(f"{what:<28} {value:<44} error {error:.2g}" for what, value, error in rows),
            "equal to one device" if verdict.ok else f"DIFFERENT: {verdict.complaint}",
        ]
    )


def _random_text(report: dict[str, Any]) -> str:
    lines = [f"{share:>6.0%}  {name}" for name, share in report["coverage"].items()]
    lines.append(f"{report['passed']} of {report['drawn']} drawn runs equal one device (seed {report['seed']})")
    lines += [f"FAILED {failure['run']}: {failure['error']}" for failure in report["failures"]]
    return "\n".join(lines)
