"""First values depend on (seed, name) and on nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.models.decoder import Decoder, PassThrough, logical_tensors
from plait.models.init import Rectangle, draw, initialise
from plait.spec.model import ModelSpec, TensorSpec
from plait.spec.presets import PRESETS

SPEC = PRESETS["llama-tiny"]


def tensor(*shape: int, name: str = "blocks.0.mlp.down.weight", role: str = "row") -> TensorSpec:
    return TensorSpec(name, shape, role, 0, "block", name)


@st.composite
def rectangles(draw_from: st.DrawFn) -> tuple[tuple[int, ...], Rectangle]:
    shape = draw_from(
        st.one_of(st.tuples(st.integers(1, 600), st.integers(1, 600)), st.tuples(st.integers(1, 200_000)))
    )
    cuts = [sorted(draw_from(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return shape, tuple((a, b) for a, b in cuts)


@settings(max_examples=40, deadline=None)
@given(rectangles())
def test_a_rectangle_is_bitwise_the_slice_of_the_whole(case: tuple[tuple[int, ...], Rectangle]) -> None:
    shape, rectangle = case
    name = "weight" if len(shape) == 2 else "bias"
    whole = draw(tensor(*shape, name=name), SPEC, 3, randomise=True)
    part = draw(tensor(*shape, name=name), SPEC, 3, rectangle, randomise=True)
    assert torch.equal(part, whole[tuple(slice(a, b) for a, b in rectangle)])


def test_a_shard_has_the_spread_of_the_global_fan_in() -> None:
    whole = draw(tensor(1024, 1024), SPEC, 1)
    shard = draw(tensor(1024, 1024), SPEC, 1, ((0, 1024), (256, 512)))  # fan-in 256 here: 1/16 would be wrong
    for values in (whole, shard):
        assert abs(values.std().item() / 0.03125 - 1) < 0.02
        assert abs(values.mean().item()) < 1e-3


def test_tiles_names_and_seeds_are_independent() -> None:
    def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
        return torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1].abs().item()

    whole = draw(tensor(512, 512), SPEC, 1)
    others = [
        whole[:256, 256:],
        whole[256:, :256],
        draw(tensor(512, 512), SPEC, 2)[:256, :256],
        draw(tensor(512, 512, name="other"), SPEC, 1)[:256, :256],
    ]
    assert max(correlation(whole[:256, :256], other) for other in others) < 5 / 256


def test_values_of_a_seed_never_change() -> None:
    # A numpy that draws otherwise would let a run resume as another: better to fail here.
    values = draw(tensor(300, 300), SPEC, 1)
    assert values[0, :2].tolist() == [0.06543386727571487, 0.01959395594894886]
    assert values[299, 298:].tolist() == [0.03786613792181015, -0.0681057795882225]


def test_each_role_starts_as_its_kind_does() -> None:
    spec = ModelSpec.model_validate({**PRESETS["gpt2-tiny"].model_dump(), "vocab": 4096, "max_sequence": 2048})
    for t in spec.parameters():
        values = draw(t, spec, 1)
        if t.role in ("embedding", "positions"):
            assert abs(values.std().item() / 0.02 - 1) < 0.02
        elif len(t.shape) == 1:
            assert (values == (0.0 if t.name.endswith("bias") else 1.0)).all()
        else:
            assert abs(values.std().item() * math.sqrt(t.shape[1]) - 1) < 0.1


def test_init_std_overrides_matrices_and_embeddings() -> None:
    spec = SPEC.model_copy(update={"init_std": 0.5})
    for t in spec.parameters():
        if len(t.shape) == 2:
            assert abs(draw(t, spec, 1).std().item() / 0.5 - 1) < 0.1


def test_randomised_norms_lie_around_one_and_biases_are_normal() -> None:
    norm = draw(tensor(10_000, name="head.norm.weight", role="norm"), SPEC, 1, randomise=True)
    bias = draw(tensor(10_000, name="head.norm.bias", role="norm"), SPEC, 1, randomise=True)
    assert 0.5 <= norm.min() < 0.51 and 1.49 < norm.max() <= 1.5
    assert abs(bias.std().item() - 1) < 0.03 and abs(bias.mean().item()) < 0.03


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_start_as_copies_of_float32(dtype: torch.dtype) -> None:
    one, other = Decoder(SPEC, "cpu"), Decoder(SPEC, "cpu", dtype)
    initialise(one, 1)
    initialise(other, 1)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.to(dtype), b)


def test_a_stage_starts_as_its_part_of_the_whole() -> None:
    whole, stage = Decoder(SPEC, "cpu"), Decoder(SPEC)
    stage.embedding = PassThrough("embedding")
    for layer in ("0", "1"):
        del stage.blocks[layer]
    stage.to_empty(device="cpu")
    for model in (whole, stage):
        initialise(model, 7, randomise=True)
    held = logical_tensors(SPEC, dict(stage.named_parameters()))
    full = logical_tensors(SPEC, dict(whole.named_parameters()))
    assert {name.split(".")[1] for name in held if name.startswith("blocks")} == {"2", "3"}
    assert all(torch.equal(held[name], full[name]) for name in held)
