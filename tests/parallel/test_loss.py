"""The loss in columns on different ranks, or in chunks of tokens, is that of whole logits, and so is its gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.models.layers import Factory, Linear, Terms
from plait.models.loss import IGNORED, CrossEntropy
from plait.parallel.collectives import Group
from plait.parallel.loss import ChunkedLoss, VocabularyCrossEntropy
from plait.parallel.mesh import Mesh
from plait.parallel.tensor import ColumnLinear
from plait.parallel.traffic import TrafficCounter
from plait.spec.layout import Layout
from plait.spec.run import RecomputeSpec
from tests.fixtures import T0_TIED, assert_equals_one_device, run_of
from tests.launching import on_ranks

ROWS, TOKENS, HIDDEN, VOCAB = 3, 10, 8, 13
Z = 0.01


class Given(nn.Module):
    """A projection that has already happened."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_cross_entropy_over_split_logits_is_that_of_the_whole_row_and_so_is_its_gradient() -> None:
    """Logits 0, 1, 2, 3 and label 3: 0.4401897; a loss that forgets the other rank's logits gives 1.1333369."""

    def run(rank: int, world: int) -> tuple[float, int, Tensor]:
        loss = VocabularyCrossEntropy(0.0, (2 * rank, 2 * rank + 2), Mesh(Layout(tp=2)).group("tp"))
        logits = torch.tensor([[[2.0 * rank, 2.0 * rank + 1]]]).requires_grad_()
        terms = loss(logits, Given(), torch.tensor([[3]]))
        terms["loss"].backward()
        assert logits.grad is not None
        return terms["loss"].item(), int(terms["count"]), logits.grad.flatten()

    whole = torch.tensor([0.0, 1.0, 2.0, 3.0]).softmax(0) - F.one_hot(torch.tensor(3), 4)
    results = on_ranks(2, run)
    assert [total for total, _, _ in results] == [pytest.approx(0.4401897, abs=1e-6)] * 2
    assert [count for _, count, _ in results] == [1, 1]
    assert torch.allclose(torch.cat([gradient for _, _, gradient in results]), whole, atol=1e-6)


def test_cross_entropy_refuses_logits_that_are_already_gathered() -> None:
    loss = VocabularyCrossEntropy(0.0, (0, 2), Group("tp", (0,), 0))
    with pytest.raises(AssertionError, match="4 logits"):
        loss(torch.zeros(1, 1, 4), Given(), torch.tensor([[3]]))


def test_cross_entropy_of_ignored_labels_is_zero_with_zero_gradient() -> None:
    def run(rank: int, world: int) -> tuple[float, float, int, float]:
        loss = VocabularyCrossEntropy(Z, (2 * rank, 2 * rank + 2), Mesh(Layout(tp=2)).group("tp"))
        logits = torch.randn(2, 3, 2).requires_grad_()
        terms = loss(logits, Given(), torch.full((2, 3), IGNORED))
        (terms["loss"] + terms["z_loss"]).backward()
        assert logits.grad is not None
        return terms["loss"].item(), terms["z_loss"].item(), int(terms["count"]), logits.grad.abs().max().item()

    assert on_ranks(2, run) == [(0.0, 0.0, 0, 0.0)] * 2


def test_z_loss_is_its_formula_over_the_valid_tokens() -> None:
    logits = torch.tensor([[[0.0, 1.0, 2.0], [3.0, 0.0, 0.0], [9.0, 9.0, 9.0]]])
    terms = CrossEntropy(0.5)(logits, Given(), torch.tensor([[2, 0, IGNORED]]))
    log_sums = torch.tensor([2.4076059, 3.0949230])  # ln(1 + e + e²), ln(e³ + 2)
    assert terms["z_loss"].item() == pytest.approx(0.5 * log_sums.square().sum().item(), rel=1e-6)
    assert (terms["count"].item(), set(CrossEntropy()(logits, Given(), torch.tensor([[2, 0, 1]])))) == (
        2,
        {"loss", "count"},
    )


# --- chunks -----------------------------------------------------------------------------------------------------------


def given(dtype: torch.dtype) -> tuple[Tensor, Linear, Tensor]:
    """Activations, a projection, labels of which every row ignores another number."""
    torch.manual_seed(0)
    projection = Linear(HIDDEN, VOCAB, False, Factory(device="cpu", dtype=dtype))
    nn.init.normal_(projection.weight)
    labels = torch.randint(0, VOCAB, (ROWS, TOKENS))
    for row in range(ROWS):
        labels[row, 3 * row + 1 :] = IGNORED
    return torch.randn(ROWS, TOKENS, HIDDEN, dtype=dtype), projection, labels


def results(loss: nn.Module, x: Tensor, projection: nn.Module, labels: Tensor) -> dict[str, Tensor]:
    """The terms, and the gradients of their sum divided by 7."""
    x = x.clone().requires_grad_()
    projection.zero_grad()
    terms: Terms = loss(x, projection, labels)
    differentiable = [value for value in terms.values() if value.requires_grad]
    torch.autograd.backward(differentiable, [torch.full_like(value, 1 / 7) for value in differentiable])
    assert x.grad is not None
    weights = {name: p.grad.clone() for name, p in projection.named_parameters() if p.grad is not None}
    return {**{name: value.detach() for name, value in terms.items()}, "x": x.grad, **weights}


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys() and "weight" in found
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("z_loss", [0.0, Z])
@pytest.mark.parametrize("tokens", [1, 4, 7, 30, 1000])
def test_chunks_of_any_size_give_the_sums_and_gradients_of_the_whole(tokens: int, z_loss: float) -> None:
    x, projection, labels = given(torch.float64)
    plain = CrossEntropy(z_loss)
    found, expected = (results(loss, x, projection, labels) for loss in (ChunkedLoss(plain, tokens), plain))
    assert_alike(found, expected, 1e-13)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.02), (torch.float16, 0.003)])
def test_chunks_add_up_in_fp32_what_is_computed_in_a_half(dtype: torch.dtype, tolerance: float) -> None:
    """A thousand chunks: added up in bf16, a sum of one sign sticks at 256 times a term."""
    x, projection, labels = given(dtype)
    x, labels = x[:1, :1].expand(1, 1000, HIDDEN).contiguous(), labels[:1, :1].expand(1, 1000)
    plain = CrossEntropy(Z)
    found = results(ChunkedLoss(plain, 1), x, projection, labels)
    exact = results(plain, x.double(), projection.double(), labels)
    assert found["loss"].dtype == torch.float32 and found["weight"].dtype == dtype
    assert found["loss"].item() == pytest.approx(exact["loss"].item(), rel=tolerance)
    scale = exact["weight"].abs().max()
    assert ((found["weight"] - exact["weight"]).abs().max() / scale).item() < tolerance


def test_a_frozen_projection_or_input_gets_no_gradient() -> None:
    x, projection, labels = given(torch.float64)
    projection.weight.requires_grad_(False)
    frozen = results(ChunkedLoss(CrossEntropy(), 4), x, projection, labels)
    assert "weight" not in frozen and frozen["x"].abs().max() > 0
    projection.weight.requires_grad_(True)
    ChunkedLoss(CrossEntropy(), 4)(x, projection, labels)["loss"].backward()
    assert projection.weight.grad is not None and x.grad is None


def test_an_evaluation_in_chunks_computes_no_gradient() -> None:
    x, projection, labels = given(torch.float64)
    with torch.no_grad():
        chunked, whole = (loss(x, projection, labels) for loss in (ChunkedLoss(CrossEntropy(), 4), CrossEntropy()))
    assert chunked["loss"].item() == pytest.approx(whole["loss"].item(), rel=1e-13)
    assert not chunked["loss"].requires_grad and chunked["count"] == whole["count"]


def test_a_second_backward_is_refused() -> None:
    x, projection, labels = given(torch.float64)
    total = ChunkedLoss(CrossEntropy(), 4)(x, projection, labels)["loss"]
    total.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="given once"):
        total.backward()


# --- both -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [False, True])
def test_chunks_of_logits_in_columns_equal_whole_ones_at_the_same_bytes(split: bool) -> None:
    """Two ranks, 7 and 6 of the columns. Chunks repeat the calls, not the bytes."""

    def run(rank: int, world: int) -> tuple[dict[str, Tensor], dict[str, Tensor], float, float]:
        mesh = Mesh(Layout(tp=2))
        group, (x, projection, labels) = mesh.group("tp"), given(torch.float64)
        start, stop = ((0, 7), (7, 13))[rank]
        projection.weight = nn.Parameter(projection.weight.detach()[start:stop].clone())
        column = ColumnLinear(projection, None, group, split)
        mine = x.chunk(2, dim=1)[rank] if split else x
        plain = VocabularyCrossEntropy(Z, (start, stop), group)
        found, sent = [], []
        for loss in (plain, ChunkedLoss(plain, 8)):
            with TrafficCounter(mesh.axes()) as counter:
                found.append(results(loss, mine, column, labels))
            sent.append(sum(row[3] for row in counter.rows()))
        return found[0], found[1], sent[0], sent[1]

    x, projection, labels = given(torch.float64)
    whole = results(CrossEntropy(Z), x, projection, labels)
    ranks = on_ranks(2, run)
    for plain, chunked, plain_bytes, chunked_bytes in ranks:
        assert_alike(chunked, plain, 1e-13)
        assert chunked_bytes == plain_bytes > 0
    of_ranks = [found for _, found, _, _ in ranks]
    by_x = torch.cat([found["x"] for found in of_ranks], dim=1) if split else of_ranks[0]["x"]
    joined = {**of_ranks[0], "x": by_x, "weight": torch.cat([found["weight"] for found in of_ranks])}
    assert_alike(joined, whole, 1e-13)


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "sequence_parallel": True, "pp": 2, "dp": 2},
        {"pp": 2, "schedule": "gpipe", "micro_batches": 4},
    ],
)
def test_chunks_with_z_loss_equal_one_device_on_a_tied_table(layout: dict[str, int]) -> None:
    run = run_of(T0_TIED.model_copy(update={"vocab": 61, "z_loss": Z}), **layout)  # type: ignore[arg-type]
    assert_equals_one_device(run.model_copy(update={"recompute": RecomputeSpec(loss_chunk=5)}))
