"""Recompute changes what is kept and nothing else: bitwise on one process, and as one device on every split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.models.decoder import Block, Decoder
from plait.models.dropout import step_key
from plait.models.init import initialise
from plait.models.where import Where
from plait.parallel.recompute import Recomputed, RecomputedPart, recompute
from plait.parallel.traffic import TrafficCounter
from plait.spec.model import ModelSpec
from plait.spec.run import RecomputeSpec, RunSpec
from tests.fixtures import SEQUENCE, T0, T0_GROUPED, T0_TIED, assert_equals_one_device, run_of
from tests.launching import on_ranks
from tests.parallel.test_compile import compile_whole
from tests.ranks import Rank

Mode = Any
MODES: tuple[Mode, ...] = ("full", "selective", ("attention",), ("norm",), ("activation",))
DROPS = T0_GROUPED.model_copy(update={"dropout": 0.1, "attention_dropout": 0.1})
BIASED = DROPS.model_copy(
    update={"norm": "layer", "mlp": "gelu_tanh", "qkv_bias": True, "out_bias": True, "mlp_bias": True, "qk_norm": True}
)


def decoder(model: ModelSpec, mode: Mode, layers: Any = "all", dtype: torch.dtype = torch.float32) -> Decoder:
    made = Decoder(model, "cpu", dtype)
    initialise(made, seed=1, randomise=True)
    recompute(made, RecomputeSpec(mode=mode, layers=layers))
    return made.train()


def where(rows: int = 3, sequence: int = SEQUENCE) -> Where:
    return Where.of(torch.arange(rows), sequence, step_key(1, 1))


def gradients(made: Decoder) -> dict[str, Tensor]:
    """The loss, and every gradient by the name it has without recompute."""
    tokens = torch.arange(3 * SEQUENCE).view(3, SEQUENCE) % made.spec.vocab
    _, terms = made(tokens, where(), (tokens * 7 + 1) % made.spec.vocab)
    terms["loss"].backward()  # type: ignore[no-untyped-call]
    return {"loss": terms["loss"].detach(), **_by_name(made)}


def _by_name(module: nn.Module) -> dict[str, Tensor]:
    plain = {".".join(part for part in n.split(".") if part != "inner"): p for n, p in module.named_parameters()}
    return {name: p.grad for name, p in plain.items() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", [DROPS, BIASED])
@pytest.mark.parametrize("mode", MODES)
def test_b29_loss_and_gradients_are_bitwise_those_without_recompute(
    mode: Mode, model: ModelSpec, dtype: torch.dtype
) -> None:
    plain, again = (gradients(decoder(model, m, dtype=dtype)) for m in ("none", mode))
    assert len(plain) == 1 + sum(1 for _ in Decoder(model).parameters())
    assert again.keys() == plain.keys()
    assert all(torch.equal(again[name], plain[name]) for name in plain)


def calls(block: nn.Module, kind: type[nn.Module]) -> list[int]:
    """Forward calls of the modules of a kind in a forward, and in a backward."""
    counts = [0, 0]
    for module in block.modules():
        if isinstance(module, kind):
            module.register_forward_pre_hook(lambda *_: counts.__setitem__(0, counts[0] + 1))
    made = torch.randn(2, SEQUENCE, T0.hidden, requires_grad=True)
    ready = Decoder(T0).rotary(where(2), torch.float32)
    y, _ = block(made, ready)
    counts[1], counts[0] = 0, counts[0]
    forward = counts[0]
    y.sum().backward()
    return [forward, counts[0] - forward]


@pytest.mark.parametrize(("layers", "wrapped"), [("all", 4), (1, 1), (3, 3), (9, 4)])
def test_the_first_k_blocks_of_a_stage_are_recomputed(layers: Any, wrapped: int) -> None:
    made = decoder(T0, "full", layers)
    assert [isinstance(block, Recomputed) for block in made.blocks.values()] == [True] * wrapped + [False] * (
        4 - wrapped
    )
    assert calls(made.blocks["0"], Block) == [1, 1]
    assert calls(made.blocks["3"], Block) == [1, 1 if wrapped == 4 else 0]


def test_a_fused_attention_core_is_left_alone_and_one_with_dropout_is_not() -> None:
    for model, expected in ((T0, 0), (DROPS, 1)):
        block = decoder(model, ("attention",)).blocks["0"]
        assert sum(isinstance(module, RecomputedPart) for module in block.modules()) == expected


def test_nothing_is_computed_again_without_a_backward() -> None:
    made = decoder(DROPS, "full")
    with torch.no_grad():
        x = torch.randn(2, SEQUENCE, DROPS.hidden)
        assert not made.blocks["0"](x, made.rotary(where(2), torch.float32))[0].requires_grad


@pytest.mark.parametrize("mode", MODES)
def test_a_second_backward_computes_once_more_and_gives_the_same(mode: Mode) -> None:
    made = decoder(DROPS, mode)
    x = torch.randn(2, SEQUENCE, DROPS.hidden, requires_grad=True)
    y, _ = made.blocks["0"](x, made.rotary(where(2), torch.float32))
    first, second = (torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for _ in "ab")
    assert torch.equal(first, second) and first.abs().max() > 0


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_inputs_and_weights_can_be_differentiated_one_after_the_other(mode: Mode) -> None:
    """As a pipeline does that splits backward in two."""
    made = decoder(DROPS, mode)
    block = made.blocks["0"]
    x = torch.randn(2, SEQUENCE, DROPS.hidden, requires_grad=True)
    y, _ = block(x, made.rotary(where(2), torch.float32))
    loss = y.square().sum()
    weights = list(block.parameters())
    at_once = torch.autograd.grad(loss, [x, *weights], retain_graph=True)
    apart = (*torch.autograd.grad(loss, [x], retain_graph=True), *torch.autograd.grad(loss, weights))
    assert all(torch.equal(a, b) for a, b in zip(at_once, apart, strict=True))


def test_a_result_that_was_changed_in_place_is_kept() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.norm(x).mul_(2)
            return y * y

    stage = nn.Module()
    stage.blocks, stage.head = nn.ModuleDict({"0": Changing()}), nn.Identity()
    x = torch.randn(2, 4, requires_grad=True)
    plain = torch.autograd.grad(stage.blocks["0"](x).sum(), x)[0]
    recompute(stage, RecomputeSpec(mode=("norm",)))
    assert torch.equal(torch.autograd.grad(stage.blocks["0"](x).sum(), x)[0], plain)


# --- split runs -------------------------------------------------------------------------------------------------------


def with_recompute(run: RunSpec, mode: Mode, layers: Any = "all") -> RunSpec:
    return run.model_copy(update={"recompute": RecomputeSpec(mode=mode, layers=layers)})


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("mode", "layout"),
    [
        ("full", {"tp": 2, "sequence_parallel": True, "pp": 2, "schedule": "gpipe"}),
        ("selective", {"tp": 2, "sequence_parallel": True, "dp": 2}),
        ("full", {"pp": 4, "micro_batches": 4}),
        (("norm", "activation"), {"tp": 2, "pp": 2}),
    ],
)
def test_b29_masks_of_a_split_run_with_recompute_are_those_of_one_device(mode: Mode, layout: dict[str, Any]) -> None:
    model = DROPS.model_copy(update={"tied": True, "layers": 5, "vocab": 61})
    assert_equals_one_device(with_recompute(run_of(model, **layout), mode))


@pytest.mark.quick(1)
@pytest.mark.parametrize("layers", [1, 2])
def test_some_layers_of_each_stage_equal_one_device(layers: int) -> None:
    assert_equals_one_device(with_recompute(run_of(T0_TIED, pp=2), "full", layers))


@pytest.mark.parametrize("split", [False, True])
def test_a_recomputed_block_repeats_its_collectives_but_the_last(split: bool) -> None:
    """Forward again up to the last saved tensor: the input of the last matrix, whose sum over ranks comes after."""

    def run(rank: int, world: int) -> list[dict[str, int]]:
        found = []
        for mode in ("none", "full", "selective"):
            mine = Rank.of(with_recompute(run_of(T0, tp=2, micro_batches=1, sequence_parallel=split), mode))
            with TrafficCounter(mine.mesh.axes()) as counter:
                mine.backward()
            found.append({operation: n for axis, operation, n, _ in counter.rows() if axis == "tp"})
        return found

    plain, full, selective = on_ranks(2, run)[0]
    again = {"all_gather_into_tensor": 2, "all_to_all_single": 1} if split else {"all_reduce": 1}
    assert {name: full[name] - n for name, n in plain.items() if full[name] != n} == {
        name: n * T0.layers for name, n in again.items()
    }
    assert selective == plain


# --- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.mark.proof
@pytest.mark.timeout(300)
def test_recomputed_blocks_compile_whole_and_compiled_blocks_can_be_recomputed() -> None:
    """Blocks of a model split over two ranks with split tokens: outputs and gradients are the eager ones."""

    def run(rank: int, world: int) -> list[dict[str, Tensor]]:
        found = []
        for mode, prepare in (
            ("none", lambda block: block),
            ("full", compile_whole),
            ("selective", compile_whole),
            ("none", lambda block: Recomputed(compile_whole(block))),
        ):
            plain = with_recompute(run_of(DROPS, tp=2, sequence_parallel=True), mode)
            double = plain.precision.model_copy(update={"compute": "float64"})
            stage = Rank.of(plain.model_copy(update={"precision": double})).parallel.stages[0].module.train()
            block = stage.blocks["0"]
            torch.manual_seed(rank)
            x = torch.randn(2, SEQUENCE // 2, DROPS.hidden, dtype=torch.float64, requires_grad=True)
            y, _ = prepare(block)(x, stage.rotary(where(2), torch.float64))
            y.backward(torch.randn_like(y))
            assert x.grad is not None
            found.append({"output": y.detach(), "input": x.grad, **_by_name(block)})
        return found

    for eager, *others in on_ranks(2, run, timeout=240):
        assert len(eager) == 2 + 6 and all(value.abs().max() > 0 for value in eager.values())
        for other in others:
            for name, value in eager.items():
                torch.testing.assert_close(other[name], value, rtol=1e-12, atol=1e-12, msg=name)
