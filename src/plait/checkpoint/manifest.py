"""What a checkpoint is: `manifest.json` as a value, with where every rectangle of every tensor lies. No torch.

The manifest is written last and by rename, so a folder without one is no checkpoint. Its first line holds a checksum of
the rest; nothing in it can run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from plait.checkpoint.files import Checksums
from plait.placement.cuts import Rectangle
from plait.spec.errors import BrokenCheckpoint

MANIFEST = "manifest.json"
FORMAT = 1  # raise it when what a checkpoint holds changes
WEIGHT = "weight"  # the state that every checkpoint has: the master copy


class Part(NamedTuple):
    """A rectangle of a tensor, and the file that holds it."""

    rectangle: Rectangle
    file: str


@dataclass(frozen=True)
class Tensor:
    """A global tensor: its shape, which states of it there are, and the rectangles that together are all of it."""

    shape: tuple[int, ...]
    states: tuple[str, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Facts:
    """Where a run stood. `samples` is the number of the next sample; `scale` the loss scale's state; `loss` the last.

    `run` and `layout` are those it was written with (`run` without a run: a converted file), `data` the fingerprint of
    its tokens, `dtype` that of every state, `versions` of what wrote it.
    """

    step: int
    updates: int
    samples: int
    loss: float | None
    scale: Mapping[str, float]
    run: Mapping[str, Any]
    layout: Mapping[str, Any]
    data: str
    dtype: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Manifest:
    """A whole checkpoint: facts, files by name, tensors by global name."""

    folder: Path
    facts: Facts
    files: Mapping[str, Checksums]
    tensors: Mapping[str, Tensor]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())

    @property
    def states(self) -> tuple[str, ...]:
        """Every state that some tensor has."""
        return tuple(dict.fromkeys(state for tensor in self.tensors.values() for state in tensor.states))


def key_of(state: str, name: str, rectangle: Rectangle) -> str:
    """The key of a rectangle in its file: `name@offset`, with the state before it where it is not the weight."""
    offset = ",".join(str(start) for start, _ in rectangle)
    return f"{name}@{offset}" if state == WEIGHT else f"{state}:{name}@{offset}"


def write_manifest(manifest: Manifest) -> None:
    """Publish: from now on the folder is this checkpoint."""
    rest = json.dumps(_plain(manifest), separators=(",", ":"), allow_nan=False)[1:].encode()
    path = manifest.folder / MANIFEST
    building = path.with_suffix(".building")
    with building.open("wb") as file:
        file.write(_head(rest) + rest)
        file.flush()
        os.fsync(file.fileno())
    building.rename(path)
    for folder in (manifest.folder, manifest.folder.parent):
        _sync(folder)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises BrokenCheckpoint where it is missing, damaged, or of another format."""
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BrokenCheckpoint(path, error.strerror or str(error)) from error
    head, line, rest = content.partition(b"\n")
    if head + line != _head(rest):
        raise BrokenCheckpoint(path, f"{len(content)} bytes that are not those that were written")
    found = json.loads(b"{" + rest)
    if found["format"] != FORMAT:
        raise BrokenCheckpoint(path, f"is of format {found['format']}, this version reads {FORMAT}")
    names = tuple(found["files"])
    tensors = {
        name: Tensor(
            tuple(t["shape"]),
            tuple(t["states"]),
            tuple(Part(tuple((a, a + n) for a, n in rectangle), names[file]) for file, rectangle in t["parts"]),
        )
        for name, t in found["tensors"].items()
    }
    files = {name: Checksums.from_dict(file) for name, file in found["files"].items()}
    return Manifest(folder, Facts(**found["facts"]), files, tensors)


def _head(rest: bytes) -> bytes:
    return f'{{"checksum":"{hashlib.blake2b(rest, digest_size=16).hexdigest()}",\n'.encode()


def _plain(manifest: Manifest) -> dict[str, Any]:
    numbers = {name: number for number, name in enumerate(manifest.files)}
    tensors = {
        name: {
            "shape": tensor.shape,
            "states": tensor.states,
            "parts": [[numbers[p.file], [[a, b - a] for a, b in p.rectangle]] for p in tensor.parts],
        }
        for name, tensor in manifest.tensors.items()
    }
    files = {name: checksums.as_dict() for name, checksums in manifest.files.items()}
    return {"format": FORMAT, "facts": asdict(manifest.facts), "files": files, "tensors": tensors}


def _sync(folder: Path) -> None:
    """See the folder's entries to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
