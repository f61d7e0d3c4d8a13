"""How good the predictions of published runs are: errors by source, order of layouts, regret, anchors, and intervals.

Within a source each layout counts once (the median of its rows), so one long table of weak scaling decides nothing; a
macro average is over sources with at least four layouts of quality A or B. Every source is listed, the others too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

import numpy as np

from plait.planner.published.calibrate import Table
from plait.planner.published.rows import Published
from plait.spec.flops import flops_per_token

ENOUGH = 4  # layouts of a source from which on it enters a macro average
APART = 0.05  # a measured gap between two layouts that is more than noise
COVERED = 0.80
LEAST_ROOM = 0.02  # half a width below which an interval never falls: run to run


@dataclass(frozen=True)
class Scored:
    """One row with its prediction (seconds)."""

    row: Published
    predicted: float

    @property
    def log(self) -> float:
        """log(predicted / measured)."""
        assert self.row.measured is not None
        return float(np.log(self.predicted / self.row.measured))

    @property
    def error(self) -> float:
        """|predicted / measured - 1|."""
        assert self.row.measured is not None
        return abs(self.predicted / self.row.measured - 1)


Groups = Mapping[str, list[Scored]]


def by(scored: Iterable[Scored], key: Callable[[Published], str]) -> dict[str, list[Scored]]:
    """Rows in groups, in the order in which the groups first appear."""
    found: dict[str, list[Scored]] = defaultdict(list)
    for one in scored:
        found[key(one.row)].append(one)
    return dict(found)


def judged(row: Published) -> bool:
    """Whether a row may enter an average: quality A or B, or not stated."""
    return row.cells.get("quality") != "C"


def of_source(
    scored: Sequence[Scored], baseline: Mapping[str, float], spreads: Mapping[str, float]
) -> dict[str, object]:
    """The figures of one source: each layout once, by the median of its rows."""
    layouts = list(by(scored, lambda row: row.layout).values())
    errors = np.array([np.median([one.error for one in rows]) for rows in layouts])
    biases = np.array([np.median([one.log for one in rows]) for rows in layouts])
    plain = [np.median([abs(baseline[one.row.id] / (one.row.measured or 1) - 1) for one in rows]) for rows in layouts]
    inside = [np.mean([abs(one.log) <= room(one.row, spreads) for one in rows]) for rows in layouts]
    return {
        "layouts": len(layouts), "rows": len(scored), "mape": float(errors.mean()), "bias": float(np.median(biases)),
        "p90": float(np.quantile(errors, 0.9)), "within_5": float((errors <= 0.05).mean()),
        "within_10": float((errors <= 0.10).mean()), "constant_mfu_mape": float(np.mean(plain)),
        "coverage": float(np.mean(inside)), "counts": len(layouts) >= ENOUGH and all(judged(s.row) for s in scored),
    }  # fmt: skip


def macro(figures: Iterable[Mapping[str, object]]) -> dict[str, float | int | None]:
    """Averages over the sources that count."""
    counting = [one for one in figures if one["counts"]]
    means = {
        name: float(np.mean([float(str(one[name])) for one in counting])) if counting else None
        for name in ("mape", "p90", "within_5", "within_10", "constant_mfu_mape", "coverage")
    }
    return {"sources": len(counting), **means}


def constant_mfu(rows: Sequence[Published], held_out: bool) -> dict[str, float]:
    """The baseline: seconds if every run on a device had one MFU, the median of (other) sources."""
    mfus = [(row, _mfu(row)) for row in rows]
    found = {}
    for row in rows:
        others = [(r, mfu) for r, mfu in mfus if not held_out or r.source != row.source] or mfus
        same = [mfu for r, mfu in others if _kind(r) == _kind(row)]
        found[row.id] = _useful(row) / float(np.median(same or [mfu for _, mfu in others]))
    return found


def _kind(row: Published) -> tuple[str, bool]:
    return row.ground.cluster.device.family, row.dense


def _useful(row: Published) -> float:
    """Seconds at an MFU of 1."""
    flops = flops_per_token(row.ground.shape.spec, row.job.sequence).training * row.job.batch * row.job.sequence
    return flops / (row.ground.cluster.device.peak(row.job.compute) * row.job.world)


def _mfu(row: Published) -> float:
    assert row.measured is not None
    return _useful(row) / row.measured


# --- order ----------------------------------------------------------------------------------------------------------


def _contest(row: Published) -> str:
    """Rows that differ in their layout alone: one model, machine, batch, precision and release of one source."""
    cells = row.cells
    names = ("source", "model", "layers", "heads", "gpu", "n_gpus", "seq_len", "precision", "framework_version", "task")
    state = cells.get("notes", "").partition("; source")[0]  # of the machine, where a source says that it changed
    return "|".join([*(cells.get(name, "") for name in names), str(row.job.batch), state])


def contests(scored: Iterable[Scored]) -> list[list[Scored]]:
    """Groups of at least two layouts that compete with each other."""
    groups = by(scored, _contest).values()
    return [group for group in groups if len({one.row.layout for one in group}) > 1]


def in_order(groups: Iterable[Sequence[Scored]]) -> tuple[int, int]:
    """(pairs in the measured order, pairs more than APART apart)."""
    right = pairs = 0
    for group in groups:
        for one, other in combinations(group, 2):
            gap = np.log((one.row.measured or 1) / (other.row.measured or 1))
            if abs(gap) > np.log1p(APART):
                pairs += 1
                right += bool((one.predicted > other.predicted) == (gap > 0))
    return right, pairs


def regret(groups: Iterable[Sequence[Scored]]) -> list[float]:
    """For each contest: how much slower the layout predicted best measured than the best measured."""
    found = []
    for group in groups:
        chosen = min(group, key=lambda one: one.predicted).row.measured or 1
        found.append(chosen / min(one.row.measured or 1 for one in group) - 1)
    return found


# --- anchors --------------------------------------------------------------------------------------------------------


def _setting(row: Published) -> str:
    """Rows that one measured step can anchor: one machine, stack, release and precision."""
    cells = row.cells
    return "|".join(
        cells.get(name, "") for name in ("source", "gpu", "framework", "framework_version", "precision", "task")
    )


def anchored(scored: Sequence[Scored], same_model: bool) -> dict[str, float]:
    """Source -> mean error when another layout of the same setting (and model, or another one) is known."""
    errors: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for group in by(scored, _setting).values():
        for target, anchor in permutations(group, 2):
            alike = target.row.cells.get("model") == anchor.row.cells.get("model")
            if alike == same_model and target.row.layout != anchor.row.layout:
                ratio = np.exp(target.log - anchor.log)
                errors[target.row.source][target.row.layout].append(abs(float(ratio) - 1))
    return {source: float(np.mean([np.median(e) for e in own.values()])) for source, own in errors.items()}


# --- intervals ------------------------------------------------------------------------------------------------------


def kind_of(row: Published) -> str:
    """Which spread a row's interval has: rows with experts differ, and so do rows that leave the decisive open."""
    return "dense" if row.dense else "experts"


def room(row: Published, spreads: Mapping[str, float]) -> float:
    """Half the width of the 80 % interval, in the logarithm."""
    return max(LEAST_ROOM, spreads.get(kind_of(row), 0.0))


def spreads_of(table: Table, held: np.ndarray) -> dict[str, float]:
    """Kind -> the residual that 80 % of held-out predictions stay below, each source and layout counted alike."""
    scored = [Scored(row, float(p)) for row, p in zip(table.rows, held, strict=True) if judged(row)]
    found = {}
    for kind, rows in by(scored, kind_of).items():
        weighed = []
        for own in by(rows, lambda row: row.source).values():
            layouts = by(own, lambda row: row.layout).values()
            voice = min(1.0, len(layouts) / ENOUGH)
            weighed += [(abs(one.log), voice / len(layouts) / len(group)) for group in layouts for one in group]
        found[kind] = _weighted_quantile(weighed, COVERED)
    for name, same in (("same model", True), ("another model", False)):
        for kind, rows in by(scored, kind_of).items():
            errors = list(anchored(rows, same).values())
            found[f"{kind}, anchored by {name}"] = 1.6 * float(np.mean(errors)) if errors else found[kind]
    return found


def _weighted_quantile(weighed: list[tuple[float, float]], part: float) -> float:
    weighed = sorted(weighed)
    total, sofar = sum(weight for _, weight in weighed), 0.0
    for value, weight in weighed:
        sofar += weight
        if sofar >= part * total:
            return value
    return weighed[-1][0] if weighed else 0.0
