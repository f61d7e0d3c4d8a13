"""Every layout starts from the same weights, bit for bit; every tensor has the holders that its record names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.models.decoder import Decoder, logical_tensors
from plait.models.init import initialise
from plait.spec.errors import CopiesDiffer
from plait.spec.model import ModelSpec
from plait.spec.run import RunSpec
from tests.fixtures import T0, T0_GROUPED, T0_TIED, run_of
from tests.launching import on_ranks
from tests.ranks import Rank

LAYOUTS: list[dict[str, Any]] = [
    {"dp": 2}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"tp": 4}, {"pp": 4, "order": ("tp", "dp", "cp", "pp")},
]  # fmt: skip


def world_of(run: RunSpec) -> int:
    return run.layout.tp * run.layout.pp * (run.layout.dp or 1)


def one_device(model: ModelSpec, seed: int) -> dict[str, Tensor]:
    decoder = Decoder(model, "cpu")
    initialise(decoder, seed)
    return {name: w.detach() for name, w in logical_tensors(model, dict(decoder.named_parameters())).items()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_starts_as_one_device_does_bit_for_bit(layout: dict[str, Any]) -> None:
    """Gathering compares copies bit for bit, so replicas start equal as well."""
    run = run_of(T0_GROUPED, **layout)

    def start(rank: int, world: int) -> dict[str, Tensor]:
        mine = Rank.of(run, randomise=False)
        return mine.gather(mine.weights())

    whole, expected = on_ranks(world_of(run), start)[0], one_device(T0_GROUPED, run.train.seed)
    assert whole.keys() == expected.keys()
    assert all(torch.equal(whole[name], tensor) for name, tensor in expected.items())


def test_shards_of_one_tensor_are_different_pieces() -> None:
    def start(rank: int, world: int) -> dict[str, Tensor]:
        mine = Rank.of(run_of(T0, tp=2), randomise=False)
        return {p.placement.tensor.name: w.clone() for p, w in mine.weights() if p.placement.dim is not None}

    first, second = on_ranks(2, start)
    assert len(first) == 2 + 7 * T0.layers
    assert not any(torch.equal(shard, second[name]) for name, shard in first.items())


def test_another_seed_is_another_start() -> None:
    first, second = one_device(T0, 1), one_device(T0, 2)
    assert not any(torch.equal(tensor, second[name]) for name, tensor in first.items() if tensor.ndim > 1)


@pytest.mark.parametrize(("layers", "pp"), [(5, 2), (7, 3)])
def test_stages_of_unequal_length_hold_every_parameter_once(layers: int, pp: int) -> None:
    model = T0.model_copy(update={"layers": layers})

    def held(rank: int, world: int) -> tuple[int, list[int]]:
        mine = Rank.of(run_of(model, pp=pp))
        blocks = [int(layer) for stage in mine.parallel.stages.values() for layer in stage.module.blocks]
        return sum(weight.numel() for _, weight in mine.weights()), blocks

    counts, blocks = zip(*on_ranks(pp, held), strict=True)
    assert sum(counts) == model.parameter_count()
    assert [layer for stage in blocks for layer in stage] == list(range(layers))


def test_a_tied_table_is_one_parameter_where_both_ends_meet_and_a_copy_on_each_where_they_do_not() -> None:
    ends = ("embedding.tokens.weight", "head.projection.weight")

    def places(rank: int, world: int) -> tuple[list[str], int]:
        (stage,) = Rank.of(run_of(T0_TIED, pp=world)).parallel.stages.values()
        found = {n: p for n, p in stage.module.named_parameters(remove_duplicate=False) if n in ends}
        return list(found), len(set(found.values()))

    assert on_ranks(1, places) == [(list(ends), 1)]
    assert on_ranks(2, places) == [([end], 1) for end in ends]


def test_copies_that_differ_in_one_bit_are_not_gathered() -> None:
    def gather(rank: int, world: int) -> str:
        mine = Rank.of(run_of(T0, dp=2))
        weights = mine.weights()
        if rank == 1:
            next(w for p, w in weights if p.placement.tensor.name == "blocks.0.attention.k.weight")[0] += 1e-7
        try:
            mine.gather(weights)
        except CopiesDiffer as error:
            return str(error)
        return ""

    message, silent = on_ranks(2, gather)
    assert message.startswith("blocks.0.attention.k.weight: copies on ranks 0 and 1 differ by ") and silent == ""


def test_no_rank_holds_more_of_a_table_than_its_share() -> None:
    def largest(rank: int, world: int) -> int:
        mine = Rank.of(run_of(T0.model_copy(update={"vocab": 4096}), tp=4))
        return max(weight.numel() for _, weight in mine.weights())

    assert on_ranks(4, largest) == [4096 * 32 // 4] * 4
