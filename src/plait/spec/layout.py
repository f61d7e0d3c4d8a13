"""Who stands where: ranks, coordinates and groups of a job, as arithmetic on a frozen value.

A layout knows every group that any mechanism will ask for, in the dense view (pp, dp, cp, tp), in the expert view
(the same ranks of a stage as edp x ep x etp), the factors of an axis (tp = kv x copies, cp = ring x ulysses,
dp·cp = replicate x shard) and the subset that shares a tied tensor. It makes no process group and knows no model.
Degrees that do not fit each other are refused when a layout is made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import product
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, Self

from pydantic import Field, model_validator

from plait.spec.base import Spec
from plait.spec.errors import InvalidRun, Violation
from plait.spec.nearest import nearest_divisors

AXES = ("pp", "dp", "cp", "tp")
MOST_RANKS = 2**20  # a world is a table in memory, and one beyond any machine is a slip of the keyboard

# Group -> the coordinates that its ranks have in common; along all others they differ.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "self": AXES,
    "pp": ("dp", "cp", "tp"),
    "dp": ("pp", "cp", "tp"),
    "cp": ("pp", "dp", "tp"),
    "tp": ("pp", "dp", "cp"),
    "kv": ("pp", "dp", "cp", "copy"),  # different key/value heads
    "copies": ("pp", "dp", "cp", "kv"),  # the same key/value heads, where tp > kv heads
    "ring": ("pp", "dp", "tp", "ulysses"),
    "ulysses": ("pp", "dp", "tp", "ring"),
    "dp_cp": ("pp", "tp"),  # all ranks whose tokens meet the same weights
    "shard": ("pp", "tp", "replicate"),  # ZeRO's shards
    "replicate": ("pp", "tp", "shard"),
    "edp": ("pp", "ep", "etp"),
    "ep": ("pp", "edp", "etp"),
    "etp": ("pp", "edp", "ep"),
    "tied": ("dp", "cp", "tp"),  # of these only the first and the last stage
    "stage": ("pp",),
    "world": (),
}

# Group -> the axis under which its traffic is reported.
AXIS_OF: Mapping[str, str] = {
    **{name: name for name in ("pp", "dp", "cp", "tp", "ep", "tied", "world")},
    "kv": "tp", "copies": "tp", "ring": "cp", "ulysses": "cp", "dp_cp": "dp", "shard": "dp", "replicate": "dp",
    "edp": "dp", "etp": "tp", "stage": "world", "self": "world",
}  # fmt: skip

# Group -> how many ranks stand in each group of that name.
SIZES: Mapping[str, Callable[[Layout], int]] = {
    "self": lambda x: 1,
    "pp": lambda x: x.pp,
    "dp": lambda x: x.dp,
    "cp": lambda x: x.cp,
    "tp": lambda x: x.tp,
    "kv": lambda x: x.kv,
    "copies": lambda x: x.tp // x.kv,
    "ring": lambda x: x.cp // x.ulysses,
    "ulysses": lambda x: x.ulysses,
    "dp_cp": lambda x: x.dp * x.cp,
    "shard": lambda x: x.shard,
    "replicate": lambda x: x.dp * x.cp // x.shard,
    "edp": lambda x: x.ranks_per_stage // (x.ep * x.etp),
    "ep": lambda x: x.ep,
    "etp": lambda x: x.etp,
    "tied": lambda x: min(x.pp, 2),
    "stage": lambda x: x.ranks_per_stage,
    "world": lambda x: x.world,
}


class Coordinates(NamedTuple):
    """Where one rank stands, in every view at once."""

    pp: int
    dp: int
    cp: int
    tp: int
    kv: int
    copy: int
    ring: int
    ulysses: int
    replicate: int
    shard: int
    edp: int
    ep: int
    etp: int


class Layout(Spec):
    """The degrees of every axis and the order in which ranks walk through them. world = pp·dp·cp·tp.

    `kv` of the tp ranks hold different key/value heads, the rest are copies; `ulysses` of the cp ranks exchange heads,
    the rest form rings; `shard` of the dp·cp ranks hold different ZeRO shards, the rest replicate. `order` is slowest
    first: the last axis has adjacent ranks.
    """

    pp: int = Field(1, ge=1)
    dp: int = Field(1, ge=1)
    cp: int = Field(1, ge=1)
    tp: int = Field(1, ge=1)
    ep: int = Field(1, ge=1)
    etp: int = Field(1, ge=1)
    kv: int = Field(1, ge=1)
    ulysses: int = Field(1, ge=1)
    shard: int = Field(1, ge=1)
    sequence_parallel: bool = False
    order: tuple[str, ...] = AXES

    @model_validator(mode="after")
    def _refuse_impossible(self) -> Self:
        if found := violations(self):
            raise InvalidRun(found)
        return self

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def ranks_per_stage(self) -> int:
        return self.dp * self.cp * self.tp

    def size(self, group: str) -> int:
        """The number of ranks in each group of that name."""
        return SIZES[group](self)

    def coordinates(self, rank: int) -> Coordinates:
        """The coordinates of a rank in every view."""
        if not 0 <= rank < self.world:
            raise IndexError(f"rank {rank} of a world of {self.world}")
        return _all_coordinates(self)[rank]

    def rank(self, *, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """The rank that stands at these dense coordinates."""
        at = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
        rank = 0
        for axis in self.order:
            rank = rank * int(getattr(self, axis)) + at[axis]
        return rank

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """All groups of that name, each with its ranks in the order of the varying coordinate."""
        return _groups(self, name)

    def group(self, name: str, rank: int) -> tuple[int, ...]:
        """The group of that name in which `rank` stands; of `tied`, the first and last stage of its pipeline."""
        return _groups_by_rank(self, name)[rank]


def violations(layout: Layout) -> list[Violation]:
    """Every reason why these degrees do not fit each other, under the keys of a run file."""
    if sorted(layout.order) != sorted(AXES):
        problem = f"{list(layout.order)} does not name each of {len(AXES)} axes once"
        return [Violation("layout.order", problem, f"a permutation of {list(AXES)}")]
    if layout.world > MOST_RANKS:
        return [Violation("layout", f"a world of {layout.world} ranks is more than {MOST_RANKS}", "use fewer")]
    stage, domain = layout.ranks_per_stage, layout.dp * layout.cp
    found = [
        Violation(key, f"{parts} does not divide {what} {total}", f"use {nearest_divisors(total, parts)}")
        for key, parts, what, total in (
            ("layout.ulysses", layout.ulysses, "cp", layout.cp),
            ("layout.kv", layout.kv, "tp", layout.tp),
            ("zero.shard", layout.shard, "dp·cp", domain),
        )
        if total % parts
    ]
    if layout.etp not in (1, layout.tp):
        found.append(Violation("layout.etp", f"etp {layout.etp} is neither 1 nor tp {layout.tp}", "use one of them"))
    elif stage % (layout.ep * layout.etp):
        problem = f"ep {layout.ep} × etp {layout.etp} does not divide the stage's dp·cp·tp {stage}"
        found.append(Violation("layout.ep", problem, f"use {nearest_divisors(stage // layout.etp, layout.ep)}"))
    return found


def _strides(layout: Layout, axes: tuple[str, ...]) -> tuple[int, ...]:
    """What a step along each axis of AXES adds to the index that flattens `axes` as they stand in `order`."""
    stride, strides = 1, dict.fromkeys(AXES, 0)
    for axis in reversed(layout.order):
        if axis in axes:
            strides[axis] = stride
            stride *= SIZES[axis](layout)
    return tuple(strides[axis] for axis in AXES)


def _walk(layout: Layout) -> Iterator[Coordinates]:
    """The coordinates of rank 0, 1, 2, ..."""
    copies, ulysses, shard = layout.tp // layout.kv, layout.ulysses, layout.shard
    ep, etp = layout.ep, layout.etp
    _, dp_in_domain, cp_in_domain, _ = _strides(layout, ("dp", "cp"))
    _, dp_in_stage, cp_in_stage, tp_in_stage = _strides(layout, ("dp", "cp", "tp"))
    in_axes = itemgetter(*(layout.order.index(axis) for axis in AXES))
    for digits in product(*(range(SIZES[axis](layout)) for axis in layout.order)):
        pp, dp, cp, tp = in_axes(digits)
        domain = dp * dp_in_domain + cp * cp_in_domain
        stage = dp * dp_in_stage + cp * cp_in_stage + tp * tp_in_stage
        yield Coordinates(
            pp, dp, cp, tp,
            kv=tp // copies, copy=tp % copies,
            ring=cp // ulysses, ulysses=cp % ulysses,
            replicate=domain // shard, shard=domain % shard,
            edp=stage // (ep * etp), ep=stage // etp % ep, etp=stage % etp,
        )  # fmt: skip


@lru_cache(maxsize=16)
def _all_coordinates(layout: Layout) -> tuple[Coordinates, ...]:
    return tuple(_walk(layout))


@lru_cache(maxsize=128)
def _groups(layout: Layout, name: str) -> tuple[tuple[int, ...], ...]:
    common: Callable[[Coordinates], Any] = attrgetter(*GROUPS[name]) if GROUPS[name] else lambda at: ()
    members: dict[Any, list[int]] = defaultdict(list)
    for rank, at in enumerate(_all_coordinates(layout)):
        members[common(at)].append(rank)
    # In the order of ranks, which is the order of the coordinate that varies: it grows with the rank while all others
    # stay.
    groups = [tuple(ranks) for ranks in members.values()]
    return tuple(_ends(group) for group in groups) if name == "tied" else tuple(groups)


def _ends(pipeline: tuple[int, ...]) -> tuple[int, ...]:
    """First and last stage of a pipeline; one rank where they are the same."""
    return tuple(dict.fromkeys((pipeline[0], pipeline[-1])))


@lru_cache(maxsize=128)
def _groups_by_rank(layout: Layout, name: str) -> Mapping[int, tuple[int, ...]]:
    if name == "tied":
        return {rank: _ends(pipeline) for rank, pipeline in _groups_by_rank(layout, "pp").items()}
    return {rank: group for group in _groups(layout, name) for rank in group}
