"""Documents: the text of each source, one after the other, never all in memory. Each has a name that does not depend
on where the files lie, and the name alone decides whether a document is held out for validation.

This file knows files and their formats; it must not know tokens.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from plait.spec.errors import DataError, MissingExtra
from plait.spec.run import DataSpec

# Folders of the standard library whose files are tests, applications, or tables rather than programs.
NOT_LIBRARY = {
    *("site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"),
    *("ensurepip", "encodings", "pydoc_data", "turtledemo"),
}


class Document(NamedTuple):
    """One document. `spans`: (start, stop) characters that are trained; None means all of them."""

    name: str
    text: str
    spans: tuple[tuple[int, int], ...] | None = None


def held_out(name: str, fraction: float) -> bool:
    """Whether the document of this name is kept for validation: a hash of the name falls below `fraction`."""
    if fraction == 0:
        return False
    digest = hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2.0**64


def standard_library() -> Path:
    """The folder of Python's own standard library."""
    return Path(sysconfig.get_path("stdlib"))


def describe_source(spec: DataSpec) -> str:
    """The source in a few words."""
    if spec.source == "builtin":
        return f"the standard library of Python {platform.python_version()}"
    return f"{spec.source} {', '.join(spec.files)}"


def list_files(spec: DataSpec) -> tuple[Path, ...]:
    """The files of a source in reading order: that of `data.files`, each pattern (`**` allowed) expanded and sorted."""
    if spec.source == "builtin":
        root = standard_library()
        found = sorted(_library_files(root), key=lambda file: file.relative_to(root).as_posix())
        if not found:
            raise DataError(f"{root}: no *.py file, so there is no builtin corpus", "set data.source and data.files")
        return tuple(found)
    if not spec.files:
        raise DataError(f"data.files is empty, data.source {spec.source!r} needs at least 1 file", "set data.files")
    files: list[Path] = []
    for pattern in spec.files:
        found = [Path(p) for p in sorted(glob.glob(os.path.expanduser(pattern), recursive=True)) if os.path.isfile(p)]
        if not found:
            raise DataError(f"data.files: {pattern!r} names no file", "a folder needs a pattern: 'folder/**/*.txt'")
        files += found
    return tuple(files)


def _library_files(root: Path) -> Iterator[Path]:
    for folder, inside, files in os.walk(root):
        inside[:] = [name for name in inside if name not in NOT_LIBRARY]
        for name in files:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):  # that one differs between machines
                yield Path(folder, name)


def read_documents(spec: DataSpec, files: tuple[Path, ...]) -> Iterator[Document]:
    """Every document of the source, in order. Raises DataError naming file and line of the first that is malformed."""
    root = standard_library() if spec.source == "builtin" else Path(os.path.commonpath([f.parent for f in files]))
    for file in files:
        try:
            yield from READERS[spec.source](file, file.relative_to(root).as_posix(), spec)
        except OSError as error:
            raise DataError(f"{file}: cannot be read ({error.strerror})") from error


def _read_text(file: Path, name: str, spec: DataSpec) -> Iterator[Document]:
    try:
        yield Document(name, file.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 (byte {error.start})", "convert the file to UTF-8") from error


def _read_library(file: Path, name: str, spec: DataSpec) -> Iterator[Document]:
    yield Document(name, file.read_bytes().decode("utf-8", errors="replace"))


def _read_jsonl(file: Path, name: str, spec: DataSpec) -> Iterator[Document]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8"))
            except ValueError as error:
                raise DataError(f"{file}:{number}: not JSON in UTF-8 ({error})") from error
            yield _document(record, f"{name}:{number}", f"{file}:{number}", spec)


def _read_parquet(file: Path, name: str, spec: DataSpec) -> Iterator[Document]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtra("reading Parquet files", "hf") from error
    try:
        table = parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{file}: not a Parquet file ({error})") from error
    wanted = [spec.field] if spec.mask_field is None else [spec.field, spec.mask_field]
    number = 0
    for rows in table.iter_batches(batch_size=1024, columns=[c for c in wanted if c in table.schema_arrow.names]):
        for record in rows.to_pylist():
            number += 1
            yield _document(record, f"{name}:{number}", f"{file}: row {number}", spec)


def _document(record: Any, name: str, where: str, spec: DataSpec) -> Document:
    """The document of one record: its text, and its trained spans where `mask_field` is set (absent: all trained)."""
    if not isinstance(record, dict):
        raise DataError(f"{where}: a {type(record).__name__}, an object with the field {spec.field!r} is needed")
    text = record.get(spec.field)
    if not isinstance(text, str):
        have = ", ".join(map(str, record)) or "none"
        raise DataError(f"{where}: no text in field {spec.field!r} (fields here: {have})", "set data.field")
    spans = record.get(spec.mask_field) if spec.mask_field is not None else None
    if spans is None:
        return Document(name, text)
    try:
        pairs = tuple((int(start), int(stop)) for start, stop in spans)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: {spec.mask_field!r} is not a list of [start, stop] characters") from error
    for start, stop in pairs:
        if not 0 <= start <= stop <= len(text):
            raise DataError(f"{where}: span [{start}, {stop}] does not lie in a text of {len(text)} characters")
    return Document(name, text, pairs)


READERS: dict[str, Callable[[Path, str, DataSpec], Iterator[Document]]] = {
    "builtin": _read_library,
    "text": _read_text,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
}
