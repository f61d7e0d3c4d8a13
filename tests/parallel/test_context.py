"""Context parallelism: blocks merge exactly, every variant equals one device, and sends what its formula says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plait.data import IGNORED, Samples, batch, rows_of
from plait.data.windows import Window
from plait.models.attention import seen
from plait.parallel import ring as blocks
from plait.parallel.context import enough_heads
from plait.parallel.traffic import TrafficCounter, total
from plait.placement.tiles import tiles
from plait.placement.tokens import ring_runs, tokens_in
from plait.proof.verify import check, proof_run, samples_of
from plait.spec.errors import InvalidRun
from plait.spec.fit import fit
from plait.spec.model import ModelSpec
from plait.spec.presets import PRESETS
from plait.spec.run import RecomputeSpec, RunSpec
from tests.fixtures import ROWS, SEQUENCE, T0, T0_GROUPED, T0_RATIO_4, assert_equals_one_device, run_of
from tests.launching import on_ranks
from tests.ranks import Rank
from tests.spec.drawn import few

F64 = torch.float64
DROPPING = T0_RATIO_4.model_copy(update={"attention_dropout": 0.2, "dropout": 0.1})
WINDOWED = DROPPING.model_copy(update={"window": 5, "attention_dropout": 0.0})
LATENT = PRESETS["deepseek-v3-tiny"].model_copy(update={"moe": None, "rope_scaling": None, "max_sequence": SEQUENCE})

VARIANTS: dict[str, dict[str, Any]] = {
    "ring": {"cp": 2},
    "ring in contiguous order": {"cp": 2, "context_order": "contiguous"},
    "ring of 4": {"cp": 4},
    "gather": {"cp": 2, "context": "gather"},
    "gather of 4 in contiguous order": {"cp": 4, "context": "gather", "context_order": "contiguous"},
    "ulysses": {"cp": 2, "ulysses": 2},
    "ulysses of 4": {"cp": 4, "ulysses": 4},
    "ulysses in a ring": {"cp": 4, "ulysses": 2},
    "ulysses in a gather": {"cp": 4, "ulysses": 2, "context": "gather"},
}


# --- blocks ----------------------------------------------------------------------------------------------------------


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("value", [6, 4])
@pytest.mark.parametrize("kind", ["full", "causal", "masked"])
def test_a_kernel_gives_output_log_sum_exp_and_gradients_of_its_block(
    kind: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "SCORES", 2 * 4 * 9 * 3)  # a few queries at a time
    q, k, v = drawn(2, 4, 9, 6), drawn(2, 2, 9, 6, seed=1), drawn(2, 2, 9, value, seed=2)
    visible = {
        "full": torch.ones(9, 9, dtype=torch.bool),
        "causal": torch.ones(9, 9).tril().bool(),
        "masked": torch.ones(9, 9).tril(-2).bool(),  # two queries see nothing
    }[kind]
    masks = blocks.Masks(kind == "causal", visible if kind == "masked" else None, None, 0.3)
    for x in (q, k, v):
        x.requires_grad_()
    scores = (q @ k.repeat_interleave(2, 1).mT * 0.3).masked_fill(~visible, -math.inf)
    lse = scores.logsumexp(-1)
    meant = (scores - lse.clamp(min=-1e30)[..., None]).exp() @ v.repeat_interleave(2, 1)
    with torch.no_grad():
        out, found_lse = blocks.forward(q, k, v, masks)
    torch.testing.assert_close(found_lse, lse.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(out, meant.detach(), rtol=0, atol=1e-12)
    grad = drawn(*out.shape, seed=3)
    if kind == "masked":
        grad[:, :, :2] = 0  # the rows without a key are nobody's, and 0 · inf is theirs alone
        lse = lse.detach().clone()
        lse[:, :, :2] = 0
    whole = out, lse.detach(), (out * grad).sum(-1)
    with torch.no_grad():
        grads = blocks.backward(grad, q, k, v, whole, masks)
    wanted = torch.autograd.grad((meant * grad).nan_to_num().sum(), (q, k, v))
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, b.nan_to_num(), rtol=0, atol=1e-11)


@few
@given(st.sampled_from((2, 3, 4)), st.sampled_from((1, 2, 4)), st.sampled_from((None, 1, 3, 7, 40)), st.booleans())
def test_tiles_cover_what_is_seen_once_and_full_ones_hold_nothing_else(
    ring: int, chunks: int, window: int | None, documents: bool
) -> None:
    sequence = 2 * ring * chunks
    runs = ring_runs(sequence, ring, chunks)
    places = [torch.tensor(tokens_in(r)) for r in runs]
    for rank in range(ring):
        for source in range(ring):
            visible = seen(places[rank], places[source], window, None)
            covered = torch.zeros_like(visible, dtype=torch.int64)
            for tile in tiles(runs[rank], runs[source], window, documents):
                covered[tile.queries, tile.keys] += 1
                part = visible[tile.queries, tile.keys]
                if tile.kind == "full":
                    assert part.all()
                if tile.kind == "causal":
                    assert torch.equal(part, torch.ones_like(part).tril())
                if documents:
                    assert tile.kind == "masked"
            assert (covered[visible] == 1).all() and (covered <= 1).all()


def test_a_zigzag_step_is_one_rectangle_that_is_full() -> None:
    runs = ring_runs(64, 4, 2)
    for rank in range(4):
        for source in range(4):
            (tile,) = tiles(runs[rank], runs[source], None, False)
            assert tile.kind == ("causal" if rank == source else "full")


def test_key_heads_are_repeated_as_little_as_every_rank_needs() -> None:
    for kv, heads, ranks, held in ((2, 8, 2, 2), (2, 8, 4, 4), (1, 4, 4, 4), (3, 6, 2, 6)):
        x = torch.arange(kv).view(1, 1, kv, 1)
        found = enough_heads(x, heads, ranks).flatten().tolist()
        assert len(found) == held
        each, own = heads // ranks, held // ranks
        for head in range(heads):  # the key head that a query head meets on its rank is its own
            rank, local = divmod(head, each)
            assert found[rank * own + local // (each // own)] == head // (heads // kv)


# --- equal to one device ---------------------------------------------------------------------------------------------


@pytest.mark.quick(3)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_equals_one_device_with_dropout_on(variant: str) -> None:
    assert_equals_one_device(run_of(DROPPING, **VARIANTS[variant]))


def with_documents(run: RunSpec) -> RunSpec:
    return run.model_copy(update={"data": run.data.model_copy(update={"mask_documents": True})})


def assert_documents_equal_one_device(run: RunSpec) -> None:
    ready = proof_run(with_documents(run), "float64")
    verdict = check(ready, samples_of(ready))
    assert verdict.ok, verdict.complaint


@pytest.mark.quick(2)
@pytest.mark.parametrize("variant", ["ring", "ulysses", "gather", "ulysses in a ring"])
def test_attention_with_dropout_is_recomputed_in_every_variant(variant: str) -> None:
    run = run_of(DROPPING, **VARIANTS[variant])
    assert_equals_one_device(run.model_copy(update={"recompute": RecomputeSpec(mode="selective")}))


@pytest.mark.quick(2)
@pytest.mark.parametrize("variant", ["ring", "gather", "ulysses", "ulysses in a ring"])
def test_b25_packed_documents_equal_one_device_in_every_variant(variant: str) -> None:
    assert_documents_equal_one_device(run_of(WINDOWED, **VARIANTS[variant]))


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (T0_GROUPED, {"cp": 4, "ulysses": 4}),  # b27: fewer kv heads than ranks
        (T0_RATIO_4, {"cp": 2, "tp": 2, "sequence_parallel": True, "pp": 2}),
        (T0_RATIO_4, {"cp": 2, "tp": 2, "dp": 2, "ulysses": 2}),
        (LATENT, {"cp": 2, "tp": 2, "sequence_parallel": True}),
        (LATENT, {"cp": 2, "tp": 2, "ulysses": 2}),
    ],
)
def test_context_beside_other_axes_equals_one_device(model: ModelSpec, layout: dict[str, Any]) -> None:
    assert_equals_one_device(run_of(model, **layout))


@pytest.mark.proof
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("other", [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}, {"pp": 2, "dp": 2}])
@pytest.mark.parametrize("model", [T0_GROUPED, DROPPING, WINDOWED])
def test_grid_of_variants_axes_and_documents(variant: str, other: dict[str, Any], model: ModelSpec) -> None:
    layout = {**VARIANTS[variant], **other}
    if layout.get("tp", 1) * layout.get("ulysses", 1) > model.heads:
        with pytest.raises(InvalidRun, match="heads"):
            fit(run_of(model, **layout))
        return
    assert_equals_one_device(run_of(model, **layout))
    assert_documents_equal_one_device(run_of(model, **layout))


# --- what a rank is given --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted:
    """Rows of the numbers 0, 1, …; a document begins at each of `begins`."""

    begins: tuple[int, ...] = ()
    first: int = 0

    def __len__(self) -> int:
        return ROWS

    def window(self, index: int) -> Window:
        tokens = np.arange(SEQUENCE + 1)
        tokens[0] = self.first
        trained = np.arange(SEQUENCE + 1) < SEQUENCE  # the last token of the row predicts nothing
        return Window(tokens, trained, np.isin(np.arange(SEQUENCE + 1), self.begins) if self.begins else None)


def given_to(run: RunSpec, source: Counted) -> list[tuple[list[int], list[int], list[int], list[int] | None]]:
    """(tokens, labels, positions, documents) of the first row, by cp rank."""

    def on_rank(rank: int, world: int) -> Any:
        here = Rank.of(run)
        rows = rows_of(ROWS, 0, 1)
        here.step._begin(1, batch(Samples(source, 1, shuffle=False), 0, ROWS, rows), None)
        micro = here.parallel.stages[0]._micros[0]
        documents = micro.where.documents
        positions = micro.where.positions.expand(ROWS, -1)[0]
        return (
            micro.tokens[0].tolist(), micro.labels[0].tolist(), positions.tolist(),
            None if documents is None else documents[0].tolist(),
        )  # fmt: skip

    return on_ranks(fit(run).world, on_rank)


def test_b23_labels_are_shifted_before_the_split() -> None:
    first, second = given_to(run_of(T0, cp=2, micro_batches=1), Counted())
    assert first[0] == [0, 1, 2, 3, 12, 13, 14, 15] and first[1] == [1, 2, 3, 4, 13, 14, 15, IGNORED]
    assert second[0] == list(range(4, 12)) and second[1] == list(range(5, 13))


def test_b24_positions_and_documents_are_those_of_the_row() -> None:
    one = given_to(run_of(T0, cp=2, micro_batches=1), Counted())
    assert [rank[2] for rank in one] == [[0, 1, 2, 3, 12, 13, 14, 15], list(range(4, 12))]
    two = given_to(with_documents(run_of(T0, cp=2, micro_batches=1)), Counted(begins=(0, 8)))
    assert [rank[2] for rank in two] == [[0, 1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7, 0, 1, 2, 3]]
    assert [rank[3] for rank in two] == [[0] * 4 + [1] * 4, [0] * 4 + [1] * 4]


@pytest.mark.quick(2)
@pytest.mark.parametrize("variant", ["ring", "gather", "ulysses", "ulysses in a ring"])
def test_b25_a_change_of_one_document_reaches_its_own_eight_tokens_and_no_other(variant: str) -> None:
    run = with_documents(run_of(T0_GROUPED, micro_batches=1, **VARIANTS[variant]))

    def on_rank(rank: int, world: int) -> int:
        here = Rank.of(run)
        stage = here.parallel.stages[0]
        found = []
        for first in (0, 9):
            source = Samples(Counted(begins=(0, 8), first=first), 1, shuffle=False)
            here.step._begin(1, batch(source, 0, ROWS, rows_of(ROWS, 0, 1)), None)
            micro = stage._micros[0]
            with torch.no_grad():
                found.append(stage.module.body(micro.tokens, micro.where)[0])
        return int((found[0] != found[1]).any(-1)[0].sum())

    assert sum(on_ranks(fit(run).world, on_rank)) == 8


@pytest.mark.parametrize(
    ("layout", "sequence", "words"),
    [
        ({"cp": 3}, 16, ("3", "16", "use 2 or 4")),
        ({"cp": 4}, 18, ("4", "18", "use 3 or 6")),
        ({"cp": 3}, 15, ("cp 3", "sequence 15", "12 or 18")),
        ({"cp": 3, "ulysses": 3}, 18, ("tp·ulysses 3", "heads 4", "use 2 or 4")),
    ],
)
def test_b27_what_does_not_divide_is_refused_with_what_would(
    layout: dict[str, Any], sequence: int, words: tuple[str, ...]
) -> None:
    run = run_of(T0, **layout)
    run = run.model_copy(update={"batch": run.batch.model_copy(update={"sequence": sequence})})
    with pytest.raises(InvalidRun) as refused:
        fit(run)
    assert all(word in refused.value.message for word in words)


# --- traffic and memory ----------------------------------------------------------------------------------------------


def traffic_on_cp(run: RunSpec) -> dict[str, dict[str, int]]:
    """Calls and bytes of one step under axis cp, of all ranks."""

    def on_rank(rank: int, world: int) -> Any:
        here = Rank.of(run)
        with TrafficCounter(here.mesh.axes()) as counter:
            here.backward()
        return total(counter, here.mesh.group("world"))

    found: dict[str, dict[str, int]] = on_ranks(fit(run).world, on_rank)[0].get("cp", {})
    return found


SHIFT = "all_to_all_single"


@pytest.mark.quick(1)
@pytest.mark.parametrize("cp", [2, 4])
def test_w30_a_ring_sends_each_block_as_often_as_the_formula_says(cp: int) -> None:
    """A layer and rank: forward 2(cp-1) of K, V; backward 2(cp-1) of K, V and 2(cp-1) of dK, dV in the accumulation
    dtype, here as wide as the model's."""
    run = run_of(T0_GROUPED, cp=cp)
    micro_batches = 2
    block = run.batch.micro_size * (SEQUENCE // cp) * 2 * 8 * 4  # tokens, kv heads, channels, bytes of a float
    sends = (2 + 2 + 2) * (cp - 1) * T0.layers * micro_batches * cp
    assert traffic_on_cp(run) == {SHIFT: {"calls": sends, "bytes": sends * block}}


def test_ulysses_makes_four_all_to_alls_a_layer_and_direction() -> None:
    cp, micro_batches = 2, 2
    run = run_of(T0_GROUPED, cp=cp, ulysses=cp)
    calls = 2 * 4 * T0.layers * micro_batches * cp
    token = (4 + 2 + 2 + 4) * 8 * 4  # q, k, v, out: heads, channels, bytes of a float
    sent = 2 * T0.layers * micro_batches * run.batch.micro_size * SEQUENCE * token * (cp - 1) // cp
    assert traffic_on_cp(run) == {SHIFT: {"calls": calls, "bytes": sent}}


def test_a_gather_moves_keys_twice_and_their_gradients_once() -> None:
    cp, micro_batches = 4, 2
    run = run_of(T0_GROUPED, cp=cp, context="gather")
    block = run.batch.micro_size * (SEQUENCE // cp) * 2 * 8 * 4
    times = 2 * T0.layers * micro_batches * cp  # K and V of every layer, micro-batch and rank
    assert traffic_on_cp(run) == {
        "all_gather_into_tensor": {"calls": 2 * times, "bytes": 2 * times * block * (cp - 1)},
        SHIFT: {"calls": times, "bytes": times * block * (cp - 1)},  # gloo's reduce-scatter: pieces exchanged
    }


def kept_bytes(forward: Callable[[], object], parameters: set[int]) -> int:
    """Bytes of what backward keeps of a forward pass, each memory once, weights left out."""
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        alive = forward()
    assert alive is not None
    return sum(kept.values())


@pytest.mark.quick(1)
@pytest.mark.parametrize("variant", [{}, {"context": "gather"}, {"ulysses": "all"}])
def test_w30_activations_of_a_rank_fall_as_the_ranks_rise(variant: dict[str, Any]) -> None:
    def on_rank(rank: int, world: int) -> int:
        ulysses = {"ulysses": world} if variant.get("ulysses") else {}
        run = run_of(T0, cp=world, micro_batches=1, **{**variant, **ulysses})
        run = run.model_copy(update={"batch": run.batch.model_copy(update={"sequence": 256})})
        here = Rank.of(run)
        tokens = torch.zeros(ROWS, 256, dtype=torch.int64)
        mine = batch(Samples(Counted(), 1, shuffle=False), 0, ROWS, rows_of(ROWS, 0, 1))
        mine = mine._replace(tokens=tokens, labels=tokens, positions=torch.arange(256))
        here.step._begin(1, mine, None)
        stage = here.parallel.stages[0]
        micro = stage._micros[0]
        stage.module.train()
        weights = {p.untyped_storage().data_ptr() for p in stage.module.parameters()}
        return kept_bytes(lambda: stage.module(micro.tokens, micro.where, micro.labels), weights)

    one = on_ranks(1, on_rank)[0]
    for cp in (2, 4):
        for kept in on_ranks(cp, on_rank):
            assert kept * cp == pytest.approx(one, rel=0.05)
