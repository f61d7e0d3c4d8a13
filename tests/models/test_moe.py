"""A mixture of experts equals the sum that its definition says, and its losses have the values of their definitions."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.models.decoder import Decoder, logical_tensors
from plait.models.init import initialise
from plait.models.moe import MoE, Router, Tokens, choose, coarse, settle
from plait.models.where import Where
from plait.spec.experts import Experts
from plait.spec.model import ModelSpec

F64 = torch.float64


def spec_of(**moe: Any) -> ModelSpec:
    given = {"count": 6, "top_k": 2, "ffn": 7, **moe}
    return ModelSpec.model_validate(
        {"vocab": 31, "hidden": 10, "layers": 1, "heads": 2, "ffn": 9, "max_sequence": 12, "moe": given}
    )


def mixture(spec: ModelSpec) -> MoE:
    """The mixture of the first block, with weights of a seed."""
    model = Decoder(spec, "cpu", F64)
    initialise(model, seed=3, randomise=True)
    found = model.get_submodule("blocks.0.mlp")
    assert isinstance(found, MoE)
    return found


def tokens(spec: ModelSpec, rows: int = 3, length: int = 12) -> tuple[Tensor, Where]:
    x = torch.randn(rows, length, spec.hidden, dtype=F64, generator=torch.Generator().manual_seed(1))
    return x.requires_grad_(), Where.of(torch.arange(rows), length)


def by_definition(moe: MoE, x: Tensor, kept: Tensor | None = None) -> Tensor:
    """Every expert on every token, weighed by a dense matrix of scores."""
    spec, router, experts = moe.router.moe, moe.router, moe.experts
    assert experts.gate is not None
    logits = x @ router.weight.T
    scores = logits.sigmoid() if spec.scores == "sigmoid" else logits.softmax(-1)
    chosen = choose((scores if router.bias is None else scores + router.bias).flatten(0, 1), spec).view(
        *x.shape[:2], -1
    )
    dense = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
    if spec.normalise:
        dense = dense / dense.sum(-1, keepdim=True)
    dense = dense * spec.scale if kept is None else dense * spec.scale * kept
    y = sum(
        dense[..., e, None]
        * ((torch.nn.functional.silu(x @ experts.gate[e].T) * (x @ experts.up[e].T)) @ experts.down[e].T)
        for e in range(spec.count)
    )
    if moe.shared is not None:
        gate, up = moe.shared.up(x)
        y = y + moe.shared.down(torch.nn.functional.silu(gate) * up)
    assert isinstance(y, Tensor)
    return y


@pytest.mark.parametrize(
    "moe",
    [
        {},
        {"scores": "sigmoid", "scale": 2.5, "shared": 2},
        {"normalise": False, "top_k": 3},
        {"scores": "sigmoid", "bias": True, "groups": 3, "top_groups": 2, "group_score": "top2"},
        {"groups": 2, "top_groups": 1},
        {"top_k": 6},
        {"count": 1, "top_k": 1},
    ],
)
def test_outputs_and_gradients_are_those_of_the_definition(moe: dict[str, Any]) -> None:
    spec = spec_of(**moe)
    module = mixture(spec)
    x, where = tokens(spec)
    seed = torch.randn(x.shape, dtype=F64, generator=torch.Generator().manual_seed(2))
    wanted = [x, *module.parameters()]
    y, _ = module(x, where)
    meant = by_definition(module, x)
    torch.testing.assert_close(y, meant, rtol=0, atol=1e-12)
    ours, theirs = (torch.autograd.grad((out * seed).sum(), wanted) for out in (y, meant))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_an_expert_that_receives_nothing_has_gradient_zero_and_the_others_theirs() -> None:
    spec = spec_of(bias=True)
    module = mixture(spec)
    assert module.router.bias is not None
    module.router.bias.copy_(torch.tensor([9.0, 9.0, 0, 0, 0, 0]))
    x, where = tokens(spec)
    y, terms = module(x, where)
    y.sum().backward()
    assert terms["load.0"].tolist() == [36, 36, 0, 0, 0, 0]
    for parameter in module.experts.parameters():
        assert parameter.grad is not None
        assert (parameter.grad[2:] == 0).all() and (parameter.grad[:2] != 0).any()
    assert module.router.weight.grad is not None and module.router.weight.grad.isfinite().all()


def test_only_the_best_groups_are_chosen_from() -> None:
    scores = torch.tensor([[0.9, 0.0, 0.5, 0.6, 0.1, 0.2]])
    by_best = Experts(count=6, top_k=2, ffn=1, groups=3, top_groups=1)
    by_two = by_best.model_copy(update={"group_score": "top2"})
    assert choose(scores, by_best).tolist() == [[0, 1]]
    assert choose(scores, by_two).tolist() == [[3, 2]]


# --- capacity --------------------------------------------------------------------------------------------------------


def test_an_expert_keeps_the_highest_scores_of_each_sequence() -> None:
    spec = spec_of(capacity=0.75)
    module = mixture(spec)
    x, where = tokens(spec)
    room = ceil(0.75 * 2 * 12 / 6)
    assert room == 3
    scores = (x @ module.router.weight.T).softmax(-1)
    asked = torch.zeros_like(scores).scatter(-1, scores.topk(2, dim=-1).indices, 1) * scores
    kept = torch.zeros_like(asked)
    for row in range(3):
        for expert in range(6):
            best = sorted(range(12), key=lambda t: (-asked[row, t, expert].item(), t))[:room]
            kept[row, best, expert] = 1
    y, terms = module(x, where)
    torch.testing.assert_close(y, by_definition(module, x, kept), rtol=0, atol=1e-12)
    dropped = ((asked > 0) & (kept == 0)).sum((0, 1))
    assert dropped.sum() > 0 and terms["drops.0"].tolist() == dropped.tolist()
    assert terms["load.0"].sum() == 3 * 12 * 2  # what was asked, not what was kept


def test_equal_scores_are_kept_from_the_first_position_on() -> None:
    spec = spec_of(capacity=0.5, bias=True)
    module = mixture(spec)
    x, where = tokens(spec)
    same = x[:, :1].expand_as(x)
    y, _ = module(same, where)
    room = 2
    assert (y[:, :room] != 0).any(-1).all() and (y[:, room:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_that_differ_in_their_last_digits_are_equal_and_others_keep_their_order(dtype: torch.dtype) -> None:
    x = torch.rand(1000, dtype=dtype, generator=torch.Generator().manual_seed(1)) + 0.01
    kept, digits = coarse(x), {torch.float32: 2.0**-16, torch.float64: 2.0**-36}[dtype]
    assert ((kept - x).abs() <= digits * x).all() and (coarse(kept) == kept).all()
    near = torch.nextafter(x, torch.full_like(x, 2.0))
    assert (coarse(near) == kept).float().mean() > 0.98  # the others straddle a step
    assert (kept[x.argsort()].diff() >= 0).all()


# --- balance ---------------------------------------------------------------------------------------------------------


def terms_of(logits: Tensor, **moe: Any) -> dict[str, Tensor]:
    """The terms of a router whose logits (B, S, E) are given."""
    count = logits.shape[-1]
    spec = spec_of(**{"count": count, "balance_coef": 1.0, **moe}).model_copy(update={"hidden": count})
    router = Router(spec, 0, {"device": "cpu", "dtype": F64})
    with torch.no_grad():
        router.weight.copy_(torch.eye(count))
        if router.load is not None:
            router.load.fill_(1 / count)
    where = Where.of(torch.arange(len(logits)), logits.shape[1])
    at = Tokens.of(logits, where, logits.shape[1])
    terms: dict[str, Tensor] = router(logits.flatten(0, 1).double(), at)[1]
    return terms


def test_b19_an_even_load_costs_one_and_two_of_four_experts_with_half_each_cost_two() -> None:
    even = torch.tensor([[1.0, 1, 0, 0], [0, 0, 1, 1]]).repeat(4, 1)[None] * 1e-9  # all equal, chosen in turn
    assert terms_of(even)["balance"].item() == pytest.approx(1.0)
    two = torch.tensor([50.0, 50, 0, 0]).expand(1, 8, 4)
    assert terms_of(two)["balance"].item() == pytest.approx(2.0)


def test_b19_the_set_of_tokens_is_the_sequence_or_with_the_previous_load_the_whole_batch() -> None:
    one_each = torch.stack([torch.tensor([50.0, 0]).expand(8, 2), torch.tensor([0, 50.0]).expand(8, 2)])
    per_sequence = terms_of(one_each, top_k=1)["balance"].item()
    assert per_sequence / 2 == pytest.approx(2.0)  # the mean over two sequences
    whole_batch = terms_of(one_each, top_k=1, balance="previous")["balance"].item()
    assert whole_batch / 2 == pytest.approx(1.0)


def test_the_z_loss_is_the_sum_of_squared_logarithms_of_the_normaliser() -> None:
    logits = torch.randn(2, 5, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    assert terms_of(logits, z_coef=0.5)["z"].item() == pytest.approx(0.5 * logits.logsumexp(-1).square().sum().item())


def test_the_balance_loss_reaches_the_router_and_the_load_is_a_constant_in_it() -> None:
    spec = spec_of(balance_coef=0.3)
    module = mixture(spec)
    x, where = tokens(spec)
    (gradient,) = torch.autograd.grad(module(x, where)[1]["balance"], [module.router.weight])
    scores = (x.detach() @ module.router.weight.T).softmax(-1)
    load = torch.zeros_like(scores).scatter(-1, scores.topk(2, dim=-1).indices, 1.0).mean(1, keepdim=True) / 2
    meant = 0.3 * 6 * (scores.mean(1, keepdim=True) * load).sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(meant, [module.router.weight])[0], rtol=0, atol=1e-13)


def test_a_step_ends_with_the_load_it_had_and_biases_against_it() -> None:
    spec = spec_of(count=4, bias=True, bias_rate=0.1, balance="previous", balance_coef=1.0)
    model = Decoder(spec, "cpu", F64)
    initialise(model, seed=1)
    router = model.get_submodule("blocks.0.mlp.router")
    assert isinstance(router, Router) and router.bias is not None and router.load is not None
    assert router.load.tolist() == [0.25] * 4
    settle(model, {"load.0": torch.tensor([6.0, 2, 4, 4])})
    assert router.load.tolist() == [6 / 16, 2 / 16, 4 / 16, 4 / 16]
    torch.testing.assert_close(router.bias, torch.tensor([-0.1, 0.1, 0, 0], dtype=F64))


def test_routing_has_no_side_effect_and_tells_load_and_entropy() -> None:
    spec = spec_of(count=4)
    module = mixture(spec)
    x, where = tokens(spec)
    before = {name: t.clone() for name, t in module.state_dict().items()}
    first, second = module(x, where)[1], module(x, where)[1]
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["load.0"].sum() == 3 * 12 * 2
    scores = (x @ module.router.weight.T).softmax(-1)
    assert first["entropy.0"].item() == pytest.approx(-(scores * scores.log()).sum().item())
    assert not first["entropy.0"].requires_grad


def test_the_listing_of_a_mixture_that_remembers_has_its_buffers() -> None:
    spec = spec_of(bias=True, balance="previous", balance_coef=0.1)
    model = Decoder(spec, "cpu")
    held = logical_tensors(spec, {**dict(model.named_parameters()), **dict(model.named_buffers())})
    assert {n: tuple(t.shape) for n, t in held.items()} == {t.name: t.shape for t in spec.parameters()}
