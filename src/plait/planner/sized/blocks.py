"""A stage in sizes: the way in, blocks, and the way out, with what is computed again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from plait.planner.sized import ops
from plait.planner.sized.again import Recomputed, Results
from plait.planner.sized.attention import attention
from plait.planner.sized.experts import experts
from plait.planner.sized.layers import dropout, embedding, mlp, norm, tables
from plait.planner.sized.loss import head
from plait.planner.sized.stage import Outputs, Stage, Tables
from plait.planner.sized.states import Unit, gathered
from plait.planner.sized.tape import Sized

Block = Callable[[Sized], Outputs]


def block(s: Stage, layer: int, x: Sized, where: Tables) -> Outputs:
    """x + attention(norm(x)), then + mlp(norm(x))."""
    t, kind, path, vectors = s.tape, s.seat.run.model.norm, f"blocks.{layer}", s.seat.between
    normed = f"{path}.attention_norm"
    x = ops.add(t, x, dropout(s, attention(s, norm(s, x, normed, kind, vectors), f"{path}.attention", where)))
    y, terms = feed_forward(s, layer, norm(s, x, f"{path}.mlp_norm", kind, vectors))
    return ops.add(t, x, dropout(s, y)), terms


def feed_forward(s: Stage, layer: int, x: Sized) -> Outputs:
    """An MLP, or a mixture of them."""
    path = f"blocks.{layer}.mlp"
    return experts(s, x, path) if s.seat.run.model.has_experts(layer) else (mlp(s, x, path), {})


def wrapped(s: Stage, index: int, layer: int, where: Tables) -> Block:
    """The `index`-th block of a stage as it runs."""
    recompute = s.seat.run.recompute
    if recompute.layers != "all" and index >= recompute.layers:
        return lambda x: block(s, layer, x, where)
    if recompute.mode == "full":
        return Recomputed(s.tape, lambda x: block(s, layer, x, where))
    if not recompute.parts:
        return lambda x: block(s, layer, x, where)
    return lambda x: _in_parts(s, layer, x, where)


def _in_parts(s: Stage, layer: int, x: Sized, where: Tables) -> Outputs:
    results = Results()
    with s.tape.hooks(results):
        found = block(replace(s, recomputed=s.seat.run.recompute.parts, results=results), layer, x, where)
    results.of.clear()
    return found


def forward(s: Stage, stage: int, x: Sized | None, units: Mapping[str, Unit]) -> Outputs:
    """Of the stage's number: activations, and what backward starts from beside them."""
    t, stages = s.tape, s.seat.stages
    if x is None:
        x, _ = gathered(t, units.get("embedding"), lambda: (embedding(s), {}))
    where = tables(s)
    terms: dict[str, Sized] = {}
    for index, layer in enumerate(stages.layers[stage]):
        run = wrapped(s, index, layer, where)
        x, more = gathered(t, units.get(f"blocks.{layer}"), run, x)
        terms |= {name: ops.add(t, terms[name], value) if name in terms else value for name, value in more.items()}
    if stage == stages.last:
        x, more = gathered(t, units.get("head"), partial(head, s), x)
        terms |= more
    return x, terms
