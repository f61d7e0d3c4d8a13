"""Rotary tables keep their precision and depend on positions alone."""

from __future__ import annotations

import math

import pytest
import torch

from plait.models.rotary import Rotary, rotate
from plait.models.where import Where
from plait.spec.model import ModelSpec, RopeScaling

SPEC = ModelSpec(vocab=8, hidden=64, layers=1, heads=1, ffn=8, max_sequence=16384)


def at(*positions: int) -> Where:
    return Where.of(torch.arange(1), len(positions))._replace(positions=torch.tensor(positions))


def test_tables_of_a_bf16_model_are_exact_at_position_8191() -> None:
    rotary = Rotary(SPEC).to(torch.bfloat16)
    tables = rotary(at(0, 8191), torch.bfloat16).rotary
    assert tables is not None
    for table, function in zip(tables, (math.cos, math.sin), strict=True):
        assert table.dtype == torch.float32
        exact = [function(8191 * 10000.0 ** (-2 * i / 64)) for i in range(32)]
        assert (table[1, 0].double() - torch.tensor(exact)).abs().max() < 1e-6
    assert (tables[0][0] == 1).all() and (tables[1][0] == 0).all()


def test_a_float64_proof_has_float64_tables() -> None:
    tables = Rotary(SPEC)(at(3), torch.float64).rotary
    assert tables is not None and tables[0].dtype == torch.float64


def test_a_module_holds_no_table_that_could_be_cast_or_forgotten() -> None:
    assert not list(Rotary(SPEC).buffers()) and not list(Rotary(SPEC).parameters())


@pytest.mark.parametrize("scaling", [None, RopeScaling(kind="linear", factor=4.0)])
def test_scores_depend_on_distance_alone(scaling: RopeScaling | None) -> None:
    rotary = Rotary(SPEC.model_copy(update={"rope_scaling": scaling}))
    q, k = torch.randn(2, 1, 1, 1, 64, dtype=torch.float64)

    def score(i: int, j: int) -> float:
        a, b = (rotary(at(p), torch.float64).rotary for p in (i, j))
        assert a is not None and b is not None
        return (rotate(q, a) * rotate(k, b)).sum().item()

    assert score(5, 2) == pytest.approx(score(1005, 1002), abs=1e-9)
    assert score(5, 2) != pytest.approx(score(2, 5), abs=1e-3)


def test_linear_scaling_stretches_positions() -> None:
    stretched = Rotary(SPEC.model_copy(update={"rope_scaling": RopeScaling(kind="linear", factor=4.0)}))
    a, b = stretched(at(400), torch.float64).rotary, Rotary(SPEC)(at(100), torch.float64).rotary
    assert a is not None and b is not None
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_llama3_scaling_keeps_fast_pairs_and_slows_slow_ones() -> None:
    scaling = RopeScaling(kind="llama3", factor=8.0)
    plain, scaled = (
        Rotary(SPEC.model_copy(update={"rope_scaling": s})).frequencies(torch.device("cpu")) for s in (None, scaling)
    )
    ratio = plain / scaled
    wavelength = 2 * math.pi / plain
    assert (ratio[wavelength < 8192 / 4.0] == 1).all()
    torch.testing.assert_close(ratio[wavelength > 8192], torch.full_like(ratio[wavelength > 8192], 8.0))
    between = ratio[(wavelength > 8192 / 4.0) & (wavelength < 8192)]
    assert len(between) and ((between > 1) & (between < 8)).all()


def test_tables_of_a_slice_are_the_slice_of_the_tables() -> None:
    whole = Rotary(SPEC)(Where.of(torch.arange(2), 16), torch.float32)
    part = Rotary(SPEC)(Where.of(torch.arange(2), 16).narrow(4, 8), torch.float32)
    assert part.rotary is not None and whole.narrow(4, 8).rotary is not None
    for a, b in zip(part.rotary, whole.narrow(4, 8).rotary or (), strict=True):
        assert torch.equal(a, b)
