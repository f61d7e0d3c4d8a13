"""The same plan in other words: a run file of plait's, lines that start it, and the flags or files of other systems.

What another system cannot express is said, never dropped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

from plait.planner.job import Job
from plait.planner.memory import RECOMPUTED
from plait.spec.cluster import Cluster
from plait.spec.errors import UsageError
from plait.spec.nearest import did_you_mean
from plait.spec.run import BatchSpec, LayoutSpec, PrecisionSpec, RecomputeSpec, RunSpec, ScheduleSpec, ZeroSpec


class Told(NamedTuple):
    """A plan in another system's words, and what they cannot say."""

    text: str
    unsaid: tuple[str, ...]


def run_of(base: RunSpec, job: Job, cluster: str | None = None) -> RunSpec:
    """The run that `plait train` takes: `base` with the job's layout, schedule, batch, ZeRO stage and recompute.

    `cluster` is the machine that it was planned for, if another than the run's.
    """
    halves = job.compute in ("bfloat16", "float16")
    return base.model_copy(
        update={
            "layout": LayoutSpec(
                tp=job.tp, pp=job.pp, dp=job.dp, cp=job.cp, ep=job.ep, etp=job.etp,
                sequence_parallel=job.sequence_parallel, order=job.order, cluster=cluster or base.layout.cluster,
            ),
            "schedule": ScheduleSpec(name=job.schedule, chunks=job.chunks),
            "batch": BatchSpec(global_size=job.batch, micro_size=job.micro, sequence=job.sequence),
            "zero": ZeroSpec(stage=job.zero, shard=job.shard or "all", keep=job.keep),
            "precision": PrecisionSpec.model_validate({"compute": job.compute}) if halves else base.precision,
            "recompute": RecomputeSpec.model_validate(
                {
                    "mode": job.recompute if job.recompute in RECOMPUTED else tuple(job.recompute.split("+")),
                    "layers": "all" if job.recompute_layers < 0 else job.recompute_layers,
                }
            ),
        }
    )  # fmt: skip


def start_lines(job: Job, cluster: Cluster, file: str) -> dict[str, str]:
    """Commands that start a run: torchrun on each node, and srun that starts torchrun on all."""
    each = min(cluster.node, job.world)
    nodes = -(-job.world // each)
    torchrun = f"torchrun --nproc-per-node {each} -m plait train {file}"
    if nodes == 1:
        return {"torchrun": torchrun}
    meeting = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint $HEAD:29500"
    torchrun = torchrun.replace("torchrun ", f"torchrun {meeting} ", 1)
    return {
        "torchrun": torchrun,
        "srun": f"srun --nodes {nodes} --ntasks-per-node 1 --gpus-per-node {each} {torchrun}",
    }


def megatron(job: Job) -> Told:
    """Megatron-LM's flags (megatron/training/arguments.py)."""
    flags: list[tuple[str, object]] = [
        ("tensor-model-parallel-size", job.tp), ("pipeline-model-parallel-size", job.pp),
        ("context-parallel-size", job.cp), ("micro-batch-size", job.micro), ("global-batch-size", job.batch),
        ("seq-length", job.sequence),
    ]  # fmt: skip
    if job.ep > 1:
        flags += [("expert-model-parallel-size", job.ep), ("expert-tensor-parallel-size", job.etp)]
    if job.chunks > 1:
        flags.append(("num-virtual-stages-per-pipeline-rank", job.chunks))
    switches = [name for name, on in (("sequence-parallel", job.sequence_parallel), ("bf16", True)) if on]
    switches += ["use-distributed-optimizer"] if job.zero in (1, 2) else []
    switches += ["use-megatron-fsdp", "data-parallel-sharding-strategy optim_grads_params"] if job.zero == 3 else []
    if job.recompute == "full":
        flags += [("recompute-granularity", "full"), ("recompute-method", "uniform"), ("recompute-num-layers", 1)]
    elif job.recompute != "none":
        flags.append(("recompute-granularity", "selective"))
    unsaid = ["ZeRO 2: the distributed optimizer keeps whole gradients"] if job.zero == 2 else []
    unsaid += [] if job.schedule in ("1f1b", "interleaved") else [f"schedule {job.schedule}"]
    unsaid += [] if job.order == ("pp", "dp", "cp", "tp") else [f"order {' '.join(job.order)}"]
    lines = [f"--{name} {value}" for name, value in flags] + [f"--{name}" for name in switches]
    return Told(" \\\n".join(lines), tuple(unsaid))


def torchtitan(job: Job) -> Told:
    """torchtitan's TOML (torchtitan/config/job_config.py)."""
    schedules = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "gpipe": "GPipe", "zb-v": "ZBVZeroBubble"}
    shard = job.shards // job.cp if job.zero else 1
    lines = [
        "[parallelism]",
        f"data_parallel_replicate_degree = {max(1, job.dp // max(1, shard))}",
        f"data_parallel_shard_degree = {max(1, shard)}",
        f"tensor_parallel_degree = {job.tp}",
        f"pipeline_parallel_degree = {job.pp}",
        f"context_parallel_degree = {job.cp}",
        f"expert_parallel_degree = {job.ep}",
        f'pipeline_parallel_schedule = "{schedules.get(job.schedule, "1F1B")}"',
        f"pipeline_parallel_microbatch_size = {job.micro}",
        f'fsdp_reshard_after_forward = "{"always" if job.zero == 3 and not job.keep else "never"}"',
        "[training]",
        f"local_batch_size = {job.batch // job.dp}",
        f"global_batch_size = {job.batch}",
        f"seq_len = {job.sequence}",
        "[activation_checkpoint]",
        f'mode = "{job.recompute if job.recompute in ("none", "full") else "selective"}"',
    ]
    unsaid = [f"ZeRO {job.zero}: FSDP2 always shards weights, gradients and optimizer together"] * (job.zero in (1, 2))
    unsaid += [] if job.schedule in schedules else [f"schedule {job.schedule}"]
    unsaid += ["tensor parallel without sequence parallel"] * (job.tp > 1 and not job.sequence_parallel)
    return Told("\n".join(lines), tuple(unsaid))


def deepspeed(job: Job) -> Told:
    """DeepSpeed's JSON (docs/_pages/config-json.md)."""
    config = {
        "train_batch_size": job.batch,
        "train_micro_batch_size_per_gpu": job.micro,
        "gradient_accumulation_steps": job.micro_batches,
        "bf16": {"enabled": job.compute == "bfloat16"},
        "fp16": {"enabled": job.compute == "float16"},
        "zero_optimization": {"stage": job.zero, "overlap_comm": True},
        **({"tensor_parallel": {"autotp_size": job.tp}} if job.tp > 1 else {}),
        **({"sequence_parallel_size": job.cp} if job.cp > 1 else {}),
    }
    unsaid = [f"pp {job.pp}: the pipeline is a PipelineModule in code"] * (job.pp > 1)
    unsaid += [f"interleaved stages {job.chunks}"] * (job.chunks > 1)
    unsaid += [f"ep {job.ep}: set where the MoE layer is made"] * (job.ep > 1)
    unsaid += [f"recompute {job.recompute}: the model's own gradient checkpointing"] * (job.recompute != "none")
    return Told(json.dumps(config, indent=2), tuple(unsaid))


SYSTEMS: Mapping[str, Callable[[Job], Told]] = {"megatron": megatron, "torchtitan": torchtitan, "deepspeed": deepspeed}


def told(system: str, job: Job) -> Told:
    """A job in a system's own words. Raises UsageError for a system that is unknown."""
    if system not in SYSTEMS:
        known = ", ".join(SYSTEMS)
        raise UsageError(f"--as {system}: unknown", did_you_mean(system, SYSTEMS) or f"known: {known}")
    return SYSTEMS[system](job)
