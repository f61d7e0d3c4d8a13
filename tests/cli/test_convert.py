"""`plait convert` on what cannot be read or written: a message with the way out, and nothing left behind."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from plait.checkpoint import files
from plait.checkpoint.manifest import read_manifest
from plait.cli.main import main
from plait.models.hf import shapes_in_hf
from plait.spec.errors import SaveFailed
from plait.spec.families import to_hf_config
from plait.spec.presets import PRESETS
from plait.train import huggingface
from plait.train.huggingface import export, take_in

SPEC = PRESETS["llama-tiny"]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A tiny Hugging Face directory."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_hf_config(SPEC)))
    save_file({name: torch.zeros(shape) for name, (shape, _) in shapes_in_hf(SPEC).items()}, folder / WEIGHTS)
    return folder


def refused(capsys: pytest.CaptureFixture[str], *words: object, code: int = 2) -> str:
    """What stands in the error of a conversion that must fail."""
    assert main(["convert", *map(str, words)]) == code
    told = capsys.readouterr().err
    assert "Traceback" not in told and "pydantic" not in told
    return told


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"model_type": ["llama"]}, "is not a family"),
        ({"hidden_size": "32"}, "hidden_size: is '32'"),
        ({"rope_scaling": "x"}, "rope_scaling: is 'x'"),
        ({"rope_parameters": 3}, "rope_parameters: is 3"),
        ({"num_hidden_layers": 1000000}, "the model has 1000000 layers"),
        ({"vocab_size": 63}, "is (64, 32), and the model needs (63, 32)"),
    ],
)
def test_a_config_that_cannot_be_or_is_of_another_model_is_refused_by_key(
    changed: dict[str, object], why: str, theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (theirs / "config.json").write_text(json.dumps({**to_hf_config(SPEC), **changed}))
    assert why in refused(capsys, theirs, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize(
    ("index", "why"),
    [
        ({}, "weight_map is None"),
        ({"weight_map": 3}, "weight_map is 3"),
        ({"weight_map": {"a": 3}}, "3 is not the name of a file"),
        ({"weight_map": {"a": "../a"}}, "'../a' is not the name of a file"),
        ([], "list where a table is needed"),
    ],
)
def test_an_index_that_is_none_is_refused(
    index: object, why: str, theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (theirs / INDEX).write_text(json.dumps(index))
    assert why in refused(capsys, theirs, tmp_path / "ours")


def test_weights_without_a_config_are_told_what_they_lack(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (theirs / "config.json").unlink()
    assert "weights without a config.json" in refused(capsys, theirs, tmp_path / "ours")


def test_a_dtype_that_is_not_read_is_named_with_its_tensor(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(theirs / WEIGHTS)
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"].to(torch.int8)}, theirs / WEIGHTS)
    told = refused(capsys, theirs, tmp_path / "ours", code=1)
    assert "model.norm.weight is I8, and plait reads F64, F32, BF16, F16" in told
    assert "ValueError" not in told


def test_a_truncated_file_is_told_its_bytes(theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = (theirs / WEIGHTS).read_bytes()
    (theirs / WEIGHTS).write_bytes(content[:-100])
    told = refused(capsys, theirs, tmp_path / "ours", code=1)
    assert f"of {len(content) - 100}" in told and "ValueError" not in told


@pytest.mark.parametrize("place", ["a file", "a file/x", "/proc/x", "/proc/x/y"])
def test_a_target_that_cannot_be_made_is_named_both_ways(
    place: str, theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a file").write_text("")
    take_in(theirs, tmp_path / "ours")
    for source in (theirs, tmp_path / "ours"):
        assert "cannot be made" in refused(capsys, source, tmp_path / place)


def test_a_disk_that_is_full_is_named_and_nothing_is_left(
    theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_in(theirs, tmp_path / "ours")

    def full(path: Path, *rest: object) -> files.Checksums:
        path.write_bytes(b"a part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface, "write_file", full)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SaveFailed, match="No space left on device"):
        export(read_manifest(tmp_path / "ours"), tmp_path / "again")
    with pytest.raises(SaveFailed, match="No space left on device"):
        take_in(theirs, tmp_path / "again")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("command", ["convert", "show"])
def test_a_broken_checkpoint_is_answered_with_the_whole_one_beside_it(
    command: str, theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older, newer = (tmp_path / "checkpoints" / f"step-0000000{step}" for step in (1, 2))
    target = [tmp_path / "again"] if command == "convert" else []
    take_in(theirs, newer)
    (newer / "manifest.json").write_bytes(b"{" + (newer / "manifest.json").read_bytes())
    assert main([command, str(newer), *map(str, target)]) == 1
    assert "no other checkpoint stands beside it" in capsys.readouterr().err
    take_in(theirs, older)
    assert main([command, str(newer), *map(str, target)]) == 1
    assert f"hint: another checkpoint beside it: {older}" in capsys.readouterr().err


def test_a_flipped_bit_of_the_newest_names_the_older_one(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older, newer = (tmp_path / "checkpoints" / f"step-0000000{step}" for step in (1, 2))
    take_in(theirs, older)
    take_in(theirs, newer)
    content = bytearray((newer / "weights.safetensors").read_bytes())
    content[-1] ^= 1
    (newer / "weights.safetensors").write_bytes(content)
    told = refused(capsys, tmp_path, tmp_path / "again", code=1)
    assert "are not those that were written" in told and f"hint: another checkpoint beside it: {older}" in told


def test_weights_that_lack_a_tensor_have_a_way_out(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(theirs / WEIGHTS)
    del tensors["model.norm.weight"]
    save_file(tensors, theirs / WEIGHTS)
    told = refused(capsys, theirs, tmp_path / "ours")
    assert "lacks: model.norm.weight" in told and f"hint: take it again from where {theirs}" in told


def test_a_model_of_no_known_family_is_refused_before_anything_is_written(theirs: Path, tmp_path: Path) -> None:
    take_in(theirs, tmp_path / "ours")
    manifest = read_manifest(tmp_path / "ours")
    foo = {**manifest.facts.run, "model": {**manifest.facts.run["model"], "family": "foo"}}
    shutil.rmtree(theirs)
    with pytest.raises(Exception, match=r"model\.family: 'foo' is not a family"):
        export(replace(manifest, facts=replace(manifest.facts, run=foo)), theirs)
    assert not theirs.exists()
