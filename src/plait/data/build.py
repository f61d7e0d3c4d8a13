"""The token cache: documents are tokenized once, into one stream for training and one held out for validation.

This is the one place that decides what stands where two documents meet: with separator "eos" each document is followed
by exactly one end-of-document token, and any that the tokenizer made inside a text is removed, so that the separators
count the documents; with "none" nothing is put between them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plait.data.cache import build_once, default_cache, fallback_cache, manifest_of
from plait.data.documents import Document, held_out, list_files, read_documents
from plait.data.stream import Flags, Stream, StreamWriter, Tokens, open_stream
from plait.data.tokenizer import Tokenizer
from plait.spec.errors import DataError
from plait.spec.run import DataSpec

FORMAT = 1  # raise it when what a cache holds changes
BATCH_CHARACTERS = 1 << 20  # texts are tokenized together up to about this many characters
BATCH_DOCUMENTS = 1024
PARTS = ("train", "validation")


@dataclass(frozen=True, eq=False)
class Cached:
    """The two streams of a cache, what its manifest says, and what the user should be told of it."""

    train: Stream
    validation: Stream
    manifest: dict[str, Any]
    folder: Path
    notices: tuple[str, ...]


def separator_of(spec: DataSpec, tokenizer: Tokenizer) -> int | None:
    """The token put after each document, None for none. Raises DataError where one is asked for and unknown."""
    if spec.separator == "none":
        return None
    if tokenizer.separator is None:
        raise DataError(
            f"data.tokenizer: {tokenizer.name}: no token is known that ends a document",
            "put a tokenizer_config.json with its eos_token beside it, or set data.separator='none'",
        )
    return tokenizer.separator


def open_cache(spec: DataSpec, tokenizer: Tokenizer) -> Cached:
    """The token cache of a source, built if it is not there or its files have changed since.

    Safe to call on every rank at once. Raises DataError if `data.cache` cannot be written (and is not built yet);
    without `data.cache` a folder for temporary files stands in for the default, and a notice says so.
    """
    files = list_files(spec)
    settings = _settings_key(spec, tokenizer, files)
    name = f"{settings}-{_files_key(files)}"
    dtype = np.uint16 if tokenizer.vocab <= 1 << 16 else np.uint32
    separator = separator_of(spec, tokenizer)

    def build(folder: Path) -> dict[str, Any]:
        manifest = _write(folder, spec, tokenizer, files)
        if name != f"{settings}-{_files_key(files)}":
            raise DataError("a data file changed while it was being read", "start again when the files are at rest")
        return manifest

    root, notices = Path(spec.cache).expanduser() if spec.cache else default_cache(), []
    try:
        build_once(root / name, build)
    except OSError as error:
        if spec.cache:
            raise DataError(
                f"data.cache: {root} cannot be written ({error})", "set data.cache to a folder that can"
            ) from error
        root, refused = fallback_cache(), root
        notices.append(f"{refused} cannot be written ({error.strerror}): tokens are cached in {root} instead")
        build_once(root / name, build)
    if older := [str(p) for p in root.glob(f"{settings}-*") if p.name != name and manifest_of(p)]:
        notices.append(f"data files changed since {', '.join(sorted(older))}: delete it when no other job reads it")
    manifest = manifest_of(root / name)
    assert manifest is not None, f"{root / name} vanished"
    train, validation = (open_stream(root / name, part, dtype, separator) for part in PARTS)
    return Cached(train, validation, manifest, root / name, tuple(notices))


def _settings_key(spec: DataSpec, tokenizer: Tokenizer, files: tuple[Path, ...]) -> str:
    """A name for all that shapes the tokens, but for what the files hold."""
    paths = [str(file.resolve()) for file in files]
    fields = (spec.source, spec.field, spec.mask_field, spec.separator, spec.validation)
    return hashlib.blake2b(
        json.dumps([FORMAT, fields, tokenizer.fingerprint, paths]).encode(), digest_size=8
    ).hexdigest()


def _files_key(files: tuple[Path, ...]) -> str:
    """A name for what the files hold: sizes and times of change."""
    stats = [file.stat() for file in files]
    return hashlib.blake2b(json.dumps([(s.st_size, s.st_mtime_ns) for s in stats]).encode(), digest_size=8).hexdigest()


def _write(folder: Path, spec: DataSpec, tokenizer: Tokenizer, files: tuple[Path, ...]) -> dict[str, Any]:
    """Tokenize every document into the two streams of `folder`; the manifest."""
    dtype = np.uint16 if tokenizer.vocab <= 1 << 16 else np.uint32
    separator = separator_of(spec, tokenizer)
    writers = {part: StreamWriter(folder, part, dtype, spec.mask_field is not None) for part in PARTS}
    removed = 0
    for document, ids, trained in _tokenize(read_documents(spec, files), tokenizer):
        if separator is not None:
            ids, trained, gone = end_with(separator, ids, trained, document)
            removed += gone
        writers[PARTS[held_out(document.name, spec.validation)]].add(ids, trained)
    parts = {part: writer.close() for part, writer in writers.items()}
    return {"parts": parts, "separators_removed": removed, "files": len(files), "tokenizer": tokenizer.name}


def _tokenize(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[tuple[Document, Tokens, Flags | None]]:
    """Ids of each document, and which of them may be labels (None: all)."""
    for group in _groups(documents):
        whole = iter(tokenizer.encode([d.text for d in group if d.spans is None]))
        for document in group:
            if document.spans is None:
                yield document, next(whole), None
                continue
            ids, starts, stops = tokenizer.align(document.text)
            trained = np.zeros(len(ids), bool)
            for low, high in document.spans:
                trained |= (starts < high) & (stops > low)
            yield document, ids, trained


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in groups of bounded size."""
    group: list[Document] = []
    characters = 0
    for document in documents:
        group.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS or len(group) == BATCH_DOCUMENTS:
            yield group
            group, characters = [], 0
    yield group


def end_with(
    separator: int, ids: Tokens, trained: Flags | None, document: Document
) -> tuple[Tokens, Flags | None, int]:
    """The document with `separator` once, at its end; and how many had to be removed from inside.

    The separator is a label where the text's last character is (a model must learn to stop), or where all are.
    """
    inside = ids == separator
    removed = int(np.count_nonzero(inside))
    if removed:
        ids, trained = ids[~inside], None if trained is None else trained[~inside]
    if trained is not None:
        reaches_end = any(low < high == len(document.text) for low, high in document.spans or ())
        trained = np.append(trained, reaches_end)
    return np.append(ids, separator), trained, removed
