"""What the planner is worth on runs that others measured: every figure of the judgement, with its source left out."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.planner.constants import OF_FAMILY, calibration, value
from plait.planner.published.calibrate import Table
from plait.planner.published.judge import judge
from plait.planner.published.lint import lint
from plait.planner.published.rows import Published, Refused, interpret, interpreted, read_rows
from plait.planner.published.score import Scored, anchored, in_order, macro, regret
from plait.spec.errors import UsageError

ROWS = Path(__file__).parent / "data" / "published_runs.csv"


@cache
def shipped() -> dict[str, Any]:
    return judge(ROWS).as_dict()


@cache
def by_id() -> dict[str, Any]:
    return {row["id"]: row for row in read_rows(ROWS)}


def test_every_row_is_answered_predicted_or_refused_with_a_reason() -> None:
    rows = shipped()["rows"]
    assert len(rows) == 1143
    assert all(row["reason"] for row in rows if row["status"] == "refused")
    ran = [row for row in rows if row["status"] == "ran" and row["measured_step_time_s"]]
    assert all(row["low_s"] < row["predicted_step_time_s"] < row["high_s"] for row in ran)
    assert shipped()["summary"]["accepted"] > 0.85


def test_runs_that_ran_out_of_memory_are_warned_of_and_hardly_any_that_ran() -> None:
    memory = shipped()["summary"]["memory"]
    assert (memory["oom_caught"], memory["oom_rows"]) == (4, 4)
    assert memory["false_alarms"] <= 0.01


def test_four_of_five_pairs_come_out_in_order() -> None:
    """76 pairs, 69 of them of one sweep on 384 A100; docs/planner.md says which ones do not and why."""
    summary = shipped()["summary"]
    assert summary["pairs"] >= 70
    assert summary["pairs_in_order"] >= 0.8
    assert summary["regret"] <= 0.06


def test_the_shipped_constants_are_those_that_the_rows_give() -> None:
    rows, _ = interpreted(ROWS)
    table = Table([row for row in rows if row.measured and not row.cells.get("status")])
    start = np.log([value(calibration().constants, name) for name in table.names])
    again = table.fit(np.ones(len(table.rows), dtype=bool), start, rounds=8)
    off = np.log(table.predict(again) / table.predict(start))
    assert np.abs(off).max() < 0.02


def test_a_device_family_has_at_most_six_constants() -> None:
    families = {name.partition(".")[0] for name in calibration().constants if "." in name}
    assert len(OF_FAMILY) <= 6
    assert {"a100", "h100", "b200", "gb200", "gb300"} <= families


def test_the_node_cases_are_within_their_time_when_their_source_was_never_seen() -> None:
    """43 cases on one B200 node (SimuMax): constants of other sources, and the machine's own kernel measurements."""
    rows, _ = interpreted(ROWS)
    rows = [row for row in rows if row.measured and not row.cells.get("status")]
    table = Table(rows)
    others = np.array(["SimuMax" not in row.source for row in rows])
    start = np.log([value(calibration().constants, name) for name in table.names])
    predicted = table.predict(table.fit(others, start, rounds=2), ~others)
    errors = np.abs(predicted / table.measured[~others] - 1)
    assert (~others).sum() == 43
    assert errors.mean() <= 0.056


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_runs_of_a_source_that_was_left_out_are_predicted_within_bounds() -> None:
    summary = judge(ROWS, held=True).summary()
    dense, experts = summary["dense"]["macro"], summary["experts"]["macro"]
    assert dense["sources"] >= 10
    assert dense["mape"] <= 0.10
    assert dense["p90"] <= 0.20
    assert dense["mape"] <= 0.6 * dense["constant_mfu_mape"]
    assert experts["mape"] <= 0.25
    assert experts["p90"] <= 0.50
    assert 0.75 <= summary["coverage"] <= 0.85
    for kind, same, other in (("dense", 0.05, 0.07), ("experts", 0.10, 0.15)):
        assert summary[kind]["anchored_same_model"]["macro"] <= same
        assert summary[kind]["anchored_other_model"]["macro"] <= other


def test_a_run_that_drops_tokens_waits_for_no_counts() -> None:
    """Experts that take tokens up to a limit have shapes that are known beforehand, so graphs start the kernels."""
    rows = {row.id: row for row in interpreted(ROWS)[0]}
    dropping = [row for row in rows.values() if "tokendrop" in row.cells["notes"]]
    assert dropping
    assert all(row.ground.stack.graphs for row in dropping)
    assert not rows["r0227"].ground.stack.graphs  # the same model and machine, token-dropless


# --- reading and judging --------------------------------------------------------------------------------------------


def changed(row: str, **cells: str) -> Published | Refused:
    return interpret({**by_id()[row], **cells})


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"arch": "hybrid-mamba"}, "architecture 'hybrid-mamba' is not modelled"),
        ({"task": "lora"}, "only adapters are trained"),
        ({"gpu": "TPUv5"}, "gpu 'TPUv5' is not in the catalogue"),
        ({"framework": "inhouse", "framework_version": "", "source": "x"}, "framework 'inhouse' has no stack profile"),
        ({"dp": "3"}, "is not n_gpus"),
        ({"global_batch": ""}, "global_batch is not stated"),
        ({"step_time_s": "", "tokens_per_s_per_gpu": "", "tflops_per_gpu": ""}, "no step time"),
    ],
)
def test_a_row_that_says_too_little_is_refused_with_the_reason(cells: dict[str, str], reason: str) -> None:
    answer = changed("r0992", peak_mem_gib="", **cells)
    assert isinstance(answer, Refused)
    assert reason in answer.reason


def written(folder: Path, *changes: dict[str, str]) -> Path:
    """A table of rows of the real one, each with its changes, as Excel writes UTF-8."""
    names = list(by_id()["r0080"])
    lines = [",".join(names)]
    for row, cells in zip(("r0080", "r0083", "r0084"), changes, strict=False):
        lines.append(",".join(f'"{cell}"' for cell in {**by_id()[row], **cells}.values()))
    path = folder / "runs.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
    return path


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({"tp": "0"}, "line 3, tp: '0' is less than 1"),
        ({"tp": "x"}, "line 3, tp: 'x' is not a whole number"),
        ({"tp": "2.5"}, "line 3, tp: '2.5' is not a whole number"),
        ({"hidden": "abc"}, "line 3, hidden: 'abc' is not a whole number"),
        ({"seq_len": "inf"}, "line 3, seq_len: 'inf' is not a whole number"),
        ({"seq_len": "0"}, "line 3, seq_len: '0' is less than 1"),
        ({"n_gpus": "0"}, "line 3, n_gpus: '0' is less than 1"),
        ({"n_gpus": ""}, "line 3, n_gpus: is blank"),
        ({"source": ""}, "line 3, source: is blank"),
        ({"vocab": "0"}, "line 3, vocab: '0' is less than 1"),
        ({"layers": "-3"}, "line 3, layers: '-3' is less than 1"),
        ({"layers": "1e9"}, "line 3, layers: '1e9' is more than 10000"),
        ({"gpus_per_node": "0"}, "line 3, gpus_per_node: '0' is less than 1"),
        ({"micro_batch": "0"}, "line 3, micro_batch: '0' is less than 1"),
        ({"step_time_s": "0"}, "line 3, step_time_s: '0' is not above 0"),
        ({"step_time_s": "-1"}, "line 3, step_time_s: '-1' is not above 0"),
        ({"step_time_s": "nan"}, "line 3, step_time_s: 'nan' is not a number"),
        ({"peak_mem_gib": "-4"}, "line 3, peak_mem_gib: '-4' is not above 0"),
        ({"zero": "9"}, "line 3, zero: '9' is not a stage from 0 to 3"),
        ({"in_scope": "maybe"}, "line 3, in_scope: 'maybe' is not 0 or 1"),
        ({"id": "r0080"}, "line 3, id: 'r0080' stands on line 2 too"),
    ],
)
def test_a_cell_that_cannot_be_is_named_with_its_line_its_column_and_its_value(
    tmp_path: Path, cells: dict[str, str], why: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        judge(written(tmp_path, {}, cells))


def test_every_bad_cell_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"(?s)3 bad cells.*line 2, pp.*line 3, heads.*line 4, dp"):
        judge(written(tmp_path, {"pp": "0"}, {"heads": "x"}, {"dp": "-1"}))


@pytest.mark.parametrize("by", [1, 2, -2])
def test_a_row_with_more_or_fewer_cells_than_the_heading_is_named(tmp_path: Path, by: int) -> None:
    columns = len(by_id()["r0080"])
    path = written(tmp_path, {}, {})
    heading, row, *rest = path.read_text(encoding="utf-8").splitlines()
    row = row + ",x" * by if by > 0 else row.rsplit(",", -by)[0]
    path.write_text("\n".join([heading, row, *rest]), encoding="utf-8")
    with pytest.raises(UsageError, match=f"line 2: {columns + by} cells, the heading has {columns}"):
        judge(path)


def test_every_cell_of_the_shipped_table_can_be() -> None:
    assert len(read_rows(ROWS)) == 1143


def test_a_pipeline_of_more_stages_than_parts_of_the_model_is_refused() -> None:
    answer = changed("r0080", vpp="1000000")
    assert isinstance(answer, Refused)
    assert "is more than layers, embedding and head" in answer.reason


def test_what_a_row_leaves_open_is_assumed_and_said() -> None:
    answer = changed("r0080", vpp="", micro_batch="")
    assert isinstance(answer, Published)
    assert {"micro-batch 1", "recompute none", "ZeRO 1"} <= set(answer.assumed)
    assert any(line.startswith("interleaved stages") for line in answer.assumed)


@pytest.mark.parametrize(
    ("text", "gigabytes"),
    [
        ("8x200G HDR IB/node (Selene)", 25.0),
        ("IB NDR 8x400G/node", 50.0),
        ("4x OmniPath 100 Gb/s per node", 6.25),
        ("RoCE 1600 Gbps/node", 25.0),
        ("RoCE 400G/GPU", 50.0),
        ("4x100Gb RoCE per node", 6.25),
    ],
)
def test_networks_are_read_as_bytes_per_second_of_one_device(text: str, gigabytes: float) -> None:
    answer = changed("r0080", interconnect=text)
    assert isinstance(answer, Published)
    assert answer.ground.cluster.links[-1].bandwidth == pytest.approx(gigabytes * 1e9)


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({"dp": "5"}, "is not n_gpus"),
        ({"grad_accum": "3"}, "is not the batch"),
        ({"tokens_per_s_per_gpu": "99999"}, "step time gives"),
        ({"step_time_s": "1.0", "tokens_per_s_per_gpu": ""}, "an MFU of"),
        ({"model": "llama3-8b"}, "named 8b"),
        ({"micro_batch": "64", "grad_accum": "2"}, "short of the device"),
        ({"mlp": "foo"}, "mlp 'foo' is unknown"),
        ({"recompute": "??"}, "recompute '??' is unknown"),
        ({"kv_heads": "5"}, "5 kv heads do not divide 64 query heads"),
        ({"heads": "7", "head_dim": ""}, "7 heads do not divide hidden 8192"),
        ({"experts": "3"}, "dense, with experts 3"),
        ({"ep": "7"}, "dense, with ep 7"),
        ({"arch": "moe", "experts": "8", "topk": "99", "expert_ffn": "64"}, "99 is more than the 8 experts"),
        ({"arch": "moe", "experts": "8", "topk": "2", "expert_ffn": "64", "ep": "3"}, "ep 3 does not divide"),
    ],
)
def test_lint_distrusts_what_cannot_be(cells: dict[str, str], why: str) -> None:
    row = {**by_id()["r0080"], **cells}
    read = interpret(row)
    doubts = lint([row], [read] if isinstance(read, Published) else [])
    assert any(why in doubt.why for doubt in doubts), doubts


def test_lint_finds_exact_copies_and_leaves_sound_rows_alone() -> None:
    row = by_id()["r0080"]
    assert [d.why for d in lint([row, {**row, "id": "x"}], [])] == ["an exact copy of r0080"]
    sound = interpret(row)
    assert isinstance(sound, Published)
    assert lint([row], [sound]) == []


def scored(row: str, predicted: float, **cells: str) -> Scored:
    answer = changed(row, **cells)
    assert isinstance(answer, Published)
    return Scored(answer, predicted)


def test_order_regret_and_anchors_are_what_they_say() -> None:
    fast = scored("r0080", 10.0, step_time_s="10", tokens_per_s_per_gpu="", layout_group="a")
    slow = scored("r0080", 9.0, step_time_s="12", tokens_per_s_per_gpu="", layout_group="b")
    assert in_order([[fast, slow]]) == (0, 1)
    assert regret([[fast, slow]]) == [pytest.approx(0.2)]
    assert anchored([fast, slow], same_model=True)[fast.row.source] == pytest.approx(((1 / 0.75 - 1) + 0.25) / 2)


def test_a_macro_average_is_over_sources_that_count() -> None:
    figures = [
        {
            "mape": m,
            "p90": 0.1,
            "within_5": 0.0,
            "within_10": 0.0,
            "constant_mfu_mape": 0.2,
            "coverage": 0.8,
            "counts": c,
        }
        for m, c in ((0.1, True), (0.3, True), (0.9, False))
    ]
    assert macro(figures)["mape"] == pytest.approx(0.2)
    assert macro(figures)["sources"] == 2
