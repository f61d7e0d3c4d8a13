"""`verify_random`: many drawn runs, each proved, with the coverage of the draw."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from plait.proof.draw import coverage, draw_run, one_line
from plait.proof.verify import check, proof_run, samples_of
from plait.spec.errors import PlaitError

Told = Callable[[int, str, str], None]  # number, the run in a line, the complaint (empty: equal)


def verify_random(count: int, seed: int, dtype: str = "float64", told: Told = lambda *_: None) -> dict[str, Any]:
    """Draw and prove `count` runs; the JSON of `plait verify --random`."""
    runs, failures = [], []
    for number in range(count):
        run = proof_run(draw_run(seed, number), dtype)
        runs.append(run)
        try:
            complaint = check(run, samples_of(run)).complaint
        except PlaitError as failure:
            complaint = failure.message
        if complaint:
            failures.append(
                {"run": {"seed": seed, "number": number, **run.model_dump(exclude_none=True)}, "error": complaint}
            )
        told(number, one_line(run), complaint)
    return {
        "ok": not failures,
        "drawn": count,
        "passed": count - len(failures),
        "failures": json.loads(json.dumps(failures)),
        "coverage": coverage(runs),
        "seed": seed,
    }
