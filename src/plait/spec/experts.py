"""[model.moe]: a mixture of experts as data: how many, how a token chooses among them, what keeps them evenly loaded.

Everything here changes what is computed, so it belongs to the model; nothing here knows where an expert stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from plait.spec.base import Spec
from plait.spec.errors import Violation
from plait.spec.nearest import nearest_divisors


class Experts(Spec):
    """Of the blocks `first_dense` … layers-1 every `every`-th of the model has `count` experts of inner size `ffn` in
    place of the MLP (with 2: blocks 1, 3, 5, …).

    A token goes to the `top_k` experts of highest score (plus `bias`, a buffer that only the choice sees), among the
    experts of the `top_groups` best of `groups` (a group's score is its best, or the sum of its two best; DeepSeek-V2
    and -V3). It gets the sum of their outputs times its scores, `normalise`d to sum 1 or not, times `scale`; `shared`
    experts of the same size see every token.

    Balance: `balance_coef` weighs the auxiliary loss Σ f·P (Fedus et al. 2021), of each sequence, or of the whole batch
    with the load f of the step before; `z_coef` weighs the router's z-loss (Zoph et al. 2022); `bias_rate` is what an
    expert's bias rises or falls by after a step (Wang et al. 2024). `capacity` c lets an expert take at most
    ⌈c · top_k · S / count⌉ tokens of a sequence of S, those of highest score, then of lowest position; None: all.
    """

    count: int
    top_k: int
    ffn: int
    shared: int = 0
    first_dense: int = 0
    every: int = 1
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    bias: bool = False
    bias_rate: float = 0.0
    balance: Literal["sequence", "previous"] = "sequence"
    balance_coef: float = 0.0
    z_coef: float = 0.0
    capacity: float | None = None

    @property
    def remembers(self) -> bool:
        """Whether routers keep the load of the step before."""
        return self.balance == "previous" and self.balance_coef > 0


# What only training sees: it says nothing about what trained weights compute.
TRAINING = ("bias_rate", "balance", "balance_coef", "z_coef")


def expert_rows(moe: Experts, hidden: int, gated: bool) -> Iterator[tuple[str, tuple[int, ...], str, str]]:
    """Rows of (name, shape, role, home) inside a block. Experts of a layer are one tensor, stacked along dim 0."""
    yield "mlp.router.weight", (moe.count, hidden), "router", "mlp.router.weight"
    if moe.bias:
        yield "mlp.router.bias", (moe.count,), "router_bias", "mlp.router.bias"
    if moe.remembers:
        yield "mlp.router.load", (moe.count,), "router_load", "mlp.router.load"
    for name in ("gate", "up") if gated else ("up",):
        yield f"mlp.experts.{name}", (moe.count, moe.ffn, hidden), "expert_column", f"mlp.experts.{name}"
    yield "mlp.experts.down", (moe.count, hidden, moe.ffn), "expert_row", "mlp.experts.down"
    inner = moe.shared * moe.ffn
    if inner:
        for name in ("gate", "up") if gated else ("up",):
            yield f"mlp.shared.{name}.weight", (inner, hidden), "column", "mlp.shared.up.weight"
        yield "mlp.shared.down.weight", (hidden, inner), "row", "mlp.shared.down.weight"


def expert_violations(moe: Experts, layers: int) -> list[Violation]:
    """Every reason why these experts cannot be built into `layers` blocks."""
    at_least_one = ("count", "top_k", "ffn", "every", "groups", "top_groups")
    found = [
        Violation(f"model.moe.{name}", f"is {value}, but at least 1 is needed", "use 1 or more")
        for name in at_least_one
        if (value := getattr(moe, name)) < 1
    ]
    found += [
        Violation(f"model.moe.{name}", f"is {value}, below 0", "use 0 or more")
        for name in ("shared", "first_dense", "bias_rate", "balance_coef", "z_coef")
        if (value := getattr(moe, name)) < 0
    ]
    if not 0 <= moe.first_dense < layers:
        problem = f"{moe.first_dense} dense blocks leave none of {layers} for experts"
        found.append(Violation("model.moe.first_dense", problem, f"use < {layers}"))
    if moe.bias_rate and not moe.bias:
        found.append(Violation("model.moe.bias_rate", f"is {moe.bias_rate}, and there is no bias", "set bias = true"))
    if not moe.scale > 0:
        found.append(Violation("model.moe.scale", f"is {moe.scale}, but must be above 0"))
    if moe.capacity is not None and not moe.capacity > 0:
        found.append(Violation("model.moe.capacity", f"is {moe.capacity}, but must be above 0", "leave it out"))
    return found or _choice_violations(moe)


def _choice_violations(moe: Experts) -> list[Violation]:
    """What groups refuse about the choice of a token."""
    if moe.count % moe.groups:
        problem = f"{moe.groups} groups do not divide {moe.count} experts"
        return [Violation("model.moe.groups", problem, f"use {nearest_divisors(moe.count, moe.groups)}")]
    found = []
    each = moe.count // moe.groups
    if moe.top_groups > moe.groups:
        problem = f"{moe.top_groups} is more than the {moe.groups} groups"
        found.append(Violation("model.moe.top_groups", problem, f"use ≤ {moe.groups}"))
    elif moe.top_k > moe.top_groups * each:
        problem = f"{moe.top_k} is more than the {moe.top_groups * each} experts to choose from"
        found.append(Violation("model.moe.top_k", problem, f"use ≤ {moe.top_groups * each}"))
    if moe.group_score == "top2" and each < 2 and moe.groups > 1:
        problem = f"the two best of a group of {each} expert are asked for"
        found.append(Violation("model.moe.group_score", problem, "use 'max'"))
    return found
