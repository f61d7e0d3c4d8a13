"""The proof is proved: mistakes that trainers have really made are planted, and each is caught within 20 draws."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from plait.proof.draw import FEATURES, MOST_RANKS, draw_run
from plait.proof.plant import BUGS
from plait.proof.verify import check, proof_run, samples_of
from plait.spec.errors import RankFailed
from plait.spec.fit import fit
from plait.spec.run import RunSpec

DRAWS = 20

# What a run must have for the bug to matter: in the others it changes nothing, and running them would only take time.
MATTERS: dict[str, tuple[str, ...]] = {
    "mean_for_sum": ("dp > 1",),
    "mean_of_rank_means": ("dp > 1",),
    "split_norms_not_summed": ("sequence parallel",),
    "copied_heads_not_summed": ("kv < tp",),
    "tied_table_not_summed": ("tied over stages",),
    "copies_counted_in_norm": ("dp > 1",),
    "input_gradient_not_summed": ("tp > 1", "no sequence parallel", "no backward apart"),
    "labels_shifted_again": (),
    "dropout_by_local_position": ("sequence parallel", "dropout"),
    "dropout_by_local_head": ("tp > 1", "attention dropout"),
    "bias_added_by_every_rank": ("tp > 1", "biases"),
    "sent_before_complete": ("dp > 1", "accumulation"),
    "last_micro_batch_only": ("accumulation",),
    "stale_pipeline_gradient": ("pp > 1",),
    "dropout_without_step": ("dropout",),
    "padding_in_a_weight": ("shards",),
    "last_reduction_only": ("sharded gradients", "accumulation"),
    "replicas_not_summed": ("hybrid shards",),
    "shards_counted_as_copies": ("shards",),
    "overflow_not_reduced": ("pp > 1",),
    "old_weights_gathered": ("shards", "no ZeRO 3"),
    "ignored_labels_in_chunks": ("chunked loss",),
    "chunk_of_other_labels": ("chunked loss of split tokens",),
    "z_loss_by_micro_batch": ("z-loss", "accumulation", "no chunked loss"),
    "other_mask_recomputed": ("recompute full", "dropout", "no experts"),  # there it breaks instead
    "expert_gradients_times_ep": ("ep > 1",),
    "router_detached": ("spread experts",),
    "balance_of_local_tokens": ("spread sequences",),
    "load_of_local_tokens": ("router bias", "dp > 1"),
    "labels_shifted_after_split": ("cp > 1",),
    "positions_of_the_part": ("cp > 1",),
    "documents_forgotten_between_ranks": ("ring", "masked documents over cp"),
}

# One for each mechanism on every commit; make proof plants them all.
QUICK = {
    "mean_for_sum", "split_norms_not_summed", "tied_table_not_summed", "labels_shifted_again",
    "bias_added_by_every_rank", "padding_in_a_weight", "ignored_labels_in_chunks", "expert_gradients_times_ep",
    "positions_of_the_part",
}  # fmt: skip


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


def draws_of(seed: int) -> list[RunSpec]:
    return [draw_run(seed, number) for number in range(DRAWS)]


@cache
def drawn() -> list[RunSpec]:
    """The draws of the first seed among which each bug matters somewhere."""
    return next(d for d in map(draws_of, range(100)) if all(any(matters(name, run) for run in d) for name in MATTERS))


def test_every_planted_bug_has_a_row_here() -> None:
    assert set(MATTERS) == set(BUGS) > QUICK and len(BUGS) >= 10


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.proof]) for name in BUGS]
)
def test_a_planted_bug_is_caught_within_20_draws(name: str) -> None:
    matter = sorted((run for run in drawn() if matters(name, run)), key=cost)
    assert any(complaint(run, BUGS[name]) for run in matter)


def test_planting_nothing_leaves_the_proof_clean() -> None:
    run = min((run for run in drawn() if FEATURES["three axes > 1"](run)), key=cost)
    assert fit(run).world == MOST_RANKS
    assert complaint(run, lambda: None) == ""


def test_a_bug_is_planted_in_the_ranks_only() -> None:
    run = min(drawn(), key=cost)
    assert complaint(run, BUGS["labels_shifted_again"]) != ""
    assert complaint(run, lambda: None) == ""
