"""How far apart two outcomes are, and that nothing but equality passes."""

from __future__ import annotations

import math

import pytest
import torch

from plait.proof.compare import TOLERANCE, compare, error
from plait.proof.reference import Outcome
from plait.spec.run import RunSpec
from tests.fixtures import run_of

RUN = run_of()  # float32


def outcome(**tensors: list[float]) -> Outcome:
    values = {name: torch.tensor(value, dtype=torch.float64) for name, value in tensors.items()}
    return Outcome([2.0, 1.0], [3.0, 4.0], values, {name: value.clone() for name, value in values.items()})


def judge(one: Outcome, split: Outcome, run: RunSpec = RUN):  # type: ignore[no-untyped-def]
    return compare(run, {}, one, split)


def test_an_error_is_relative_to_the_tensor_and_to_a_hundredth_of_the_largest() -> None:
    one = torch.tensor([4.0, -8.0])
    assert error(one + 0.5, one, largest=8.0) == 0.5 / 8
    assert error(one / 1000 + 0.5, one / 1000, largest=100.0) == pytest.approx(0.5 / 1.0)
    assert error(torch.zeros(2), torch.zeros(2), largest=1.0) == 0.0
    assert error(torch.zeros(2), torch.zeros(2), largest=0.0) == 0.0
    assert error(torch.ones(2), torch.zeros(2), largest=0.0) == math.inf


def test_equal_outcomes_pass_and_say_nothing() -> None:
    verdict = judge(outcome(a=[1.0, 2.0]), outcome(a=[1.0, 2.0]))
    assert verdict.ok and verdict.complaint == ""


def test_the_first_tensor_that_differs_and_the_worst_one_are_named() -> None:
    one, split = outcome(a=[1.0], b=[1.0], c=[1.0]), outcome(a=[1.0], b=[1.001], c=[1.1])
    verdict = judge(one, split)
    assert not verdict.ok
    assert (verdict.gradients.first, verdict.gradients.name) == ("b", "c")
    assert "gradients first differ at b, most at c (error 0.1)" in verdict.complaint


@pytest.mark.parametrize("what", ["losses", "norms"])
def test_a_later_step_that_differs_is_found(what: str) -> None:
    one, split = outcome(a=[1.0]), outcome(a=[1.0])
    getattr(split, what)[1] *= 1 + 2 * TOLERANCE["float32"]
    verdict = judge(one, split)
    assert not verdict.ok
    assert {"losses": "loss", "norms": "gradient norm"}[what] in verdict.complaint


@pytest.mark.parametrize("where", ["losses", "norms", "gradients", "weights"])
def test_what_is_not_a_number_never_passes(where: str) -> None:
    one, split = outcome(a=[1.0], b=[1.0]), outcome(a=[1.0], b=[1.0])
    found = getattr(split, where)
    if isinstance(found, list):
        found[0] = math.nan
    else:
        found["a"][0] = math.nan
    assert not judge(one, split).ok


def test_a_tensor_that_is_missing_is_a_bug_not_a_pass() -> None:
    with pytest.raises(AssertionError, match="b"):
        judge(outcome(a=[1.0], b=[1.0]), outcome(a=[1.0]))


def test_the_tolerances_are_those_of_the_promise() -> None:
    assert TOLERANCE == {"float64": 1e-10, "float32": 1e-5}
