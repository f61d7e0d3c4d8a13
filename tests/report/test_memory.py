"""The picture of memory: every figure is a sum over placement records, whichever rank is asked."""

from collections import defaultdict

import pytest

from plait.planner.seat import Seat
from plait.planner.sized.step import peak
from plait.report.memory import MemoryPicture, picture_memory
from plait.spec.fit import fit
from plait.spec.layout import Layout
from plait.spec.load import load

UNEVEN = ("model.layers=3", "model.vocab=67", "layout.pp=2", "layout.tp=2", "layout.dp=3", "batch.global_size=36")


def pictured(*overrides: str) -> MemoryPicture:
    run = load(None, overrides)
    return picture_memory(run, fit(run))


@pytest.mark.parametrize("stage", range(4))
def test_no_rank_holds_more_than_the_picture_says_of_its_place_and_one_holds_it(stage: int) -> None:
    run = load(None, UNEVEN)
    layout = fit(run)
    places = {(place.pp, place.tp): place for place in picture_memory(run, layout).zero[stage]}
    run = run.model_copy(update={"zero": run.zero.model_copy(update={"stage": stage})})
    held: defaultdict[tuple[int, int], list[dict[str, int]]] = defaultdict(list)
    for rank in range(layout.world):
        at = layout.coordinates(rank)
        held[at.pp, at.tp].append(Seat(run, layout, rank).states())
    for place, ranks in held.items():
        assert {kind: max(states[kind] for states in ranks) for kind in ranks[0]} == places[place].kinds
    assert len(held) == 4


def test_padding_is_what_the_equal_slices_hold_beyond_the_tensors() -> None:
    picture = pictured(*UNEVEN)
    assert {place.padding for place in picture.zero[0]} == {0}
    for stage, bytes_each in ((1, 8), (2, 12), (3, 16)):  # moments, + gradients, + weights; all in float32
        first = picture.zero[stage][0]
        whole = sum(picture.zero[0][0].kinds.values()) * bytes_each // 16
        sharded = {1: ("moments",), 2: ("moments", "gradients"), 3: ("moments", "gradients", "weights")}[stage]
        # Three equal slices are the tensors and the padding; no tensor here leaves more than one slice short.
        surplus = 3 * sum(first.kinds[kind] for kind in sharded) - whole
        assert surplus == first.padding > 0


def test_w2_w3_mixed_precision_adam_is_16_bytes_a_parameter_and_zero_divides_them() -> None:
    mixed = ("precision.compute=bfloat16", "precision.grad_accumulate=bfloat16")
    run = load(None, ["model.vocab=256", "batch.global_size=256", *mixed])
    picture = picture_memory(run, Layout(dp=64, shard=64))
    per_parameter = [picture.largest(stage).total / run.model.parameter_count() for stage in range(4)]
    assert [round(7.5 * each, 2) for each in per_parameter] == [120, 31.41, 16.64, 1.88]  # GB of 7.5e9 parameters


def test_the_largest_rank_is_named() -> None:
    picture = pictured("layout.pp=2", "layout.tp=2", "layout.dp=2")
    largest = picture.as_dict()["largest"]
    assert largest["rank"] == 4  # the last stage holds the last norm beside a table of equal size
    assert largest["bytes"] == max(rank.total for rank in picture.zero[0])
    assert "largest: rank 4 (pp 1, tp 0)" in picture.text(100)


def test_kinds_that_take_no_bytes_have_no_column() -> None:
    plain, momentum = (pictured("optim.name=sgd", f"optim.momentum={m}").text(100) for m in (0.0, 0.9))
    assert "moments (" not in plain and "moments (4 B)" in momentum
    assert "master" not in plain


def test_it_says_what_is_not_counted() -> None:
    assert "not counted: communication buffers" in pictured().text(100)
    assert "communication buffers" in pictured().as_dict()["not_counted"]


def test_without_replicas_zero_has_nobody_to_share_with() -> None:
    assert "ZeRO saves nothing here" in pictured("layout.tp=2").text(100)
    assert "ZeRO saves nothing here" not in pictured("layout.dp=2").text(100)


def test_b85_logits_are_a_line_of_their_own_and_tensor_parallelism_divides_them() -> None:
    """4096 tokens over 128256 words: 1.957 GiB in fp32 on the stage with the head."""
    words = ("model.preset=llama3-8b", "batch.sequence=4096", "batch.micro_size=1", "precision.compute=bfloat16")
    first, last = pictured(*words, "layout.pp=2").activations
    assert first.logits == 0
    assert last.logits / 2**30 == pytest.approx(1.957, abs=0.001)
    (spread,) = pictured(*words, "layout.tp=8").activations
    assert spread.logits == last.logits / 8


def test_experts_spread_over_ranks_are_counted_with_the_tokens_that_are_here() -> None:
    """As the step in sizes that `plait plan` prints."""
    words = (
        "model.preset=mixtral-8x7b", "layout.tp=2", "layout.ep=8", "layout.pp=4", "layout.dp=8", "batch.sequence=4096",
        "batch.global_size=128", "batch.micro_size=1", "precision.compute=bfloat16",
    )  # fmt: skip
    run = load(None, words)
    layout = fit(run)
    for found in picture_memory(run, layout).activations:
        exact = peak(Seat(run, layout, layout.rank(pp=found.pp))).activations
        assert found.peak == pytest.approx(exact, rel=1e-3)
