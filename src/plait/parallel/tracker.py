"""Bytes of tensors that are born while a step runs, counted where torch dispatches: what each block keeps, and peaks.

What is split: nothing; no collective; replaces nothing. Hooks on saved tensors would see neither what a recomputation
works with nor that two saved tensors share memory; a storage is counted once here, from its birth to its death.
What a kernel allocates inside itself is not seen. Weights and the like that are there before are not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class BlockBytes:
    """Of one block: `kept` from one micro-batch's forward for its backward, result included; `peak` is the most that
    all activations held at one time while the block worked."""

    kept: int
    peak: int


@dataclass(frozen=True)
class StepBytes:
    """Of one step: the most activations at any time, the most while nothing worked (from forward to backward), the
    most in buffers (gathered weights, gradients on their way), and activations by layer."""

    peak: int
    between: int
    buffers: int
    blocks: Mapping[int, BlockBytes]


class _Event(NamedTuple):
    """A change of what is held, or a mark: `what` begins or ends to work."""

    storage: int
    change: int
    begins: str = ""
    ends: str = ""


FOLLOWED, MARK = -1, -2  # in place of a storage's number
MESSAGES = ("send", "recv_")  # of activations, which they stay


class Tracker(TorchDispatchMode):
    """Counts while it is entered. `watch` names who works when; `report` judges at the end.

    `followed` are tensors that are there before, and whose memory comes and goes.
    """

    def __init__(self, followed: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._followed = [x.untyped_storage() for x in followed]
        self._followed_bytes = 0
        self._events: list[_Event] = []
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}  # address -> the storage, its number
        self._moved: set[int] = set()
        self._born = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._followed:
            self._follow()  # what was freed since then made room for what is born now
        given = {_address(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and _address(x) not in given:
                self._see(x)
        if func.namespace == "c10d" and func.overloadpacket.__name__ not in MESSAGES:
            self._moved |= {self._alive[address][1] for address in given if address in self._alive}
        if self._followed:
            self._follow()
        return out

    def _see(self, x: Tensor) -> None:
        storage, address = x.untyped_storage(), _address(x)
        known = self._alive.get(address)
        if known is not None and known[0]() is storage:
            return
        number, size = self._born, storage.nbytes()
        self._born += 1
        self._events.append(_Event(number, size))
        dead = partial(self._died, number, size)
        self._alive[address] = weakref.ref(storage, lambda _: dead()), number

    def _died(self, number: int, size: int) -> None:
        self._events.append(_Event(number, -size))

    def _follow(self) -> None:
        now = sum(storage.nbytes() for storage in self._followed)
        if now != self._followed_bytes:
            self._events.append(_Event(FOLLOWED, now - self._followed_bytes))
            self._followed_bytes = now

    @contextmanager
    def watch(self, stages: Iterable[nn.Module]) -> Iterator[None]:
        """Mark when the forward of each stage ends, and when each of its blocks works, in either direction."""
        handles = []
        for stage in stages:
            handles.append(stage.register_forward_hook(lambda *_: self._mark(ends="stage")))
            for layer, block in stage.get_submodule("blocks").named_children():
                handles.append(block.register_forward_pre_hook(partial(self._enter, layer)))
                handles.append(block.register_forward_hook(partial(self._leave, layer)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _mark(self, begins: str = "", ends: str = "") -> None:
        self._events.append(_Event(MARK, 0, begins, ends))

    def _enter(self, layer: str, block: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._mark(begins=f"forward {layer}")
        if inputs[0].requires_grad and torch.is_grad_enabled():
            inputs[0].register_hook(lambda _: self._mark(ends=f"backward {layer}"))

    def _leave(self, layer: str, block: nn.Module, inputs: tuple[Any, ...], out: Any) -> None:
        self._mark(ends=f"forward {layer}")
        y = out[0] if isinstance(out, tuple) else out
        if y.requires_grad:
            y.register_hook(lambda _: self._mark(begins=f"backward {layer}"))

    def report(self, but: Iterable[Tensor] = ()) -> StepBytes:
        """The bytes of everything born but the storages of some tensors (gradients that stay, say)."""
        kept = self._numbers(but)
        buffers = [e for e in self._events if e.storage in (self._moved | {FOLLOWED}) - kept]
        peak, between, blocks = _replay(self._activations(kept))
        return StepBytes(peak, between, _replay(buffers)[0], blocks)

    def held(self, but: Iterable[Tensor] = ()) -> int:
        """The bytes of activations that are there now, without the storages of some tensors."""
        return sum(event.change for event in self._activations(self._numbers(but)))

    def _activations(self, kept: set[int]) -> list[_Event]:
        return [e for e in self._events if e.storage not in kept | self._moved | {FOLLOWED}]

    def _numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        return {known[1] for x in tensors if (known := self._alive.get(_address(x))) is not None}


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes in memory, each storage once."""
    return sum({_address(x): x.untyped_storage().nbytes() for x in tensors}.values())


def _address(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _replay(events: list[_Event]) -> tuple[int, int, dict[int, BlockBytes]]:
    """(peak, most while nothing worked, by layer)."""
    held = peak = between = 0
    working: dict[str, int] = {}  # who works -> held when it began
    kept: dict[int, int] = {}
    peaks: dict[int, int] = {}
    resting = False  # since a stage's forward ended: what dies now was its result, what is born is somebody's work
    for event in events:
        if resting and event.change > 0:
            between, resting = max(between, held), False
        held += event.change
        peak = max(peak, held)
        for who in working if event.change > 0 else ():
            layer = int(who.split()[1])
            peaks[layer] = max(peaks.get(layer, 0), held)
        resting = resting or event.ends == "stage"
        if event.begins:
            working[event.begins] = held
        if event.ends in working:
            direction, layer = event.ends.split()[0], int(event.ends.split()[1])
            before = working.pop(event.ends)
            if direction == "forward":
                kept[layer] = max(kept.get(layer, 0), held - before)
    return peak, between, {layer: BlockBytes(kept[layer], peaks.get(layer, 0)) for layer in sorted(kept)}
