"""A searched schedule keeps the bytes that it was given, takes the times that were measured, and says what it beats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.placement.stages import stage_flops, stages_of
from plait.planner.seat import Seat
from plait.report.found import Asked, FoundPicture, picture_found
from plait.report.memory import peak_activations
from plait.schedule.of_run import schedules
from plait.spec.errors import UsageError
from plait.spec.fit import fit
from plait.spec.load import load

RUN = ("layout.pp=2", "schedule.name=zb-v", "batch.global_size=12")


def found(asked: Asked, *overrides: str) -> FoundPicture:
    run = load(None, [*RUN, *overrides])
    return picture_found(run, fit(run), asked)


def measured(folder: Path, seconds: dict[str, list[float]]) -> Path:
    """A run's spans: so long for each kind and stage, and once much longer."""
    rows = [
        {"rank": stage % 2, "kind": kind, "stage": stage, "micro": micro, "start": 0.0, "end": micro == 2 or took}
        for kind, times in seconds.items()
        for stage, took in enumerate(times)
        for micro in range(3)
    ]
    (folder / "spans.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_the_last_stage_costs_its_head_too() -> None:
    run = load(None, ["layout.pp=2"])
    first, last = stage_flops(run, stages_of(run, fit(run)))
    assert last - first == 2 * run.model.vocab * run.model.hidden


def test_times_are_the_medians_that_a_run_measured_and_a_whole_backward_is_halved(tmp_path: Path) -> None:
    times = {"F": [0.1, 0.2, 0.1, 0.1], "BW": [0.2, 0.4, 0.2, 0.6]}
    picture = found(Asked(measured(tmp_path, times), link=0.01))
    assert picture.costs["F"] == (0.1, 0.2, 0.1, 0.1)
    assert picture.costs["B"] == picture.costs["W"] == (0.1, 0.2, 0.1, 0.3)
    assert picture.unit == "s" and picture.timeline.step >= 3 * 0.9  # 3 micro-batches of the busiest rank
    assert f"the times that {tmp_path} measured, messages of 0.01 s" in picture.text(100)


def test_a_run_of_other_stages_gives_no_times(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="measured 2 of its 2 stages, this run has 4"):
        found(Asked(measured(tmp_path, {"F": [0.1, 0.1], "BW": [0.2, 0.2]})))


def test_it_is_never_longer_than_the_best_named_one_and_keeps_the_limit() -> None:
    for limit, fits in ((0.8, False), (2.0, True)):
        picture = found(Asked(link=0.3, limit=limit))
        assert (picture.best is not None) is fits
        assert picture.best is None or picture.timeline.step <= picture.best[1]
        run = load(None, [*RUN, "schedule.name=1f1b"])
        batch = Seat(run, fit(run), 0).batch
        plain = peak_activations(run, fit(run), schedules(run, 1)[0])
        most = max(rank.in_flight - batch for rank in plain)
        assert picture.limit_bytes == int(limit * most)
