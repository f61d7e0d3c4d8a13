"""`plait measure`: what the machine at hand reaches, written as a cluster file that `plait plan` reads.

Torch is imported inside the command. On one machine local ranks are forked; under torchrun the job that is there is
measured, and rank 0 writes.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from plait.cli.run import Json, need_torch, to_json, with_options
from plait.spec.errors import UsageError

RANKS = 2  # forked where nothing else is said


@dataclass(frozen=True)
class Options:
    """What `plait measure` takes."""

    nproc: Annotated[int, typer.Option(min=1, metavar="N", help="Local processes.")] = RANKS
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repetitions: within a minute.")] = False
    check: Annotated[bool, typer.Option("--check", help="Compare the ranks and name a slow one; write nothing.")] = (
        False
    )
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="What to measure.")] = "auto"
    output: Annotated[Path, typer.Option("-o", metavar="FILE.toml", help="Where to write.")] = Path("cluster.toml")
    as_json: Json = False


def _measure(options: Options) -> None:
    """Time products, memory copies and collectives here, and write a cluster file for plait plan --cluster."""
    need_torch("plait measure")
    from plait.parallel.launch import launch
    from plait.parallel.probe import probe
    from plait.parallel.world import device_kind, joined_world, run_here
    from plait.planner.measured import Probe, cluster_toml, slow_ranks

    if options.device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device {options.device}: unknown", "auto, cpu or cuda")
    device = device_kind(options.device)
    joined = joined_world(device) if "RANK" in os.environ else None
    if joined is not None:
        gathered = run_here(joined, probe, options.quick)
    else:
        gathered = launch(options.nproc, probe, options.quick, device=device)[0]
    if gathered is None:
        return
    probes = [Probe.of(one) for one in gathered]
    slow = slow_ranks(probes)
    for line in slow:
        print(f"slow: {line}", file=sys.stderr)
    if options.check:
        print(to_json({"ranks": gathered, "slow": slow}) if options.as_json else "\n".join(slow or ["no rank is slow"]))
        return
    text = cluster_toml(probes)
    try:
        options.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{options.output}: cannot be written: {error.strerror}") from error
    print(to_json({"file": str(options.output), "ranks": gathered, "slow": slow}) if options.as_json else text)


measure = with_options(_measure, Options)
