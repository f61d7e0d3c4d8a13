"""Rows that cannot be as they are printed: arithmetic that does not close, rates beyond the device, copies, misnomers.

A distrusted row is still predicted; it is listed with its reason, and keeps out of no average by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from plait.planner.memory import memory
from plait.planner.published.machines import Cells
from plait.planner.published.rows import MLPS, MODES, Published
from plait.spec.flops import flops_per_token
from plait.spec.model import violations
from plait.spec.units import format_bytes, format_count

HIGHEST_MFU = 0.90
NAME_OFF = 0.25  # relative, beyond which a name's size is not the model's


class Doubt(NamedTuple):
    """A row that is distrusted, and why."""

    id: str
    why: str


def lint(rows: Sequence[Cells], read: Sequence[Published]) -> list[Doubt]:
    """Every doubt, in the order of the table."""
    by_id = {row.id: row for row in read}
    copies = _copies(rows)
    found = []
    for cells in rows:
        found += [Doubt(cells["id"], why) for check in CELL_CHECKS for why in check(cells)]
        if cells["id"] in copies:
            found.append(Doubt(cells["id"], f"an exact copy of {copies[cells['id']]}"))
        if cells["id"] in by_id:
            found += [Doubt(cells["id"], why) for check in ROW_CHECKS for why in check(by_id[cells["id"]])]
    return found


def _copies(rows: Sequence[Cells]) -> dict[str, str]:
    """Row -> the earlier row that says the same in every cell but the id."""
    first: dict[tuple[str, ...], str] = {}
    copies = {}
    for cells in rows:
        key = tuple(value for name, value in cells.items() if name != "id")
        if first.setdefault(key, cells["id"]) != cells["id"]:
            copies[cells["id"]] = first[key]
    return copies


def _numbers(cells: Cells, *names: str) -> list[float] | None:
    try:
        return [float(cells[name]) for name in names]
    except (KeyError, ValueError):
        return None


def _world(cells: Cells) -> Iterator[str]:
    sizes = _numbers(cells, "tp", "pp", "cp", "dp", "n_gpus")
    if sizes and sizes[0] * sizes[1] * sizes[2] * sizes[3] != sizes[4]:
        yield f"tp·pp·cp·dp {sizes[0] * sizes[1] * sizes[2] * sizes[3]:.0f} is not n_gpus {sizes[4]:.0f}"


def _batch(cells: Cells) -> Iterator[str]:
    sizes = _numbers(cells, "dp", "micro_batch", "grad_accum", "global_batch")
    if sizes and sizes[0] * sizes[1] * sizes[2] != sizes[3]:
        yield f"dp · micro-batch · accumulation {sizes[0] * sizes[1] * sizes[2]:.0f} is not the batch {sizes[3]:.0f}"


def _rates(cells: Cells) -> Iterator[str]:
    """Tokens per second and step time say the same."""
    sizes = _numbers(cells, "tokens_per_s_per_gpu", "step_time_s", "n_gpus", "global_batch", "seq_len")
    if sizes:
        implied = sizes[3] * sizes[4] / (sizes[1] * sizes[2])
        if abs(implied / sizes[0] - 1) > 0.05:
            yield f"step time gives {implied:.0f} tokens/s a GPU, the row says {sizes[0]:.0f}"


def _fits(row: Published) -> Iterator[str]:
    if row.cells.get("status"):
        return
    frugal = memory(row.ground, row.job._replace(recompute="full"))
    if frugal.verdict == "no":
        short = format_bytes(-frugal.headroom)
        yield f"full recompute would still be {short} short of the device"


def _physical(row: Published) -> Iterator[str]:
    if row.measured is None:
        return
    flops = flops_per_token(row.ground.shape.spec, row.job.sequence).training * row.job.batch * row.job.sequence
    mfu = flops / (row.measured * row.job.world * row.ground.cluster.device.peak(row.job.compute))
    if mfu > HIGHEST_MFU:
        yield f"an MFU of {mfu:.2f} in {row.job.compute}"


_SIZE = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)([mbt])(?![a-z])")
_SCALE: Mapping[str, float] = {"m": 1e6, "b": 1e9, "t": 1e12}


def _name(row: Published) -> Iterator[str]:
    found = _SIZE.search(row.cells.get("model", "").lower())
    if not found:
        return
    said = float(found[1]) * _SCALE[found[2]]
    count = row.ground.shape.spec.parameter_count()
    if abs(count / said - 1) > NAME_OFF:
        yield f"named {found[0]}, its shape has {format_count(count)} parameters"


def _words(cells: Cells) -> Iterator[str]:
    """What a row calls its MLP and its recompute is known."""
    mlp, recompute = cells.get("mlp", ""), cells.get("recompute", "")
    if mlp not in MLPS:
        yield f"mlp {mlp!r} is unknown, taken as gelu"
    if recompute and recompute not in MODES and not recompute.startswith("selective"):
        yield f"recompute {recompute!r} is unknown, taken as selective"


def _heads(cells: Cells) -> Iterator[str]:
    sizes = _numbers(cells, "hidden", "heads")
    if sizes and not cells.get("head_dim") and cells.get("arch") != "moe-mla" and sizes[0] % sizes[1]:
        yield f"{sizes[1]:.0f} heads do not divide hidden {sizes[0]:.0f}, and head_dim is not stated"


def _experts(cells: Cells) -> Iterator[str]:
    """Experts where the architecture has them, and as many ranks as share them out evenly."""
    count, ranks = _numbers(cells, "experts"), _numbers(cells, "ep")
    if cells.get("arch") == "dense":
        stated = {"experts": count, "ep": ranks if ranks and ranks[0] > 1 else None}
        yield from (f"dense, with {name} {sizes[0]:.0f}" for name, sizes in stated.items() if sizes)
    if count and ranks and ranks[0] and count[0] % ranks[0]:
        yield f"ep {ranks[0]:.0f} does not divide the experts {count[0]:.0f}"


def _shape(row: Published) -> Iterator[str]:
    """What the model itself refuses; the size of a head, where it was divided out, is doubted above."""
    spec = row.ground.shape.spec
    yield from (str(one) for one in violations(spec) if row.cells.get("head_dim") or one.key != "model.head_dim")


CELL_CHECKS: tuple[Callable[[Cells], Iterator[str]], ...] = (_world, _batch, _rates, _words, _heads, _experts)
ROW_CHECKS: tuple[Callable[[Published], Iterator[str]], ...] = (_fits, _physical, _name, _shape)
