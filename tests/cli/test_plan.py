"""`plait plan` from the outside: its JSON contract, the files it writes, and its answers to wrong input; no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plait.cli.main import main
from plait.spec.errors import InvalidRun
from plait.spec.fit import fit
from plait.spec.load import load

SOURCE = Path(__file__).parents[2] / "src"
ON_A_NODE = ("--model", "llama3-8b", "--cluster", "h100-dgx", "--nodes", "1", "--batch", "64", "--stack", "megatron")


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main(["plan", *words, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_the_json_document_has_every_key_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    document = planned(capsys, *ON_A_NODE)
    keys = {"plans", "within_noise_of_best", "examined", "seconds", "rejected", "cluster", "stack", "assumed"}
    assert keys <= document.keys()
    plan = document["plans"][0]  # type: ignore[index]
    assert {
        "run", "layout", "step_time_s", "interval_s", "mfu", "tokens_per_second_per_gpu", "memory_bytes", "breakdown_s"
    } <= plan.keys()  # fmt: skip
    assert {"limit", "worst_stage", "headroom", "by_stage"} <= plan["memory_bytes"].keys()
    assert sum(plan["breakdown_s"].values()) == pytest.approx(plan["step_time_s"])
    assert {"reason", "count", "nearest"} == document["rejected"][0].keys()  # type: ignore[index]


def test_the_builtin_run_is_planned_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, "layout.tp=2", "layout.pp=2")["plans"][0]  # type: ignore[index]
    assert (plan["layout"]["tp"], plan["layout"]["pp"], plan["layout"]["dp"]) == (2, 2, 1)


def test_it_needs_no_torch_and_answers_within_a_second_of_processor_time() -> None:
    block = "import sys; sys.modules.update(dict.fromkeys(['torch', 'safetensors']))"
    code = f"{block}; from plait.cli.main import main; sys.exit(main())"
    begun = os.times()
    ended = subprocess.run(
        [sys.executable, "-c", code, "plan", *ON_A_NODE],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    spent = os.times()
    assert ended.returncode == 0, ended.stderr
    taken = spent.children_user + spent.children_system - begun.children_user - begun.children_system
    assert "layouts examined" in ended.stdout
    assert taken <= 2.5  # of a busy machine; about 1 s of an idle one


def test_a_written_run_is_one_that_this_version_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    assert main(["plan", "--model", "llama3-8b", "--cluster", "h100-dgx", "--nodes", "2", "-o", str(file)]) == 0
    run = load(file)
    assert fit(run, 16).world == 16
    assert run.precision.compute == "bfloat16"
    assert "--nnodes 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("system", "says"),
    [
        ("megatron", "--tensor-model-parallel-size 2"),
        ("torchtitan", "tensor_parallel_degree = 2"),
        ("deepspeed", '"train_batch_size": 32'),
    ],
)
def test_the_same_plan_is_told_in_another_systems_words(
    system: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "layout.tp=2", "layout.pp=2", "--as", system]) == 0
    out = capsys.readouterr().out
    assert says in out
    assert ("cannot say: pp 2" in out) == (system == "deepspeed")


def test_an_anchor_moves_the_step_to_what_was_measured_and_narrows_the_interval(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--cluster", "h100-dgx", "layout.dp=8", "model.preset=llama3-8b", "batch.sequence=8192")
    before = planned(capsys, *words)["plans"][0]  # type: ignore[index]
    after = planned(capsys, *words, "--anchor", "14.7s")["plans"][0]  # type: ignore[index]
    assert after["step_time_s"] == pytest.approx(14.7)
    assert after["interval_before_anchor_s"] == pytest.approx(before["interval_s"])
    width = [plan["interval_s"][1] / plan["interval_s"][0] for plan in (before, after)]
    assert width[1] < width[0]


def test_fits_says_which_knob_by_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--cluster", "h100-dgx", "layout.dp=8", "model.preset=llama3-8b", "batch.sequence=8192", "--dtype", "bf16")
    knobs = planned(capsys, *words, "--fits")["fits"]["knobs"]  # type: ignore[index]
    turned = {one["turn"]: one for one in knobs}
    assert any(one["fits"] for one in turned.values())
    assert all(one["headroom"] < 0 for one in turned.values() if not one["fits"])


def test_tokens_are_turned_into_time_and_cost(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--cluster", "h100-dgx", "layout.dp=8", "model.preset=llama3-8b", "batch.sequence=8192")
    document = planned(capsys, *words, "--tokens", "1T", "--price", "2")
    rate = 8 * document["plans"][0]["tokens_per_second_per_gpu"]  # type: ignore[index]
    assert document["hours"] == pytest.approx(1e12 / rate / 3600)
    assert document["cost"] == pytest.approx(16 * 1e12 / rate / 3600)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--cluster", "h100-dxg"), "did you mean h100-dgx"),
        (("--cluster", "h100-d"), "did you mean h100-dgx"),
        (("--stack", "megatorn"), "did you mean megatron"),
        (("--model", "llama3-70"), "did you mean llama3-70b"),
        (("--model", "llama3-405b", "--cluster", "h100-dgx", "--nodes", "1"), "times as many devices"),
        (
            ("--model", "llama3-8b", "--cluster", "h100-dgx", "--nodes", "8", "--stack", "fsdp", "--batch", "7"),
            "does not divide the batch of 7",
        ),
        (("--cluster", "."), "ends in .toml"),
        (("--anchor", "soon"), "--anchor 14.7s"),
        (("--anchor", "0s"), "more than 0 s"),
        (("--anchor", "-3s"), "not a time"),
        (("--tokens", "-3"), "more than 0 tokens"),
        (("--tokens", "nan"), "more than 0 tokens"),
        (("--tokens", ""), "not a number of tokens"),
        (("--tokens", "1T", "--price", "-5"), "--price"),
        (("--price", "5"), "without --tokens"),
        (("--held-out",), "without --published"),
        (("--as", "megatorn"), "did you mean megatron"),
        (("--dtype", "int8"), "unknown"),
        (("--dtype", "xyz"), "known: bf16, fp16"),
        (("--published", "nowhere.csv"), "cannot be read"),
        (("layout.tp=3",), "heads 4"),
    ],
)
def test_wrong_input_is_answered_with_the_way_out(
    words: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    assert complaint in capsys.readouterr().err


def test_no_plan_is_for_more_devices_than_a_cluster_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cpu = SOURCE / "plait" / "spec" / "catalogue" / "clusters" / "cpu.toml"
    file = tmp_path / "two.toml"
    file.write_text("devices = 2\n" + cpu.read_text())
    assert main(["plan", "layout.dp=2", "--cluster", str(file)]) == 0
    for words in (("layout.dp=3",), ("--nodes", "2")):
        assert main(["plan", "--cluster", str(file), *words]) == 2
        assert "devices are asked for, it has 2" in capsys.readouterr().err


def test_a_hugging_face_config_is_a_model_and_an_unknown_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from plait.spec.families import to_hf_config
    from plait.spec.presets import PRESETS

    file = tmp_path / "config.json"
    file.write_text(json.dumps(to_hf_config(PRESETS["qwen3-30b-a3b"])))
    plan = planned(capsys, "--model", str(file), "--cluster", "h100-dgx", "--nodes", "2", "--stack", "megatron")
    assert plan["plans"][0]["layout"]["ep"] > 1  # type: ignore[index]
    file.write_text(json.dumps({"model_type": "mamba2"}))
    assert main(["plan", "--model", str(file)]) == 2
    assert "'mamba2' is not a family that plait knows" in capsys.readouterr().err


def test_published_rows_are_predicted_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = (Path(__file__).parents[1] / "planner" / "data" / "published_runs.csv").read_text().splitlines()
    file = tmp_path / "few.csv"
    file.write_text("\n".join(rows[:1] + [row for row in rows if "llama3.1_README_70b" in row]))
    begun = time.process_time()
    document = planned(capsys, "--published", str(file))
    assert time.process_time() - begun < 20
    assert len(document["rows"]) == 24  # type: ignore[arg-type]
    keys = "id status measured_step_time_s predicted_step_time_s low_s high_s measured_memory_bytes assumed"
    assert {*keys.split(), "predicted_memory_bytes"} <= document["rows"][0].keys()  # type: ignore[index]
    assert document["summary"]["dense"]["total"]["mape"] < 0.1  # type: ignore[index]


def test_a_run_as_it_stands_is_told_what_its_first_and_last_rank_send(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["layout.tp=2", "layout.pp=2", "layout.dp=2", "zero.stage=1"]
    assert main(["plan", *words, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert main(["verify", *words, "--world", "8", "--ranks", "first,last", "--json"]) == 0
    counted = {str(each["rank"]): each for each in json.loads(capsys.readouterr().out)["ranks"]}
    for name in ("collectives", "states"):
        assert planned[name] == {rank: each[name] for rank, each in counted.items()}


def test_mode_auto_is_settled_by_the_same_search(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "layout", "--json", "--world", "4", "layout.mode=auto"]) == 0
    answer = capsys.readouterr()
    assert "layout.mode auto: tp" in answer.err
    found = planned(capsys, "layout.mode=auto", "layout.dp=4", "--cluster", "cpu")["plans"]
    chosen = json.loads(answer.out)["axes"]
    assert any(all(plan["layout"][axis] == chosen[axis] for axis in ("tp", "pp", "dp", "cp")) for plan in found)  # type: ignore[attr-defined]


def test_a_count_settles_mode_auto_for_the_world_that_it_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "layout.mode=auto", "--world", "2", "--ranks", "last", "--json"]) == 0
    answer = capsys.readouterr()
    assert "layout.mode auto: tp" in answer.err
    assert json.loads(answer.out)["world"] == 2


def test_mode_auto_that_nobody_settled_is_refused() -> None:
    with pytest.raises(InvalidRun, match="the planner has not been asked"):
        fit(load(None, ["layout.mode=auto"]), 4)
