"""The decoder holds what the listing says, computes sums, and comes apart into stages."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from plait.models.decoder import Decoder, PassThrough, add_terms, logical_tensors
from plait.models.dropout import step_key
from plait.models.init import initialise
from plait.models.loss import IGNORED
from plait.models.where import Where
from plait.spec.model import ModelSpec
from plait.spec.presets import PRESETS

TINY = [name for name in PRESETS if name.endswith("tiny") or name == "builtin"]


def build(spec: ModelSpec, dtype: torch.dtype = torch.float64) -> Decoder:
    model = Decoder(spec, "cpu", dtype)
    initialise(model, seed=1, randomise=True)
    return model


def batch(rows: int = 3, sequence: int = 16) -> tuple[Tensor, Where, Tensor]:
    tokens = torch.randint(0, 64, (rows, sequence + 1), generator=torch.Generator().manual_seed(0))
    labels = tokens[:, 1:].clone()
    for row in range(rows):
        labels[row, 2 * row + 1 :] = IGNORED
    return tokens[:, :-1], Where.of(torch.arange(rows), sequence, step_key(1, 0)), labels


def with_dropout(name: str) -> ModelSpec:
    return PRESETS[name].model_copy(update={"dropout": 0.2, "attention_dropout": 0.2})


@pytest.mark.parametrize("name", PRESETS)
def test_the_listing_is_exactly_what_the_module_holds(name: str) -> None:
    spec = PRESETS[name]
    model = Decoder(spec, device="cpu" if name in TINY else "meta")
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    kinds = {home: tensors[0].kind for home, tensors in spec.homes().items()}
    assert list(parameters) == [home for home, kind in kinds.items() if kind == "weight"]
    assert list(buffers) == [home for home, kind in kinds.items() if kind == "buffer"]
    views = logical_tensors(spec, {**parameters, **buffers})
    assert {n: tuple(t.shape) for n, t in views.items()} == {t.name: t.shape for t in spec.parameters()}
    assert sum(p.numel() for p in parameters.values()) == spec.parameter_count()


def test_a_tied_head_stays_one_tensor_through_moves_and_casts() -> None:
    spec = PRESETS["qwen2-tiny"]
    model = Decoder(spec).to_empty(device="cpu").double()
    assert model.head.projection.weight is model.embedding.tokens.weight
    assert len(list(model.parameters())) == len(spec.homes())


def test_the_last_stage_of_a_tied_model_holds_the_shared_tensor_under_its_one_name() -> None:
    spec = PRESETS["qwen2-tiny"]
    stage = Decoder(spec)
    stage.embedding = PassThrough("embedding")
    held = dict(stage.named_parameters())
    assert "head.projection.weight" in held
    assert "embedding.tokens.weight" in logical_tensors(spec, held)


def test_the_loss_is_a_sum_over_valid_labels_beside_their_count() -> None:
    model = build(PRESETS["llama-tiny"])
    tokens, where, labels = batch()
    _, terms = model(tokens, where, labels)
    probabilities = model.logits(tokens, where).log_softmax(-1)
    valid = [(b, s) for b in range(3) for s in range(16) if labels[b, s] != IGNORED]
    assert terms["count"].item() == len(valid) == 1 + 3 + 5
    expected = -sum(probabilities[b, s, labels[b, s]].item() for b, s in valid)
    assert terms["loss"].item() == pytest.approx(expected, rel=1e-12)


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary() -> None:
    model = build(PRESETS["llama-tiny"].model_copy(update={"vocab": 61}))
    torch.nn.init.zeros_(model.head.projection.weight)
    tokens, where, labels = (t.clamp(max=60) if isinstance(t, Tensor) else t for t in batch())
    _, terms = model(tokens, where, labels)
    assert terms["loss"].item() / terms["count"].item() == pytest.approx(math.log(61))


def test_a_micro_batch_without_valid_labels_has_loss_zero_and_finite_gradients() -> None:
    model = build(PRESETS["llama-tiny"])
    tokens, where, labels = batch()
    _, terms = model(tokens, where, torch.full_like(labels, IGNORED))
    terms["loss"].backward()
    assert terms["loss"].item() == 0 and terms["count"].item() == 0
    assert all(p.grad is not None and (p.grad == 0).all() for p in model.parameters())


@pytest.mark.parametrize("name", TINY)
def test_no_token_sees_a_later_one(name: str) -> None:
    model = build(PRESETS[name])
    tokens, where, _ = batch()
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 64
    a, b = model.logits(tokens, where), model.logits(changed, where)
    # A GEMM of other rows beside it may round a token of the same expert another way.
    torch.testing.assert_close(a[:, :9], b[:, :9], rtol=0, atol=1e-12 if PRESETS[name].moe else 0)
    assert (a[:, 9:] != b[:, 9:]).any(dim=-1).any(dim=0)[0]


@pytest.mark.parametrize("name", TINY)
def test_masked_documents_in_one_row_compute_what_they_compute_alone(name: str) -> None:
    model = build(PRESETS[name])
    tokens, where, _ = batch()
    documents = torch.tensor([0] * 6 + [1] * 10).expand(3, 16)
    positions = torch.cat((torch.arange(6), torch.arange(10)))
    together = model.logits(tokens, where._replace(documents=documents, positions=positions.expand(3, 16)))
    for part in (slice(0, 6), slice(6, 16)):
        alone = model.logits(tokens[:, part], Where.of(where.samples, part.stop - part.start))
        torch.testing.assert_close(together[:, part], alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", TINY)
def test_micro_batches_of_a_batch_sum_to_it_with_dropout_on(name: str) -> None:
    tokens, where, labels = batch()
    whole, parts = build(with_dropout(name)), build(with_dropout(name))
    whole(tokens, where, labels)[1]["loss"].backward()
    for row in range(3):
        rows = slice(row, row + 1)
        parts(tokens[rows], where._replace(samples=where.samples[rows]), labels[rows])[1]["loss"].backward()
    largest = max(p.grad.abs().max() for p in whole.parameters())
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert (a.grad - b.grad).abs().max() <= 1e-12 * largest


@pytest.mark.parametrize("name", TINY)
def test_stages_in_a_row_are_the_whole_decoder(name: str) -> None:
    whole, first, last = (build(with_dropout(name)) for _ in range(3))
    first.head, last.embedding = PassThrough("head"), PassThrough("embedding")
    for layer in range(whole.spec.layers):
        del (last if layer < 1 else first).blocks[str(layer)]
    tokens, where, labels = batch()
    x, terms = first(tokens, where)
    _, terms = last(x, where, labels)
    _, expected = whole(tokens, where, labels)
    assert torch.equal(terms["loss"], expected["loss"])


def test_terms_add_by_name() -> None:
    one, two = {"balance": torch.tensor(1.0)}, {"balance": torch.tensor(2.0), "loss": torch.tensor(3.0)}
    assert {name: value.item() for name, value in add_terms(one, two).items()} == {"balance": 3.0, "loss": 3.0}


@pytest.mark.proof
@pytest.mark.parametrize("name", ["mistral-tiny", "gpt2-tiny"])
def test_a_block_compiles_as_one_graph_and_equals_eager(name: str) -> None:
    model = build(with_dropout(name))
    block = model.blocks["1"]
    where = model.rotary(batch()[1], torch.float64)
    x = torch.randn(3, 16, 32, dtype=torch.float64, requires_grad=True)
    eager, _ = block(x, where)
    (gradient,) = torch.autograd.grad(eager.square().sum(), x)
    compiled, _ = torch.compile(block, fullgraph=True, backend="aot_eager")(x, where)
    (compiled_gradient,) = torch.autograd.grad(compiled.square().sum(), x)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-12)
    torch.testing.assert_close(compiled_gradient, gradient, rtol=0, atol=1e-10)


def test_bf16_models_train_with_a_loss_in_float32() -> None:
    model = build(PRESETS["llama-tiny"], torch.bfloat16)
    tokens, where, labels = batch()
    x, terms = model(tokens, where, labels)
    assert x.dtype == torch.bfloat16 and terms["loss"].dtype == torch.float32
    terms["loss"].backward()
    exact = build(PRESETS["llama-tiny"])(tokens, where, labels)[1]["loss"]
    assert terms["loss"].item() == pytest.approx(exact.item(), rel=0.02)
