"""Constants from published runs: penalised least squares on the logarithm of the step time, with numpy alone.

Each source counts as much as the next one, each layout of a source as much as the next; a residual beyond the knee
counts less and less, so one wrong label cannot bend the physics. What few runs say stays near what was believed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tomli_w

from plait.planner.constants import CALIBRATED, Constants, Recipe, belief, fixed, recipe
from plait.planner.pace import Counted, Rates, seconds
from plait.planner.published.rows import Published
from plait.planner.work import Work, work

SPREAD = 0.12  # of a sound row's residual
STRENGTH = 8.0  # sound rows that one source counts as
KNEE = 0.15
FULL_VOICE = 4  # layouts from which on a source has its full weight
OF_EXPERTS = {
    "expert",
    "exchange",
    "routing",
    "host",
    "graphs",
    "hidden",
}  # constants that rows without experts say nothing of
WHISPER = 0.1  # weight of quality C


class Table:
    """Rows with a measured time, their counts as arrays, and the constants that their rates are made of."""

    def __init__(self, rows: Sequence[Published]) -> None:
        self.rows = list(rows)
        counted = [work(row.ground, row.job) for row in self.rows]
        self.counted = Counted(*(np.array([getattr(one, name) for one in counted]) for name in Work._fields))
        self.measured = np.array([row.measured or np.nan for row in self.rows])
        own = [fixed(row.ground, row.job) for row in self.rows]
        recipes = [
            {rate: () if rate in given else parts for rate, parts in recipe(row.ground, row.job, row.blocks).items()}
            for row, given in zip(self.rows, own, strict=True)
        ]
        self.fixed = {rate: np.array([given.get(rate, 1.0) for given in own]) for rate in Rates._fields}
        self.names = sorted({name for made in recipes for parts in made.values() for name in parts})
        self.parts = _parts(recipes, self.names)
        self.beliefs = np.log([belief(name).value for name in self.names])
        self.spreads = np.array([belief(name).spread for name in self.names])
        self.weights = _weights(self.rows)

    def terms(self, logs: np.ndarray, chosen: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Seconds by term of the chosen rows, under the logarithms of the constants."""
        made = {
            rate: own[chosen] * np.exp(self.parts[rate][chosen] @ logs) if rate in self.parts else own[chosen]
            for rate, own in self.fixed.items()
        }
        counted = Counted(*(column[chosen] for column in self.counted))
        terms: np.ndarray = seconds(counted, Rates(**made))
        return terms

    def predict(self, logs: np.ndarray, chosen: np.ndarray | slice = slice(None)) -> np.ndarray:
        return np.asarray(self.terms(logs, chosen).sum(-1))

    def constants(self, logs: np.ndarray) -> Constants:
        return dict(zip(self.names, np.exp(logs).tolist(), strict=True))

    def fit(self, chosen: np.ndarray, start: np.ndarray | None = None, rounds: int = 8) -> np.ndarray:
        """The logarithms of the constants that the chosen rows (a mask) ask for.

        Rows without experts settle what they have a say in, rows with experts the rest: their spread between releases
        of one program is several times as large.
        """
        logs = self.beliefs.copy() if start is None else start.copy()
        dense = np.array([row.dense for row in self.rows])
        families = {row.ground.cluster.device.family for row, use in zip(self.rows, chosen & dense, strict=True) if use}
        of_dense = np.array(
            [name not in OF_EXPERTS and name.partition(".")[0] in {*families, name} for name in self.names]
        )
        for mask, free in ((chosen & dense, of_dense), (chosen & ~dense, ~of_dense)):
            if mask.any() and free.any():
                logs = self._settle(mask, np.flatnonzero(free), logs, rounds)
        return logs

    def _settle(self, chosen: np.ndarray, free: np.ndarray, logs: np.ndarray, rounds: int) -> np.ndarray:
        """Gauss-Newton on the free constants, with numeric slopes."""
        logs = logs.copy()
        target = np.log(self.measured[chosen])
        for _ in range(rounds):
            now = np.log(self.predict(logs, chosen))
            slopes = np.stack([self._slope(logs, at, now, chosen) for at in free], axis=1)
            residual = target - now
            size = np.abs(residual)
            weight = self.weights[chosen] * STRENGTH / SPREAD**2 * np.minimum(1.0, KNEE / np.maximum(size, 1e-9))
            normal = slopes.T @ (slopes * weight[:, None]) + np.diag(self.spreads[free] ** -2.0)
            pull = slopes.T @ (weight * residual) + (self.beliefs - logs)[free] / self.spreads[free] ** 2
            step = np.clip(np.linalg.solve(normal, pull), -0.5, 0.5)
            logs[free] += step
            if np.abs(step).max() < 1e-3:
                break
        return logs

    def _slope(self, logs: np.ndarray, at: int, now: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        moved = logs.copy()
        moved[at] += 1e-4
        return np.asarray((np.log(self.predict(moved, chosen)) - now) / 1e-4)


def _parts(recipes: Sequence[Recipe], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Rate -> (rows, constants) matrix of exponents."""
    column = {name: at for at, name in enumerate(names)}
    found = {rate: np.zeros((len(recipes), len(names))) for rate in recipes[0]} if recipes else {}
    for row, made in enumerate(recipes):
        for rate, parts in made.items():
            for name in parts:
                found[rate][row, column[name]] += 1
    return found


def _weights(rows: Sequence[Published]) -> np.ndarray:
    """One per source at most, shared by its layouts, and of each layout by its rows."""
    layouts: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for at, row in enumerate(rows):
        layouts[row.source][row.layout].append(at)
    weights = np.zeros(len(rows))
    for groups in layouts.values():
        for members in groups.values():
            weights[members] = min(1.0, len(groups) / FULL_VOICE) / len(groups) / len(members)
    return np.asarray(weights * np.array([WHISPER if row.cells.get("quality") == "C" else 1.0 for row in rows]))


def held_out(table: Table) -> np.ndarray:
    """Each row's prediction by constants fitted to all other sources."""
    sources = np.array([row.source for row in table.rows])
    everything = np.ones(len(sources), dtype=bool)
    start = table.fit(everything)
    found = np.empty(len(sources))
    for source in dict.fromkeys(sources.tolist()):
        rest = sources != source
        logs = table.fit(rest, start, rounds=2) if rest.any() else table.beliefs
        found[~rest] = table.predict(logs, ~rest)
    return found


def write(table: Table, logs: np.ndarray, spreads: dict[str, float], path: Path = CALIBRATED) -> None:
    """The constants as `constants.py` reads them."""
    made: dict[str, dict[str, float]] = defaultdict(dict)
    shared: dict[str, float] = {}
    for name, number in table.constants(logs).items():
        family, _, own = name.rpartition(".")
        (made[family] if family else shared)[own] = float(f"{number:.4g}")
    rounded = {name: round(number, 4) for name, number in spreads.items()}
    path.write_text(tomli_w.dumps({"shared": shared, "spreads": rounded, "families": dict(made)}), encoding="utf-8")
