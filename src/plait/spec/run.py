"""RunSpec: one description of a run, section by section as they stand in `run.toml`.

`RunSpec()` is the built-in run: a byte-level Llama on the text of Python's own standard library. What needs several
sections at once (does the batch divide?) is judged in `fit.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, Strict

from plait.spec.base import Spec
from plait.spec.layout import AXES
from plait.spec.model import ModelSpec
from plait.spec.presets import PRESETS

Texts = Annotated[tuple[str, ...], Strict(False)]  # TOML has lists, a frozen value has tuples
DType = Literal["float32", "bfloat16", "float16", "float64"]
# Optimizer -> what the border of a ZeRO shard may not cut: "element", or "matrix" where whole ones are needed.
SHARD_UNITS: Mapping[str, str] = {"adamw": "element", "sgd": "element"}
BYTE_VOCAB = 257  # text without a tokenizer: the 256 bytes, and the end of a document


class LayoutSpec(Spec):
    """[layout]: the degree of every axis; `dp` left out follows from the world."""

    mode: Literal["manual", "auto"] = "manual"  # auto: the planner's choice for this many ranks
    cluster: str = "cpu"  # for mode auto: a machine of the catalogue, or a file that `plait measure` wrote
    tp: int = Field(1, ge=1)
    pp: int = Field(1, ge=1)
    dp: int | None = Field(None, ge=1)
    cp: int = Field(1, ge=1)
    ep: int = Field(1, ge=1)
    etp: int = Field(1, ge=1)
    ulysses: int = Field(1, ge=1)  # of the cp ranks, those that exchange tokens for heads; the rest form rings
    context: Literal["ring", "gather"] = "ring"  # how a ring's keys and values come
    context_order: Literal["zigzag", "contiguous"] = "zigzag"  # which tokens of a row a ring rank holds
    sequence_parallel: bool = False
    order: Texts = AXES


class ScheduleSpec(Spec):
    """[schedule]: the pipeline schedule by name, or a file of actions; stages per device; layers per stage.

    `chunks` left out is what the schedule needs. `layers` says how many blocks each stage has: as even as can be,
    balanced by the stages' FLOPs (the head is not free), or listed.
    """

    name: str = "1f1b"
    chunks: int | None = Field(None, ge=1)
    file: str | None = None
    layers: Literal["even", "balanced"] | Annotated[tuple[Annotated[int, Field(ge=1)], ...], Strict(False)] = "even"


class BatchSpec(Spec):
    """[batch]: sequences per step, sequences per micro-batch, tokens per sequence."""

    global_size: int = Field(32, ge=1)
    micro_size: int = Field(4, ge=1)
    sequence: int = Field(128, ge=1)

    def micro_batches(self, dp: int) -> int:
        """How many micro-batches each of `dp` replicas has in a step."""
        return self.global_size // (dp * self.micro_size)


class ZeroSpec(Spec):
    """[zero]: what data-parallel ranks shard (0 nothing, 1 optimizer, 2 + gradients, 3 + weights), and how widely."""

    stage: int = Field(0, ge=0, le=3)
    shard: Annotated[int, Field(ge=1)] | Literal["all", "node"] = "all"
    keep: bool = False


class PrecisionSpec(Spec):
    """[precision]: "float32" of accumulation and reduction means the wider of float32 and the compute dtype.

    `scale…` rule the dynamic loss scale of float16: where it starts, after how many good steps it doubles, how many
    overflows halve it, and below which value the run stops.
    """

    compute: DType = "float32"
    grad_accumulate: DType = "float32"
    grad_reduce: DType = "float32"
    scale: float = Field(65536.0, gt=0)
    scale_growth_every: int = Field(2000, ge=1)
    scale_hysteresis: int = Field(1, ge=1)
    scale_floor: float = Field(1.0, gt=0)


# Cheap to compute for the bytes that they keep (Korthikanti et al. 2022, section 5).
RECOMPUTED_PARTS = ("attention", "norm", "activation")


class RecomputeSpec(Spec):
    """[recompute]: which activations are computed again in backward, and in how many blocks of each stage.

    `loss_chunk`: tokens whose logits are held at once (0: those of a whole micro-batch).
    """

    mode: Literal["none", "full", "selective"] | Texts = "none"  # a list of RECOMPUTED_PARTS; selective: all of them
    layers: Annotated[int, Field(ge=1)] | Literal["all"] = "all"
    loss_chunk: int = Field(0, ge=0)

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of a block that are computed again where the whole block is not."""
        named = {"none": (), "full": (), "selective": RECOMPUTED_PARTS}
        return named[self.mode] if isinstance(self.mode, str) else self.mode


class OptimSpec(Spec):
    """[optim]: update n (from 1) uses lr(n); after the last update the LR stands at `lr · final`."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(6e-3, ge=0)
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    warmup: int = Field(0, ge=0)
    decay: int = Field(0, ge=0)  # wsd: the last steps, in which the LR falls
    final: float = Field(0.1, ge=0, le=1)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    momentum: float = Field(0.0, ge=0, lt=1)  # sgd
    weight_decay: float = Field(0.1, ge=0)
    clip: float = Field(1.0, ge=0)  # the largest gradient norm; 0: no clipping


class DataSpec(Spec):
    """[data]: where text or tokens come from, and what stands between documents."""

    source: Literal["builtin", "text", "jsonl", "parquet", "tokens", "synthetic"] = "builtin"
    files: Texts = ()
    tokenizer: str | None = None  # a Hugging Face tokenizer.json; none: bytes, 256 ends a document
    field: str = "text"
    mask_field: str | None = None
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    separator: Literal["eos", "none"] = "eos"
    mask_documents: bool = False
    validation: float = Field(0.05, ge=0, lt=1)
    cache: str | None = None


class TrainSpec(Spec):
    """[train]: how long, from which seed, where to, and how often the run looks up from its work."""

    steps: int = Field(200, ge=1)
    seed: int = Field(1, ge=0, lt=2**31)
    run_dir: str | None = None
    resume: str | None = None
    log_every: int = Field(10, ge=1)
    eval_every: int = Field(0, ge=0)  # 0: at the end only
    eval_batches: int = Field(8, ge=0)
    sample: int = Field(0, ge=0)  # tokens of text to sample at the end
    device: Literal["auto", "cpu", "cuda", "cuda-shared"] = "auto"
    tensorboard: bool = False


class CheckpointSpec(Spec):
    """[checkpoint]: save every so many steps (0: never), and how many to keep."""

    every: int = Field(0, ge=0)
    keep: int = Field(3, ge=1)


class RunSpec(Spec):
    """A whole run. Every section and every key has a default; together they are the built-in run."""

    model: ModelSpec = PRESETS["builtin"]
    layout: LayoutSpec = LayoutSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    batch: BatchSpec = BatchSpec()
    zero: ZeroSpec = ZeroSpec()
    precision: PrecisionSpec = PrecisionSpec()
    recompute: RecomputeSpec = RecomputeSpec()
    optim: OptimSpec = OptimSpec()
    data: DataSpec = DataSpec()
    train: TrainSpec = TrainSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
