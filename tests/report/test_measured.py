"""The picture of a run that has been: its plan above its spans, or the reason why they cannot be read."""

import json
from pathlib import Path

import pytest

from plait.report.measured import picture_run
from plait.report.schedule import picture_schedule
from plait.schedule import Action, Kind, Span
from plait.spec.errors import UsageError
from plait.spec.fit import fit
from plait.spec.load import dump, load

OVERRIDES = ("layout.pp=2", "layout.tp=2", 'layout.order=["pp", "dp", "cp", "tp"]')


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of 2 stages over 2 tp ranks and 2 replicas, each action ten times as long as a unit."""
    run = load(None, OVERRIDES)
    layout = fit(run, 8)
    timeline = picture_schedule(run, layout).timeline
    (tmp_path / "run.toml").write_text(dump(run))
    with (tmp_path / "spans.jsonl").open("w") as file:
        for rank in range(8):
            for span in timeline.compute[layout.coordinates(rank).pp]:
                kind, stage, micro = span.action.kind, span.action.stage, span.action.micro
                row = {"rank": rank, "kind": kind, "stage": stage, "micro": micro}
                print(json.dumps({**row, "start": 5000 + 10 * span.start, "end": 5000 + 10 * span.end}), file=file)
    return tmp_path


def test_the_measured_timeline_stands_below_the_planned_one(folder: Path) -> None:
    planned, measured = picture_run(folder).text(100).split("\n\n")
    assert planned.startswith("1f1b: 2 pipeline ranks")
    assert measured.startswith("measured in the last step: ranks 0, 4 of the world\nrank 0 |F0")
    bars = [[line for line in part.splitlines() if line.startswith("rank ")] for part in (planned, measured)]
    assert bars[0] == bars[1]


def test_measured_times_are_seconds_from_the_first_start(folder: Path) -> None:
    both = picture_run(folder).as_dict()
    assert both["measured"]["world_ranks"] == [0, 4]
    assert both["measured"]["step"] == pytest.approx(10 * both["planned"]["step"])
    assert both["measured"]["bubble"] == pytest.approx(both["planned"]["bubble"])
    assert both["measured"]["ranks"][0][0]["start"] == 0


def test_the_world_is_counted_where_the_run_left_dp_out(folder: Path) -> None:
    assert load(folder / "run.toml").layout.dp is None
    assert picture_run(folder).planned.schedule.micro_batches == 4


def test_a_run_without_spans_is_told_apart_from_a_broken_one(folder: Path) -> None:
    (folder / "spans.jsonl").unlink()
    with pytest.raises(UsageError, match=r"spans\.jsonl: cannot be read[\s\S]*a run writes it when it ends"):
        picture_run(folder)


@pytest.mark.parametrize(
    "line", ["{", "7", '{"rank": 0}', '{"rank":0,"kind":"Q","stage":0,"micro":0,"start":0,"end":1}']
)
def test_a_broken_line_is_named_by_its_number(folder: Path, line: str) -> None:
    path = folder / "spans.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line, *lines[2:]]))
    with pytest.raises(UsageError, match=r"spans\.jsonl:2: not a span"):
        picture_run(folder)


def test_a_missing_rank_is_noticed(folder: Path) -> None:
    path = folder / "spans.jsonl"
    path.write_text("\n".join(line for line in path.read_text().splitlines() if '"rank": 1,' not in line))
    with pytest.raises(UsageError, match="needs every rank from 0"):
        picture_run(folder)


def test_a_page_and_a_trace_put_the_plan_above_the_measurement(folder: Path) -> None:
    picture = picture_run(folder)
    html = picture.html()
    assert 0 < html.index("planned with") < html.index("measured: ranks 0, 4 of the world")
    events = picture.trace()["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [processes[pid] for pid in sorted(processes)] == [
        *("planned rank 0", "planned rank 1"),
        *("measured rank 0", "measured rank 1"),
    ]
    boxes = [event for event in events if event["ph"] == "X"]
    planned, measured = ([e["dur"] for e in boxes if e["tid"] == 0 and e["pid"] // 2 == side] for side in (0, 1))
    assert planned == pytest.approx(measured)  # each action took ten times its plan, and so did the step


def test_forward_and_backward_together_are_read_back_as_they_were_written() -> None:
    together = Action.together(Action(Kind.F, 0, 5), Action(Kind.BW, 3, 1))
    span = Span(together, 1.0, 2.5)
    assert Span.from_row(json.loads(json.dumps(span.row()))) == span
