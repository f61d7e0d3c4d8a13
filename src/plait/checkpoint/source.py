"""Reading: any rectangle of any tensor out of a checkpoint, whatever layout wrote it, taking only the bytes it needs.

A rank asks for what it holds; files are opened when first needed, and every block that is read is checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Self

import torch
from torch import Tensor

from plait.checkpoint.files import File
from plait.checkpoint.manifest import WEIGHT, Manifest, key_of
from plait.checkpoint.overlap import overlap, runs, slices
from plait.placement.cuts import Rectangle, area
from plait.spec.errors import BrokenCheckpoint, CheckpointMismatch

SHOWN = 5  # names in an error


class Source:
    """An open checkpoint. Close it, or use it as a context: its files stay open between reads."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._files: dict[str, File] = {}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def taken(self) -> int:
        """Bytes read so far."""
        return sum(file.taken for file in self._files.values())

    def read(self, name: str, rectangle: Rectangle, state: str = WEIGHT) -> Tensor:
        """A rectangle of one state of a tensor, on the CPU, in the dtype of the file."""
        tensor = self.manifest.tensors[name]
        dtype = getattr(torch, self.manifest.facts.dtype)
        values: Tensor | None = None
        filled, wanted = 0, area(rectangle)
        for part in tensor.parts:
            common = overlap(part.rectangle, rectangle)
            if common is None:
                continue
            file = self._file(part.file)
            entry = file.entry(key_of(state, name, part.rectangle))
            if entry.shape != tuple(b - a for a, b in part.rectangle) or entry.dtype != self.manifest.facts.dtype:
                raise BrokenCheckpoint(file.path, f"{name} is {entry.dtype} {entry.shape} there")
            found = read_part(file, entry.start, common, part.rectangle, dtype)
            filled += area(common)
            if common == rectangle:
                values = found
                break
            values = torch.empty([b - a for a, b in rectangle], dtype=dtype) if values is None else values
            values[slices(common, rectangle)] = found
        if values is None or filled != wanted:
            raise BrokenCheckpoint(self.manifest.folder, f"holds {filled} of {wanted} elements of {name}")
        return values

    def _file(self, name: str) -> File:
        if name not in self._files:
            path = self.manifest.folder / name
            self._files[name] = self._open.enter_context(File(path, self.manifest.files[name]))
        return self._files[name]


def read_part(file: File, start: int, wanted: Rectangle, within: Rectangle, dtype: torch.dtype) -> Tensor:
    """The elements `wanted` of a tensor that holds the rectangle `within` and whose bytes begin at `start`."""
    values = torch.empty([b - a for a, b in wanted], dtype=dtype)
    target, width, at = values.view(-1).view(torch.uint8).numpy().data, dtype.itemsize, 0
    for low, high in runs(wanted, within):
        length = (high - low) * width
        file.read_into(target[at : at + length], start + low * width)
        at += length
    return values


def refuse_mismatch(manifest: Manifest, wanted: Mapping[str, tuple[int, ...]], states: Iterable[str]) -> None:
    """Raise CheckpointMismatch unless a checkpoint holds exactly these tensors, in these shapes, with these states."""
    held = manifest.tensors
    missing = [name for name in wanted if name not in held]
    extra = [name for name in held if name not in wanted]
    shapes = [
        f"{name} is {held[name].shape}, the model's is {shape}"
        for name, shape in wanted.items()
        if name in held and held[name].shape != shape
    ]
    lacking = [state for state in states if state not in manifest.states]
    found = [
        text
        for text in (
            _listed("lacks", missing),
            _listed("has unknown tensors", extra),
            _listed("has other shapes", shapes),
            _listed("lacks the optimizer's", lacking),
        )
        if text
    ]
    if found:
        raise CheckpointMismatch(f"{manifest.folder} {'; '.join(found)}", "it is of another model or optimizer")


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{what}: {', '.join(names[:SHOWN])}{more}"
