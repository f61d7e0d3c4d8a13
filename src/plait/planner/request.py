"""From what a user asks for to plans: which model, machine, stack and batch; one layout, or a search over all.

What was not said is assumed and listed. Nothing here prints.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plait.planner.estimate import Anchor, Estimate, estimate
from plait.planner.export import run_of
from plait.planner.ground import Ground
from plait.planner.job import WIDTHS, Job, job_of
from plait.planner.search import Found, Want, describe, search
from plait.planner.seat import Seat
from plait.planner.sized.step import peak
from plait.planner.stack import load_stack
from plait.planner.traffic import collectives
from plait.spec.cluster import Cluster, load_cluster
from plait.spec.errors import UsageError
from plait.spec.families import from_hf_config
from plait.spec.fit import fit, violations
from plait.spec.model import ModelSpec
from plait.spec.nearest import did_you_mean
from plait.spec.presets import PRESETS
from plait.spec.run import RunSpec

DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8", "fp4": "float4", "tf32": "float32",
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """What stands on the command line beside the run."""

    model: str | None = None
    cluster: str | None = None
    nodes: int | None = None
    stack: str | None = None
    batch: int | None = None
    sequence: int | None = None
    dtype: str | None = None
    anchor: str | None = None
    top: int = 10


@dataclass(frozen=True)
class Asked:
    """A request resolved: the ground, the run it starts from, how many devices, and what was assumed."""

    ground: Ground
    run: RunSpec
    world: int
    searched: bool
    compute: str
    cluster: str  # as it was named
    assumed: tuple[str, ...]


def resolve(run: RunSpec, request: Request) -> Asked:
    """Names looked up and blanks filled. Raises UsageError or InvalidRun for what cannot be."""
    assumed: list[str] = []
    model = run.model if request.model is None else read_model(request.model)
    named = request.cluster or "cpu"
    cluster = load_cluster(named)
    if request.cluster is None:
        assumed.append(f"cluster {cluster.name}: {cluster.device.source}")
    stack = load_stack(request.stack or "plait")
    if request.stack is None:
        assumed.append(f"stack {stack.name}")
    searched = request.model is not None or request.nodes is not None or run.layout.mode == "auto"
    node = min(cluster.node, cluster.devices or cluster.node)
    world = request.nodes * cluster.node if request.nodes else _own_world(run, searched, node, assumed)
    _refuse_more_than_there_are(cluster, world)
    run = run.model_copy(update={"model": model, "batch": _batch(run, request, model, assumed)})
    if run.schedule.file is not None:
        assumed.append(f"time and memory of schedule.name {run.schedule.name}, not of schedule.file")
    compute = _compute(run, request, cluster.device.kind, assumed)
    return Asked(Ground.of(model, stack, cluster), run, world, searched, compute, named, tuple(assumed))


def _refuse_more_than_there_are(cluster: Cluster, world: int) -> None:
    if cluster.devices is not None and world > cluster.devices:
        problem = f"cluster {cluster.name}: {world} devices are asked for, it has {cluster.devices}"
        raise UsageError(problem, f"ask for {cluster.devices} at most, or change devices in its file")


def _own_world(run: RunSpec, searched: bool, node: int, assumed: list[str]) -> int:
    if searched and run.layout.dp is None:
        assumed.append(f"one node of {node}")
        return node
    return run.layout.tp * run.layout.pp * run.layout.cp * (run.layout.dp or 1)


def _batch(run: RunSpec, request: Request, model: ModelSpec, assumed: list[str]) -> Any:
    sequence = request.sequence
    if sequence is None and request.model is not None:
        sequence = min(model.max_sequence, 8192)
        assumed.append(f"sequence {sequence}")
    sequence = sequence or run.batch.sequence
    size = request.batch
    if size is None and request.model is not None:
        size = max(1, 4 * 2**20 // sequence)
        assumed.append(f"batch {size} sequences (4 Mi tokens)")
    return run.batch.model_copy(update={"sequence": sequence, "global_size": size or run.batch.global_size})


def _compute(run: RunSpec, request: Request, kind: str, assumed: list[str]) -> str:
    if request.dtype is not None:
        compute = DTYPES.get(request.dtype, request.dtype)
        if compute not in WIDTHS:
            known = {**DTYPES, **WIDTHS}
            near = did_you_mean(request.dtype, known) or "known: " + ", ".join(known)
            raise UsageError(f"--dtype {request.dtype}: unknown", near)
        return compute
    if request.model is not None and kind != "cpu":
        assumed.append("bfloat16")
        return "bfloat16"
    return run.precision.compute


def read_model(name: str) -> ModelSpec:
    """A preset, or a Hugging Face `config.json` (a file, or a folder with one)."""
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        near = did_you_mean(name, PRESETS) or "known: " + ", ".join(PRESETS)
        raise UsageError(f"--model {name}: neither a preset nor a config.json", near)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path}: holds no table", "a config.json as Hugging Face writes it")
    return from_hf_config(config)


def one(asked: Asked) -> Job:
    """The job of the run as it stands. Raises InvalidRun with every reason why it cannot be."""
    return job_of(asked.run, fit(asked.run, asked.world))._replace(compute=asked.compute)


def exact(asked: Asked) -> dict[str, Any]:
    """Of a run that plait itself trains as it stands: what its first and its last rank send in a step, by axis and
    operation, their model states, and the most bytes of activations and buffers beside those, on a CPU's kernels."""
    if asked.searched or asked.ground.stack.name != "plait" or asked.compute != asked.run.precision.compute:
        return {}
    layout = fit(asked.run, asked.world)
    seats = [Seat(asked.run, layout, rank) for rank in dict.fromkeys((0, layout.world - 1))]
    return {
        "collectives": {str(seat.rank): collectives(seat) for seat in seats},
        "states": {str(seat.rank): seat.states() for seat in seats},
        "peaks": {str(seat.rank): peak(seat)._asdict() for seat in seats},
    }


def find(asked: Asked, top: int) -> Found:
    """The search of a request."""
    batch = asked.run.batch
    want = Want(asked.world, batch.global_size, batch.sequence, asked.compute)
    return search(asked.ground, want, top)


def trainable(asked: Asked, plans: list[Estimate]) -> tuple[RunSpec, Estimate] | None:
    """The first plan that `plait train` takes, with its run."""
    for plan in plans:
        run = run_of(asked.run, plan.job, asked.cluster)
        if not violations(run, plan.job.world):
            return run, plan
    return None


def settle(run: RunSpec, world: int) -> tuple[RunSpec, str]:
    """The run with the layout, micro-batch and schedule that are best for `world` ranks by plan, and a line of why.

    Only what plait trains is considered. Raises UsageError where nothing fits, or nothing is legal.
    """
    free = run.layout.model_copy(update={"dp": None})
    asked = replace(resolve(run.model_copy(update={"layout": free}), Request(cluster=run.layout.cluster)), world=world)
    _refuse_more_than_there_are(asked.ground.cluster, world)
    found = find(asked, top=10)
    taken = trainable(asked, found.plans)
    if taken is None:
        raise UsageError(f"layout.mode: none of the {len(found.plans)} best plans for {world} ranks can be trained")
    chosen, plan = taken
    seconds = f"{plan.step:.3g} s planned a step on {asked.ground.cluster.name}"
    return chosen, f"layout.mode auto: {describe(plan.job)}; {seconds}, {found.within_noise} alike"


_SECONDS = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min)?")


def parse_seconds(text: str) -> float:
    """'14.7s', '812 ms' or '2min' as seconds."""
    found = _SECONDS.fullmatch(text.strip())
    if not found:
        raise UsageError(f"--anchor {text}: not a time", "for example --anchor 14.7s")
    seconds = float(found[1]) * {"ms": 1e-3, "s": 1.0, "min": 60.0}[found[2] or "s"]
    if not 0 < seconds < float("inf"):
        raise UsageError(f"--anchor {text}: a measured step takes more than 0 s", "for example --anchor 14.7s")
    return seconds


def anchored(asked: Asked, plan: Estimate, text: str) -> Estimate:
    """A plan whose own step was measured."""
    return estimate(asked.ground, plan.job, plan.assumed, Anchor(parse_seconds(text), plan.step))
