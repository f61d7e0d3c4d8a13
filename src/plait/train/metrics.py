"""What a step tells the world: `Metrics`, and the end of a run: `Summary`. Values only; sinks decide where they go."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from plait.train.experts import ExpertUse


@dataclass(frozen=True)
class Metrics:
    """One step. Loss in nats per token over the global batch; `norm` before clipping; rates per wall-clock second.

    `updates` counts the updates so far; `lr` is None where the step was skipped; `eval_loss` where none was made.
    `auxiliary` are losses beside the tokens', `experts` says how those of each layer were used (mixtures only).
    `loss_scale` is what the next step's loss will be multiplied by (fp16; None in other dtypes).
    """

    step: int
    loss: float
    norm: float
    lr: float | None
    labels: int
    updates: int
    seconds: float
    tokens_per_second: float
    mfu: float | None = None
    eval_loss: float | None = None
    loss_scale: float | None = None
    auxiliary: Mapping[str, float] = field(default_factory=dict)
    experts: Mapping[int, ExpertUse] = field(default_factory=dict)

    @property
    def skipped(self) -> str | None:
        """Why weights were left as they are."""
        if self.lr is not None:
            return None
        return "no valid label in the batch" if self.labels == 0 else f"fp16 overflow, loss scale {self.loss_scale:g}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON; what a model has none of is left out."""
        found = asdict(self)
        found["experts"] = {str(layer): use._asdict() for layer, use in self.experts.items()}
        return {name: value for name, value in found.items() if value != {}}


@dataclass(frozen=True)
class Summary:
    """The whole run, as `plait train --json` prints it; the last three are for people only."""

    steps: int
    loss_first: float
    loss_last: float
    eval_loss: float | None
    tokens_per_second: float
    parameters: int
    layout: Mapping[str, Any]
    world: int
    peak_memory_bytes: list[int]
    memory: list[Mapping[str, Any]]  # of each rank, see train/memory.py
    collectives: Mapping[str, Any]
    run_dir: str | None
    bigram_loss: float | None = None
    sample: str | None = None
    first: int = 1  # step of this run of the program

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: value for name, value in asdict(self).items() if name not in ("bigram_loss", "sample", "first")}


def peak_memory(device: torch.device) -> int:
    """Most bytes ever held by this rank: the allocator's on CUDA, the process's resident set (VmHWM) on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if not status.exists():  # macOS: ru_maxrss is in bytes there
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    highest = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(highest.split()[1]) * 1024


# Dense peak FLOP/s by the name that the device gives itself, for compute dtypes; an unknown device has no MFU.
# Source: NVIDIA data sheets (A100, H100 SXM, H200), without sparsity.
PEAKS: Mapping[str, Mapping[str, float]] = {
    "A100": {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12, "float64": 9.7e12},
    "H100": {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12, "float64": 34e12},
    "H200": {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12, "float64": 34e12},
}


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """FLOP/s of one device, or None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peaks[dtype] for model, peaks in PEAKS.items() if model in name), None)
