"""A pipeline schedule as a CSV file: one line per rank, one cell per action in the order in which the rank runs it.

A cell is a kind, a micro-batch, and after a slash the stage (the line's own number where it is left out): `F3`,
`B0/5`, `W0/5`, `BW2/1`, and `F4/0+BW1/7` for a forward run together with a backward. Empty cells are idle time and
mean nothing; lines that begin with `#` are remarks. What is wrong with a cell is judged here, with file and line; what
is wrong with the order, `schedule/check.py` judges.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from plait.spec.errors import UsageError

CELL = re.compile(r"(BW|F|B|W)(\d{1,15})(?:/(\d{1,15}))?")
EXAMPLE = "a cell is like F3, B0/5, W0/5, BW2/1 or F4/0+BW1/7: kind, micro-batch, stage"


class Pass(NamedTuple):
    """One pass of a cell: kind (F, B, W or BW), stage and micro-batch."""

    kind: str
    stage: int
    micro: int


@dataclass(frozen=True)
class ScheduleFile:
    """What a file says: for each rank its line in the file and its cells, each of one pass or of an F and a BW."""

    path: str
    lines: tuple[int, ...]
    ranks: tuple[tuple[tuple[Pass, ...], ...], ...]
    owner: tuple[int, ...]
    micro_batches: int


def read_file(path: str) -> ScheduleFile:
    """The file's schedule, not yet checked for order. Raises UsageError that names the file, the line and the cell."""
    try:
        stat = Path(path).stat()
        return _read(path, stat.st_mtime_ns, stat.st_size)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path}: cannot be read: {error}", "schedule.file names a CSV file of actions") from error


@lru_cache(maxsize=4)
def _read(path: str, changed: int, size: int) -> ScheduleFile:
    lines: list[int] = []
    ranks: list[tuple[tuple[Pass, ...], ...]] = []
    with open(path, encoding="utf-8-sig", newline="") as file:
        for number, line in enumerate(file, 1):
            if line.strip() and not line.startswith("#"):
                cells = [cell.strip() for cell in next(csv.reader([line]))]
                ranks.append(tuple(_cell(c, len(lines), f"{path}:{number}") for c in cells if c))
                lines.append(number)
    micros = [part.micro for cells in ranks for cell in cells for part in cell]
    if not micros:
        raise UsageError(f"{path}: holds 0 actions, needs at least 1", EXAMPLE)
    return ScheduleFile(path, tuple(lines), tuple(ranks), _owner(path, lines, ranks), max(micros) + 1)


def _cell(text: str, rank: int, where: str) -> tuple[Pass, ...]:
    found = [CELL.fullmatch(part.strip()) for part in text.split("+")]
    passes = tuple(Pass(m[1], int(m[3] or rank), int(m[2])) for m in found if m)
    kinds = [part.kind for part in passes]
    if len(passes) != len(found) or (len(passes) > 1 and kinds != ["F", "BW"]):
        raise UsageError(f"{where}: {text!r} is not an action", EXAMPLE)
    return passes


def _owner(path: str, lines: list[int], ranks: list[tuple[tuple[Pass, ...], ...]]) -> tuple[int, ...]:
    owner: dict[int, int] = {}
    for rank, cells in enumerate(ranks):
        for stage in sorted({part.stage for cell in cells for part in cell}):
            if (other := owner.setdefault(stage, rank)) != rank:
                where = f"{path}:{lines[rank]}"
                hint = "a stage belongs to the one rank that runs all of its actions"
                raise UsageError(f"{where}: stage {stage} stands on line {lines[other]} too", hint)
    if len(owner) <= max(owner):
        missing = next(stage for stage in range(len(owner) + 1) if stage not in owner)
        raise UsageError(
            f"{path}: stage {missing} has no action, stage {max(owner)} has",
            f"number the {len(owner)} stages from 0 to {len(owner) - 1}",
        )
    return tuple(owner[stage] for stage in range(len(owner)))
