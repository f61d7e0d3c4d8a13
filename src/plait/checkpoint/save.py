"""Saving: a snapshot is copied at once, and written, agreed upon and published beside training, by a thread.

Each rank writes one file with what it is the first to hold. The thread has a communicator of its own, on the CPU: all
ranks report, and rank 0 publishes the manifest only where every file is on the disk and every number finite.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.checkpoint.files import Checksums, header_of, size_of, write_file
from plait.checkpoint.manifest import MANIFEST, WEIGHT, Facts, Manifest, Part, key_of, write_manifest
from plait.checkpoint.manifest import Tensor as TensorFacts
from plait.checkpoint.shelf import clear, expire, folder_of
from plait.parallel import collectives as comm
from plait.parallel.collectives import Group
from plait.parallel.faults import strike
from plait.placement import Piece
from plait.placement.cuts import Rectangle, area
from plait.spec.errors import PlaitError, SaveFailed, TrainingStopped

Parts = Sequence[tuple[Piece, Tensor]]
CHUNK = 1 << 20  # elements written at once


class Item(NamedTuple):
    """A rectangle of one state of a tensor, with its values, flat."""

    state: str
    name: str
    rectangle: Rectangle
    values: Tensor

    @property
    def key(self) -> str:
        return key_of(self.state, self.name, self.rectangle)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.rectangle)


@dataclass(frozen=True)
class Snapshot:
    """What a rank will write: a copy on the CPU, which training does not touch, and (state, piece, its part of it)."""

    rank: int
    copy: Tensor
    parts: Sequence[tuple[str, Piece, Tensor]]

    def items(self) -> list[Item]:
        """The rectangles of the copy, in its order. It takes milliseconds: for the thread that writes."""
        return [
            Item(state, piece.placement.tensor.name, rectangle, values)
            for state, piece, part in self.parts
            for rectangle, values in _rectangles(piece, self.rank, part)
        ]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Those of all tensors that this rank is the first to hold a part of."""
        return {piece.placement.tensor.name: piece.placement.tensor.shape for _, piece, _ in self.parts}


@torch.no_grad()
def snapshot(states: Mapping[str, Parts], rank: int, memory: Tensor | None = None) -> Snapshot:
    """Copy what `rank` writes of each state (its name -> parts), over the copy of an earlier snapshot if that fits."""
    owned = [(state, piece, part) for state, parts in states.items() for piece, part in parts if piece.first_copy(rank)]
    if not owned:  # another rank speaks for all that this one holds
        return Snapshot(rank, torch.empty(0), ())
    sources = [part.detach() for _, _, part in owned]
    sizes, dtype, pinned = [source.numel() for source in sources], sources[0].dtype, sources[0].is_cuda
    if memory is None or (memory.numel(), memory.dtype) != (sum(sizes), dtype):
        memory = torch.empty(sum(sizes), dtype=dtype, pin_memory=pinned)
    targets = list(memory.split(sizes))
    torch._foreach_copy_(targets, sources, non_blocking=pinned)
    if pinned:
        torch.cuda.synchronize()
    return Snapshot(rank, memory, [(s, piece, part) for (s, piece, _), part in zip(owned, targets, strict=True)])


def _rectangles(piece: Piece, rank: int, values: Tensor) -> Iterator[tuple[Rectangle, Tensor]]:
    found = list(piece.rectangles(rank))
    yield from zip(found, values.split([area(rectangle) for rectangle in found]), strict=True)


class Saver:
    """Saves of one run, one after the other. `group` is of the world, on the CPU, and nobody else's.

    After a failed save `failed` is true on this rank, and `wait` raises the same error on all ranks.
    """

    def __init__(self, shelf: Path, group: Group, keep: int) -> None:
        self.shelf, self.group, self.keep = shelf, group, keep
        self._thread: threading.Thread | None = None
        self._memory: Tensor | None = None  # of the last snapshot: fresh memory costs more than the copy into it
        self._error: BaseException | None = None
        self._name: str | None = None  # what this job's files begin with: another's in the same folder have other names

    @property
    def failed(self) -> bool:
        return self._error is not None

    def start(self, states: Mapping[str, Parts], facts: Facts) -> None:
        """Copy the states, and write the copy beside what this thread does next. A save that still goes on is waited
        for."""
        self.wait()
        taken = snapshot(states, self.group.rank, self._memory)
        self._memory = taken.copy
        self._thread = threading.Thread(target=self._run, args=(taken, facts), name="plait save", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until the last save is published. Raises what kept it from that."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self, taken: Snapshot, facts: Facts) -> None:
        try:
            self._save(taken, facts)
        except BaseException as error:  # it is raised again by `wait`, in the thread that can act on it
            self._error = error
            if self.group.rank == 0 and isinstance(error, PlaitError):
                print(f"step {facts.step}: {error.message}", file=sys.stderr, flush=True)

    def _save(self, taken: Snapshot, facts: Facts) -> None:
        rank, step = self.group.rank, facts.step
        folder = folder_of(self.shelf, step)
        name = self._begin(step)
        strike(rank, step, "save opened")
        report = _attempt(lambda: _write(folder / f"{name}-rank-{rank:05d}.safetensors", taken, step))
        reports = self._agree(report)
        if any("error" in report for report in reports):
            if rank == 0:
                _attempt(lambda: _remove(folder, name))
            raise _error(step, reports)
        strike(rank, step, "save agreed")
        published = _attempt(lambda: self._publish(folder, facts, reports)) if rank == 0 else {}
        answers = self._agree(published)
        if "error" in answers[0]:
            raise _error(step, answers[:1])
        strike(rank, step, "save finished")

    def _begin(self, step: int) -> str:
        """The name under which this job's files stand: the first rank's, known to all since the first save."""
        strike(self.group.rank, step, "save begun")
        if self._name is None:
            self._name = str(self._agree({"name": secrets.token_hex(4)})[0]["name"])
        return self._name

    def _agree(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's report, on every rank."""
        return [json.loads(report) for report in comm.gather_bytes(json.dumps(mine).encode(), self.group)]

    def _publish(self, folder: Path, facts: Facts, reports: list[dict[str, Any]]) -> dict[str, Any]:
        manifest = _manifest(folder, facts, reports)
        strike(0, facts.step, "save publishing")
        _refuse_unseen(manifest)
        write_manifest(manifest)
        strike(0, facts.step, "save published")
        try:
            clear(folder, {MANIFEST, *manifest.files})
            expire(self.shelf, self.keep, folder)
        except OSError as error:  # the checkpoint is there, and older ones are too many at worst
            print(f"step {facts.step}: older checkpoints stay: {error}", file=sys.stderr, flush=True)
        return {}


def _refuse_unseen(manifest: Manifest) -> None:
    """Raise OSError where a file that some rank wrote is not here as it wrote it."""
    for name, checksums in manifest.files.items():
        path = manifest.folder / name
        if not path.exists() or path.stat().st_size != checksums.size:
            raise OSError(errno.ENOENT, "rank 0 does not see it: all nodes must share train.run_dir", str(path))


def _attempt(act: Any) -> dict[str, Any]:
    """What `act` reports, or its failure as a report: the other ranks must hear of it."""
    try:
        return dict(act())
    except OSError as error:
        return {"error": f"{error.filename or ''}: {error.strerror or error}".strip(": "), "number": error.errno}
    except TrainingStopped as error:
        return {"error": error.message, "number": None, "stopped": True}
    except Exception as error:  # the others wait for this rank's report, whatever it is
        return {"error": f"{type(error).__name__}: {error}", "number": None}


def _remove(folder: Path, name: str) -> dict[str, Any]:
    for path in folder.glob(f"{name}-*"):
        path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
    return {}


def _write(path: Path, taken: Snapshot, step: int) -> dict[str, Any]:
    """This rank's file; its report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    items = taken.items()
    if not items:
        return {"file": None}
    dtype = str(taken.copy.dtype).removeprefix("torch.")
    entries = [(item.key, dtype, item.shape) for item in items]
    header = header_of(entries, {"rank": str(taken.rank)})
    size = size_of(header, entries)
    try:
        checksums = write_file(path, header, size, _contents(taken, step))
    except OSError as error:
        free = shutil.disk_usage(path.parent).free
        raise OSError(error.errno, f"{error.strerror} ({size} bytes are needed, {free} are free)", str(path)) from error
    strike(taken.rank, step, "save written")
    parts = [(item.name, item.rectangle) for item in items if item.state == WEIGHT]
    states: dict[str, list[str]] = {}
    for item in items:
        states.setdefault(item.name, [])
        if item.state not in states[item.name]:
            states[item.name].append(item.state)
    return {
        "file": path.name, "checksums": checksums.as_dict(), "parts": parts, "states": states, "shapes": taken.shapes(),
    }  # fmt: skip


def _contents(taken: Snapshot, step: int) -> Iterator[memoryview]:
    """The copy in chunks, at least two, each found finite while it is on its way."""
    chunks = taken.copy.split(min(CHUNK, -(-taken.copy.numel() // 2)))
    for number, chunk in enumerate(chunks):
        if number == len(chunks) // 2:
            strike(taken.rank, step, "save writing")
        if not _finite(chunk):
            key = next(item.key for item in taken.items() if not _finite(item.values))
            raise TrainingStopped(f"{key} on rank {taken.rank} is not finite: this checkpoint is not published")
        yield chunk.view(torch.uint8).numpy().data


def _finite(values: Tensor) -> bool:
    return all(math.isfinite(end) for end in torch.aminmax(values))  # in one pass, and NaN is both ends


def _manifest(folder: Path, facts: Facts, reports: list[dict[str, Any]]) -> Manifest:
    written = [report for report in reports if report["file"] is not None]
    parts: dict[str, list[Part]] = {}
    states: dict[str, tuple[str, ...]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for report in written:
        for name, rectangle in report["parts"]:
            parts.setdefault(name, []).append(Part(tuple((a, b) for a, b in rectangle), report["file"]))
            states[name] = tuple(report["states"][name])
            shapes[name] = tuple(report["shapes"][name])
    for name, found in parts.items():
        held, whole = sum(area(part.rectangle) for part in found), area(tuple((0, n) for n in shapes[name]))
        assert held == whole, f"{held} of {whole} elements of {name} were written"
    files = {report["file"]: Checksums.from_dict(report["checksums"]) for report in written}
    return Manifest(folder, facts, files, {n: TensorFacts(shapes[n], states[n], tuple(parts[n])) for n in parts})


def _error(step: int, reports: list[dict[str, Any]]) -> PlaitError:
    """The first report of a failure, as the error that all ranks raise."""
    rank, report = next((rank, report) for rank, report in enumerate(reports) if "error" in report)
    if report.get("stopped"):
        return TrainingStopped(f"step {step}: {report['error']}")
    full = report["number"] in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    hint = "make room, or set train.run_dir to a larger disk; checkpoints before this one are untouched" if full else ""
    return SaveFailed(f"the checkpoint of step {step} could not be written by rank {rank}: {report['error']}", hint)


def versions() -> dict[str, str]:
    """What writes checkpoints here."""
    from plait import __version__

    return {
        "plait": __version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "host": os.uname().nodename,
    }
