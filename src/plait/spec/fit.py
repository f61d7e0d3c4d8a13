"""From a run and a world to a layout; or every reason why not, together, each with its two numbers and the way out.

What a run asks of one section alone is judged where that section is defined; what it asks of several at once, here.
Nothing is opened but a schedule's file, which is a part of the run's description: whether a file of data is there and
holds enough is the business of whoever reads it.
"""

from __future__ import annotations

from math import gcd, lcm

from plait.spec.errors import InvalidRun, UsageError, Violation
from plait.spec.families import unknown_family
from plait.spec.layout import Layout
from plait.spec.model import ModelSpec
from plait.spec.model import violations as model_violations
from plait.spec.nearest import did_you_mean, divisors, nearest_divisors, nearest_multiples, neighbours
from plait.spec.pipeline import SHAPES, chunks_of, stage_count
from plait.spec.run import BYTE_VOCAB, RECOMPUTED_PARTS, RunSpec
from plait.spec.schedule_file import read_file

UNREAD = ("builtin", "synthetic")  # sources that read no file of the user's
OTHERS_IDS = ("tokens", "synthetic")  # sources whose token ids have no text unless a tokenizer is named


def fit(run: RunSpec, world: int | None = None, train: bool = False, node: int | None = None) -> Layout:
    """The layout of this run on `world` ranks; without a world, the product of the sizes given (dp 1 if left out).

    `train` also judges whether the run's data can train its model (a picture or a proof does not read it). `node` is
    the number of ranks of each machine, for zero.shard = "node"; left out, all ranks are on one.
    Raises InvalidRun with every violation at once.
    """
    if found := violations(run, world, train):
        raise InvalidRun(found)
    dp = _dp(run, world)
    assert dp is not None
    layout = _layout(run, dp)
    if run.zero.shard == "node" and node is not None:
        inside = sum(rank < node for rank in layout.group("dp_cp", 0))
        return Layout(**layout.model_dump() | {"shard": inside})
    return layout


def violations(run: RunSpec, world: int | None = None, train: bool = False) -> list[Violation]:
    """Every reason why this run cannot be, in the order of the file's sections."""
    dp = _dp(run, world)
    sizes = model_violations(run.model)
    return [
        *unknown_family("model.family", run.model.family),
        *sizes,
        *([] if sizes else _split_violations(run)),
        *_layout_violations(run, dp),
        *_world_violations(run, world),
        *_batch_violations(run, dp),
        *_schedule_violations(run, dp),
        *_recompute_violations(run),
        *_rate_violations(run),
        *_data_violations(run),
        *(_training_violations(run) if train else []),
    ]


def _dp(run: RunSpec, world: int | None) -> int | None:
    """The data-parallel degree: the one given, else what the world leaves; None where that is no whole number."""
    if run.layout.dp is not None or world is None:
        return run.layout.dp or 1
    dp, rest = divmod(world, _ranks_of_one_replica(run))
    return dp if dp > 0 and rest == 0 else None


def _ranks_of_one_replica(run: RunSpec) -> int:
    return run.layout.pp * run.layout.cp * run.layout.tp


def _layout(run: RunSpec, dp: int) -> Layout:
    asked = run.layout
    return Layout(
        pp=asked.pp, dp=dp, cp=asked.cp, tp=asked.tp, ep=asked.ep, etp=asked.etp,
        kv=gcd(asked.tp, run.model.kv_heads), ulysses=asked.ulysses,
        shard=run.zero.shard if isinstance(run.zero.shard, int) else dp * asked.cp,
        sequence_parallel=asked.sequence_parallel, order=asked.order,
    )  # fmt: skip


def _layout_violations(run: RunSpec, dp: int | None) -> list[Violation]:
    """What a layout refuses about itself."""
    if run.layout.mode == "auto":
        problem = "is 'auto', and the planner has not been asked"
        return [Violation("layout.mode", problem, "plait plan RUN.toml -o planned.toml, or plait train")]
    # Where dp is unknown, one that every rule about dp is content with: the world is at fault, nothing else.
    shard = run.zero.shard if isinstance(run.zero.shard, int) else 1
    try:
        _layout(run, run.layout.ep * run.layout.etp * shard if dp is None else dp)
    except InvalidRun as refused:
        return list(refused.violations)
    return []


def _split_violations(run: RunSpec) -> list[Violation]:
    """What the model's sizes refuse about the layout."""
    model, asked = run.model, run.layout
    tp, sequence = asked.tp, run.batch.sequence
    found = []
    if model.heads % tp or gcd(tp, model.kv_heads) not in (tp, model.kv_heads):
        legal = [n for n in divisors(model.heads) if gcd(n, model.kv_heads) in (n, model.kv_heads)]
        found.append(Violation("layout.tp", _tp_problem(model, tp), f"use {neighbours(legal, tp)}"))
    for name, size in _cut_over_tp(run):
        if size < tp:
            found.append(Violation("layout.tp", f"tp {tp} is more than {name} {size}", f"use tp ≤ {size}"))
    found += _expert_violations(run)
    found += _too_many_stages(run)
    if sequence % asked.cp:
        problem = f"cp {asked.cp} does not divide sequence {sequence}"
        found.append(Violation("layout.cp", problem, f"use {nearest_divisors(sequence, asked.cp)}"))
    elif sequence % (unit := _context_unit(run)):
        problem = f"zigzag order over cp {asked.cp} does not divide sequence {sequence} into {unit}"
        fix = f"use batch.sequence {nearest_multiples(unit, sequence)}, or context_order = 'contiguous'"
        found.append(Violation("layout.cp", problem, fix))
    if asked.sequence_parallel and sequence % (asked.cp * tp):
        problem = f"cp·tp {asked.cp * tp} does not divide sequence {sequence}"
        fix = f"use batch.sequence {nearest_multiples(asked.cp * tp, sequence)}, or false"
        found.append(Violation("layout.sequence_parallel", problem, fix))
    if asked.ulysses > 1 and model.heads % (tp * asked.ulysses):
        problem = f"tp·ulysses {tp * asked.ulysses} does not divide heads {model.heads}"
        found.append(Violation("layout.ulysses", problem, f"use {nearest_divisors(model.heads // tp, asked.ulysses)}"))
    return found


def _context_unit(run: RunSpec) -> int:
    """What a sequence must be a multiple of: zigzag order cuts two chunks for each ring rank."""
    asked = run.layout
    ring = asked.cp // asked.ulysses
    return lcm(asked.cp, 2 * ring) if asked.context_order == "zigzag" and ring > 1 else asked.cp


def _cut_over_tp(run: RunSpec) -> list[tuple[str, int]]:
    """Sizes of which every tp rank must get at least 1."""
    model, moe = run.model, run.model.moe
    sizes = [("vocab", model.vocab)]
    if moe is None or moe.first_dense or moe.every > 1:
        sizes.append(("ffn", model.ffn))
    if moe is not None and moe.shared:
        sizes.append(("shared ffn", moe.shared * moe.ffn))
    return sizes


def _expert_violations(run: RunSpec) -> list[Violation]:
    """Every ep rank holds as many experts as the next. A model without any does not care."""
    moe, ep, etp = run.model.moe, run.layout.ep, run.layout.etp
    if moe is None:
        return []
    found = []
    if moe.count % ep:
        problem = f"ep {ep} does not divide experts {moe.count}"
        found.append(Violation("layout.ep", problem, f"use {nearest_divisors(moe.count, ep)}"))
    if etp > moe.ffn:
        found.append(Violation("layout.etp", f"etp {etp} is more than an expert's ffn {moe.ffn}", "use 1"))
    return found


def _too_many_stages(run: RunSpec) -> list[Violation]:
    """Every stage needs a layer. Where the schedule is at fault, it is said of the schedule, not here."""
    layers = run.model.layers
    try:
        stages = stage_count(run.schedule, run.layout.pp)
    except (KeyError, UsageError):
        return []
    if stages <= layers:
        return []
    chunks = stages // run.layout.pp
    fix = f"pp ≤ {layers // chunks}" if 0 < chunks <= layers else f"schedule.chunks ≤ {layers}"
    if chunks > layers and not SHAPES[run.schedule.name].chosen:
        fix = f"model.layers ≥ {stages}, or a schedule of fewer than {chunks} stages per rank"
    return [Violation("layout.pp", f"{stages} stages are more than layers {layers}", f"use {fix}")]


def _tp_problem(model: ModelSpec, tp: int) -> str:
    problems = [f"{tp} does not divide heads {model.heads}"] if model.heads % tp else []
    if gcd(tp, model.kv_heads) not in (tp, model.kv_heads):
        problems.append(f"neither of tp {tp} and kv heads {model.kv_heads} divides the other")
    return ", ".join(problems)


def _world_violations(run: RunSpec, world: int | None) -> list[Violation]:
    replica, dp = _ranks_of_one_replica(run), run.layout.dp
    if world is None:
        return []
    if world < 1:
        return [Violation("layout", f"a world of {world} ranks is less than 1")]
    if dp is None and world % replica:
        fix = f"use a world of {nearest_multiples(replica, world)}, or axes whose product divides {world}"
        return [Violation("layout", f"pp·cp·tp {replica} does not divide the world {world}", fix)]
    if dp is not None and replica * dp != world:
        fix = f"start {replica * dp} ranks" + ("" if world % replica else f", or use dp {world // replica}")
        return [Violation("layout", f"pp·dp·cp·tp {replica * dp} is not the world {world}", fix)]
    return []


def _batch_violations(run: RunSpec, dp: int | None) -> list[Violation]:
    batch, found = run.batch, []
    unit = (dp or 1) * batch.micro_size
    if dp is not None and batch.global_size % unit:
        problem = f"dp {dp} × micro_size {batch.micro_size} = {unit} does not divide {batch.global_size}"
        fix = f"use {nearest_multiples(unit, batch.global_size)}"
        found.append(Violation("batch.global_size", problem, fix))
    if run.model.positions == "learned" and batch.sequence > run.model.max_sequence:
        problem = f"sequence {batch.sequence} is more than the {run.model.max_sequence} learned positions"
        found.append(Violation("batch.sequence", problem, f"use ≤ {run.model.max_sequence}"))
    return found


def _schedule_violations(run: RunSpec, dp: int | None) -> list[Violation]:
    """What the schedule refuses: its name or file, stages per rank, and layers for its stages."""
    schedule = run.schedule
    if schedule.name not in SHAPES:
        fix = did_you_mean(schedule.name, SHAPES) or "one of " + ", ".join(SHAPES)
        return [Violation("schedule.name", f"{schedule.name!r} is unknown", fix)]
    if schedule.file is not None:
        return _file_violations(run, schedule.file, dp)
    shape, chunks, found = SHAPES[schedule.name], chunks_of(schedule), []
    if chunks != shape.chunks and not shape.chosen:
        holds = f"{schedule.name} holds {shape.chunks} stage{'s' * (shape.chunks > 1)} per rank"
        found.append(Violation("schedule.chunks", f"{chunks}, but {holds}", f"use {shape.chunks}, or leave it out"))
    return found + _layer_violations(run, run.layout.pp * chunks)


def _file_violations(run: RunSpec, path: str, dp: int | None) -> list[Violation]:
    """A file of actions must be one, for as many ranks and micro-batches as the run has."""
    try:
        file = read_file(path)
    except UsageError as error:
        return [Violation("schedule.file", error.message, error.hint)]
    found, unit = [], (dp or 1) * run.batch.micro_size
    if len(file.ranks) != run.layout.pp:
        problem = f"{path} has lines for {len(file.ranks)} ranks, layout.pp is {run.layout.pp}"
        found.append(Violation("schedule.file", problem, f"use layout.pp {len(file.ranks)}"))
    ends = file.owner[0], file.owner[-1]
    if run.model.tied and len(set(ends)) == 2 and set(ends) != {0, len(file.ranks) - 1}:
        problem = (
            f"{path} has the first stage on rank {ends[0]} and the last on rank {ends[1]}, which share a tied table"
        )
        fix = f"give both to one rank, or to ranks 0 and {len(file.ranks) - 1}, or set model.tied=false"
        found.append(Violation("schedule.file", problem, fix))
    if dp is not None and file.micro_batches * unit != run.batch.global_size and run.batch.global_size % unit == 0:
        problem = f"{path} has {file.micro_batches} micro-batches, the run {run.batch.global_size // unit}"
        found.append(Violation("schedule.file", problem, f"use batch.global_size {file.micro_batches * unit}"))
    return found + _layer_violations(run, len(file.owner))


def _layer_violations(run: RunSpec, stages: int) -> list[Violation]:
    """Where the layers of each stage are listed, all stages and all layers are."""
    total, layers = run.model.layers, run.schedule.layers
    if isinstance(layers, str):
        return []
    found = []
    if len(layers) != stages:
        found.append(Violation("schedule.layers", f"{len(layers)} counts for {stages} stages", f"give {stages}"))
    if sum(layers) != total:
        found.append(Violation("schedule.layers", f"counts of {sum(layers)} layers, the model has {total}"))
    return found


def _recompute_violations(run: RunSpec) -> list[Violation]:
    mode, known = run.recompute.mode, ", ".join(RECOMPUTED_PARTS)
    found = [
        Violation("recompute.mode", f"{part!r} is no part", did_you_mean(part, RECOMPUTED_PARTS) or f"parts: {known}")
        for part in run.recompute.parts
        if part not in RECOMPUTED_PARTS
    ]
    for part in sorted({part for part in run.recompute.parts if run.recompute.parts.count(part) > 1}):
        found.append(
            Violation("recompute.mode", f"lists {part!r} {run.recompute.parts.count(part)} times", "once will do")
        )
    if mode == ():
        found.append(Violation("recompute.mode", "lists 0 parts, needs at least 1", f"use 'none', or of {known}"))
    if mode == "none" and run.recompute.layers != "all":
        problem = f"is {run.recompute.layers}, and mode 'none' recomputes 0 blocks"
        found.append(Violation("recompute.layers", problem, "leave it out, or set recompute.mode"))
    return found


def _rate_violations(run: RunSpec) -> list[Violation]:
    """The learning rate must have room to rise, and to come to its end at the last update."""
    optim, steps, found = run.optim, run.train.steps, []
    falling = {"constant": 0, "cosine": 1, "linear": 1, "wsd": optim.decay}[optim.schedule]
    if optim.schedule == "wsd" and optim.decay == 0:
        fix = f"use {max(1, steps // 10)}, or schedule = 'constant'"
        found.append(Violation("optim.decay", "wsd falls in its last 0 steps, but at least 1 is needed", fix))
    if optim.schedule != "wsd" and optim.decay:
        problem = f"is {optim.decay}, and schedule {optim.schedule!r} has no such part"
        found.append(Violation("optim.decay", problem, "use 0, or schedule = 'wsd'"))
    if optim.warmup and optim.warmup + falling > steps:
        problem = f"warmup {optim.warmup} and {falling} falling steps are more than train.steps {steps}"
        found.append(Violation("optim.warmup", problem, f"use ≤ {max(0, steps - falling)}"))
    elif optim.decay > steps:
        found.append(Violation("optim.decay", f"{optim.decay} is more than train.steps {steps}", f"use ≤ {steps}"))
    if optim.momentum and optim.name != "sgd":
        problem = f"is {optim.momentum}, and {optim.name} has none"
        found.append(Violation("optim.momentum", problem, "use 0, or name = 'sgd'"))
    return found


def _data_violations(run: RunSpec) -> list[Violation]:
    """What was asked of the data that its source cannot give, or would not look at."""
    data, found = run.data, []
    if data.source in UNREAD and data.files:
        problem = f"source {data.source!r} reads 0 files, {len(data.files)} are named"
        found.append(Violation("data.files", problem, "set data.source to 'text', 'jsonl', 'parquet' or 'tokens'"))
    if data.source not in UNREAD and not data.files:
        problem = f"source {data.source!r} has 0 files, needs at least 1"
        found.append(Violation("data.files", problem, "name the files"))
    if data.source == "synthetic" and data.tokenizer is not None:
        found.append(Violation("data.tokenizer", "synthetic tokens have no text", "leave it out"))
    if data.source not in ("jsonl", "parquet") and data.mask_field is not None:
        problem = f"source {data.source!r} has no fields"
        found.append(Violation("data.mask_field", problem, "leave it out, or use 'jsonl' or 'parquet'"))
    if data.source == "tokens" and data.mask_documents and data.tokenizer is None:
        problem = "a token file alone does not say which token ends a document"
        found.append(Violation("data.mask_documents", problem, "set data.tokenizer, or false"))
    return found


def _training_violations(run: RunSpec) -> list[Violation]:
    """What the data refuses about the model that it is to train."""
    data, model, found = run.data, run.model, []
    if data.source not in OTHERS_IDS and data.tokenizer is None and model.vocab < BYTE_VOCAB:
        problem = f"{model.vocab} tokens are fewer than the {BYTE_VOCAB} of text read as bytes"
        found.append(Violation("model.vocab", problem, f"use {BYTE_VOCAB}, or data.source = 'synthetic'"))
    if run.train.sample and data.source in OTHERS_IDS and data.tokenizer is None:
        problem = f"{run.train.sample} tokens of text cannot be told from ids alone"
        found.append(Violation("train.sample", problem, "set data.tokenizer, or 0"))
    return found
