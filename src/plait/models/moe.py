"""A mixture of experts on one device: the router, the experts, and what keeps them evenly loaded.

Routing has no side effects: what a step counted leaves the stage as named terms, so that running a block again counts
nothing twice, and `settle` moves biases and loads once a step. Nothing here knows where an expert or a token stands;
`router.parts` and the whole slot `mlp` are what parallelism replaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from plait.models.grouped import ExpertWeights, grouped_mlp
from plait.models.layers import MLP, Activation, Factory, Terms
from plait.models.where import Where
from plait.spec.experts import Experts
from plait.spec.model import ModelSpec


class Tokens(NamedTuple):
    """Where N tokens of a micro-batch stand: row (N,) of `rows`, and place (N,) among the `length` of a sequence."""

    row: Tensor
    place: Tensor
    rows: int
    length: int

    @classmethod
    def of(cls, x: Tensor, where: Where, length: int) -> Tokens:
        """Those of x (B, T, d), row after row."""
        batch, tokens = x.shape[:2]
        row = torch.arange(batch, device=x.device).repeat_interleave(tokens)
        return cls(row, where.indices.repeat(batch), batch, length)


class Routes(NamedTuple):
    """Where N tokens go: experts (N, k) and weights (N, k). What capacity refused is expert `count`, weight 0."""

    experts: Tensor
    weights: Tensor


class Parts(nn.Module):
    """What is known of the tokens of a sequence that are not here: on one device there are none."""

    def length(self, here: int) -> int:
        """Tokens of a whole sequence of which `here` are here."""
        return here

    def sum(self, x: Tensor) -> Tensor:
        """The sum of a statistic over all parts; nothing is differentiated through it."""
        return x


class Router(nn.Module):
    """Scores every expert for every token and chooses. `bias` and `load` are buffers (None where the spec has none)."""

    bias: Tensor | None
    load: Tensor | None
    parts: Parts

    def __init__(self, spec: ModelSpec, layer: int, make: Factory) -> None:
        super().__init__()
        assert spec.moe is not None
        self.moe, self.layer = spec.moe, layer
        self.weight = nn.Parameter(torch.empty(self.moe.count, spec.hidden, **make))
        wide: Factory = {"device": make["device"], "dtype": torch.promote_types(make["dtype"], torch.float32)}
        self.register_buffer("bias", torch.empty(self.moe.count, **wide) if self.moe.bias else None)
        self.register_buffer("load", torch.empty(self.moe.count, **wide) if self.moe.remembers else None)
        self.parts = Parts()

    def forward(self, x: Tensor, at: Tokens) -> tuple[Routes, Terms]:
        """x (N, d) -> where each token goes, and the terms of these tokens."""
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = nn.functional.linear(x.to(wide), self.weight.to(wide))  # (N, E)
        scores = logits.sigmoid() if self.moe.scores == "sigmoid" else logits.softmax(-1)
        experts = choose(scores.detach() if self.bias is None else scores.detach() + self.bias, self.moe)
        weights = scores.gather(1, experts)
        if self.moe.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        kept, drops = self._within_capacity(scores.detach(), experts, at)
        weights = (weights * self.moe.scale).masked_fill(~kept, 0.0)
        routes = Routes(experts.masked_fill(~kept, self.moe.count), weights.to(x.dtype))
        return routes, {**self._losses(logits, scores, experts, at), **self._statistics(scores, experts), **drops}

    def _within_capacity(self, scores: Tensor, experts: Tensor, at: Tokens) -> tuple[Tensor, Terms]:
        """Which choices an expert has room for: bool (N, k). An expert takes the highest scores of each sequence."""
        if self.moe.capacity is None:
            return torch.ones_like(experts, dtype=torch.bool), {}
        room = ceil(self.moe.capacity * self.moe.top_k * at.length / self.moe.count)
        asked = scores.new_zeros(at.rows, at.length, self.moe.count)  # 0 where a token did not choose an expert
        places = at.row[:, None], at.place[:, None], experts
        asked = self.parts.sum(asked.index_put(places, coarse(scores.gather(1, experts))))
        order = asked.argsort(dim=1, descending=True, stable=True)  # equal scores: the lower position first
        rank = torch.empty_like(order).scatter_(1, order, _positions(order))
        kept = (rank < room)[places]
        return kept, {f"drops.{self.layer}": _counts(experts.masked_fill(kept, self.moe.count), self.moe.count)}

    def _losses(self, logits: Tensor, scores: Tensor, experts: Tensor, at: Tokens) -> Terms:
        """The balance loss as a sum over sequences, and the z-loss as one over tokens, each times its coefficient."""
        terms: Terms = {}
        if self.moe.balance_coef:
            shares = scores / scores.sum(-1, keepdim=True)  # P of each token; sigmoid scores sum to anything
            load = self._load(experts, at)  # (B, E) or (1, E): 1/E each where balanced
            meant = shares * load.expand(at.rows, -1)[at.row]
            terms["balance"] = meant.sum() * (self.moe.balance_coef * self.moe.count / at.length)
        if self.moe.z_coef:
            terms["z"] = logits.logsumexp(-1).square().sum() * self.moe.z_coef
        return terms

    def _load(self, experts: Tensor, at: Tokens) -> Tensor:
        """f: the share of choices that each expert got, in each sequence, or in the whole step before this one."""
        if self.load is not None:
            return self.load[None]
        chosen = experts.new_zeros(at.rows, self.moe.count, dtype=torch.float32)
        chosen = chosen.index_put((at.row[:, None], experts), chosen.new_ones(()), accumulate=True)
        # Counts are whole numbers below 2^24, exact in float32; the division is done as widely as the scores.
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        return self.parts.sum(chosen).to(wide) / (at.length * self.moe.top_k)

    def _statistics(self, scores: Tensor, experts: Tensor) -> Terms:
        """Choices of each expert (E,) and the entropy of the scores in nats, summed over tokens."""
        shares = (scores / scores.sum(-1, keepdim=True)).detach()
        load = _counts(experts, self.moe.count)
        return {
            f"load.{self.layer}": load,
            f"entropy.{self.layer}": torch.special.entr(shares).sum(dtype=torch.float64),
        }

    @torch.no_grad()
    def settle(self, counts: Tensor) -> None:
        """End a step in which experts were chosen `counts` (E,) times by the whole batch."""
        counts = counts.to(self.weight.device, torch.promote_types(self.weight.dtype, torch.float32))
        if self.load is not None:
            self.load.copy_(counts / counts.sum().clamp(min=1))
        if self.bias is not None and self.moe.bias_rate:
            self.bias += self.moe.bias_rate * (counts.mean() - counts).sign()


def coarse(x: Tensor) -> Tensor:
    """x to two thirds of its digits (Dekker's split): tokens that are alike have scores that differ in the last ones,
    by the order of sums, and that is the layout's."""
    kept = x * (2.0 ** (17 if x.dtype == torch.float64 else 8) + 1)
    return kept - (kept - x)


def choose(scores: Tensor, moe: Experts) -> Tensor:
    """The experts (N, k) of highest score (N, E), among the best groups."""
    if moe.groups > 1:
        groups = scores.unflatten(-1, (moe.groups, -1))  # (N, G, E/G)
        best = groups.amax(-1) if moe.group_score == "max" else groups.topk(2, dim=-1).values.sum(-1)
        open_groups = torch.zeros_like(best, dtype=torch.bool).scatter(
            1, best.topk(moe.top_groups, dim=-1).indices, True
        )
        scores = groups.masked_fill(~open_groups[..., None], -torch.inf).flatten(1)
    return scores.topk(moe.top_k, dim=-1).indices


def _positions(order: Tensor) -> Tensor:
    return torch.arange(order.shape[1], device=order.device)[None, :, None].expand_as(order)


def _counts(experts: Tensor, count: int) -> Tensor:
    """How often each of `count` experts stands in a tensor of numbers up to `count`: float64 (count,)."""
    return torch.bincount(experts.flatten(), minlength=count + 1)[:count].double()


class ExpertMLPs(nn.Module):
    """The experts of a layer, stacked; their inner size, number and kernel are read off the tensors."""

    def __init__(self, spec: ModelSpec, make: Factory) -> None:
        super().__init__()
        assert spec.moe is not None
        count, ffn, hidden = spec.moe.count, spec.moe.ffn, spec.hidden
        self.activation = Activation(spec.mlp)
        self.gate = nn.Parameter(torch.empty(count, ffn, hidden, **make)) if spec.mlp == "swiglu" else None
        self.up = nn.Parameter(torch.empty(count, ffn, hidden, **make))
        self.down = nn.Parameter(torch.empty(count, hidden, ffn, **make))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x (M, d), the tokens of expert 0, then those of expert 1, …: counts (E,) of each -> (M, d).

        Several such runs, one after the other, have counts (runs·E,).
        """
        return grouped_mlp(x, counts, ExpertWeights(self.gate, self.up, self.down), self.activation)


def sort_by_expert(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Places of experts (N, k), flat, in the order of experts and within one in that of tokens, refused ones left out;
    and how many there are of each expert."""
    order = experts.flatten().argsort(stable=True)
    counts = torch.bincount(experts.flatten(), minlength=count + 1)[:count]
    if counts.is_meta:
        return order, counts
    return order[: int(counts.sum())], counts


class _ToExperts(torch.autograd.Function):
    """Rows of x (N, d) in `order` of the places (N, k) that they go to; a row's gradient is the sum of its places'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.shape = x.shape[0], top_k
        return x.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        tokens, top_k = ctx.shape
        make = torch.empty if len(order) == tokens * top_k else torch.zeros
        places = make(tokens * top_k, grad.shape[-1], dtype=grad.dtype, device=grad.device).index_copy_(0, order, grad)
        return places.view(tokens, top_k, -1).sum(1), None, None


def to_experts(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """x (N, d) -> (M, d): a token's row once for each expert that it goes to, in `order` of the places (N, k)."""
    return cast(Tensor, _ToExperts.apply(x, order, top_k))  # type: ignore[no-untyped-call]


def combine(out: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Σ over a token's experts of weight · output: out (M, d) in `order` of the places of weights (N, k) -> (N, d)."""
    places = out.new_zeros(weights.numel(), out.shape[-1]).index_copy(0, order, out)
    return torch.bmm(weights.unsqueeze(1), places.unflatten(0, weights.shape)).squeeze(1)


class MoE(nn.Module):
    """The mixture in the feed-forward slot of a block: (x, where) -> (y, loss terms and statistics)."""

    def __init__(self, spec: ModelSpec, layer: int, make: Factory) -> None:
        super().__init__()
        assert spec.moe is not None
        self.router = Router(spec, layer, make)
        self.experts = ExpertMLPs(spec, make)
        self.shared = MLP(spec, make, spec.moe.shared * spec.moe.ffn) if spec.moe.shared else None

    def forward(self, x: Tensor, where: Where) -> tuple[Tensor, Terms]:
        tokens = x.flatten(0, 1)  # (N, d)
        routes, terms = self.router(tokens, Tokens.of(x, where, self.router.parts.length(x.shape[1])))
        order, counts = sort_by_expert(routes.experts, self.router.moe.count)
        out = self.experts(to_experts(tokens, order, self.router.moe.top_k), counts)
        y = combine(out, order, routes.weights).view_as(x)
        if self.shared is not None:
            y = y + self.shared(x, where)[0]
        return y, terms


def settle(model: nn.Module, terms: Mapping[str, Tensor]) -> None:
    """End a step: each router of the model learns how often its experts were chosen by the whole batch."""
    for module in model.modules():
        if isinstance(module, Router):
            module.settle(terms[f"load.{module.layer}"])


def denominators(spec: ModelSpec, rows: int, length: int) -> dict[str, int]:
    """What divides each auxiliary term of a batch of `rows` sequences of `length`: sequences, or tokens."""
    if spec.moe is None:
        return {}
    counts = {"balance": (spec.moe.balance_coef, rows), "z": (spec.moe.z_coef, rows * length)}
    return {name: count for name, (coefficient, count) in counts.items() if coefficient}
