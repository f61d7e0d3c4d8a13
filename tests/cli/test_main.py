"""The command line before any command runs: help, refusals, exit codes, what goes to which stream."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from plait.cli.main import COMMANDS, main
from plait.cli.run import read_run
from plait.spec.errors import PlaitError, UsageError

SOURCE = Path(__file__).parents[2] / "src"


def test_help_answers_within_four_tenths_of_a_second() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, "-m", "plait", "--help"], env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time: what the command costs, whatever else the machine is doing.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.4


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_names_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"Usage: plait {command} [OPTIONS]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["trian"], "'trian'", "plait --help"),
        (["--loud"], "--loud", "plait --help"),
        (["train", "--loud"], "--loud", "plait train --help"),
        (["train", "--nproc", "0"], "--nproc", "plait train --help"),
        (["verify", "--dtype", "float8"], "float8", "plait verify --help"),
        (["show", "weather"], "weather", "plait show --help"),
        (["show", "layout", "a.toml", "b.toml"], "2 run files, at most 1: a.toml, b.toml", "section.key=value"),
    ],
)
def test_a_mistake_is_named_with_the_way_out_and_exits_2(
    arguments: list[str], error: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    first, second = err.splitlines()
    assert out == ""
    assert first.startswith("error: ") and error in first
    assert second.startswith("hint: ") and hint in second


def test_debug_shows_the_traceback_wherever_it_stands() -> None:
    with pytest.raises(UsageError, match="2 run files"):
        main(["show", "layout", "a.toml", "b.toml", "--debug"])


def test_a_failure_exits_with_its_own_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(words: object) -> None:
        raise PlaitError("rank 3, step 7: gone")

    monkeypatch.setattr("plait.cli.show.read_run", fail)
    assert main(["show", "layout"]) == 1
    assert capsys.readouterr().err == "error: rank 3, step 7: gone\n"


def test_a_bug_of_our_own_is_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.cli.show.read_run", lambda words: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["show", "layout"])


def test_overrides_apply_in_order_and_no_file_is_the_builtin_run() -> None:
    run = read_run(["layout.tp=2", "train.steps=7", "layout.tp=4"])
    assert (run.layout.tp, run.train.steps) == (4, 7)
    assert read_run(None).train.steps == read_run([]).train.steps != 7


def test_a_file_with_an_equals_sign_in_its_folder_is_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "lr=1"
    folder.mkdir()
    (folder / "run.toml").write_text("[train]\nsteps = 5\n")
    assert read_run([str(folder / "run.toml")]).train.steps == 5
