"""The built-in run on real text, as a mixture of experts and with rows of thousands of tokens: minutes each."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest

from tests.cli.commands import plait

SPLIT = ("layout.tp=2", "layout.pp=2", "layout.dp=2", "batch.micro_size=8", "--json")
MIXTURE = (
    "layout.ep=2", "model.moe.count=8", "model.moe.top_k=2", "model.moe.ffn=192", "model.moe.scores=sigmoid",
    "model.moe.bias=true", "model.moe.bias_rate=0.01",
)  # fmt: skip
SETTLED = 50  # steps until the bias has found the load


@pytest.mark.proof
@pytest.mark.timeout(2400)
def test_a_mixture_learns_no_less_than_the_dense_model_of_its_active_size_and_keeps_experts_busy(
    tmp_path: Path,
) -> None:
    """Two experts of half the width for each token: 384 of inner size either way."""
    losses = []
    for name, words in (("dense", ()), ("mixture", MIXTURE)):
        ended = plait("train", *SPLIT, *words, f"train.run_dir={tmp_path / name}")
        assert ended.code == 0, ended.stderr
        losses.append(json.loads(ended.stdout)["eval_loss"])
    assert losses[1] <= losses[0], losses
    steps = [json.loads(line) for line in (tmp_path / "mixture" / "metrics.jsonl").read_text().splitlines()]
    for layer in steps[-1]["experts"]:
        loads = [step["experts"][layer]["imbalance"] for step in steps[SETTLED:]]
        assert mean(loads) < 2 and max(loads[-20:]) < 2, (layer, max(loads), loads[-20:])


@pytest.mark.proof
@pytest.mark.timeout(2400)
def test_rows_of_8192_tokens_train_over_four_context_ranks_in_less_than_a_third_of_the_activations(
    tmp_path: Path,
) -> None:
    rows = ("model.max_sequence=8192", "batch.sequence=8192", "batch.global_size=2", "batch.micro_size=1",
            "train.steps=4", "train.eval_batches=0", "--json")  # fmt: skip
    found = {}
    for cp in (1, 4):
        ended = plait("train", *rows, f"layout.cp={cp}", f"train.run_dir={tmp_path / str(cp)}")
        assert ended.code == 0, ended.stderr
        found[cp] = json.loads(ended.stdout)
    peaks = {cp: max(rank["activations"] for rank in run["memory"]) for cp, run in found.items()}
    print(f"activations at their peak: {peaks[1]:,} bytes on one rank, {peaks[4]:,} on each of four")
    assert peaks[4] <= 0.3 * peaks[1]
    assert found[4]["loss_first"] == pytest.approx(found[1]["loss_first"], rel=1e-5)
    assert found[4]["loss_last"] == pytest.approx(found[1]["loss_last"], rel=1e-4)
    assert found[4]["loss_last"] < found[4]["loss_first"]
