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

    _replace(collectives, "sum_in_place", mean)


def mean_of_rank_means() -> None:
    """Each data-parallel rank divides by its own labels."""
    _skip_all_reduce("dp_cp")


def split_norms_not_summed() -> None:
    """Norm gradients of split tokens stay partial over tp."""
    _replace(gradients, "SECOND_GROUPS", ("copies", "tied"))


def copied_heads_not_summed() -> None:
    """Key and value gradients stay partial where tp ranks share kv heads."""
    _replace(gradients, "SECOND_GROUPS", ("tp", "tied"))


def tied_table_not_summed() -> None:
    """First and last stage keep their own gradient of the tied table."""
    _replace(gradients, "SECOND_GROUPS", ("copies", "tp"))


def copies_counted_in_norm() -> None:
    """The gradient norm counts every copy of a tensor."""
    _replace(Placement, "copies", 1)


def input_gradient_not_summed() -> None:
    """A column's input gradient misses its reduction: one collective dropped."""
    plain = tensor._Column.backward

    def backward(ctx: Any, grad: Tensor) -> Any:
        if not ctx.split:
            ctx.group = Group("tp", (0,), 0)
        return plain(ctx, grad)

    _replace(tensor._Column, "backward", staticmethod(backward))


def labels_shifted_again() -> None:
    """Labels are shifted after the split into micro-batches too."""
    plain = DecoderStage.begin

    def begin(self: DecoderStage, micros: Any, *rest: Any) -> None:
        plain(self, [m._replace(labels=m.labels.roll(-1, dims=1)) for m in micros], *rest)

    _replace(DecoderStage, "begin", begin)


def dropout_by_local_position() -> None:
    """Under split tokens every rank draws the mask of the first part."""

    def forward(self: SplitTokens, x: Tensor, where: Where) -> Any:
        return self.inner(x, where.narrow(0, x.shape[1]))

    _replace(SplitTokens, "forward", forward)


def dropout_by_local_head() -> None:
    """Attention dropout takes each rank's first head for head 0."""
    plain = Core.forward

    def forward(self: Core, *args: Any) -> Tensor:
        self.first_head = 0
        return plain(self, *args)

    _replace(Core, "forward", forward)


def bias_added_by_every_rank() -> None:
    """A row's bias is added before the sum, so tp times."""

    def forward(self: RowLinear, x: Tensor) -> Tensor:
        y: Tensor = tensor._Row.apply(x, self.weight, self.group, self.split)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.group.size * self.bias

    _replace(RowLinear, "forward", forward)


def sent_before_complete() -> None:
    """Gradients are reduced after the first micro-batch instead of the last."""
    plain, arm = Gradients.zero, Gradients.arm

    def zero_and_arm(self: Gradients) -> None:
        plain(self)
        for stage in self.buckets:
            arm(self, stage)

    _replace(Gradients, "zero", zero_and_arm)
    _replace(Gradients, "arm", lambda self, stage: None)


def last_micro_batch_only() -> None:
    """Each micro-batch overwrites the gradient of the one before."""
    plain = DecoderStage.backward

    def backward(self: DecoderStage, micro: int, grads: Any) -> Any:
        if self._live and micro > 0:
            for parameter in self.module.parameters():
                assert parameter.grad is not None
                parameter.grad.zero_()
        return plain(self, micro, grads)

    _replace(DecoderStage, "backward", backward)


def stale_pipeline_gradient() -> None:
    """A stage answers with the gradient of its output instead of that of its input."""
    plain = DecoderStage.backward

    def backward(self: DecoderStage, micro: int, grads: Any) -> Any:
        returned = plain(self, micro, grads)
        return grads if grads else returned

    _replace(DecoderStage, "backward", backward)


def dropout_without_step() -> None:
    """Every step drops the same elements."""
    plain = Step._begin
    _replace(Step, "_begin", lambda self, step, *rest: plain(self, min(step, 1), *rest))


def _replace(owner: object, name: str, by: object) -> None:
    assert hasattr(owner, name), f"nothing to break: {owner} has no {name}"
    setattr(owner, name, by)


def _skip_all_reduce(group_name: str) -> None:
    """Every functional all-reduce over the groups of that name does nothing."""
    for name in ("start_all_reduce", "finish_all_reduce"):
        plain = getattr(collectives, name)

        def skipping(x: Tensor, group: Group, *rest: Any, plain: Callable[..., Tensor] = plain) -> Tensor:
            return x if group.name == group_name else plain(x, group, *rest)

        _replace(collectives, name, skipping)


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
