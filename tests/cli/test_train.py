"""`plait train` from its words to its exit code: the JSON it promises, and how it fails."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from plait.parallel.faults import POINTS
from tests.cli.commands import Ended, fresh, plait

TINY = (
    "model.preset=llama-tiny", "batch.global_size=8", "batch.micro_size=2", "batch.sequence=16",
    "data.source=synthetic", "train.steps=4", "train.eval_batches=1",
)  # fmt: skip
KEYS = {
    "steps", "loss_first", "loss_last", "eval_loss", "tokens_per_second", "parameters", "layout", "world",
    "peak_memory_bytes", "memory", "collectives", "run_dir",
}  # fmt: skip
CAUSES = {
    "raise": "RuntimeError: injected fault",
    "exit": "exit code 3",
    "kill": "signal 9 (SIGKILL), possibly out of memory",
    "segv": "signal 11 (SIGSEGV)",
}
LAYOUTS = {
    "data": ("layout.dp=2",),
    "tensor": ("layout.tp=2", "layout.sequence_parallel=true"),
    "pipeline": ("layout.pp=2",),
    "all": ("layout.tp=2", "layout.pp=2"),
}


def document(ended: Ended) -> dict[str, Any]:
    assert ended.code == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert isinstance(found, dict)
    return found


def test_json_is_one_document_with_the_promised_keys(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = (*TINY, "layout.tp=2", "layout.pp=2", "layout.dp=2", f"train.run_dir={folder}")
    summary = document(plait("train", *words, "--json"))
    assert set(summary) == KEYS
    assert (summary["steps"], summary["world"], summary["run_dir"]) == (4, 8, str(folder))
    assert {axis: summary["layout"][axis] for axis in ("tp", "pp", "dp", "cp", "ep")} == {
        "tp": 2, "pp": 2, "dp": 2, "cp": 1, "ep": 1,
    }  # fmt: skip
    assert len(summary["peak_memory_bytes"]) == 8 and min(summary["peak_memory_bytes"]) > 1e7
    kinds = {"weights", "gradients", "master", "moments", "buffers", "activations"}
    for memory in summary["memory"]:
        assert set(memory) == kinds | {"between", "total", "blocks"}
        assert memory["total"] == sum(memory[kind] for kind in kinds) and memory["weights"] == memory["gradients"] > 0
        assert memory["activations"] >= memory["between"] >= sum(block["kept"] for block in memory["blocks"]) > 0
    assert set(summary["collectives"]) == {"tp", "pp", "dp", "world"}
    rows = [row for operations in summary["collectives"].values() for row in operations.values()]
    assert rows and all(set(row) == {"calls", "bytes"} for row in rows)
    assert summary["collectives"]["pp"]["send"]["calls"] == 2 * 2 * 4  # tp 2, 4 micro-batches of both replicas, 2 ways
    assert {path.name for path in folder.iterdir()} == {"run.toml", "metrics.jsonl", "spans.jsonl", "trace.json"}
    assert tomllib.loads((folder / "run.toml").read_text())["layout"]["pp"] == 2


def test_without_json_the_end_is_told_in_words(tmp_path: Path) -> None:
    ended = plait("train", *TINY, "layout.dp=2", folder=tmp_path)
    assert ended.code == 0 and "4 steps, loss " in ended.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_file_and_overrides_make_the_run_and_the_world_gives_dp(tmp_path: Path) -> None:
    lines = [word.partition("=") for word in TINY]
    sections: dict[str, list[str]] = {}
    for key, _, value in lines:
        section, name = key.split(".")
        sections.setdefault(section, []).append(f"{name} = {value if value.isdigit() else json.dumps(value)}")
    file = tmp_path / "run.toml"
    file.write_text("\n".join(f"[{section}]\n" + "\n".join(rows) for section, rows in sections.items()))
    summary = document(plait("train", file, "train.steps=1", "--nproc", 2, "--json", folder=tmp_path))
    assert (summary["steps"], summary["world"], summary["layout"]["dp"]) == (1, 2, 2)


def test_a_directory_that_holds_a_run_is_not_written_over(tmp_path: Path) -> None:
    words = ("train", *TINY, "layout.dp=2", "train.steps=1", f"train.run_dir={tmp_path}")
    assert plait(*words).code == 0
    again = plait(*words)
    assert again.code == 2 and "already holds a run" in again.error


def failed(kind: str, layout: str, at: str, run: Any, folder: Path) -> None:
    """One try: rank 1 fails in step 3; then the same job starts again at once."""
    words = ("train", *TINY, *LAYOUTS[layout], "train.eval_every=3", "--json")
    fault = f"rank=1,step=3,at={at},kind={kind}"
    ended = run(*words, f"train.run_dir={folder / 'first'}", PLAIT_FAULT=fault)
    assert ended.code == 1, ended
    assert ended.error == f"error: rank 1, step 3: {CAUSES[kind]}"
    assert ended.stdout == "" and ended.left == []
    assert document(run(*words, f"train.run_dir={folder / 'second'}"))["steps"] == 4


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("kind", "layout"), list(zip(CAUSES, LAYOUTS, strict=True)))
def test_b94_a_rank_that_fails_ends_the_job_and_is_named_with_step_and_cause(
    kind: str, layout: str, tmp_path: Path
) -> None:
    failed(kind, layout, "forward", plait, tmp_path)


@pytest.mark.proof
@pytest.mark.parametrize("at", POINTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", CAUSES)
def test_b94_wherever_a_rank_fails_the_first_line_names_it(kind: str, layout: str, at: str, tmp_path: Path) -> None:
    failed(kind, layout, at, plait, tmp_path)


@pytest.mark.proof
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("kind", CAUSES)
def test_in_twenty_fresh_starts_out_of_twenty_the_first_line_names_rank_step_and_cause(
    kind: str, number: int, tmp_path: Path
) -> None:
    failed(kind, list(LAYOUTS)[number % 4], "forward", fresh, tmp_path)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "plait")


@pytest.mark.proof
def test_under_torchrun_the_same_command_joins_the_job_and_gives_the_same_losses(tmp_path: Path) -> None:
    words = ("train", *TINY, "layout.tp=2", "--json")
    joined = document(fresh(*words, f"train.run_dir={tmp_path / 'joined'}", launcher=TORCHRUN))
    forked = document(plait(*words, f"train.run_dir={tmp_path / 'forked'}"))
    assert joined["world"] == 2
    for key in ("loss_first", "loss_last", "eval_loss", "collectives", "layout"):
        assert joined[key] == forked[key], key


@pytest.mark.proof
def test_under_torchrun_a_failure_is_in_the_log_and_the_exit_code_is_not_0(tmp_path: Path) -> None:
    words = ("train", *TINY, "layout.dp=2", f"train.run_dir={tmp_path}")
    ended = fresh(*words, launcher=TORCHRUN, PLAIT_FAULT="rank=1,step=3,at=forward,kind=raise")
    assert ended.code != 0 and ended.left == []
    assert "error: rank 1, step 3, forward: RuntimeError: injected fault" in ended.stderr
