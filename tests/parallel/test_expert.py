"""Expert parallelism: tokens meet their experts wherever those are, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.models import moe as routing
from plait.models.moe import Router
from plait.parallel.expert import SpreadMoE
from plait.parallel.traffic import TrafficCounter, total
from plait.placement import place
from plait.placement.cuts import area
from plait.spec.fit import fit
from plait.spec.model import ModelSpec
from plait.spec.run import RecomputeSpec, RunSpec, ZeroSpec
from tests.fixtures import M0, ROWS, SEQUENCE, T0, assert_equals_one_device, mixture, run_of
from tests.launching import on_ranks
from tests.ranks import Rank

LOSSES = {"balance_coef": 0.1, "z_coef": 0.01}
# As in DeepSeek-V3, and an expert's room is limited too.
EVERYTHING = mixture(
    scores="sigmoid", bias=True, bias_rate=0.05, shared=2, first_dense=1, capacity=0.8, balance="previous", **LOSSES
)
UNEVEN = mixture(M0.model_copy(update={"heads": 3, "kv_heads": 3}), count=6, top_k=3, ffn=7, **LOSSES)


def with_zero(run: RunSpec, stage: int) -> RunSpec:
    return run.model_copy(update={"zero": ZeroSpec(stage=stage)})


# --- equal to one device ---------------------------------------------------------------------------------------------


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "layout", [{"dp": 2, "ep": 2}, {"dp": 4, "ep": 2}, {"tp": 2}, {"tp": 2, "ep": 2}, {"tp": 2, "etp": 2}]
)
def test_b17_b18_gradients_of_experts_and_routers_are_those_of_one_device(layout: dict[str, Any]) -> None:
    assert_equals_one_device(run_of(M0, **layout))


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("model", "layout", "zero"),
    [
        (mixture(**LOSSES), {"dp": 2, "tp": 2, "ep": 2, "etp": 2}, 0),
        (mixture(**LOSSES), {"cp": 2, "tp": 2, "sequence_parallel": True, "ep": 4}, 1),
        (EVERYTHING, {"pp": 2, "tp": 2, "dp": 2, "ep": 2}, 3),
        (EVERYTHING, {"cp": 2, "tp": 2, "dp": 2, "ep": 4, "context": "gather"}, 2),
        (UNEVEN, {"tp": 3, "etp": 3}, 0),
        (UNEVEN, {"tp": 3, "ep": 3}, 3),
        (mixture(**LOSSES), {"dp": 2, "tp": 2, "ep": 2, "order": ("tp", "dp", "cp", "pp"), "etp": 2}, 0),
    ],
)
def test_experts_beside_other_axes_equal_one_device(model: ModelSpec, layout: dict[str, Any], zero: int) -> None:
    assert_equals_one_device(with_zero(run_of(model, **layout), zero))


@pytest.mark.proof
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize(
    "stage",
    [
        {"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 2, "sequence_parallel": True}, {"dp": 2, "tp": 2, "etp": 2},
        {"cp": 2, "tp": 2, "etp": 2, "sequence_parallel": True}, {"cp": 2, "dp": 2}, {"cp": 4, "ulysses": 2},
    ],
)  # fmt: skip
def test_grid_of_expert_axes_and_zero_stages(stage: dict[str, Any], pp: int, ep: int, zero: int) -> None:
    if ep * stage.get("etp", 1) > 4:
        return
    for model in (mixture(**LOSSES), EVERYTHING):
        assert_equals_one_device(with_zero(run_of(model, pp=pp, ep=ep, **stage), zero))


# --- the kind of thing that goes wrong -------------------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", [{"tp": 2, "ep": 2}, {"tp": 2, "etp": 2}, {"tp": 2, "sequence_parallel": True}])
def test_b18_router_gradients_are_not_zero_and_bitwise_equal_on_tp_ranks(layout: dict[str, Any]) -> None:
    def on_rank(rank: int, world: int) -> dict[str, Tensor]:
        here = Rank.of(run_of(M0, **layout))
        here.backward()
        found = {p.placement.tensor.name: g.clone() for p, g in here.step.states.gradients()}
        return {name: gradient for name, gradient in found.items() if "router" in name}

    first, second = on_ranks(2, on_rank)
    assert len(first) == T0.layers
    for name, gradient in first.items():
        assert gradient.abs().max() > 0 and torch.equal(gradient, second[name])


@pytest.mark.quick(1)
@pytest.mark.parametrize("balance", ["sequence", "previous"])
@pytest.mark.parametrize("coefficients", [{"balance_coef": 0.01}, {"z_coef": 0.01}])
def test_b19_the_weight_of_an_auxiliary_loss_does_not_depend_on_the_layout(
    balance: str, coefficients: dict[str, float]
) -> None:
    """No label is trained, so that nothing but the auxiliary loss has a gradient."""
    model = mixture(balance=balance, **coefficients)

    def router_gradient(**layout: Any) -> Tensor:
        run = run_of(model, **{"micro_batches": 2, **layout})

        def on_rank(rank: int, world: int) -> Tensor | None:
            here = Rank.of(run)
            here.backward(keep=(0,) * ROWS)
            whole = here.gradients()
            return whole["blocks.1.mlp.router.weight"] if rank == 0 else None

        found = on_ranks(fit(run).world, on_rank)[0]
        assert found is not None
        return found

    one = router_gradient()
    assert one.abs().max() > 0
    for layout in (
        {"micro_batches": 8}, {"dp": 2, "ep": 2}, {"tp": 2}, {"cp": 2, "pp": 2},
        {"cp": 2, "tp": 2, "ep": 4, "sequence_parallel": True},
    ):  # fmt: skip
        torch.testing.assert_close(router_gradient(**layout), one, rtol=1e-4, atol=1e-7)


def test_b44_a_rank_whose_experts_get_no_token_computes_as_one_device() -> None:
    """Every token goes to experts 0 and 1, both on rank 0; a bias that the router is given decides."""

    def forced(rank: int, world: int, layout: dict[str, Any]) -> tuple[float, float]:
        here = Rank.of(run_of(mixture(bias=True), **layout))
        for stage in here.parallel.stages.values():
            for module in stage.module.modules():
                if isinstance(module, Router) and module.bias is not None:
                    module.bias.copy_(torch.tensor([9.0, 9, 0, 0, 0, 0, 0, 0]))
        sums = here.backward()
        assert all(use.imbalance == pytest.approx(4) for use in sums.experts.values())
        return sums.loss, sums.norm

    one = on_ranks(1, forced, {})[0]
    for layout in ({"dp": 2, "ep": 2}, {"dp": 4, "ep": 4}, {"pp": 2, "dp": 2, "ep": 2}, {"tp": 2, "ep": 2}):
        for loss, norm in on_ranks(fit(run_of(M0, **layout)).world, forced, layout):
            assert loss == pytest.approx(one[0], rel=1e-5) and norm == pytest.approx(one[1], rel=1e-5)


def test_b44_a_rank_whose_rows_have_no_label_takes_part() -> None:
    assert_equals_one_device(run_of(mixture(**LOSSES), dp=2, ep=2), keep=(0,) * 4 + (3, 5, 7, 15))


@pytest.mark.quick(1)
@pytest.mark.parametrize(("layout", "held"), [({"tp": 2, "dp": 2, "ep": 4}, 60_704), ({"tp": 4, "ep": 1}, 203_040)])
def test_b80_a_rank_holds_experts_by_ep_the_router_whole_and_the_rest_by_tp(layout: dict[str, Any], held: int) -> None:
    run = run_of(M0, micro_batches=1, **layout)
    placements = place(M0, fit(run), run.zero)
    for rank in range(fit(run).world):
        assert sum(area(p.rectangle(rank)) for p in placements.values()) == held
    spoken = sum(
        area(p.rectangle(rank)) for p in placements.values() for rank in range(fit(run).world) if p.first_copy(rank)
    )
    assert spoken == M0.parameter_count() == 218_400

    def on_rank(rank: int, world: int) -> int:
        return sum(p.numel() for s in Rank.of(run).parallel.stages.values() for p in s.module.parameters())

    assert on_ranks(fit(run).world, on_rank) == [held] * fit(run).world


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", [{}, {"dp": 2, "ep": 2}])
def test_b21_recompute_counts_choices_once_and_leaves_gradients_as_they_are(layout: dict[str, Any]) -> None:
    def on_rank(rank: int, world: int, mode: str) -> tuple[Any, list[Tensor]]:
        run = run_of(mixture(**LOSSES), **layout).model_copy(update={"recompute": RecomputeSpec(mode=mode)})
        here = Rank.of(run)
        sums = here.backward()
        assert [int(c.load.sum()) for c in here.step.loads.counted.values()] == [ROWS * SEQUENCE * 2] * T0.layers
        return (dict(sums.auxiliary), dict(sums.experts)), [g.clone() for _, g in here.step.states.gradients()]

    plain, *others = (on_ranks(fit(run_of(M0, **layout)).world, on_rank, m) for m in ("none", "selective", "full"))
    for other in others:
        for (told, gradients), (also, same) in zip(plain, other, strict=True):
            assert told == also
            assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))


# --- traffic ---------------------------------------------------------------------------------------------------------


@pytest.mark.quick(2)
@pytest.mark.parametrize("layout", [{"dp": 2, "ep": 2}, {"dp": 4, "ep": 4}, {"tp": 2, "ep": 2}, {"dp": 4, "ep": 2}])
def test_w29_tokens_travel_out_and_back_once_where_routing_is_even(layout: dict[str, Any]) -> None:
    """Bytes of a rank: its tokens, after the split over tp, · top_k · hidden · dtype · (ep-1)/ep each way; forward and
    backward. Beside them, one count of 8 bytes for each expert of another rank."""
    micro_batches = 2
    run = run_of(M0, micro_batches=micro_batches, **layout)
    ep, ranks = run.layout.ep, fit(run).world

    def even(scores: Tensor, moe: object) -> Tensor:
        """Token after token the next two of the eight experts."""
        return torch.arange(2 * len(scores)).view(-1, 2) % 8

    def on_rank(rank: int, world: int) -> Any:
        routing.choose = even
        here = Rank.of(run)
        assert any(isinstance(m, SpreadMoE) for m in here.parallel.stages[0].module.modules())
        with TrafficCounter(here.mesh.axes()) as counter:
            here.backward()
        return total(counter, here.mesh.group("world"))

    tokens = run.batch.micro_size * SEQUENCE // run.layout.tp
    layers = T0.layers * micro_batches * ranks
    sent = 4 * tokens * 2 * 32 * 4 * (ep - 1) // ep
    counts = 8 * 8 * (ep - 1) // ep
    assert on_ranks(ranks, on_rank)[0]["ep"] == {
        "all_to_all_single": {"calls": 5 * layers, "bytes": (sent + counts) * layers}
    }
