"""A schedule in a CSV file: written and read again it is the same; what is wrong is named by file and line."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from plait.schedule import GENERATORS, Schedule, generate
from plait.schedule.of_run import from_file, schedules, to_csv
from plait.spec.errors import UsageError
from plait.spec.fit import violations
from plait.spec.load import load
from plait.spec.schedule_file import read_file


def read(folder: Path, text: str) -> Schedule:
    path = folder / "s.csv"
    path.write_text(text, encoding="utf-8")
    return from_file(read_file(str(path)))


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("micro_batches", [1, 5, 9])
def test_a_schedule_that_is_written_and_read_is_the_same(name: str, micro_batches: int, tmp_path: Path) -> None:
    schedule = generate(name, 4, micro_batches)
    again = read(tmp_path, to_csv(schedule))
    assert (again.programs, again.owner) == (schedule.programs, schedule.owner)


def test_remarks_empty_cells_and_blank_lines_mean_nothing_and_a_stage_left_out_is_the_ranks_own(tmp_path: Path) -> None:
    text = "# idle where nothing stands\n F0 , F1,,BW0,,BW1\n\n,F0,BW0/1,F1,BW1\n"
    assert read(tmp_path, text).programs == generate("1f1b", 2, 2).programs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0,BW0\nF0,BV0\n", "s.csv:2: 'BV0' is not an action\na cell is like F3"),
        ("F0,BW0\nF0/1,BW0+F0/1\n", "s.csv:2: 'BW0+F0/1' is not an action"),
        ("# remark\nF0,BW0/1\nF0/1,BW0\n", "s.csv:3: stage 1 stands on line 2 too"),
        ("F0,BW0\nF0/2,BW0/2\n", "s.csv: stage 1 has no action, stage 2 has\nnumber the 2 stages from 0 to 1"),
        ("F0,BW0\nF0,B0\n", "s.csv:2: rank 1: W(stage 1, micro 0) is missing\neach stage runs every micro-batch"),
        ("F0,BW0\nF0,BW0,F0\n", "s.csv:2: rank 1: F(stage 1, micro 0) comes after F"),
        ("F0,BW0,F1,BW1\nF1,BW1,F0,BW0\n", "s.csv: deadlock: rank 0 stands at BW(stage 0, micro 0) until rank 1"),
        ("# nothing\n", "s.csv: holds 0 actions, needs at least 1"),
    ],
)
def test_what_is_wrong_is_named_by_file_line_and_way_out(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        read(tmp_path, text)
    assert message in str(refused.value)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.csv: cannot be read"):
        read_file(str(tmp_path / "none.csv"))


def test_a_file_for_other_ranks_or_micro_batches_is_refused_with_both_numbers(tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    path.write_text(to_csv(generate("zb-v", 2, 3)), encoding="utf-8")
    found = violations(load(None, [f"schedule.file={path}", "layout.pp=3", "batch.global_size=32", "model.layers=4"]))
    said = [str(violation) for violation in found if violation.key == "schedule.file"]
    assert f"{path} has lines for 2 ranks, layout.pp is 3 (use layout.pp 2)" in said[0]
    assert f"{path} has 3 micro-batches, the run 8 (use batch.global_size 12)" in said[1]


def test_a_run_executes_the_schedule_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    path.write_text(to_csv(generate("zb-v", 2, 3)), encoding="utf-8")
    run = load(None, [f"schedule.file={path}", "layout.pp=2", "batch.global_size=12"])
    named = load(None, ["schedule.name=zb-v", "layout.pp=2", "batch.global_size=12"])
    assert [s.programs for s in schedules(run, dp=1)] == [s.programs for s in schedules(named, dp=1)]


def test_a_stage_far_beyond_the_others_is_named_at_once(tmp_path: Path) -> None:
    """Within a second: nothing is counted up to the number that stands in the file."""
    path = tmp_path / "far.csv"
    path.write_text("F0/999999999999,BW0/999999999999\n")
    begun = time.process_time()
    with pytest.raises(UsageError, match="stage 0 has no action, stage 999999999999 has"):
        read_file(str(path))
    assert time.process_time() - begun < 1


def test_a_file_as_excel_writes_it_reads_like_any_other(tmp_path: Path) -> None:
    text = "F0,BW0\nF0,BW0\n"
    plain, marked = tmp_path / "plain.csv", tmp_path / "marked.csv"
    plain.write_text(text, encoding="utf-8")
    marked.write_text(text, encoding="utf-8-sig")
    assert read_file(str(marked)).ranks == read_file(str(plain)).ranks
