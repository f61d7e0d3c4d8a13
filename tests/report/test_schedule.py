"""The picture of a schedule: closed forms come out of the very list that runs."""

import pytest

from plait.report.schedule import SchedulePicture, picture_schedule
from plait.schedule.of_run import schedules
from plait.spec.fit import fit
from plait.spec.load import load
from plait.spec.pipeline import SHAPES


def pictured(*overrides: str) -> SchedulePicture:
    run = load(None, overrides)
    return picture_schedule(run, fit(run))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batches", [1, 4, 8, 16, 32])
def test_w7_the_bubble_is_shown_by_both_of_its_names(name: str, micro_batches: int) -> None:
    picture = pictured("layout.pp=4", f"schedule.name={name}", f"batch.global_size={4 * micro_batches}")
    share, over_ideal = 3 / (micro_batches + 3), 3 / micro_batches
    assert picture.as_dict()["bubble"] == pytest.approx(share)
    assert picture.as_dict()["bubble_over_ideal"] == pytest.approx(over_ideal)
    assert f"{share:.2%} as a share of the step, {over_ideal:.2%} relative to the ideal time" in picture.text(100)


def test_w12_the_peaks_fall_from_stage_to_stage_under_1f1b_and_stay_under_gpipe() -> None:
    assert pictured("layout.pp=4").peak_live == (4, 3, 2, 1)
    assert pictured("layout.pp=4", "schedule.name=gpipe").peak_live == (8, 8, 8, 8)
    assert "by rank: 4 3 2 1" in pictured("layout.pp=4").text(100)


def test_micro_batches_are_those_of_one_replica() -> None:
    picture = pictured("layout.pp=2", "layout.dp=2", "layout.tp=2")
    assert picture.as_dict()["micro_batches"] == 4
    assert "2 pipeline ranks (each line stands for 4 ranks alike), 4 micro-batches of 4 × 128" in picture.text(100)


def test_every_stage_and_micro_batch_is_drawn_once_each_way() -> None:
    ranks = pictured("layout.pp=4").as_dict()["ranks"]
    drawn = [(span["kind"], span["stage"], span["micro"]) for rank in ranks for span in rank]
    assert sorted(drawn) == sorted((kind, s, m) for kind in ("F", "BW") for s in range(4) for m in range(8))
    assert all(span["end"] - span["start"] == {"F": 1, "BW": 2}[span["kind"]] for rank in ranks for span in rank)


def test_an_evaluation_runs_the_same_forwards_and_nothing_else() -> None:
    training, evaluation = schedules(load(None, ["layout.pp=4"]), dp=1)
    assert not evaluation.trains
    for trained, evaluated in zip(training.programs, evaluation.programs, strict=True):
        assert [a for a in trained if a.kind == "F"] == [a for a in evaluated if a.kind not in ("SEND", "RECV")]


@pytest.mark.parametrize("name", SHAPES)
def test_every_schedule_is_drawn_as_text_as_a_page_and_as_a_trace(name: str) -> None:
    picture = pictured(f"schedule.name={name}", "layout.pp=2", "batch.global_size=20")
    assert picture.text(160).startswith(f"{name}: 2 pipeline ranks")
    spans = [span for rank in picture.timeline.compute for span in rank]
    html = picture.html()
    assert html.count("<rect") == len(spans) == html.count("<title>") - 1  # each box says what it is, and the page too
    assert "http" not in html and "<script" not in html
    events = [event for event in picture.trace()["traceEvents"] if event["ph"] == "X" and event["tid"] == 0]
    assert sorted((e["ts"], e["dur"]) for e in events) == sorted((1e3 * s.start, 1e3 * s.seconds) for s in spans)


def test_what_waits_for_its_weight_gradient_is_shown_where_there_is_any() -> None:
    assert "from B to W, by rank: 1 2 3 4" in pictured("layout.pp=4", "schedule.name=zb-h1").text(100)
    assert "from B to W" not in pictured("layout.pp=4").text(100)
