"""Bugs planted on purpose, as a table: a proof that lets one of them pass proves nothing.

Each row breaks one thing of `parallel/` or `train/` in the process of a rank (never in the reference) by replacing one
function. They are the mistakes that trainers have really made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from plait.data import Batch
from plait.models import moe
from plait.models.attention import Core
from plait.models.where import Where
from plait.parallel import collectives, expert, tensor, zero
from plait.parallel.collectives import Group, Transfer
from plait.parallel.context import Attend
from plait.parallel.expert import SpreadParts
from plait.parallel.late import LateRowLinear
from plait.parallel.loss import ChunkedLoss
from plait.parallel.recompute import _Forward
from plait.parallel.row import Row
from plait.parallel.stage import DecoderStage
from plait.parallel.tensor import RowLinear, SplitTokens
from plait.parallel.zero import States
from plait.placement import Piece
from plait.train.experts import ExpertLoads
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
    _replace(zero, "SECOND_GROUPS", ("copies", "tied"))


def copied_heads_not_summed() -> None:
    """Key and value gradients stay partial where tp ranks share kv heads."""
    _replace(zero, "SECOND_GROUPS", ("tp", "tied"))


def tied_table_not_summed() -> None:
    """First and last stage keep their own gradient of the tied table."""
    _replace(zero, "SECOND_GROUPS", ("copies", "tp"))


def copies_counted_in_norm() -> None:
    """The gradient norm counts every copy of a tensor."""
    _replace(Piece, "copies", 1)


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
    for kind in (RowLinear, LateRowLinear):
        plain = kind.forward

        def forward(self: Any, x: Tensor, plain: Callable[..., Tensor] = plain) -> Tensor:
            y = plain(self, x)
            return y if self.bias is None else y + (self.group.size - 1) * self.bias

        _replace(kind, "forward", forward)


def sent_before_complete() -> None:
    """Gradients are reduced after the first micro-batch instead of the last."""
    plain, arm = States.begin, States.arm

    def begin_and_arm(self: States) -> None:
        plain(self)
        for stage in self._of_stage:
            arm(self, stage)

    _replace(States, "begin", begin_and_arm)
    _replace(States, "arm", lambda self, stage: None)


def last_micro_batch_only() -> None:
    """Each micro-batch overwrites the gradient of the one before."""
    plain = Row.add

    def add(self: Row, index: int, gradient: Tensor) -> None:
        self._filled[index] = False
        plain(self, index, gradient)

    _replace(Row, "add", add)


def padding_in_a_weight() -> None:
    """A shard begins one element too early, so that the end of a buffer holds padding where a weight's gradient was."""
    plain = collectives.sum_to_shards

    def shifted(x: Tensor, group: Group) -> Transfer:
        return plain(x.roll(1) if group.size > 1 else x, group)

    _replace(collectives, "sum_to_shards", shifted)


def last_reduction_only() -> None:
    """Stage 2 keeps the shard of the last micro-batch, not the sum of all."""
    plain = Row.settle

    def settle(self: Row) -> None:
        if self._reducing is not None:
            self._sum = None
        plain(self)

    _replace(Row, "settle", settle)


def replicas_not_summed() -> None:
    """Hybrid sharding forgets the ranks that repeat a shard."""
    _replace(Row, "start_repeat", lambda self: self.settle())


def shards_counted_as_copies() -> None:
    """The norm divides a shard's square by the copies of the whole tensor."""
    _replace(Piece, "copies", property(lambda self: self.placement.copies))


def overflow_not_reduced() -> None:
    """Each rank takes the norm of its own gradients, by which it also judges whether a step overflowed."""
    plain = Step._over_world

    def local(self: Step, norm_squared: Tensor) -> Any:
        sums, uses = plain(self, norm_squared)
        return sums | {"norm": norm_squared.item()}, uses

    _replace(Step, "_over_world", local)


def old_weights_gathered() -> None:
    """The optimizer's new weights are not made everyone's."""
    _replace(Row, "publish", lambda self: Transfer(self.own, []))


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


def other_mask_recomputed() -> None:
    """What is computed again drops other elements than forward did."""
    plain = _Forward._compute_again

    def again(self: _Forward) -> None:
        self._inputs = tuple(
            (x._replace(key=x.key + 1) if isinstance(x, Where) else x, differentiable)
            for x, differentiable in self._inputs
        )
        plain(self)

    _replace(_Forward, "_compute_again", again)


def ignored_labels_in_chunks() -> None:
    """A chunk takes ignored labels for token 0."""
    plain = ChunkedLoss.forward
    _replace(
        ChunkedLoss, "forward", lambda self, x, projection, labels: plain(self, x, projection, labels.clamp(min=0))
    )


def chunk_of_other_labels() -> None:
    """Under split tokens a chunk takes the labels that stand first, not those of the gathered tokens."""
    plain = ChunkedLoss.forward

    def forward(self: ChunkedLoss, x: Tensor, projection: Any, labels: Tensor) -> Any:
        parts = labels.shape[1] // x.shape[1]
        return plain(self, x, projection, labels.unflatten(1, (-1, parts)).transpose(1, 2).flatten(1))

    _replace(ChunkedLoss, "forward", forward)


def z_loss_by_micro_batch() -> None:
    """The z-loss is divided by the labels of its own micro-batch."""
    plain = DecoderStage._roots

    def roots(self: DecoderStage, outputs: Any, terms: Mapping[str, Tensor]) -> Any:
        starts, seeds = plain(self, outputs, terms)
        if "z_loss" in terms and seeds:
            seeds = (*seeds[:-1], (1 / terms["count"].clamp(min=1)).to(seeds[-1]))
        return starts, seeds

    _replace(DecoderStage, "_roots", roots)


def expert_gradients_times_ep() -> None:
    """Experts' gradients are ep times too large: they were made of the tokens of all ep ranks already."""
    plain = States.finish

    def finish(self: States) -> None:
        plain(self)
        for row in self.rows:
            for piece, part in row.gradients() if row.buffer.domain == "edp" else ():
                part.mul_(piece.placement.layout.ep)

    _replace(States, "finish", finish)


def router_detached() -> None:
    """Outputs of experts are weighed by scores that nothing flows back through."""
    plain = moe.combine
    _replace(expert, "combine", lambda out, order, weights: plain(out, order, weights.detach()))


def balance_of_local_tokens() -> None:
    """A rank balances what it sees of a sequence, not the sequence."""
    _replace(SpreadParts, "sum", lambda self, x: x)


def load_of_local_tokens() -> None:
    """Routers move their biases by the load of their own rank."""
    _replace(ExpertLoads, "gather", _gather_alone(ExpertLoads.gather))


def _gather_alone(plain: Callable[[ExpertLoads], None]) -> Callable[[ExpertLoads], None]:
    def gather(self: ExpertLoads) -> None:
        self.group = self.group and Group("stage", (0,), 0)
        plain(self)

    return gather


def labels_shifted_after_split() -> None:
    """The label of a token is the next token that its context rank holds."""
    plain = Batch.columns

    def columns(self: Batch, indices: Tensor) -> Batch:
        part = plain(self, indices)
        return part._replace(labels=part.tokens.roll(-1, dims=1).where(part.labels >= 0, part.labels))

    _replace(Batch, "columns", columns)


def positions_of_the_part() -> None:
    """Positions are counted from the first token that a context rank holds."""
    plain = Batch.columns

    def columns(self: Batch, indices: Tensor) -> Batch:
        return plain(self, indices)._replace(positions=torch.arange(len(indices)))

    _replace(Batch, "columns", columns)


def documents_forgotten_between_ranks() -> None:
    """The mask of documents is dropped where keys come from another rank."""
    plain = Attend.masks

    def masks(self: Attend, tile: Any, source: int, q: Tensor) -> Any:
        if source == self.rank:
            return plain(self, tile, source, q)
        return plain(replace(self, where=self.where._replace(row_documents=None)), tile, source, q)

    _replace(Attend, "masks", masks)


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
        padding_in_a_weight,
        last_reduction_only,
        replicas_not_summed,
        shards_counted_as_copies,
        overflow_not_reduced,
        old_weights_gathered,
        dropout_without_step,
        other_mask_recomputed,
        ignored_labels_in_chunks,
        chunk_of_other_labels,
        z_loss_by_micro_batch,
        expert_gradients_times_ep,
        router_detached,
        balance_of_local_tokens,
        load_of_local_tokens,
        labels_shifted_after_split,
        positions_of_the_part,
        documents_forgotten_between_ranks,
    )
}
