"""Bugs planted on purpose, as a table: a proof that lets one of them pass proves nothing.

Each row breaks one thing of `parallel/` or `train/` in the process of a rank (never in the reference) by replacing one
function. They are the mistakes that trainers have really made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from plait.models.attention import Core
from plait.models.where import Where
from plait.parallel import collectives, gradients, tensor
from plait.parallel.collectives import Group, Transfer
from plait.parallel.gradients import Gradients
from plait.parallel.stage import DecoderStage
from plait.parallel.tensor import RowLinear, SplitTokens
from plait.placement import Placement
from plait.train.step import Step


def mean_for_sum() -> None:
    """Gradients are averaged over data-parallel ranks, though the loss is already divided by all labels."""
    plain = collectives.sum_in_place

    def mean(x: Tensor, group: Group) -> Transfer:
        transfer = plain(x, group)
        if group.name == "dp_cp" and x.is_floating_point():
            transfer.wait().div_(group.size)
        return transfer

    gradients.comm.sum_in_place = mean


def mean_of_rank_means() -> None:
    """Each data-parallel rank divides by its own labels."""
    tensor.comm.start_all_reduce = _skip(collectives.start_all_reduce, lambda g: g.name == "dp_cp")
    tensor.comm.finish_all_reduce = _skip(collectives.finish_all_reduce, lambda g: g.name == "dp_cp")


def split_norms_not_summed() -> None:
    """Norm gradients of split tokens stay partial over tp."""
    gradients.SECOND_GROUPS = ("copies", "tied")


def copied_heads_not_summed() -> None:
    """Key and value gradients stay partial where tp ranks share kv heads."""
    gradients.SECOND_GROUPS = ("tp", "tied")


def tied_table_not_summed() -> None:
    """First and last stage keep their own gradient of the tied table."""
    gradients.SECOND_GROUPS = ("copies", "tp")


def copies_counted_in_norm() -> None:
    """The gradient norm counts every copy of a tensor."""
    Placement.copies = 1  # type: ignore[assignment]


def input_gradient_not_summed() -> None:
    """A column's input gradient misses its reduction: one collective dropped."""
    tensor.comm.start_all_reduce = _skip(collectives.start_all_reduce, lambda g: g.name == "tp")
    tensor.comm.finish_all_reduce = _skip(collectives.finish_all_reduce, lambda g: g.name == "tp")


def labels_shifted_again() -> None:
    """Labels are shifted after the split into micro-batches too."""
    plain = DecoderStage.begin

    def begin(self: DecoderStage, micros: Any, *rest: Any) -> None:
        plain(self, [m._replace(labels=m.labels.roll(-1, dims=1)) for m in micros], *rest)

    DecoderStage.begin = begin  # type: ignore[method-assign]


def dropout_by_local_position() -> None:
    """Under split tokens every rank draws the mask of the first part."""

    def forward(self: SplitTokens, x: Tensor, where: Where) -> Any:
        return self.inner(x, where.narrow(0, x.shape[1]))

    SplitTokens.forward = forward  # type: ignore[method-assign]


def dropout_by_local_head() -> None:
    """Attention dropout takes each rank's first head for head 0."""
    plain = Core.forward

    def forward(self: Core, *args: Any) -> Tensor:
        self.first_head = 0
        return plain(self, *args)

    Core.forward = forward  # type: ignore[method-assign]


def bias_added_by_every_rank() -> None:
    """A row's bias is added before the sum, so tp times."""

    def forward(self: RowLinear, x: Tensor) -> Tensor:
        y: Tensor = tensor._Row.apply(x, self.weight, self.group, self.split)
        return y if self.bias is None else y + self.group.size * self.bias

    RowLinear.forward = forward  # type: ignore[method-assign]


def sent_before_complete() -> None:
    """Gradients are reduced after the first micro-batch instead of the last."""
    plain, arm = Gradients.zero, Gradients.arm

    def zero_and_arm(self: Gradients) -> None:
        plain(self)
        for stage in self.buckets:
            arm(self, stage)

    Gradients.zero = zero_and_arm  # type: ignore[method-assign]
    Gradients.arm = lambda self, stage: None  # type: ignore[method-assign]


def last_micro_batch_only() -> None:
    """Each micro-batch overwrites the gradient of the one before."""
    plain = DecoderStage.backward

    def backward(self: DecoderStage, micro: int, grads: Any) -> Any:
        if self._live and micro > 0:
            for parameter in self.module.parameters():
                assert parameter.grad is not None
                parameter.grad.zero_()
        return plain(self, micro, grads)

    DecoderStage.backward = backward  # type: ignore[method-assign]


def stale_pipeline_gradient() -> None:
    """A stage answers with the gradient of its output instead of that of its input."""
    plain = DecoderStage.backward

    def backward(self: DecoderStage, micro: int, grads: Any) -> Any:
        returned = plain(self, micro, grads)
        return grads if grads else returned

    DecoderStage.backward = backward  # type: ignore[method-assign]


def dropout_without_step() -> None:
    """Every step drops the same elements."""
    plain = Step._begin
    Step._begin = lambda self, step, *rest: plain(self, min(step, 1), *rest)  # type: ignore[method-assign]


def _skip(function: Callable[..., Any], when: Callable[[Group], bool]) -> Callable[..., Any]:
    return lambda x, group, *rest: x if when(group) else function(x, group, *rest)


BUGS: Mapping[str, Callable[[], None]] = {
    bug.__name__: bug
    for bug in (
        mean_for_sum,
        mean_of_rank_means,
        split_norms_not_summed,
        copied_heads_not_summed,
        tied_table_not_summed,
        copies_counted_in_norm,
        input_gradient_not_summed,
        labels_shifted_again,
        dropout_by_local_position,
        dropout_by_local_head,
        bias_added_by_every_rank,
        sent_before_complete,
        last_micro_batch_only,
        stale_pipeline_gradient,
        dropout_without_step,
    )
}
