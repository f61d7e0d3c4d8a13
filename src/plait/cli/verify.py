"""`plait verify`: the same steps in plain PyTorch on one device and on the layout, compared; exit 1 where they differ.

Torch is imported inside the command, so that its help needs none.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from plait.cli.run import Json, Words, need_torch, read_run, to_json
from plait.spec.errors import UsageError

if TYPE_CHECKING:
    from plait.proof.compare import Verdict

DType = Literal["float64", "float32"]


def verify(
    words: Words = None,
    dtype: Annotated[DType, typer.Option(help="Compute, accumulation, reduction and master dtype alike.")] = "float64",
    full: Annotated[bool, typer.Option("--full", help="Do not shrink the run to the smallest legal sizes.")] = False,
    random: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Draw N legal runs and check each.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="S", help="Seed of the draws of --random.")] = 0,
    as_json: Json = False,
) -> None:
    """Prove that a split computes what one device computes: loss, every gradient, norm, weights after 3 SGD steps."""
    run = read_run(words)
    need_torch("plait verify")
    if random is not None:
        report = _random(random, seed, dtype)
        text = _random_text(report)
    else:
        from plait.proof.verify import verify as prove

        verdict = prove(run, dtype, full)
        if verdict is None:  # another rank of a torchrun job speaks
            return
        report, text = verdict.as_dict(), _text(verdict)
    print(to_json(report) if as_json else text)
    if not report["ok"]:
        raise typer.Exit(1)


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
