"""The checkpoints of a run, side by side in one folder: which there are, which is whole, which may go. No torch.

A folder counts by its manifest: complete means that it is there, undamaged, and every file has the size it names.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from plait.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from plait.spec.errors import BrokenCheckpoint, UsageError

LOCK = "lock"
_NAME = re.compile(r"step-(\d{8,})")
_WRITTEN = re.compile(r"[0-9a-f]+-rank-\d+\.safetensors|.*\.building")


def folder_of(shelf: Path, step: int) -> Path:
    """Where the checkpoint of a step stands."""
    return shelf / f"step-{step:08d}"


def folders(shelf: Path) -> list[Path]:
    """Every checkpoint's folder, whole or not, the newest first."""
    named = [path for path in shelf.iterdir() if _NAME.fullmatch(path.name)] if shelf.is_dir() else []
    return sorted(named, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)


def complete(folder: Path) -> Manifest:
    """The manifest of a folder whose files all have their sizes; BrokenCheckpoint says which one has not."""
    manifest = read_manifest(folder)
    for name, checksums in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise BrokenCheckpoint(path, error.strerror or str(error)) from error
        if size != checksums.size:
            raise BrokenCheckpoint(path, f"{size} bytes, the manifest says {checksums.size}")
    return manifest


def candidates(place: Path) -> list[Path]:
    """The checkpoints that a path means, the newest first: itself, those beside each other in it, or those of a run."""
    if (place / MANIFEST).exists() or _NAME.fullmatch(place.name):
        return [place]
    return folders(place) or folders(place / "checkpoints")


def none_in(place: Path, found: Sequence[Path] = ()) -> str:
    """How a path can mean no checkpoint: it is not there, there is none in it, or none of those found is whole."""
    if found:
        return f"{place} holds no checkpoint that is whole"
    return f"{place} holds no checkpoint" if place.exists() else f"{place} does not exist"


def newest(place: Path) -> Manifest:
    """The newest complete checkpoint that a path means; UsageError where it means none."""
    for path in (found := candidates(place)):
        try:
            return complete(path)
        except BrokenCheckpoint:
            if len(found) == 1:
                raise
    raise UsageError(none_in(place, found))


def expire(shelf: Path, keep: int, newest: Path) -> list[Path]:
    """Remove all complete checkpoints up to `newest` but the last `keep`, and what interrupted saves left behind.

    Later steps than that of `newest` are another run's, or damaged: they are left alone, and count for nothing.
    """
    gone, kept = [], 0
    found = folders(shelf)
    for folder in found[found.index(newest) :]:
        try:
            names = {MANIFEST, *complete(folder).files}
        except BrokenCheckpoint:
            if kept:  # else it may be the newest there is, and worth a look
                gone.append(folder)
            continue
        kept += 1
        if kept > keep:
            gone.append(folder)
        else:
            clear(folder, names)
    for folder in gone:
        (folder / MANIFEST).unlink(missing_ok=True)  # first, so that a half-removed checkpoint is none
        clear(folder, set())
        if not any(folder.iterdir()):
            folder.rmdir()
    return gone


def clear(folder: Path, names: set[str]) -> None:
    """Remove every file that a save wrote into a folder and that is not one of `names`; what others put there stays."""
    for path in folder.iterdir():
        if _WRITTEN.fullmatch(path.name) and path.name not in names:
            path.unlink(missing_ok=True)


@contextmanager
def held(shelf: Path) -> Iterator[None]:
    """The folder is this job's alone while it runs; UsageError where another one has it. Ends with the process."""
    try:
        shelf.mkdir(parents=True, exist_ok=True)
        file = (shelf / LOCK).open("a+")
    except OSError as error:
        raise UsageError(f"{shelf}: cannot be written: {error.strerror or error}", "name another directory") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            owner = file.read().strip() or "another job"
            raise UsageError(f"{shelf}: {owner} writes its checkpoints here", "name another train.run_dir") from error
        except OSError:  # a filesystem without locks: files of two jobs have different names, the last manifest counts
            pass
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
