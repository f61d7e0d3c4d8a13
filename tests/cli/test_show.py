"""`plait show` from the outside: three pictures and a run's directory, in an installation without torch, at once."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from plait.cli.main import main
from plait.cli.show import PICTURES

SOURCE = Path(__file__).parents[2] / "src"
LAYOUT = ["layout.pp=2", "layout.tp=2", "layout.dp=2"]


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


def base_install(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in an interpreter in which torch cannot be imported, nor what pictures do without."""
    block = "import sys; sys.modules.update(dict.fromkeys(['torch', 'numpy', 'rich', 'safetensors']))"
    return run_python("-c", f"{block}; from plait.cli.main import main; sys.exit(main())", *arguments)


@pytest.mark.parametrize("what", PICTURES)
def test_every_picture_is_drawn_without_torch(what: str) -> None:
    done = base_install("show", what, *LAYOUT)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) > 5


def test_help_needs_no_torch() -> None:
    assert base_install("--help").returncode == 0
    assert base_install("show", "--help").returncode == 0


def test_importing_plait_needs_no_torch() -> None:
    assert (
        run_python("-c", "import sys; sys.modules['torch'] = None; import plait; plait.load(); plait.Layout").stderr
        == ""
    )


def test_a_runs_directory_is_drawn_without_torch(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[train]\nsteps = 1\n")
    spans = [
        {"rank": 0, "kind": kind, "stage": 0, "micro": 0, "start": at, "end": at + 1}
        for at, kind in [(0, "F"), (1, "BW")]
    ]
    (tmp_path / "spans.jsonl").write_text("\n".join(map(json.dumps, spans)))
    done = base_install("show", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "measured in the last step: rank 0 of the world" in done.stdout


def test_the_commands_that_need_torch_say_so_in_that_installation() -> None:
    done = base_install("train", "train.steps=1")
    assert done.returncode == 2
    assert done.stderr.startswith("error: plait train needs plait[train]")


@pytest.mark.parametrize("what", PICTURES)
def test_json_is_one_document(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", what, *LAYOUT, "--json"]) == 0
    out, err = capsys.readouterr()
    assert isinstance(json.loads(out), dict)
    assert err == ""


def test_schedule_answers_within_half_a_second() -> None:
    def seconds(*arguments: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run_python(*arguments).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    # Processor time: what the command costs. Neighbours on the same core inflate even that, and then the measure is
    # twice what the two libraries under every command cost at that moment (0.2 to 0.25 s when it is quiet).
    libraries = ("-c", "import typer; from pydantic import BaseModel, Field, ValidationError, model_validator")
    command = ("-m", "plait", "show", "schedule", "layout.pp=4")
    assert any(seconds(*command) <= max(0.5, 2 * seconds(*libraries)) for _ in range(5))


def test_a_world_gives_the_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "layout", "layout.tp=2", "--world", "8", "--json"]) == 0
    picture = json.loads(capsys.readouterr().out)
    assert (picture["world"], picture["axes"]["dp"]) == (8, 4)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["layout", *LAYOUT, "--world", "6"], "pp·dp·cp·tp 8 is not the world 6"),
        (["schedule", "layout.pp=9"], "9 stages are more than layers 4"),
        (["memory", "layout.tp=3"], "3 does not divide heads 4"),
        (["layout", "layout.tq=2"], "layout.tq: unknown key"),
        (["no/such/run"], "plait show no/such/run: neither layout, schedule, memory nor a run's directory"),
        ([str(SOURCE)], "neither a run's directory nor a checkpoint"),
        ([str(SOURCE), "layout.tp=2"], "nothing can be overridden"),
    ],
)
def test_what_cannot_be_shown_is_refused(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and error in err


def test_a_width_is_taken_from_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    widths = []
    for columns in ("60", "140"):
        monkeypatch.setenv("COLUMNS", columns)
        main(["show", "schedule", "layout.pp=4"])
        widths.append(max(len(line) for line in capsys.readouterr().out.splitlines() if line.startswith("rank")))
    assert widths[0] <= 60 < widths[1] <= 140


def test_the_trainer_executes_the_list_that_is_drawn() -> None:
    pytest.importorskip("torch")
    from plait.schedule.of_run import schedules
    from plait.train import step

    assert step.schedules is schedules


def test_a_timeline_is_written_as_a_page_and_as_a_trace_without_torch(tmp_path: Path) -> None:
    page, trace = tmp_path / "s.html", tmp_path / "s.json"
    done = base_install(
        "show", "schedule", "schedule.name=zb-v", "layout.pp=2", "--html", str(page), "--trace", str(trace)
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert page.read_text().startswith("<!doctype html>") and json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("what", "path", "message"),
    [("layout", "s.html", "layout has no timeline"), ("schedule", "no/s.html", "cannot be")],
)
def test_a_page_that_cannot_be_is_refused(
    what: str, path: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", what, "--html", str(tmp_path / path)]) == 2
    assert message in capsys.readouterr().err


SEARCH = ["show", "schedule", "layout.pp=2", "schedule.name=zb-v", "batch.global_size=12"]


def test_a_schedule_is_searched_written_and_read_again_without_torch(tmp_path: Path) -> None:
    file = tmp_path / "found.csv"
    done = base_install(*SEARCH, "--search", "--link", "0.5", "--limit", "2", "--json", "-o", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["name"] == "found" and found["stage_owner"] == [0, 1, 1, 0]
    assert 0 < found["step"] <= found["best_named"]["step"]
    again = base_install(*SEARCH, f"schedule.file={file}", "--json")
    assert (again.returncode, again.stderr) == (0, "")
    order = [[(s["kind"], s["stage"], s["micro"]) for s in rank] for rank in found["ranks"]]
    assert [[(s["kind"], s["stage"], s["micro"]) for s in r] for r in json.loads(again.stdout)["ranks"]] == order


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["layout", "--search"], "--search: layout has no schedule to search"),
        (["schedule", "-o", "found.csv"], "-o belongs to a search"),
        (["schedule", "--limit", "0.5"], "--limit belongs to a search"),
        (["schedule", "layout.pp=2", "--search", "--limit", "0.01"], "lets no micro-batch come through"),
        (["schedule", "layout.pp=2", "--search", "--costs", "no/run"], "no/run/spans.jsonl: cannot be read"),
    ],
)
def test_a_search_that_cannot_be_is_refused(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", *arguments]) == 2
    assert error in capsys.readouterr().err


def test_a_limit_that_lets_nothing_through_is_answered_with_one_that_does(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["show", "schedule", "layout.pp=2", "--search"]
    assert main([*words, "--limit", "0"]) == 2
    hint = capsys.readouterr().err.splitlines()[-1]
    option, share = hint.removeprefix("hint: ").split()
    assert option == "--limit" and 0 < float(share) <= 1
    assert main([*words, option, share]) == 0


def test_a_run_that_has_not_ended_is_told_from_a_folder_of_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shelf = tmp_path / "checkpoints"
    (shelf / "step-00000002").mkdir(parents=True)
    (shelf / "step-00000001").mkdir()
    assert main(["show", str(shelf)]) == 2
    told = capsys.readouterr().err
    assert "holds 2 checkpoints" in told and f"plait show {shelf / 'step-00000002'}" in told
    (tmp_path / "run.toml").touch()
    assert main(["show", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "has no spans.jsonl" in told and f"plait show {shelf / 'step-00000002'}" in told
