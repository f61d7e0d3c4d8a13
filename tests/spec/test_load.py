"""run.toml and overrides in, a run out, and back; and what is said of every kind of mistake."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given

from plait.spec.errors import InvalidRun, PlaitError, UsageError
from plait.spec.load import dump, load
from plait.spec.model import violations as model_violations
from plait.spec.presets import PRESETS
from plait.spec.run import RunSpec
from tests.spec.drawn import few, specs

SOURCE = Path(__file__).parents[2] / "src"


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path | None, *overrides: str) -> PlaitError:
    with pytest.raises(UsageError) as refused:
        load(path, overrides)
    return refused.value


# --- there and back --------------------------------------------------------------------------------------------------


@given(run=specs(RunSpec))
@few
def test_what_is_dumped_loads_as_the_same_run(tmp_path_factory: pytest.TempPathFactory, run: RunSpec) -> None:
    path = write(tmp_path_factory.getbasetemp(), dump(run))
    assert load(path) == run
    assert dump(load(path)) == dump(run)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_same_by_name_and_written_out(name: str, tmp_path: Path) -> None:
    run = load(None, [f"model.preset={name}"])
    assert run.model == PRESETS[name]
    assert load(write(tmp_path, dump(run))) == run


def test_no_file_an_empty_file_and_nothing_said_are_the_builtin_run(tmp_path: Path) -> None:
    assert load() == load(write(tmp_path, "")) == load(write(tmp_path, "[layout]\n# nothing\n")) == RunSpec()


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes("\ufeff[layout]\r\ntp = 2\r\n".encode())
    assert load(path).layout.tp == 2


# --- presets ---------------------------------------------------------------------------------------------------------


def test_fields_beside_a_preset_replace_its_own(tmp_path: Path) -> None:
    model = load(write(tmp_path, '[model]\npreset = "llama3-8b"\nlayers = 2\ntied = true\n')).model
    assert model == PRESETS["llama3-8b"].model_copy(update={"layers": 2, "tied": True})


@pytest.mark.parametrize(
    ("preset", "given", "head_dim", "kv_heads"),
    [
        ("llama3-8b", ("model.hidden=8192",), 256, 8),
        ("llama3-8b", ("model.heads=64",), 64, 8),
        ("llama3-8b", ("model.heads=64", "model.head_dim=128"), 128, 8),
        ("gpt2", ("model.heads=16",), 48, 16),
        ("gpt2", ("model.heads=16", "model.kv_heads=4"), 48, 4),
        ("qwen3-tiny", ("model.hidden=64",), 16, 2),  # its head size never followed from hidden / heads
        ("llama3-8b", ("model.ffn=8",), 128, 8),
    ],
)
def test_head_sizes_follow_anew_from_hidden_and_heads_where_they_did_in_the_preset(
    preset: str, given: tuple[str, ...], head_dim: int, kv_heads: int
) -> None:
    model = load(None, [f"model.preset={preset}", *given]).model
    assert (model.head_dim, model.kv_heads) == (head_dim, kv_heads)
    assert model_violations(model) == []


def test_heads_that_do_not_divide_hidden_need_a_head_size() -> None:
    error = refusal(None, "model.preset=gpt2", "model.hidden=770")
    assert "model.head_dim: heads 12 do not divide hidden 770 (set it, or use hidden 768 or 780)" in str(error)
    assert load(None, ["model.preset=gpt2", "model.hidden=770", "model.head_dim=64"]).model.head_dim == 64


@pytest.mark.parametrize("heads", [0, -2])
def test_heads_below_one_are_refused_as_such(heads: int) -> None:
    assert refusal(None, f"model.heads={heads}").message.startswith(f"model.heads: is {heads}, but at least 1")


def test_part_of_a_presets_rope_scaling_can_be_replaced() -> None:
    scaling = load(None, ["model.preset=llama3-405b", "model.rope_scaling.factor=4.0"]).model.rope_scaling
    before = PRESETS["llama3-405b"].rope_scaling
    assert before is not None and scaling == before.model_copy(update={"factor": 4.0})


def test_a_model_override_without_a_model_changes_the_builtin_one(tmp_path: Path) -> None:
    expected = PRESETS["builtin"].model_copy(update={"layers": 2})
    assert load(None, ["model.layers=2"]).model == expected
    assert load(write(tmp_path, "[layout]\ntp = 2\n"), ["model.layers=2"]).model == expected


def test_an_override_of_the_preset_puts_the_files_model_aside_but_no_other_override(tmp_path: Path) -> None:
    path = write(tmp_path, dump(load(None, ["model.preset=gpt2", "layout.tp=2"])))
    for overrides in (["model.preset=llama3-8b", "model.layers=2"], ["model.layers=2", "model.preset=llama3-8b"]):
        run = load(path, overrides)
        assert run.model == PRESETS["llama3-8b"].model_copy(update={"layers": 2})
        assert run.layout.tp == 2


def test_a_model_without_a_preset_must_be_whole(tmp_path: Path) -> None:
    error = refusal(write(tmp_path, "[model]\nlayers = 2\n"))
    assert isinstance(error, InvalidRun)
    missing = {v.key for v in error.violations}
    assert missing == {f"model.{name}" for name in ("vocab", "hidden", "heads", "ffn", "max_sequence")}
    assert all("line 1" in v.problem and "preset" in v.fix for v in error.violations)


# --- overrides -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("layout.tp=2", "layout", "tp", 2),
        (" layout.tp =2", "layout", "tp", 2),
        ("optim.lr=3e-4", "optim", "lr", 3e-4),
        ("optim.lr=1", "optim", "lr", 1.0),
        ("model.tied=true", "model", "tied", True),
        ("schedule.name=gpipe", "schedule", "name", "gpipe"),
        ("schedule.name='gpipe'", "schedule", "name", "gpipe"),
        ('data.files=["a.txt", "b.txt"]', "data", "files", ("a.txt", "b.txt")),
        ("data.files=[]", "data", "files", ()),
        ("zero.shard=node", "zero", "shard", "node"),
        ("zero.shard=4", "zero", "shard", 4),
        ("train.run_dir=runs/a=b", "train", "run_dir", "runs/a=b"),
        ("train.run_dir=2024-01-01", "train", "run_dir", "2024-01-01"),
        ("train.run_dir=", "train", "run_dir", ""),
        ("train.run_dir='7'", "train", "run_dir", "7"),
        ("train.run_dir=1\ntp=2", "train", "run_dir", "1\ntp=2"),
        ('layout.order=["dp","pp","cp","tp"]', "layout", "order", ("dp", "pp", "cp", "tp")),
    ],
)
def test_an_overrides_value_is_toml_else_text(override: str, section: str, key: str, value: object) -> None:
    assert getattr(getattr(load(None, [override]), section), key) == value


def test_overrides_apply_over_the_file_in_their_order(tmp_path: Path) -> None:
    path = write(tmp_path, "[layout]\ntp = 2\npp = 2\n")
    layout = load(path, ["layout.tp=4", "layout.tp=1", "layout.dp=2", "layout.tp=4"]).layout
    assert (layout.tp, layout.pp, layout.dp) == (4, 2, 2)


@pytest.mark.parametrize(("value", "told"), [("9" * 5000, "too many digits"), ("[" * 5000, "nests too deeply")])
def test_what_python_will_not_read_is_refused_in_words(value: str, told: str, tmp_path: Path) -> None:
    assert told in refusal(None, f"layout.tp={value}").message
    assert told in refusal(write(tmp_path, f"[layout]\ntp = {value}\n")).message


@pytest.mark.parametrize("override", ["layout.tp", "=2", "layout.=2", ".tp=2", "layout..tp=2", "lay out.tp=2", ""])
def test_what_is_no_override_is_said_to_be_none(override: str) -> None:
    assert "is not section.key=value" in refusal(None, override).message


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("lr=2", "lr: unknown key, in the override 'lr=2' (it belongs to [optim])"),
        ("layout=2", "layout: is a section, not a value"),
        ("layout-tp=2", "did you mean layout.tp?"),
        ("a.b.c=3", "a: unknown key, in the override 'a.b.c=3' (known: model, layout"),
        ("layuot.tp=2", "layuot: unknown key, in the override 'layuot.tp=2' (did you mean layout?)"),
        ("layout.tp.x=2", "layout.tp: should be a whole number"),
        ("data.files=a.txt", "data.files: should be a list of texts, got 'a.txt'"),
        ("model.tied=True", "write true without quotes"),
        ("train.run_dir=7", "text stands in quotes"),
        ("layout.tp=", "layout.tp: should be a whole number, got ''"),
        ("optim.lr=nan", "optim.lr: should be a finite number, got nan"),
        ("layout.tp=nan", "layout.tp: should be a whole number, got nan"),
        ("zero.shard=nodes", "should be a whole number or 'all' or 'node', got 'nodes'"),
        ("recompute.mode=ful", "did you mean full?"),
        ("model.preset=3", "model.preset: 3 is unknown"),
        ("model.rope_scaling.factr=3.0", "model.rope_scaling.factr: unknown key"),
    ],
)
def test_a_mistake_in_an_override_is_named_with_the_override(override: str, said: str) -> None:
    message = str(refusal(None, override))
    assert said in message and f"in the override {override!r}" in message


def test_a_mistake_in_an_override_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    error = refusal(write(tmp_path, "[layout]\ntp = 2\npp = '2'\n"), "layout.tpp=2", "layout.tp=x")
    lines = str(error).splitlines()
    assert lines[0].endswith("run.toml: 3 problems")
    assert lines[1:] == [
        "  layout.tpp: unknown key, in the override 'layout.tpp=2' (did you mean tp?)",
        "  layout.tp: should be a whole number, got 'x', in the override 'layout.tp=x'",
        "  layout.pp: should be a whole number, got '2', line 3 (write 2 without quotes)",
    ]


def test_an_override_below_a_value_of_the_file_names_both(tmp_path: Path) -> None:
    error = refusal(write(tmp_path, "[layout]\ntp = 2\n"), "layout.tp.x=3")
    assert error.message == "layout.tp.x: layout.tp is 2, a value and not a section"


# --- mistakes in a file (B97), through the real command --------------------------------------------------------------

MISTAKES = {
    "typo": (
        "[optim]\nlearnign_rate = 3e-4\n",
        ["run.toml: optim.learnign_rate: unknown key, line 2 (did you mean lr?)"],
    ),
    "right key, wrong section": (
        "[train]\nsteps = 5\n\n[batch]\nclip = 1.0\n",
        ["run.toml: batch.clip: unknown key, line 5 (it belongs to [optim])"],
    ),
    "key of two other sections": (
        "[layout]\nname = 'gpipe'\n",
        ["run.toml: layout.name: unknown key, line 2 (it belongs to [schedule] or [optim])"],
    ),
    "hyphen for underscore": (
        "[batch]\nglobal-size = 8\n",
        ["run.toml: batch.global-size: unknown key, line 2 (did you mean global_size?)"],
    ),
    "duplicate key": (
        "[layout]\ntp = 1\npp = 1\ntp = 2\n",
        ["run.toml: layout.tp: stands twice, on lines 2 and 4 (keep one)"],
    ),
    "duplicate section": (
        "[layout]\ntp = 1\n[train]\n[layout]\npp = 2\n",
        ["run.toml: layout: stands twice, on lines 1 and 4 (keep one)"],
    ),
    "wrong type": (
        "[model]\npreset = 'builtin'\nqkv_bias = 1\n",
        ["run.toml: model.qkv_bias: should be a boolean, got 1, line 3"],
    ),
    "four and a half layers": (
        "[model]\npreset = 'builtin'\nlayers = 4.5\n",
        ["run.toml: model.layers: should be a whole number, got 4.5, line 3 (use 4 or 5)"],
    ),
    "number as text": (
        "[layout]\ntp = '8'\n",
        ["run.toml: layout.tp: should be a whole number, got '8', line 2 (write 8 without quotes)"],
    ),
    "syntax": (
        "[layout]\ntp = two\n",
        ["run.toml: line 2: not TOML: Invalid value: tp = two", "text stands in quotes"],
    ),
    "unknown section": (
        "[layout]\n\n[optimizer]\nlr = 1.0\n",
        ["run.toml: optimizer: unknown key, line 3 (did you mean optim?)"],
    ),
    "preset": (
        "[model]\npreset = 'lama3-8b'\n",
        ["run.toml: model.preset: 'lama3-8b' is unknown, line 2 (did you mean llama3-8b?)"],
    ),
    "no such choice": (
        "[optim]\nschedule = 'cosin'\n",
        ["run.toml: optim.schedule: should be 'constant', 'cosine', 'linear' or 'wsd', got 'cosin', line 2", "cosine?"],
    ),
    "several at once": (
        "steps = 3\n[layout]\ntpp = 2\ndp = 0\n[optim]\nlr = '1'\n",
        [
            "run.toml: 4 problems",
            "  steps: unknown key, line 1 (it belongs to [train])",
            "  layout.tpp: unknown key, line 3 (did you mean tp?)",
            "  layout.dp: should be greater than or equal to 1, got 0, line 4",
            "  optim.lr: should be a number, got '1', line 6 (write 1 without quotes)",
        ],
    ),
}
THROUGH_BOTH = ("typo", "syntax", "several at once")


@pytest.mark.parametrize(
    ("command", "kind"), [("train", kind) for kind in MISTAKES] + [("verify", kind) for kind in THROUGH_BOTH]
)
def test_b97_a_mistake_stops_the_command_with_file_key_line_and_nearest_name_before_anything_starts(
    command: str, kind: str, tmp_path: Path
) -> None:
    text, said = MISTAKES[kind]
    error = refused_command(command, text, tmp_path)
    assert error.startswith("error: run.toml: ")
    assert all(line in error for line in said), error


def test_b99_every_reason_against_a_layout_stops_the_command_before_anything_starts(tmp_path: Path) -> None:
    model = "[model]\nhidden = 48\nheads = 6\nkv_heads = 6\nlayers = 4\npreset = 'builtin'\n"
    error = refused_command("train", f"{model}[layout]\ntp = 4\npp = 8\ncp = 3\n[batch]\nsequence = 16\n", tmp_path)
    assert error.splitlines() == [
        "error: 3 problems",
        "  layout.tp: 4 does not divide heads 6, neither of tp 4 and kv heads 6 divides the other (use 3 or 6)",
        "  layout.pp: 8 stages are more than layers 4 (use pp ≤ 4)",
        "  layout.cp: cp 3 does not divide sequence 16 (use 2 or 4)",
    ]


def refused_command(command: str, text: str, folder: Path) -> str:
    """stderr of `plait command run.toml`, which must exit with 2, say nothing on stdout, and leave nothing behind."""
    write(folder, text)
    (folder / "torch.py").write_text("raise SystemExit('torch was imported')\n")  # no rank starts without it
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{SOURCE}"}
    done = subprocess.run(
        [sys.executable, "-m", "plait", command, "run.toml"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert {path.name for path in folder.iterdir()} == {"run.toml", "torch.py"}
    return done.stderr


# --- where a key stands ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "[layout]\n\n  tpp = 2",
        "# tpp = 1\n[ layout ]\ntpp=2",
        "[train]\nsteps = 2\n[layout] # tpp = 5\n'tpp' = 2",
        "layout.tp = 2\n\nlayout.tpp = 2",
        "\n\nlayout = {tp = 1, tpp = 2}",
        '\n\n"layout"."tpp" = 2',
    ],
)
def test_the_line_of_a_key_is_found_however_it_is_written(text: str, tmp_path: Path) -> None:
    wanted = max(number for number, line in enumerate(text.splitlines(), 1) if "tpp" in line)
    assert f"layout.tpp: unknown key, line {wanted} (" in str(refusal(write(tmp_path, text)))


def test_a_file_that_is_not_there_is_named_with_the_one_that_is(tmp_path: Path) -> None:
    write(tmp_path, "")
    error = refusal(tmp_path / "runn.toml")
    assert error.message == f"{tmp_path / 'runn.toml'}: no such file"
    assert error.hint == f"did you mean {tmp_path / 'run.toml'}? A key is set as section.key=value"
    assert "without a file it is the built-in run" in refusal(tmp_path / "none" / "x.toml").hint


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path).message == f"{tmp_path}: cannot be read: Is a directory"
    (tmp_path / "binary.toml").write_bytes(b"tp = \xff")
    assert refusal(tmp_path / "binary.toml").message == f"{tmp_path / 'binary.toml'}: not UTF-8 text (byte 5)"


def test_a_file_that_ends_too_early_is_named_with_its_last_line(tmp_path: Path) -> None:
    assert "run.toml: line 2: not TOML: Invalid value: tp =" in refusal(write(tmp_path, "[layout]\ntp = ")).message
