"""Tensors that have a size and no values, and the automatic differentiation that decides how long each of them lives.

What a rank holds at its peak depends on which tensors an operation keeps for its backward, and on the order in which
gradients are made and freed. Here that is repeated, not estimated: an operation makes outputs of the sizes that torch's
CPU kernels make, keeps what they keep, and backward runs nodes as torch does, the latest first. A tensor dies when
nobody refers to it any more. Nothing here knows a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Protocol


class Heap:
    """Bytes that live, and the most that ever did."""

    def __init__(self) -> None:
        self.live = self.most = 0

    def take(self, size: int) -> None:
        self.live += size
        self.most = max(self.most, self.live)

    def give(self, size: int) -> None:
        self.live -= size


class Memory:
    """A storage: its bytes live from here until nobody holds it. Where `heap` is None somebody else counts them."""

    __slots__ = ("__weakref__", "heap", "size")

    def __init__(self, size: int, heap: Heap | None) -> None:
        self.size, self.heap = size, heap
        if heap is not None:
            heap.take(size)

    def __del__(self) -> None:
        if self.heap is not None:
            self.heap.give(self.size)


class Sized:
    """A tensor: `elements` of `width` bytes in a memory that views share; `node` made output `slot`."""

    __slots__ = ("elements", "memory", "needs", "node", "slot", "width")

    def __init__(self, memory: Memory, elements: int, width: int) -> None:
        self.memory, self.elements, self.width = memory, elements, width
        self.node: Node | None = None
        self.slot = 0
        self.needs = False  # whether anything is differentiated by it

    def detach(self) -> Sized:
        return Sized(self.memory, self.elements, self.width)


class Leaf(Sized):
    """What is differentiated by and came from nothing: `gradients` takes what is found, under the name `place`."""

    __slots__ = ("gradients", "place")

    def __init__(self, memory: Memory, elements: int, width: int, gradients: Gradients, place: Any) -> None:
        super().__init__(memory, elements, width)
        self.gradients, self.place = gradients, place
        self.needs = True


class Gradients(Protocol):
    """Who takes gradients of leaves."""

    def keeps(self, place: Any) -> bool:
        """Whether the next gradient stays where backward puts it."""

    def add(self, place: Any, gradient: Sized) -> None:
        """Take a gradient."""


Saved = Sequence[Sized]
Grads = Sequence[Sized | None]
Backward = Callable[[Saved, Grads], Grads]


class Hooks(Protocol):
    """What is done with tensors that operations save."""

    def pack(self, x: Sized) -> Any: ...

    def unpack(self, packed: Any) -> Sized: ...


@dataclass(eq=False)
class Node:
    """An operation that has been run: what it saved, and how it turns gradients of outputs into those of inputs."""

    number: int
    inputs: list[tuple[Node | Leaf | None, int, int, int]]  # who made it, as which output; elements, width
    outputs: int
    saved: list[tuple[Hooks | None, Any]]
    backward: Backward | None

    def unpack(self) -> list[Sized]:
        return [x if hooks is None else hooks.unpack(x) for hooks, x in self.saved]

    def release(self) -> None:
        self.saved, self.backward = [], None


@dataclass
class Tape:
    """Makes tensors and records operations."""

    heap: Heap = field(default_factory=Heap)
    _hooks: list[Hooks] = field(default_factory=list)
    _runs: list[_Run] = field(default_factory=list)
    _number: int = 0

    def new(self, elements: int, width: int) -> Sized:
        return Sized(Memory(elements * width, self.heap), elements, width)

    def gradient(self, weight: Leaf, width: int | None = None) -> Sized:
        """A tensor for a gradient of a weight; where it stays for good, it is no activation."""
        width = weight.width if width is None else width
        whole = not self._runs or self._runs[-1].times.get(weight, 1) == 1
        return self.whole_gradient(weight, width) if whole else self.new(weight.elements, width)

    def whole_gradient(self, weight: Leaf, width: int) -> Sized:
        """The same of one that nothing is added to before it is taken."""
        stays = width == weight.width and weight.gradients.keeps(weight.place)
        return Sized(Memory(weight.elements * width, None if stays else self.heap), weight.elements, width)

    @contextmanager
    def hooks(self, hooks: Hooks) -> Iterator[None]:
        self._hooks.append(hooks)
        try:
            yield
        finally:
            self._hooks.pop()

    def record(
        self, inputs: Sequence[Sized], outputs: Sequence[Sized], saved: Iterable[Sized], backward: Backward
    ) -> None:
        """Tie outputs to the inputs that they came from, if anything is differentiated by those."""
        if not any(x.needs for x in inputs):
            return
        hooks = self._hooks[-1] if self._hooks else None
        kept = [(hooks, x.detach() if hooks is None else hooks.pack(x)) for x in saved]
        edges = [
            (x if isinstance(x, Leaf) else x.node if x.needs else None, x.slot, x.elements, x.width) for x in inputs
        ]
        self._number += 1
        node = Node(self._number, edges, len(outputs), kept, backward)
        for slot, out in enumerate(outputs):
            out.node, out.slot, out.needs = node, slot, True

    def backward(self, roots: Sequence[Sized], gradients: Sequence[Sized]) -> None:
        """Gradients of everything that the roots came from, the latest operation first."""
        run = _Run(self, roots)
        for root, gradient in zip(roots, gradients, strict=True):
            run.give(root.node, root.slot, gradient)
        del gradients
        self._runs.append(run)
        run.all()
        self._runs.pop()


class _Run:
    """One backward pass: gradients that wait for their node, or for others of a leaf that is read more than once."""

    def __init__(self, tape: Tape, roots: Sequence[Sized]) -> None:
        self.tape = tape
        self.times = _readings(roots)
        self.missing = self.times.copy()
        self.partial: dict[Leaf, Sized] = {}
        self.waiting: dict[int, list[Sized | None]] = {}
        self.ready: list[tuple[int, Node]] = []

    def give(self, node: Node | Leaf | None, slot: int, gradient: Sized) -> None:
        if not isinstance(node, Node):
            return
        if node.number not in self.waiting:
            self.waiting[node.number] = [None] * node.outputs
            heappush(self.ready, (-node.number, node))
        held = self.waiting[node.number]
        there = held[slot]
        held[slot] = gradient if there is None else self.tape.new(gradient.elements, gradient.width)

    def all(self) -> None:
        while self.ready:
            _, node = heappop(self.ready)
            self._distribute(node, self._gradients(node))

    def _gradients(self, node: Node) -> list[Sized | None]:
        given = self.waiting.pop(node.number)
        assert node.backward is not None, "a graph is differentiated once"
        found = list(node.backward(node.unpack(), given))
        for at, (maker, _, elements, width) in enumerate(node.inputs):
            found[at] = self._fitted(_taken(found, at), maker, elements, width)
        del given
        node.release()
        return found

    def _fitted(self, gradient: Sized | None, maker: Any, elements: int, width: int) -> Sized | None:
        """A gradient in the shape and the dtype of its input."""
        if gradient is None or maker is None:
            return None
        for fits, found in ((gradient.elements == elements, gradient.width), (gradient.width == width, width)):
            if not fits and isinstance(maker, Leaf):
                gradient = self.tape.gradient(maker, found)
            elif not fits:
                gradient = self.tape.new(elements, found)
        return gradient

    def _distribute(self, node: Node, found: list[Sized | None]) -> None:
        leaves = []
        for at, (maker, slot, _, _) in enumerate(node.inputs):
            gradient, found[at] = found[at], None
            if isinstance(maker, Leaf):
                leaves.append((maker, gradient))
            elif gradient is not None:
                self.give(maker, slot, gradient)
        gradient = None
        while leaves:
            self._deliver(*leaves.pop(0))

    def _deliver(self, leaf: Leaf, gradient: Sized | None) -> None:
        """To whoever takes it, once no other gradient of the leaf is missing."""
        self.missing[leaf] -= 1
        there = self.partial.pop(leaf, None)
        if there is not None and gradient is not None:
            makes = self.tape.gradient if self.missing[leaf] else self.tape.whole_gradient
            gradient = makes(leaf, max(there.width, gradient.width))
        elif gradient is None:
            gradient = there
        del there
        if gradient is not None and self.missing[leaf]:
            self.partial[leaf] = gradient
        elif gradient is not None:
            leaf.gradients.add(leaf.place, gradient)


def _readings(roots: Sequence[Sized]) -> Counter[Leaf]:
    """How often each leaf is read by what the roots came from."""
    found: Counter[Leaf] = Counter()
    seen: set[int] = set()
    ahead = [root.node for root in roots if root.node is not None]
    while ahead:
        node = ahead.pop()
        if node.number in seen:
            continue
        seen.add(node.number)
        for maker, *_ in node.inputs:
            if isinstance(maker, Leaf):
                found[maker] += 1
            elif maker is not None:
                ahead.append(maker)
    return found


def _taken(found: list[Sized | None], at: int) -> Sized | None:
    """An entry that the list holds no longer."""
    entry, found[at] = found[at], None
    return entry
