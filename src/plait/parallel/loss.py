"""The loss without whole logits: columns of them on different ranks, or those of a few tokens at a time, or both.

| what is split          | forward                       | backward | replaces                             |
|------------------------|-------------------------------|----------|--------------------------------------|
| columns of the logits  | all-reduce of 3 numbers/token | none     | head.loss, over tensor parallel ranks |
| nothing (tokens, time) | those of the loss, by chunk   | none     | head.loss, whichever stood there     |

Chunks give the gradient while the logits are there, in forward: what waits for backward is the gradient of x and that
of the projection's weights, and no logit is computed twice (docs/log.md compares).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.models.decoder import add_terms
from plait.models.layers import Terms
from plait.models.loss import IGNORED, CrossEntropy
from plait.parallel import collectives as comm
from plait.parallel.collectives import Group


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Losses (N,) and logs of summed exponentials (N,) of logits (N, V/tp) spread over the group.

    Ignored tokens lose nothing.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, start: int, group: Group) -> tuple[Tensor, Tensor]:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        highest = comm.all_reduce(logits.amax(-1), group, "max")
        shifted = logits - highest.unsqueeze(-1)
        valid = labels != IGNORED
        local = labels - start
        here = valid & (local >= 0) & (local < logits.shape[-1])
        local = local.masked_fill(~here, 0)
        target = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0.0)
        exponentials = shifted.exp_()
        total, target = comm.all_reduce(torch.stack((exponentials.sum(-1), target)), group).unbind(0)
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), local, here, valid)
        return (total.log() - target).masked_fill(~valid, 0.0), total.log() + highest

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_log_sums: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, local, here, valid = ctx.saved_tensors
        grad = grad.masked_fill(~valid, 0.0)
        grad_logits = probabilities * (grad + grad_log_sums).unsqueeze(-1)
        grad_logits.scatter_add_(-1, local.unsqueeze(-1), -grad.masked_fill(~here, 0.0).unsqueeze(-1))
        return grad_logits, None, None, None


class VocabularyCrossEntropy(CrossEntropy):
    """The loss slot over logits that no rank holds whole.

    `tokens` are the first and the last + 1 of those whose logits the projection gives here.
    """

    def __init__(self, z_loss: float, tokens: tuple[int, int], group: Group) -> None:
        super().__init__(z_loss)
        self.tokens, self.group = tokens, group

    def forward(self, x: Tensor, projection: nn.Module, labels: Tensor) -> Terms:
        logits, labels = projection(x).flatten(0, -2), labels.flatten()
        start, stop = self.tokens
        assert logits.shape[-1] == stop - start, f"{logits.shape[-1]} logits, {stop - start} tokens are of this rank"
        losses, log_sums = _VocabularyCrossEntropy.apply(logits, labels, start, self.group)  # type: ignore[no-untyped-call]
        return self.terms(losses.sum(), log_sums, labels)


class _Known(torch.autograd.Function):
    """Sums whose gradients by `inputs` are known when they are: those of all sums together."""

    @staticmethod
    def forward(ctx: Any, sums: Terms, gradients: list[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.gradients, ctx.dtypes = gradients, [x.dtype for x in inputs]
        return tuple(x.clone() for x in sums.values())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        factors = [grad for grad in grads if grad.is_floating_point()]
        for other in factors[1:]:
            torch._assert_async(other == factors[0], "sums over one count have one factor")
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "gradients that forward computed are given once"
        scaled = (_times(x, factors[0]).to(dtype) for x, dtype in zip(gradients, ctx.dtypes, strict=True))
        return None, None, *scaled


def _times(x: Tensor, factor: Tensor) -> Tensor:
    """x · factor (), in place unless that would round the factor."""
    return x.mul_(factor) if x.dtype == factor.dtype else x.to(factor.dtype) * factor


class ChunkedLoss(nn.Module):
    """The loss slot over `tokens` tokens at a time: what stood there, for each chunk, and differentiated at once.

    Where x (B, T/tp, d) is split over tp and labels (B, T) are not, a chunk has as many tokens of each rank.
    """

    def __init__(self, inner: nn.Module, tokens: int) -> None:
        super().__init__()
        self.inner, self.tokens = inner, tokens

    def forward(self, x: Tensor, projection: nn.Module, labels: Tensor) -> Terms:
        parts = labels.shape[1] // x.shape[1]
        size = max(1, self.tokens // parts)
        labels = labels.unflatten(1, (parts, -1)).transpose(0, 1).flatten(1)  # (tp, B·T/tp)
        pieces = [piece.reshape(1, -1) for piece in labels.split(size, dim=1)]
        x = x.reshape(1, -1, x.shape[-1])
        wanted = [i for i in (x, *projection.parameters()) if i.requires_grad]
        chunks = list(zip(x.split(size, dim=1), pieces, strict=True))
        if not (wanted and torch.is_grad_enabled()):
            return self._sums(chunks, projection)
        sums, gradients = self._differentiated(x, chunks, projection)
        values = _Known.apply(sums, gradients, *wanted)  # type: ignore[no-untyped-call]
        return dict(zip(sums, values, strict=True))

    def _sums(self, chunks: Sequence[tuple[Tensor, Tensor]], projection: nn.Module) -> Terms:
        sums: Terms = {}
        for x, labels in chunks:
            sums = add_terms(sums, self.inner(x, projection, labels))
        return sums

    def _differentiated(
        self, x: Tensor, chunks: Sequence[tuple[Tensor, Tensor]], projection: nn.Module
    ) -> tuple[Terms, list[Tensor]]:
        """The sums, and their gradient by x (in its dtype) and by the weights (added up in fp32 or wider)."""
        sums: Terms = {}
        weights = [weight for weight in projection.parameters() if weight.requires_grad]
        by_x: list[Tensor] = []
        by_weights: list[Tensor] = []
        for part, labels in chunks:
            leaf = part.detach().requires_grad_(x.requires_grad)
            with torch.enable_grad():
                terms = self.inner(leaf, projection, labels)
                total = torch.stack([value for value in terms.values() if value.requires_grad]).sum()
            found = torch.autograd.grad(total, [leaf, *weights] if x.requires_grad else weights)
            by_x += found[:1] if x.requires_grad else ()
            by_weights = _add(by_weights, found[len(found) - len(weights) :])
            del found  # or it would stand beside the next one
            sums = add_terms(sums, {name: value.detach() for name, value in terms.items()})
        return sums, ([torch.cat(by_x, dim=1)] if by_x else []) + by_weights


def _add(sums: list[Tensor], more: Sequence[Tensor]) -> list[Tensor]:
    wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in more]
    return [total.add_(x) for total, x in zip(sums, wide, strict=True)] if sums else wide
