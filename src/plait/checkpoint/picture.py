"""A checkpoint in words: where its run stood, what it holds, whether every byte is as it was written. No torch.

It only tells; whether a run may go on from it is judged elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plait.checkpoint.files import Checksums, File
from plait.checkpoint.manifest import Manifest, read_manifest
from plait.checkpoint.shelf import complete, folders
from plait.spec.errors import BrokenCheckpoint
from plait.spec.units import format_bytes, format_count

CHUNK = 1 << 24


@dataclass(frozen=True)
class CheckpointPicture:
    """A manifest, and what is wrong with its files: (file, reason)."""

    manifest: Manifest
    broken: tuple[tuple[str, str], ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        tensors = {
            name: {"shape": tensor.shape, "states": tensor.states, "parts": len(tensor.parts)}
            for name, tensor in self.manifest.tensors.items()
        }
        return {
            "folder": str(self.manifest.folder),
            "healthy": not self.broken,
            "broken": [{"file": file, "reason": reason} for file, reason in self.broken],
            "bytes": self.manifest.size,
            "files": {name: checksums.size for name, checksums in self.manifest.files.items()},
            "tensors": tensors,
            **asdict(self.manifest.facts),
        }

    def text(self, width: int) -> str:
        """Facts, then a line for each tensor: name, shape, states, and in how many parts it lies."""
        facts, tensors = self.manifest.facts, self.manifest.tensors
        elements = sum(math.prod(tensor.shape) for tensor in tensors.values())
        loss = "" if facts.loss is None else f", loss {facts.loss:.4f}"
        split = {key: value for key, value in facts.layout.items() if isinstance(value, int) and value > 1}
        zero = facts.run.get("zero", {}).get("stage", 0)
        axes = " × ".join(f"{key} {split[key]}" for key in ("pp", "dp", "cp", "tp", "ep") if key in split)
        rows = [(name, " × ".join(map(str, t.shape)), ", ".join(t.states), len(t.parts)) for name, t in tensors.items()]
        columns = [max(len(str(row[i])) for row in rows) for i in range(3)]
        health = [f"BROKEN {file}: {reason}" for file, reason in self.broken]
        return "\n".join(
            [
                f"step {facts.step}, {facts.updates} updates, {facts.samples} samples{loss}",
                f"written at {axes or 'one rank'}, ZeRO {zero}; "
                + ", ".join(f"{name} {version}" for name, version in facts.versions.items()),
                f"{len(tensors)} tensors of {format_count(elements)} elements, {', '.join(self.manifest.states)} in "
                f"{facts.dtype}: {format_bytes(self.manifest.size)} in {len(self.manifest.files)} files",
                *(health or ["healthy: every byte is as it was written"]),
                "",
                *(
                    f"{name:<{columns[0]}}  {shape:>{columns[1]}}  {held:<{columns[2]}}  in {parts}"
                    for name, shape, held, parts in rows
                ),
            ]
        )


def picture_checkpoint(folder: Path) -> CheckpointPicture:
    """Look at a checkpoint, reading every byte of it. Raises BrokenCheckpoint where it has no manifest to go by."""
    manifest = read_manifest(folder)
    broken = []
    for name, checksums in manifest.files.items():
        try:
            _read_whole(folder / name, checksums)
        except BrokenCheckpoint as error:
            broken.append((name, error.reason))
    return CheckpointPicture(manifest, tuple(broken))


def way_round(folder: Path) -> str:
    """What to take in place of a broken checkpoint: the newest complete one that stands beside it."""
    for other in folders(folder.parent):
        try:
            if other != folder:
                return f"another checkpoint beside it: {complete(other).folder}"
        except BrokenCheckpoint:
            continue
    return "no other checkpoint stands beside it that is whole"


def _read_whole(path: Path, checksums: Checksums) -> None:
    buffer = memoryview(bytearray(CHUNK))
    with File(path, checksums) as file:
        for start in range(0, checksums.size, CHUNK):
            file.read_into(buffer[: min(CHUNK, checksums.size - start)], start)
