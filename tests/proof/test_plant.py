"""The proof is proved: mistakes that trainers have really made are planted, and each is caught within 20 draws."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from plait.proof.draw import FEATURES, MOST_RANKS, draw_run
from plait.proof.plant import BUGS
from plait.proof.verify import check, proof_run, samples_of
from plait.spec.errors import RankFailed
from plait.spec.fit import fit
from plait.spec.run import RunSpec

SEED, DRAWS = 20, 20

# What a run must have for the bug to matter: in the others it changes nothing, and running them would only take time.
MATTERS: dict[str, tuple[str, ...]] = {
    "mean_for_sum": ("dp > 1",),
    "mean_of_rank_means": ("dp > 1",),
    "split_norms_not_summed": ("sequence parallel",),
    "copied_heads_not_summed": ("kv < tp",),
    "tied_table_not_summed": ("tied over stages",),
    "copies_counted_in_norm": ("dp > 1",),
    "input_gradient_not_summed": ("tp > 1", "no sequence parallel"),
    "labels_shifted_again": (),
    "dropout_by_local_position": ("sequence parallel", "dropout"),
    "dropout_by_local_head": ("tp > 1", "attention dropout"),
    "bias_added_by_every_rank": ("tp > 1", "biases"),
    "sent_before_complete": ("dp > 1", "accumulation"),
    "last_micro_batch_only": ("accumulation",),
    "stale_pipeline_gradient": ("pp > 1",),
    "dropout_without_step": ("dropout",),
}


def complaint(run: RunSpec, plant: Callable[[], None]) -> str:
    """What the proof says; copies that came apart are told by the gathering, before any comparison."""
    ready = proof_run(run, "float64")
    try:
        return check(ready, samples_of(ready), plant).complaint
    except RankFailed as failure:
        assert "copies on ranks" in failure.cause, failure
        return failure.cause


def matters(name: str, run: RunSpec) -> bool:
    return all(FEATURES[f.removeprefix("no ")](run) is not f.startswith("no ") for f in MATTERS[name])


def cost(run: RunSpec) -> int:
    return fit(run).world * run.batch.global_size * run.model.layers


def test_every_planted_bug_has_a_row_here() -> None:
    assert set(MATTERS) == set(BUGS) and len(BUGS) >= 10


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught_within_20_draws(name: str) -> None:
    drawn = [draw_run(SEED, number) for number in range(DRAWS)]
    matter = sorted((run for run in drawn if matters(name, run)), key=cost)
    assert any(complaint(run, BUGS[name]) for run in matter)


def test_planting_nothing_leaves_the_proof_clean() -> None:
    drawn = [draw_run(SEED, number) for number in range(DRAWS)]
    run = min((run for run in drawn if FEATURES["three axes > 1"](run)), key=cost)
    assert fit(run).world == MOST_RANKS
    assert complaint(run, lambda: None) == ""


def test_a_bug_is_planted_in_the_ranks_only() -> None:
    run = min((draw_run(SEED, number) for number in range(DRAWS)), key=cost)
    assert complaint(run, BUGS["labels_shifted_again"]) != ""
    assert complaint(run, lambda: None) == ""
