"""`plait plan --fits`: one knob at a time, how far it must be turned until a layout fits, and what it costs in time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from plait.planner.estimate import closed_form
from plait.planner.ground import Ground
from plait.planner.job import Job
from plait.planner.memory import memory
from plait.spec.nearest import divisors
from plait.spec.units import format_bytes


def turns(job: Job, ground: Ground) -> Iterator[tuple[str, Job]]:
    """Each knob's further positions, the gentlest first. The world and the batch stay as they are."""
    for mode in ("selective", "full"):
        if job.recompute != mode and job.recompute != "full":
            yield f"recompute {mode}", job._replace(recompute=mode)
    for micro in sorted((n for n in divisors(job.batch // job.dp) if n < job.micro), reverse=True):
        yield f"micro_size {micro}", job._replace(micro=micro)
    for stage in range(job.zero + 1, 4):
        yield f"zero {stage}", job._replace(zero=stage)
    yield from _degrees(job, ground, "tp")
    yield from _degrees(job, ground, "pp")
    yield from _degrees(job, ground, "cp")


def _degrees(job: Job, ground: Ground, axis: str) -> Iterator[tuple[str, Job]]:
    """More of one axis at the expense of dp."""
    spec = ground.shape.spec
    limits = {"tp": spec.heads, "pp": spec.layers, "cp": job.sequence}
    now = int(getattr(job, axis))
    for times in (n for n in divisors(job.dp) if n > 1):
        degree = now * times
        legal = degree <= limits[axis] and (axis == "pp" or limits[axis] % degree == 0)
        if legal and job.batch % (job.dp // times * job.micro) == 0:
            parallel = job.sequence_parallel or (axis == "tp" and ground.stack.sequence_parallel)
            yield (
                f"{axis} {degree}",
                job._replace(
                    **{axis: degree, "dp": job.dp // times, "sequence_parallel": parallel}  # type: ignore[arg-type]
                ),
            )


def knobs(ground: Ground, job: Job) -> dict[str, Any]:
    """The layout's own verdict, and for each knob the first position that fits (or its last one)."""
    own = memory(ground, job)
    step = float(closed_form(ground, [job]).sum())
    found: dict[str, dict[str, Any]] = {}
    for name, turned in turns(job, ground):
        knob = name.split()[0]
        if knob in found and found[knob]["fits"]:
            continue
        then = memory(ground, turned)
        slower = float(closed_form(ground, [turned]).sum()) / step - 1
        fits = then.verdict == "fits"
        found[knob] = {"turn": name, "fits": fits, "headroom": then.headroom, "slower_by": slower}
    return {"verdict": own.verdict, "headroom": own.headroom, "worst_stage": own.worst, "knobs": list(found.values())}


def knob_lines(found: dict[str, Any]) -> list[str]:
    """The same to read."""
    lines = [
        f"as it stands: {found['verdict']}, headroom {format_bytes(found['headroom'])} on stage {found['worst_stage']}"
    ]
    for one in found["knobs"]:
        room = format_bytes(abs(one["headroom"]))
        says = f"fits with {room} to spare" if one["fits"] else f"is still {room} short"
        lines.append(f"  {one['turn']}: {says}, step {100 * one['slower_by']:+.0f} %")
    return lines
