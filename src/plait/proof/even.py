"""Routing without tokens: what a count on tensors without values knows of experts is that all are chosen alike.

The numbers of tokens that travel are the only values that a step's shapes depend on. Here they are what even routing
gives, the first experts one more where they do not divide, and every rank is told that the others route as it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor

from plait.parallel import expert
from plait.parallel.collectives import Group
from plait.placement.cuts import piece

KNOWN = 2**16  # elements up to which a tensor without memory keeps values that were written out


def _sorted(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """In place of `sort_by_expert`."""
    places = experts.numel()
    pieces = (piece(places, count, number) for number in range(count))
    return experts.new_empty(places), torch.tensor([stop - start for start, stop in pieces])


def _exchanged(counts: Tensor, group: Group) -> Tensor:
    """In place of `exchange_counts`, which is called all the same: it is counted."""
    _exchange_counts(counts, group)
    return torch.tensor([counts.tolist()[group.rank]] * group.size)


def _counts(experts: Tensor, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.float64)


_exchange_counts = expert.exchange_counts


@contextmanager
def routed_evenly() -> Iterator[None]:
    """While it is entered, routers tell of even routing, whatever tokens and weights are."""
    with ExitStack() as stack:
        for name, instead in {
            "plait.models.moe.sort_by_expert": _sorted,
            "plait.parallel.expert.sort_by_expert": _sorted,
            "plait.parallel.expert.exchange_counts": _exchanged,
            "plait.models.moe._counts": _counts,
            "torch._subclasses.fake_tensor.CONSTANT_NUMEL_LIMIT": KNOWN,
        }.items():
            stack.enter_context(mock.patch(name, instead))
        yield
