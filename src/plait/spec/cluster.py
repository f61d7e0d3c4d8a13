"""The machine as data: a device, how devices are linked, and the catalogue of machines that plait knows by name.

Bandwidths are bytes per second of one device in one direction, peaks are dense FLOP per second: what a brochure counts
in both directions or with half of the operands zero is halved in the catalogue. A file of the user's has the same
form, and `plait measure` writes one. Nothing here says how much of a peak a program reaches.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from plait.spec.base import Spec
from plait.spec.errors import UsageError
from plait.spec.nearest import did_you_mean

CATALOGUE = Path(__file__).parent / "catalogue"

Positive = Annotated[float, Field(gt=0)]


class Device(Spec):
    """One accelerator (or, on a CPU node, one process): its memory in bytes, and what it could do at best."""

    name: str
    family: str = ""  # devices that share the calibrated constants of the planner; blank: none do
    kind: Literal["cuda", "rocm", "cpu"]
    memory: int = Field(gt=0)
    bandwidth: Positive
    peaks: Mapping[str, Positive] = Field(min_length=1)
    units: int | None = Field(
        None, ge=1
    )  # multiprocessors, each at one tile of a product at a time; None: any share of one
    source: str = ""

    @property
    def moves_itself(self) -> bool:
        """Whether what computes is also its own host and moves what is sent, so that nothing runs beside anything."""
        return self.kind == "cpu"

    def peak(self, dtype: str) -> float:
        """Dense FLOP per second in a dtype. Raises UsageError where the device has none: no other peak stands in."""
        if dtype not in self.peaks:
            known = ", ".join(self.peaks)
            raise UsageError(f"{self.name} has no peak in {dtype}", f"it has peaks in {known}")
        return self.peaks[dtype]


class Link(Spec):
    """One kind of wire. `domain` devices reach each other over it; None: all devices of the cluster do."""

    bandwidth: Positive
    latency: float = Field(ge=0)
    domain: int | None = Field(None, ge=1)
    staged: bool = False  # what is sent passes through the host's memory: no adapter reads the device's own
    source: str = ""


class Timed(Spec):
    """A collective of neighbours, measured: seconds are `start` + bytes that a ring sends from a rank / `bandwidth`."""

    operation: Literal["all_reduce", "all_gather", "reduce_scatter", "send"]
    ranks: int = Field(ge=2)
    start: float = Field(ge=0)
    bandwidth: Positive


class Measured(Spec):
    """What `plait measure` found: fractions of the device's peaks and of its links, and seconds of one kernel's start.

    They take the place of the calibrated constants of the planner; what was not measured is left out.
    """

    gemm: Mapping[str, Positive] = {}
    expert: Positive | None = None  # grouped products of experts, relative to a dense product
    attention: Positive | None = None
    memory: Positive | None = None
    operands: float | None = Field(
        None, ge=0
    )  # part of a product's reading and writing that its arithmetic does not hide
    update: Positive | None = None  # of the memory's bandwidth, by an optimizer's update
    kernel: float | None = Field(None, ge=0)
    link: Positive | None = None
    collectives: tuple[Timed, ...] = ()


class Cluster(Spec):
    """Devices in nodes of `node`, and the links between them, the fastest (and narrowest) first."""

    name: str
    device: Device
    node: int = Field(ge=1)
    links: tuple[Link, ...] = Field(min_length=1)
    devices: int | None = Field(None, ge=1)  # how many there are; None: as many as asked for
    cores: float | None = Field(None, gt=0)  # of a node, shared by its devices, which are processes; None: not shared
    measured: Measured = Measured()

    def sharers(self, world: int) -> float:
        """Devices at work on each core of a node where `world` of them are: 1 where each has one of its own."""
        return max(1.0, min(world, self.node) / self.cores) if self.cores else 1.0

    def timed(self, operation: str, ranks: int) -> Timed | None:
        """What was measured of a collective in the smallest group that holds `ranks`, or else in the largest."""
        alike = [one for one in self.measured.collectives if one.operation == operation]
        found = sorted(alike, key=lambda one: one.ranks)
        return next((one for one in found if one.ranks >= ranks), found[-1] if found else None)

    def link(self, ranks: int, stride: int = 1) -> Link:
        """The narrowest link that a group of `ranks` crosses whose neighbours are `stride` ranks apart."""
        reach = (ranks - 1) * stride + 1
        return next((link for link in self.links if link.domain is None or reach <= link.domain), self.links[-1])

    @property
    def domain(self) -> int:
        """Devices that the fastest link joins."""
        return self.links[0].domain or self.node


def known_clusters() -> list[str]:
    """The names of the catalogue."""
    return sorted(path.stem for path in (CATALOGUE / "clusters").glob("*.toml"))


@lru_cache(maxsize=64)
def load_cluster(name: str) -> Cluster:
    """The cluster of that name, or of that file (a path that ends in .toml).

    Raises UsageError for a name that is not in the catalogue, and for a file that is not a cluster's.
    """
    if not name.endswith(".toml") and name not in known_clusters():
        way = "a file of a cluster ends in .toml" if Path(name).exists() else did_you_mean(name, known_clusters())
        raise UsageError(f"cluster {name!r} is not in the catalogue", way or "known: " + ", ".join(known_clusters()))
    path = Path(name) if name.endswith(".toml") else CATALOGUE / "clusters" / f"{name}.toml"
    table = _read(path)
    device = table.get("device")
    if isinstance(device, str):
        of_catalogue = CATALOGUE / "devices" / f"{device}.toml"
        if not of_catalogue.is_file():
            known = sorted(p.stem for p in of_catalogue.parent.glob("*.toml"))
            near = did_you_mean(device, known) or "known: " + ", ".join(known)
            raise UsageError(f"{path}: device {device!r} is unknown", f"{near}; or a table [device] with its figures")
        table = {**table, "device": _read(of_catalogue)}
    try:
        return Cluster.model_validate(_rows_as_tuples(table))
    except ValidationError as error:
        wrong = "; ".join(_told(dict(one)) for one in error.errors())
        raise UsageError(f"{path}: {wrong}", "plait measure writes such a file") from error


def _rows_as_tuples(table: dict[str, Any]) -> dict[str, Any]:
    """Lists of tables, as specs hold them; what is of another type stays, to be refused by its spec."""
    fixed = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    if isinstance(measured := fixed.get("measured"), dict):
        fixed["measured"] = _rows_as_tuples(measured)
    return fixed


def _told(error: dict[str, Any]) -> str:
    """One reason of pydantic's: key, what it should be, and what a single value is instead."""
    key, value = ".".join(str(part) for part in error["loc"]), error["input"]
    return f"{key}: {error['msg']}" + (f", is {value!r}" if isinstance(value, int | float | str) else "")


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read: {error.strerror}", "known: " + ", ".join(known_clusters())
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not TOML: {error}") from error
