"""A folder that is built once, whoever asks and however many: the file mechanics of the token cache.

A folder is filled under another name and renamed when complete, so that a reader sees all of it or nothing. A file
lock lets one builder work while the others wait; where a filesystem has no locks the work is done twice and the first
rename wins. A finished folder is never changed nor deleted (another job may have it mapped). What is in the folder is
not known here.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


def default_cache() -> Path:
    """Where token caches go unless the run says otherwise: `$XDG_CACHE_HOME/plait`, else `~/.cache/plait`."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "plait"


def fallback_cache() -> Path:
    """Where token caches go when the default folder cannot be written: a folder of this user among temporary files."""
    return Path(tempfile.gettempdir()) / f"plait-{os.getuid()}"


def manifest_of(folder: Path) -> dict[str, Any] | None:
    """The manifest of a complete folder: it is there and every file that it lists has the size that it says."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text("utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in manifest["sizes"]}
    except (OSError, ValueError, KeyError):
        return None
    return manifest if sizes == manifest["sizes"] else None


def build_once(folder: Path, build: Callable[[Path], dict[str, Any]]) -> None:
    """Make `folder` complete. Needs no write access if it is complete already.

    `build(empty)` fills a folder and returns what the manifest shall say of it. An OSError (no space, no permission)
    and whatever `build` raises pass through, and leave nothing that would be read.
    """
    if manifest_of(folder) is not None:
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_name(f"{folder.name}.lock")) as alone:
        if manifest_of(folder) is not None:
            return
        mine = f"{folder.name}.building-{socket.gethostname()}-"
        if alone:
            for dead in folder.parent.glob(f"{glob.escape(mine)}*"):
                shutil.rmtree(dead, ignore_errors=True)
        building = Path(tempfile.mkdtemp(prefix=mine, dir=folder.parent))
        try:
            building.chmod(0o755)  # mkdtemp makes it private; a shared cache is read by others
            _finish(building, build(building))
            _publish(building, folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold the lock of `path`; False if this filesystem has none. The lock ends with the process, however it ends."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True


def _finish(building: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, with everything on disk before the folder gets its name."""
    sizes = {file.name: file.stat().st_size for file in sorted(building.iterdir())}
    (building / MANIFEST).write_text(json.dumps(manifest | {"sizes": sizes}, indent=1) + "\n", "utf-8")
    for file in [*building.iterdir(), building]:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def _publish(building: Path, folder: Path) -> None:
    """Give the finished folder its name, unless another builder was first."""
    if folder.exists() and manifest_of(folder) is None:
        shutil.rmtree(folder)  # damaged from outside: never read, so no one has it mapped
    try:
        building.rename(folder)
    except OSError:
        if manifest_of(folder) is None:
            raise
