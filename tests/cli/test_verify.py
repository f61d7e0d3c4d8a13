"""`plait verify` from its words to its exit code: the JSON it promises, and that a difference is told."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from plait.proof import verify as proof
from plait.proof.draw import FEATURES
from plait.proof.plant import BUGS
from plait.proof.verify import Plant
from tests.cli.commands import fresh, plait

SCALAR = {"one", "split", "error"}
TINY = ("model.preset=llama-tiny", "batch.sequence=16", "data.source=synthetic")
WORDS = ("verify", *TINY, "layout.tp=2", "layout.dp=2", "layout.sequence_parallel=true")


def test_json_is_one_document_with_the_promised_keys() -> None:
    ended = plait(*WORDS, "--json")
    assert ended.code == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert set(found) == {"ok", "layout", "dtype", "run", "loss", "gradients", "norm", "weights"}
    assert set(found["loss"]) == set(found["norm"]) == SCALAR
    assert set(found["gradients"]) == {"compared", "worst"} and set(found["weights"]) == {"steps", "worst"}
    assert set(found["gradients"]["worst"]) == set(found["weights"]["worst"]) == {"name", "error"}
    assert found["ok"] is True and found["dtype"] == "float64" and found["weights"]["steps"] == 3
    assert found["layout"]["tp"] == found["layout"]["dp"] == 2 and found["layout"]["sequence_parallel"] is True
    assert found["run"]["model"]["vocab"] == 61  # what was run, not what was asked for
    assert max(found[part]["error"] for part in ("loss", "norm")) <= 1e-10
    assert max(found[part]["worst"]["error"] for part in ("gradients", "weights")) <= 1e-10


def test_random_json_is_one_document_with_the_promised_keys() -> None:
    ended = plait("verify", "--random", 2, "--seed", 4, "--json")
    assert ended.code == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert set(found) == {"ok", "drawn", "passed", "failures", "coverage", "seed"}
    assert (found["ok"], found["drawn"], found["passed"], found["failures"], found["seed"]) == (True, 2, 2, [], 4)
    assert list(found["coverage"]) == list(FEATURES)
    assert len([line for line in ended.stderr.splitlines() if line.endswith("equal")]) == 2


def test_a_proof_in_words_says_what_was_run_and_how_near_it_came() -> None:
    ended = plait(*WORDS, "--dtype", "float32")
    assert ended.code == 0 and ended.stdout.splitlines()[-1] == "equal to one device"
    assert "layout  pp 1  dp 2  cp 1  tp 2" in ended.stdout and "float32" in ended.stdout
    assert all(what in ended.stdout for what in ("loss", "gradient norm", "gradients", "weights after 3 SGD steps"))


def planted(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    """From now on every proof runs with the bug in its ranks."""
    plain: Callable[..., object] = proof._on_rank

    def with_bug(world: object, run: object, samples: object, plant: Plant | None) -> object:
        return plain(world, run, samples, BUGS[bug])

    monkeypatch.setattr(proof, "_on_rank", with_bug)


def test_a_difference_is_told_with_the_first_tensor_and_its_error_and_exits_1(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, "labels_shifted_again")
    ended = plait(*WORDS)
    assert ended.code == 1
    assert "DIFFERENT: loss " in ended.stdout
    assert "gradients first differ at embedding.tokens.weight, most at " in ended.stdout
    as_json = plait(*WORDS, "--json")
    assert as_json.code == 1 and json.loads(as_json.stdout)["ok"] is False


def test_a_drawn_run_that_differs_is_listed_with_its_number_and_exits_1(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, "labels_shifted_again")
    ended = plait("verify", "--random", 1, "--seed", 4, "--json")
    found = json.loads(ended.stdout)
    assert ended.code == 1 and (found["ok"], found["drawn"], found["passed"]) == (False, 1, 0)
    (failure,) = found["failures"]
    assert set(failure) == {"run", "error"} and "loss" in failure["error"]
    assert (failure["run"]["seed"], failure["run"]["number"]) == (4, 0)


def test_a_run_that_cannot_be_is_refused_with_exit_2_and_nothing_on_stdout() -> None:
    ended = plait("verify", *TINY, "layout.tp=3", "--json")
    assert ended.code == 2 and ended.stdout == "" and "layout.tp" in ended.error


@pytest.mark.proof
def test_under_torchrun_one_rank_speaks_for_all() -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "plait")
    ended = fresh("verify", *TINY, "layout.tp=2", "--json", launcher=launcher)
    assert ended.code == 0, ended.stderr
    assert json.loads(ended.stdout)["ok"] is True


def test_ranks_of_any_world_are_counted_and_a_rank_beyond_it_is_refused() -> None:
    ended = plait("verify", *TINY, "layout.tp=2", "zero.stage=1", "batch.global_size=64", "--world", "32", "--json")
    assert ended.code == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["world"] == 32 and [each["rank"] for each in found["ranks"]] == [0, 31]
    assert set(found["ranks"][0]["states"]) == {"weights", "gradients", "master", "moments"}
    assert found["ranks"][0]["collectives"]["dp"]["reduce_scatter_tensor"]["bytes"] > 0
    beyond = plait("verify", *TINY, "--world", "4", "--ranks", "first,4")
    assert beyond.code == 2 and "rank 4 of a world of 4" in beyond.stderr
