"""Recompute: what backward needs is not kept but computed again (Chen et al. 2016; Korthikanti et al. 2022).

| what is split | forward | backward                                  | replaces                                       |
|---------------|---------|-------------------------------------------|------------------------------------------------|
| nothing       | once    | the forward of a part once more, with its | full: blocks.*; selective: norms, activations, |
|               |         | collectives, up to the last saved tensor  | and attention cores that are not fused         |

What autograd saves of a part is dropped, and the first of it that backward asks for runs the part again. Nothing is
restored before: dropout is a hash of global coordinates, so a mask repeats itself. Weights are read then, so a wrapper
outside that gathers them before the block's backward begins is in time.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from plait.models.attention import Core
from plait.models.decoder import Head
from plait.models.layers import NORMS, Activation
from plait.parallel.loss import ChunkedLoss
from plait.spec.run import RecomputeSpec

OUTPUT = -1  # the slot of a part's result; those of its saved tensors are 0, 1, …


class _Complete(Exception):
    """Everything that backward asks for is there: what is left of the forward would be computed for nobody."""


class _Forward:
    """One forward of a module, of which nothing is kept but its inputs: numbers instead of its saved tensors."""

    def __init__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._module = module
        self._inputs = tuple((x.detach(), x.requires_grad) if isinstance(x, Tensor) else (x, False) for x in inputs)
        self._saves = 0
        self._output_uses = 0
        self._found: dict[int, Tensor] = {}

    def drop(self, x: Tensor) -> int:
        """Autograd saves x inside, and gets a number."""
        self._saves += 1
        return self._saves - 1

    def drop_output(self) -> int:
        """Somebody outside saves the result, and gets a number."""
        self._output_uses += 1
        return OUTPUT

    def find(self, slot: int) -> Tensor:
        """The tensor of a number. It is not held here any longer: a second backward computes it once more."""
        if slot not in self._found:
            self._compute_again()
        if slot == OUTPUT and self._output_uses > 1:
            self._output_uses -= 1
            return self._found[slot]
        return self._found.pop(slot)

    def _compute_again(self) -> None:
        saved: list[Tensor] = []

        def keep(x: Tensor) -> None:
            saved.append(x.detach())
            if len(saved) == self._saves and not self._output_uses:
                raise _Complete

        inputs = [x.requires_grad_() if differentiable else x for x, differentiable in self._inputs]
        try:
            with torch.enable_grad(), saved_tensors_hooks(keep, _unasked):
                output = self._module(*inputs)
            if self._output_uses:
                self._found[OUTPUT] = output.detach()
        except _Complete:
            pass
        assert len(saved) == self._saves, f"forward saved {self._saves} tensors, and computed again {len(saved)}"
        self._found |= enumerate(saved)


def _unasked(_: None) -> Tensor:
    raise AssertionError("nothing is differentiated through what was computed again")


class Recomputed(nn.Module):
    """A module of which backward finds nothing but its inputs. `compile` traces it as torch's own recomputation."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Any) -> Any:
        if torch.compiler.is_compiling():
            return checkpoint(self.inner, *inputs, use_reentrant=False)
        if not torch.is_grad_enabled():
            return self.inner(*inputs)
        forward = _Forward(self.inner, inputs)
        with saved_tensors_hooks(forward.drop, forward.find):
            return self.inner(*inputs)


# --- parts of a block, whose results are dropped too ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _View:
    """How a saved tensor lies in a part's result: the result itself, flattened, or transposed."""

    forward: _Forward
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def find(self) -> Tensor:
        return self.forward.find(OUTPUT).as_strided(self.size, self.stride, self.offset)


class _Result(NamedTuple):
    """The storage of a part's result, as long as anybody holds it."""

    storage: weakref.ref[Any]
    version: int
    forward: _Forward


class Results:
    """The results of a block's recomputed parts while the block runs, by storage, so that whoever saves one is told."""

    def __init__(self) -> None:
        self._of: dict[int, _Result] = {}

    def add(self, y: Tensor, forward: _Forward) -> None:
        storage = y.untyped_storage()
        self._of[storage._cdata] = _Result(weakref.ref(storage), y._version, forward)

    def clear(self) -> None:
        self._of = {}

    def pack(self, x: Tensor) -> Tensor | _View:
        """x itself, unless it is a part's result, unchanged since."""
        storage = x.untyped_storage()
        result = self._of.get(storage._cdata)
        if result is None or result.storage() is not storage or result.version != x._version:
            return x
        result.forward.drop_output()
        return _View(result.forward, tuple(x.shape), x.stride(), int(x.storage_offset()))


def _unpack(saved: Tensor | _View) -> Tensor:
    return saved.find() if isinstance(saved, _View) else saved


class RecomputedPart(nn.Module):
    """A part of a block, one tensor its result: neither what it saves nor, outside, the result is kept."""

    def __init__(self, inner: nn.Module, results: Results) -> None:
        super().__init__()
        self.inner, self.results = inner, results

    def forward(self, *inputs: Any) -> Tensor:
        y: Tensor
        if torch.compiler.is_compiling():
            y = checkpoint(self.inner, *inputs, use_reentrant=False)
        elif not torch.is_grad_enabled():
            y = self.inner(*inputs)
        else:
            forward = _Forward(self.inner, inputs)
            with saved_tensors_hooks(forward.drop, forward.find):
                y = self.inner(*inputs)
            self.results.add(y, forward)
        return y


class RecomputedParts(nn.Module):
    """A block in which some parts are a `RecomputedPart`, and nobody saves their results."""

    def __init__(self, inner: nn.Module, results: Results) -> None:
        super().__init__()
        self.inner, self.results = inner, results

    def forward(self, *inputs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self.inner(*inputs)
        try:
            with saved_tensors_hooks(self.results.pack, _unpack):
                return self.inner(*inputs)
        finally:
            self.results.clear()


# Name of a part -> the modules that it means. A fused attention kernel keeps O(S) beside its inputs, and is left alone.
PARTS: Mapping[str, tuple[type[nn.Module], ...]] = {
    "attention": (Core,),
    "norm": tuple(NORMS.values()),
    "activation": (Activation,),
}


def recompute(stage: nn.Module, spec: RecomputeSpec) -> None:
    """Replace the first `spec.layers` blocks of a stage by ones that keep less, and its loss by one in chunks."""
    blocks = stage.get_submodule("blocks")
    assert isinstance(blocks, nn.ModuleDict)
    for name in list(blocks)[: None if spec.layers == "all" else spec.layers]:
        if spec.mode == "full":
            blocks[name] = Recomputed(blocks[name])
        elif spec.parts:
            blocks[name] = _in_parts(blocks[name], spec.parts)
    head = stage.get_submodule("head")
    if spec.loss_chunk and isinstance(head, Head):
        head.loss = ChunkedLoss(head.loss, spec.loss_chunk)


def _in_parts(block: nn.Module, parts: tuple[str, ...]) -> nn.Module:
    results, kinds = Results(), tuple(kind for part in parts for kind in PARTS[part])
    for path, module in list(block.named_modules()):
        if isinstance(module, kinds) and not (isinstance(module, Core) and module.fused):
            parent, _, name = path.rpartition(".")
            setattr(block.get_submodule(parent), name, RecomputedPart(module, results))
    return RecomputedParts(block, results)
