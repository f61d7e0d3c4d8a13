"""Hypothesis strategies for the values of `spec/`: legal layouts, and any value that a run file can hold. No torch."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hypothesis import settings
from hypothesis import strategies as st

from plait.spec.base import Spec
from plait.spec.layout import AXES, Layout
from plait.spec.nearest import divisors

MOST_RANKS = 128
few = settings(max_examples=30, deadline=None)  # an example has no time of its own: the machine may be busy


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any legal layout of at most MOST_RANKS ranks, with every factor and every order."""
    size = st.sampled_from((1, 1, 2, 2, 3, 4, 6))
    pp, dp, cp, tp = draw(st.tuples(size, size, size, size).filter(lambda s: s[0] * s[1] * s[2] * s[3] <= MOST_RANKS))

    def divisor(total: int) -> int:
        return draw(st.sampled_from(divisors(total)))

    etp = draw(st.sampled_from((1, tp)))
    return Layout(
        pp=pp, dp=dp, cp=cp, tp=tp, etp=etp, ep=divisor(dp * cp * tp // etp),
        kv=divisor(tp), ulysses=divisor(cp), shard=divisor(dp * cp),
        sequence_parallel=draw(st.booleans()), order=tuple(draw(st.permutations(AXES))),
    )  # fmt: skip


def specs(spec: type[Spec]) -> st.SearchStrategy[Any]:
    """Any instance of a spec: every field is drawn within its own limits, whether or not the fields fit together."""
    fields = {name: _values(f.annotation, f.metadata) for name, f in spec.model_fields.items()}
    return st.fixed_dictionaries(fields).map(spec.model_validate)


def _values(kind: Any, metadata: Iterable[Any] = ()) -> st.SearchStrategy[Any]:
    """Values of an annotation within the limits of its metadata (a Field inside Annotated has its own)."""
    if get_origin(kind) is Annotated:
        inner, *given = get_args(kind)
        return _values(inner, [limit for each in given for limit in getattr(each, "metadata", [each])])
    if get_origin(kind) in (Union, types.UnionType):
        return st.one_of(*(_values(branch, metadata) for branch in get_args(kind)))
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if get_origin(kind) is tuple:
        return st.lists(_values(get_args(kind)[0]), max_size=3).map(tuple)
    if kind in (int, float):
        return _numbers(
            kind, {name: getattr(m, name) for m in metadata for name in ("ge", "gt", "le", "lt") if hasattr(m, name)}
        )
    return specs(kind) if issubclass(kind, Spec) else PLAIN[kind]


PLAIN = {
    bool: st.booleans(),
    types.NoneType: st.none(),
    str: st.text(st.characters(codec="utf-8"), max_size=8),
}


def _numbers(kind: type, limits: dict[str, Any]) -> st.SearchStrategy[Any]:
    low, high = limits.get("ge", limits.get("gt")), limits.get("le", limits.get("lt"))
    if kind is int:
        return st.integers(low, high).filter(lambda n: n != limits.get("gt") and n != limits.get("lt"))
    finite = {"allow_nan": False, "allow_infinity": False}
    return st.floats(low, high, exclude_min="gt" in limits, exclude_max="lt" in limits, **finite)
