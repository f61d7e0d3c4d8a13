"""`plait plan --published FILE.csv`: lint the rows, predict every one, and say how good that was, source by source."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any

import numpy as np

from plait.planner.constants import calibration, value
from plait.planner.memory import memory
from plait.planner.published.calibrate import Table, held_out
from plait.planner.published.lint import Doubt, lint
from plait.planner.published.rows import Published, Refused, interpret, read_rows
from plait.planner.published.score import (
    Scored,
    anchored,
    by,
    constant_mfu,
    contests,
    in_order,
    judged,
    macro,
    of_source,
    regret,
    room,
)

GB = {"GB": 1e9, "GiB": 2**30}


@dataclass(frozen=True)
class Verdict:
    """Predictions of a table and what they are worth."""

    scored: list[Scored]
    unmeasured: list[Published]
    refused: list[Refused]
    doubts: list[Doubt]
    held: bool

    def as_dict(self) -> dict[str, Any]:
        """For JSON: one entry per row of the table, and the summary."""
        spreads = calibration().spreads
        rows = [_row(one.row, one.predicted, spreads) for one in self.scored]
        rows += [_row(row, None, spreads) for row in self.unmeasured]
        rows += [{"id": one.id, "status": "refused", "reason": one.reason} for one in self.refused]
        return {"rows": rows, "summary": self.summary()}

    def summary(self) -> dict[str, Any]:
        spreads = calibration().spreads
        baseline = constant_mfu([one.row for one in self.scored], self.held)
        figures: dict[str, dict[str, Any]] = {}
        for kind, rows in (("dense", [s for s in self.scored if s.row.dense]), ("experts", _with_experts(self.scored))):
            sources = by(rows, lambda row: row.source + ("" if judged(row) else " (quality C)"))
            each = {source: of_source(own, baseline, spreads) for source, own in sources.items()}
            total = of_source(rows, baseline, spreads) if rows else {}
            figures[kind] = {"sources": each, "macro": macro(each.values()), "total": total, **_anchors(rows)}
        groups = contests(self.scored)
        right, pairs = in_order(groups)
        lost = regret(groups)
        return {
            "rows": len(self.scored) + len(self.unmeasured) + len(self.refused),
            "accepted": (len(self.scored) + len(self.unmeasured))
            / max(1, len(self.scored) + len(self.unmeasured) + len(self.refused)),
            "refused": dict(Counter(one.reason for one in self.refused)),
            "distrusted": [doubt._asdict() for doubt in self.doubts],
            "constants": "fitted to the other sources" if self.held else "as shipped",
            **figures,
            "pairs": pairs,
            "pairs_in_order": right / pairs if pairs else None,
            "contests": len(groups),
            "regret": float(np.mean(lost)) if lost else None,
            "coverage": self._coverage(spreads),
            "memory": _memory(self.scored, self.unmeasured),
        }

    def _coverage(self, spreads: Any) -> float | None:
        """Of rows, each source counted alike."""
        sources = by([one for one in self.scored if judged(one.row)], lambda row: row.source).values()
        shares = [np.mean([abs(one.log) <= room(one.row, spreads) for one in own]) for own in sources]
        return float(np.mean(shares)) if shares else None

    def lines(self) -> list[str]:
        """The summary to read."""
        from plait.planner.published.lines import summary_lines

        return summary_lines(self.summary())


def judge(path: Path, held: bool = False) -> Verdict:
    """Read, lint and predict a table. `held`: by constants fitted to the table's other sources."""
    cells = read_rows(path)
    read = [interpret(row) for row in cells]
    rows = [row for row in read if isinstance(row, Published)]
    refused = [row for row in read if isinstance(row, Refused)]
    measured = [row for row in rows if row.measured is not None and not row.cells.get("status")]
    scored = []
    if measured:
        table = Table(measured)
        known = calibration().constants
        logs = np.log([value(known, name) for name in table.names])
        predicted = held_out(table) if held else table.predict(logs)
        scored = [Scored(row, float(seconds)) for row, seconds in zip(measured, predicted, strict=True)]
    ids = {row.id for row in measured}
    return Verdict(scored, [row for row in rows if row.id not in ids], refused, lint(cells, rows), held)


def _with_experts(scored: list[Scored]) -> list[Scored]:
    return [one for one in scored if not one.row.dense]


def _anchors(rows: list[Scored]) -> dict[str, Any]:
    """Mean errors with one anchor, by source and over sources."""
    good = [one for one in rows if judged(one.row)]
    found = {}
    for name, same in (("anchored_same_model", True), ("anchored_other_model", False)):
        errors = anchored(good, same)
        found[name] = {"macro": float(np.mean(list(errors.values()))) if errors else None, "sources": errors}
    return found


def _row(row: Published, predicted: float | None, spreads: Any) -> dict[str, Any]:
    low_high = (None, None) if predicted is None else _interval(row, predicted, spreads)
    plan = memory(row.ground, row.job)
    return {
        "id": row.id, "source": row.source, "status": row.cells.get("status") or "ran",
        "measured_step_time_s": row.measured, "predicted_step_time_s": predicted,
        "low_s": low_high[0], "high_s": low_high[1], "measured_memory_bytes": measured_bytes(row),
        "predicted_memory_bytes": _allocated(row), "memory_verdict": plan.verdict,
        "cluster": row.ground.cluster.name, "stack": row.ground.stack.name, "assumed": list(row.assumed),
    }  # fmt: skip


def _interval(row: Published, predicted: float, spreads: Any) -> tuple[float, float]:
    half = room(row, spreads)
    return predicted * exp(-half), predicted * exp(half)


def measured_bytes(row: Published) -> float | None:
    """Peak bytes as the source has them: GiB, or GB where it says so."""
    if not row.cells.get("peak_mem_gib"):
        return None
    unit = GB["GB"] if row.cells.get("mem_kind", "").startswith("GB") else GB["GiB"]
    return float(row.cells["peak_mem_gib"]) * unit


def _allocated(row: Published) -> float:
    """What stands against the source's figure: allocated bytes where it says allocated, else all that is taken."""
    stages = memory(row.ground, row.job).stages
    says = row.cells.get("mem_kind", "")
    allocated = "alloc" in says
    return max(stage.allocated if allocated else stage.total for stage in stages)


def _memory(scored: list[Scored], unmeasured: list[Published]) -> dict[str, Any]:
    """Errors of memory, runs that ran and would be refused, and runs that ran out and would have been warned of."""
    ran = [one.row for one in scored]
    failed = [row for row in unmeasured if "OOM" in row.cells.get("status", "")]
    known = [row for row in (*ran, *unmeasured) if measured_bytes(row) and "OOM" not in row.cells.get("status", "")]
    errors: dict[str, list[float]] = {}
    for row in known:
        errors.setdefault(row.source, []).append(abs(_allocated(row) / (measured_bytes(row) or 1) - 1))
    frugal = [memory(row.ground, row.job._replace(recompute="full")).verdict for row in ran]
    return {
        "mape": {source: float(np.mean(each)) for source, each in errors.items()},
        "false_alarms": frugal.count("no") / len(frugal) if frugal else None,
        "oom_rows": len(failed),
        "oom_caught": sum(memory(row.ground, row.job).verdict != "fits" for row in failed),
    }
