"""From a run and a world to a layout; or every reason why not, together, each with its two numbers and the way out."""

from __future__ import annotations

from plait.spec.available import KNOWN_SCHEDULES, unavailable
from plait.spec.errors import InvalidRun, Violation
from plait.spec.layout import AXES, Layout
from plait.spec.model import violations as model_violations
from plait.spec.run import RunSpec


def fit(run: RunSpec, world: int | None = None) -> Layout:
    """The layout of this run on `world` ranks; without a world, the product of the sizes given (dp 1 if left out).

    Raises InvalidRun with every violation at once.
    """
    found = violations(run, world)
    if found:
        raise InvalidRun(found)
    return _layout(run, world)


def violations(run: RunSpec, world: int | None = None) -> list[Violation]:
    """Every reason why this run cannot be, in the order of the file's sections."""
    found = [*model_violations(run.model), *_layout_violations(run, world)]
    if not found:
        found = _batch_violations(run, _layout(run, world))
    return [*found, *_training_violations(run), *unavailable(run)]


def _layout(run: RunSpec, world: int | None) -> Layout:
    asked, fixed = run.layout, run.layout.pp * run.layout.cp * run.layout.tp
    dp = asked.dp if asked.dp is not None else (world or fixed) // fixed
    domain = dp * asked.cp
    shard = run.zero.shard if isinstance(run.zero.shard, int) else domain
    return Layout(
        pp=asked.pp, dp=dp, cp=asked.cp, tp=asked.tp, ep=asked.ep, etp=asked.etp,
        kv=min(asked.tp, run.model.kv_heads), ulysses=asked.ulysses, shard=min(shard, domain),
        sequence_parallel=asked.sequence_parallel, order=asked.order,
    )  # fmt: skip


def _divides(key: str, what: str, total: int, parts: int) -> list[Violation]:
    """`parts` must divide `total`; the fix names the nearest divisors on both sides."""
    if total % parts == 0:
        return []
    return [Violation(key, f"{parts} does not divide {what} {total}", f"use {nearest_divisors(total, parts)}")]


def nearest_divisors(total: int, wanted: int) -> str:
    """The divisors of `total` next to `wanted`: 6, 4 -> '3 or 6'."""
    divisors = [n for n in range(1, total + 1) if total % n == 0]
    below = [n for n in divisors if n <= wanted][-1:]
    above = [n for n in divisors if n > wanted][:1]
    return " or ".join(str(n) for n in below + above)


def _layout_violations(run: RunSpec, world: int | None) -> list[Violation]:
    model, asked = run.model, run.layout
    found: list[Violation] = []
    if sorted(asked.order) != sorted(AXES):
        found.append(
            Violation("layout.order", f"{list(asked.order)} is not {len(AXES)} axes", f"order all of {list(AXES)}")
        )
    found += _divides("layout.tp", "heads", model.heads, asked.tp)
    kv, tp = model.kv_heads, asked.tp
    if kv % tp and tp % kv:
        fix = f"use a divisor or a multiple of {kv}"
        found.append(Violation("layout.tp", f"tp {tp} and kv heads {kv}: neither divides the other", fix))
    for name, size in (("ffn", model.ffn), ("vocab", model.vocab)):
        if size < tp:
            found.append(Violation("layout.tp", f"tp {tp} is more than {name} {size}", f"use tp ≤ {size}"))
    stages = asked.pp * run.schedule.chunks
    if stages > model.layers:
        fix = f"use pp ≤ {model.layers // run.schedule.chunks}"
        found.append(Violation("layout.pp", f"{stages} stages are more than layers {model.layers}", fix))
    found += _divides("layout.cp", "sequence", run.batch.sequence, asked.cp)
    if asked.sequence_parallel:
        found += _divides("layout.sequence_parallel", "sequence", run.batch.sequence, asked.cp * tp)
    found += _world_violations(run, world)
    return found


def _world_violations(run: RunSpec, world: int | None) -> list[Violation]:
    asked = run.layout
    if world is None:
        return []
    fixed = asked.pp * asked.cp * asked.tp
    if asked.dp is None:
        if world % fixed:
            fix = f"use a world of {max(1, world // fixed) * fixed} or {(world // fixed + 1) * fixed}"
            return [Violation("layout", f"pp·cp·tp {fixed} does not divide the world {world}", fix)]
        return []
    if fixed * asked.dp != world:
        fix = f"start {fixed * asked.dp} ranks, or leave dp out"
        return [Violation("layout", f"pp·dp·cp·tp {fixed * asked.dp} is not the world {world}", fix)]
    return []


def _batch_violations(run: RunSpec, layout: Layout) -> list[Violation]:
    batch, found = run.batch, []
    unit = layout.dp * batch.micro_size
    if batch.global_size % unit:
        near = sorted({max(1, batch.global_size // unit) * unit, (batch.global_size // unit + 1) * unit})
        problem = f"dp {layout.dp} × micro_size {batch.micro_size} = {unit} does not divide {batch.global_size}"
        found.append(Violation("batch.global_size", problem, "use " + " or ".join(map(str, near))))
    if run.model.positions == "learned" and batch.sequence > run.model.max_sequence:
        problem = f"sequence {batch.sequence} is more than the {run.model.max_sequence} learned positions"
        found.append(Violation("batch.sequence", problem, f"use ≤ {run.model.max_sequence}"))
    domain = layout.dp * layout.cp
    if isinstance(run.zero.shard, int):
        found += _divides("zero.shard", "dp·cp", domain, run.zero.shard)
    return found


def _training_violations(run: RunSpec) -> list[Violation]:
    found = []
    if run.schedule.name not in KNOWN_SCHEDULES:
        found.append(
            Violation("schedule.name", f"{run.schedule.name!r} is unknown", "one of " + ", ".join(KNOWN_SCHEDULES))
        )
    optim, steps = run.optim, run.train.steps
    decay = optim.decay if optim.schedule == "wsd" else 0
    if optim.schedule != "constant" and optim.warmup + decay > steps:
        problem = f"warmup {optim.warmup} + decay {decay} is more than train.steps {steps}"
        found.append(Violation("optim.warmup", problem, f"use ≤ {max(0, steps - decay)}"))
    if run.data.source == "tokens" and run.data.tokenizer is not None:
        found.append(Violation("data.tokenizer", "a token file is tokenized already", "leave it out"))
    if run.data.source in ("text", "jsonl", "parquet", "tokens") and not run.data.files:
        found.append(
            Violation("data.files", f"source {run.data.source!r} has 0 files, needs at least 1", "name the files")
        )
    return found
