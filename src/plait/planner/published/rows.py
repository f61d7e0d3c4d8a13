"""A table of published runs (CSV) as jobs that can be predicted: what a row leaves open is assumed, and said so.

A row that says too little, or runs what the planner does not model, is refused with the reason. Nothing here looks at
what a row measured to decide how it ran.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from pathlib import Path

from plait.planner.ground import Ground
from plait.planner.job import Job
from plait.planner.memory import memory
from plait.planner.published.columns import bad_cells, repeats
from plait.planner.published.machines import Cells, Unclear, cluster_of, number, stack_of
from plait.planner.shape import shape_of
from plait.planner.stack import Stack
from plait.spec.cluster import Cluster
from plait.spec.errors import UsageError
from plait.spec.model import ModelSpec
from plait.spec.nearest import divisors

DTYPES: tuple[tuple[str, str], ...] = (("FP4", "float4"), ("FP8", "float8"), ("FP16", "float16"), ("BF16", "bfloat16"))

OVER = "more cells than columns"  # under which a row keeps them while it is read
TOLD = 20  # bad cells that an error lists

DENSE_OR_MOE = {"dense", "moe", "moe-mla"}


@dataclass(frozen=True)
class Published:
    """One row as the planner sees it. `measured` is seconds of a step, None where the run failed or says nothing."""

    id: str
    source: str
    cells: Cells
    ground: Ground
    job: Job
    measured: float | None
    assumed: tuple[str, ...]

    @property
    def layout(self) -> str:
        """Rows of one layout at any number of devices are one series; without the column each row is its own."""
        return self.cells.get("layout_group") or self.id

    @property
    def blocks(self) -> bool:
        """Whether narrow products have a scale per block of elements."""
        return "MX" in self.cells.get("precision", "")

    @property
    def dense(self) -> bool:
        return self.cells["arch"] == "dense"


@dataclass(frozen=True)
class Refused:
    """One row that cannot be predicted, and why."""

    id: str
    source: str
    cells: Cells
    reason: str


def read_rows(path: Path) -> list[Cells]:
    """The rows of a table, in its order. Raises UsageError where it is no such table, naming every bad cell."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restkey=OVER, restval=None)
            rows = [(reader.line_num, row) for row in reader]
            columns = reader.fieldnames or ()
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    lacking = ", ".join(sorted({"id", "source", "gpu", "n_gpus", "layers", "hidden", "tp", "pp"} - set(columns)))
    if not rows or lacking:
        raise UsageError(f"{path}: {len(rows)} rows, columns that are missing: {lacking}")
    bad = [f"line {line}: {_cells(row)} cells, the heading has {len(columns)}" for line, row in rows if _ragged(row)]
    bad = bad or [cell for line, row in rows for cell in bad_cells(line, row)] + list(repeats(rows))
    if bad:
        more = [f"and {len(bad) - TOLD} more"] if len(bad) > TOLD else []
        head = bad[0] if len(bad) == 1 else "\n  ".join([f"{len(bad)} bad cells", *bad[:TOLD], *more])
        raise UsageError(f"{path}: {head}", "mend the table, or leave out those rows")
    return [row for _, row in rows]


def _ragged(row: Mapping[str, object]) -> bool:
    return OVER in row or None in row.values()


def _cells(row: Mapping[str, object]) -> int:
    """How many cells a line has."""
    over = row.get(OVER, ())
    assert isinstance(over, list | tuple)
    return sum(value is not None for name, value in row.items() if name != OVER) + len(over)


def interpret(cells: Cells) -> Published | Refused:
    """A row as a job on a cluster and a stack, with what was assumed."""
    try:
        return _interpret(cells)
    except Unclear as why:
        return Refused(cells["id"], cells["source"], cells, str(why))


def _interpret(cells: Cells) -> Published:
    if cells.get("arch") not in DENSE_OR_MOE:
        raise Unclear(f"architecture {cells.get('arch')!r} is not modelled")
    if cells.get("task") == "lora":
        raise Unclear("only adapters are trained, which is not modelled")
    assumed: list[str] = []
    model = _model(cells)
    stack = stack_of(cells)
    cluster = cluster_of(cells)
    ground = _ground(model, stack, cluster)
    job = _job(cells, ground, assumed)
    measured = _seconds(cells, model, job)
    if measured is None and not cells.get("status") and not cells.get("peak_mem_gib"):
        raise Unclear("no step time, and no figure that one follows from")
    return Published(cells["id"], cells["source"], cells, ground, job, measured, tuple(assumed))


# Shapes of released models whose rows leave them out: their public configurations.
RELEASED: Mapping[str, Mapping[str, str]] = {
    "moonlight-16b": {
        "layers": "27", "hidden": "2048", "ffn_hidden": "11264", "mlp": "swiglu", "heads": "16", "kv_heads": "16",
        "vocab": "163840", "experts": "64", "topk": "6", "expert_ffn": "1408", "shared_experts": "2",
        "first_dense_layers": "1",
    },
}  # fmt: skip
LATENT = {"kv_rank": 512, "kept": 128, "rotated": 64, "value": 128}  # DeepSeek-V2 and -V3, Kimi K2, Moonlight
NO_QUERY_LATENT = {"moonlight-16b", "deepseek-v2-lite"}
MLPS = {"swiglu": "swiglu", "gelu": "gelu", "geglu": "swiglu", "relu": "relu", "relu2": "relu2", "": "swiglu"}


def _model(cells: Cells) -> ModelSpec:
    name = cells.get("model", "")
    stated = {**cells, **{key: value for key, value in RELEASED.get(name, {}).items() if not cells.get(key)}}
    keys = (
        "layers", "hidden", "ffn_hidden", "mlp", "heads", "kv_heads", "head_dim", "vocab", "seq_len", "experts", "topk",
        "expert_ffn", "shared_experts", "first_dense_layers", "moe_every", "notes",
    )  # fmt: skip
    return _model_of(name, cells["arch"] == "moe-mla", tuple((key, stated.get(key, "")) for key in keys))


@lru_cache(maxsize=1024)
def _model_of(name: str, latent: bool, items: tuple[tuple[str, str], ...]) -> ModelSpec:
    stated = dict(items)
    fields: dict[str, object] = {
        "vocab": number(stated, "vocab"), "hidden": number(stated, "hidden"), "layers": number(stated, "layers"),
        "heads": number(stated, "heads"), "max_sequence": number(stated, "seq_len"),
        "mlp": MLPS.get(stated["mlp"], "gelu"), "tied": "tied" in stated["notes"],
        "norm": "rms" if stated["mlp"] == "swiglu" else "layer",
    }  # fmt: skip
    if latent:
        fields["latent"] = LATENT | ({} if name in NO_QUERY_LATENT else {"q_rank": 1536})
    else:
        fields["kv_heads"] = number(stated, "kv_heads", number(stated, "heads"))
        fields["head_dim"] = number(stated, "head_dim", number(stated, "hidden") // number(stated, "heads"))
    if stated["experts"]:
        fields["moe"] = {
            "count": number(stated, "experts"), "top_k": number(stated, "topk"), "ffn": number(stated, "expert_ffn"),
            "shared": number(stated, "shared_experts", 0), "first_dense": number(stated, "first_dense_layers", 0),
            "every": number(stated, "moe_every", 1),
        }  # fmt: skip
        fields["ffn"] = number(stated, "ffn_hidden", number(stated, "expert_ffn"))
    else:
        fields["ffn"] = number(stated, "ffn_hidden")
    return ModelSpec.model_validate(fields)


_GROUNDS: dict[tuple[int, int, int], Ground] = {}  # one for all rows alike; it keeps the values that its key is of


def _ground(model: ModelSpec, stack: Stack, cluster: Cluster) -> Ground:
    shape = shape_of(model)
    return _GROUNDS.setdefault((id(shape), id(stack), id(cluster)), Ground(shape, stack, cluster))


def _dtype(cells: Cells) -> str:
    found = next((ours for theirs, ours in DTYPES if theirs in cells.get("precision", "")), None)
    if found is None:
        raise Unclear(f"precision {cells.get('precision')!r} is unknown")
    return found


def _job(cells: Cells, ground: Ground, assumed: list[str]) -> Job:
    stack = ground.stack
    tp, pp, cp = number(cells, "tp"), number(cells, "pp"), number(cells, "cp", 1)
    world = number(cells, "n_gpus")
    dp = number(cells, "dp", world // (tp * pp * cp))
    if tp * pp * cp * dp != world:
        raise Unclear(f"tp·pp·cp·dp {tp * pp * cp * dp} is not n_gpus {world}")
    most = len(ground.shape.layers) + 2  # embedding and head may stand for a layer each
    if (stages := pp * max(1, number(cells, "vpp", 1))) > most:
        raise Unclear(f"pp·vpp {stages} is more than layers, embedding and head {most}")
    batch = number(cells, "global_batch")
    micro = number(cells, "micro_batch", 0)
    if not micro:
        micro = 1
        assumed.append("micro-batch 1")
    stage, shard = _zero(cells, stack, assumed)
    job = Job(
        tp=tp, pp=pp, dp=dp, cp=cp, ep=_ep(cells, ground, dp * cp, assumed), etp=_etp(cells, tp), micro=micro,
        batch=batch, sequence=number(cells, "seq_len"), compute=_dtype(cells),
        sequence_parallel=_sequence_parallel(cells, stack, tp, assumed),
        zero=stage, shard=shard,
    )  # fmt: skip
    if batch % (dp * micro):
        raise Unclear(f"dp {dp} × micro-batch {micro} does not divide the batch {batch}")
    frugal = job._replace(recompute="full")
    if not cells.get("zero") and job.zero < 3 and pp == 1 and memory(ground, frugal).verdict == "no":
        job = job._replace(zero=3)
        assumed.append("ZeRO 3: nothing less fits")
    chunks = _chunks(cells, ground, job, assumed)
    job = job._replace(chunks=chunks, schedule="interleaved" if chunks > 1 else "1f1b")
    job = job._replace(recompute=_recompute(cells, ground, job, assumed))
    if stack.recompute_blocks and job.recompute == "full" and not cells.get("recompute"):
        job = job._replace(recompute_layers=fewest_recomputed(ground, job))
        assumed.append(f"of them {job.recompute_layers} blocks")
    return job


def _ep(cells: Cells, ground: Ground, data: int, assumed: list[str]) -> int:
    """As stated; where weights are sharded anyway and nothing is said, experts are spread as far as they go."""
    moe, stated = ground.shape.spec.moe, number(cells, "ep", 0)
    if moe is None or stated or ground.stack.zero < 3:
        return stated or 1
    spread = gcd(moe.count, data)
    assumed.append(f"ep {spread}")
    return spread


def _etp(cells: Cells, tp: int) -> int:
    stated = number(cells, "etp", 0)
    return stated or (tp if number(cells, "ep", 0) == 1 else 1)


def _sequence_parallel(cells: Cells, stack: Stack, tp: int, assumed: list[str]) -> bool:
    if cells.get("sp"):
        return tp > 1 and cells["sp"] == "1"
    if tp > 1:
        assumed.append(f"sequence parallel: {'yes' if stack.sequence_parallel else 'no'}")
    return tp > 1 and stack.sequence_parallel


def _zero(cells: Cells, stack: Stack, assumed: list[str]) -> tuple[int, int]:
    stated, notes = cells.get("zero", ""), cells.get("notes", "")
    stage = int(stated[0]) if stated else stack.zero
    if not stated:
        assumed.append(f"ZeRO {stage}")
    group = re.search(r"(?:shard group=|FSDP group )(\d+)", notes)
    shard = int(group[1]) if group else number(cells, "gpus_per_node", 8) if "HSDP" in stated else 0
    data = number(cells, "n_gpus") // (number(cells, "tp") * number(cells, "pp"))
    return stage, shard if shard and data % shard == 0 else 0


def _chunks(cells: Cells, ground: Ground, job: Job, assumed: list[str]) -> int:
    """Interleaved stages per device: as stated, else of about as many layers as the stack's habit."""
    stated, layers, habit = number(cells, "vpp", 0), len(ground.shape.layers), ground.stack.layers_per_chunk
    if stated or job.pp == 1:
        return max(1, stated) if job.pp > 1 else 1
    each = layers / job.pp
    chunks = 1
    if habit and ground.stack.overlap_pp and job.micro_batches % job.pp == 0:
        chunks = min(divisors(max(1, int(each))), key=lambda n: (abs(each / n - habit), n))
    assumed.append(f"interleaved stages {chunks}")
    return chunks


def fewest_recomputed(ground: Ground, job: Job) -> int:
    """Blocks of a position that must be recomputed for the job to fit; all where even that does not do."""
    most = -(-len(ground.shape.layers) // job.pp)
    fits = (n for n in range(1, most) if memory(ground, job._replace(recompute_layers=n)).verdict != "no")
    return next(fits, most)


MODES = {"none": "none", "full": "full", "selective": "selective", "minimal_flash": "selective"}


def _recompute(cells: Cells, ground: Ground, job: Job, assumed: list[str]) -> str:
    stated = cells.get("recompute", "")
    if stated:
        return MODES.get(stated, "selective")
    modes = ("none", "selective", "full") if ground.stack.least_recompute else (ground.stack.recompute,)
    mode = next((m for m in modes if memory(ground, job._replace(recompute=m)).verdict != "no"), modes[-1])
    assumed.append(f"recompute {mode}")
    return mode


def _seconds(cells: Cells, model: ModelSpec, job: Job) -> float | None:
    """Seconds of a step: as stated, else from tokens per second, else from FLOP/s by the convention that is stated."""
    tokens = job.batch * job.sequence
    if cells.get("step_time_s"):
        return float(cells["step_time_s"])
    if cells.get("tokens_per_s_per_gpu"):
        return tokens / (float(cells["tokens_per_s_per_gpu"]) * job.world)
    if not cells.get("tflops_per_gpu"):
        return None
    rate = float(cells["tflops_per_gpu"]) * 1e12 * job.world
    if cells.get("implied_flops_per_token"):
        return tokens * float(cells["implied_flops_per_token"]) / rate
    flops = _conventional(cells.get("flops_convention", ""), model, job.sequence)
    return None if flops is None else tokens * flops / rate


def _conventional(convention: str, model: ModelSpec, sequence: int) -> float | None:
    """FLOP per token as a source counts them; None where it does not say how."""
    hidden, layers, vocab = model.hidden, model.layers, model.vocab
    if convention.startswith("hardware FLOPs"):  # Narayanan et al. 2021, equation 3
        return 96 * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocab / (16 * layers * hidden))
    if convention == "model FLOPs" and model.mlp != "swiglu":
        return 72 * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocab / (12 * layers * hidden))
    if convention in ("model FLOPs", "BF16 MFU as paper"):
        from plait.spec.flops import flops_per_token

        return float(flops_per_token(model, sequence).training)
    return None


def interpreted(path: Path) -> tuple[list[Published], list[Refused]]:
    """All rows of a table: those that can be predicted, and those that cannot."""
    rows = [interpret(cells) for cells in read_rows(path)]
    return [r for r in rows if isinstance(r, Published)], [r for r in rows if isinstance(r, Refused)]
