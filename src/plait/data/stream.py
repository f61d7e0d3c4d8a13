"""A stream: documents after documents as one long run of tokens in memory-mapped files, of any length.

Offsets are 64-bit throughout. A stream knows where documents begin and which tokens may be labels; it must not know
sequences, batches or order.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from plait.spec.errors import DataError

Tokens = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Stream:
    """Tokens [first, last) of some files laid end to end.

    `ends` (documents,) holds one past the last token of each document; without it `separator` (the token that ends a
    document) is looked for instead. `trained` (tokens,) is 0 where a token may not be a label. `limit`: ids must lie
    below it (checked as they are read, for files that someone else wrote).
    """

    pieces: Sequence[NDArray[Any]]
    first: int
    last: int
    ends: NDArray[np.int64] | None = None
    trained: NDArray[np.uint8] | None = None
    separator: int | None = None
    limit: int | None = None

    def __len__(self) -> int:
        return self.last - self.first

    def part(self, start: int, stop: int) -> Stream:
        """The stream of tokens [start, stop) of this one."""
        return replace(self, first=self.first + start, last=self.first + stop)

    def tokens(self, start: int, stop: int) -> Tokens:
        """Tokens [start, stop), as int64. Raises DataError for an id at or above `limit`."""
        found = self._read(self.first + start, self.first + stop)
        if self.limit is not None and len(found) and not 0 <= int(found.min()) <= int(found.max()) < self.limit:
            bad = int(found.max()) if found.max() >= self.limit else int(found.min())
            raise DataError(f"token id {bad} among tokens {start}..{stop}, model.vocab is {self.limit}")
        return found

    def labels_allowed(self, start: int, stop: int) -> Flags | None:
        """(stop - start,) True where a token may be a label; None: everywhere."""
        return None if self.trained is None else self.trained[self.first + start : self.first + stop] != 0

    def beginnings(self, start: int, stop: int) -> Flags:
        """(stop - start,) True where a token is the first of its document."""
        low, high = self.first + start, self.first + stop
        flags = np.zeros(high - low, bool)
        if self.ends is not None:
            at = np.searchsorted(self.ends, np.array([low, high], np.int64))
            flags[self.ends[at[0] : at[1]] - low] = True
        elif self.separator is not None:
            before = self._read(max(low - 1, 0), high - 1)
            flags[len(flags) - len(before) :] = before == self.separator
        if low == 0:
            flags[:1] = True
        return flags

    def _read(self, low: int, high: int) -> Tokens:
        begins = list(accumulate((len(piece) for piece in self.pieces), initial=0))
        parts = []
        for number in range(bisect_right(begins, low) - 1, len(self.pieces)):
            if begins[number] >= high:
                break
            piece, begin = self.pieces[number], begins[number]
            parts.append(np.asarray(piece[max(low - begin, 0) : high - begin], np.int64))
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


class StreamWriter:
    """Writes a stream into a folder as it comes: `<name>.tokens`, `<name>.ends`, and `<name>.trained` if `masked`."""

    FLUSH = 1 << 18  # tokens plus documents that may wait in memory

    def __init__(self, folder: Path, name: str, dtype: DTypeLike, masked: bool) -> None:
        self.dtype = np.dtype(dtype)
        self.length = self.documents = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self._waiting: tuple[list[Tokens], list[int], list[Flags]] = ([], [], [])
        self._flushed = 0
        self._tokens = (folder / f"{name}.tokens").open("wb")
        self._ends = (folder / f"{name}.ends").open("wb")
        self._trained = (folder / f"{name}.trained").open("wb") if masked else None

    def add(self, ids: Tokens, trained: Flags | None = None) -> None:
        """Append one document. `trained` None: every token may be a label."""
        tokens, ends, flags = self._waiting
        self.length += len(ids)
        self.documents += 1
        tokens.append(ids)
        ends.append(self.length)
        if self._trained is not None:
            flags.append(np.ones(len(ids), bool) if trained is None else trained)
        if self.length + self.documents - self._flushed >= self.FLUSH:
            self._flush()

    def close(self) -> dict[str, Any]:
        """Finish the files; what the manifest says of this stream."""
        self._flush()
        for file in (self._tokens, self._ends, self._trained):
            if file is not None:
                file.close()
        return {"tokens": self.length, "documents": self.documents, "digest": self._digest.hexdigest()}

    def _flush(self) -> None:
        tokens, ends, flags = self._waiting
        if ends:
            data = np.concatenate(tokens).astype(self.dtype).tobytes()
            self._tokens.write(data)
            self._digest.update(data)
            self._ends.write(np.array(ends, np.int64).tobytes())
        if self._trained is not None and flags:
            self._trained.write(np.concatenate(flags).astype(np.uint8).tobytes())
        self._waiting = ([], [], [])
        self._flushed = self.length + self.documents


def open_stream(folder: Path, name: str, dtype: DTypeLike, separator: int | None) -> Stream:
    """The stream that a StreamWriter of the same folder, name and dtype left behind."""
    tokens = map_array(folder / f"{name}.tokens", dtype)
    trained = folder / f"{name}.trained"
    return Stream(
        pieces=(tokens,),
        first=0,
        last=len(tokens),
        ends=map_array(folder / f"{name}.ends", np.int64),
        trained=map_array(trained, np.uint8) if trained.exists() else None,
        separator=separator,
    )


def open_token_files(files: Sequence[Path], dtype: str, separator: int | None, limit: int | None) -> Stream:
    """Files of token ids as they stand, one after the other: `.npy` (one dim, integers) or raw little-endian `dtype`.

    Raises DataError for a file that is no such thing. Nothing is read but headers.
    """
    pieces = [
        _npy(file) if file.suffix == ".npy" else map_array(file, np.dtype(dtype).newbyteorder("<")) for file in files
    ]
    return Stream(pieces, 0, sum(len(piece) for piece in pieces), separator=separator, limit=limit)


def map_array(file: Path, dtype: DTypeLike) -> NDArray[Any]:
    """The file as a read-only array of one dim, mapped and not read."""
    size, width = file.stat().st_size, np.dtype(dtype).itemsize
    if size % width:
        raise DataError(f"{file}: {size} bytes, which is not a multiple of {width} ({np.dtype(dtype).name})")
    return np.memmap(file, dtype, mode="r") if size else np.zeros(0, dtype)


def _npy(file: Path) -> NDArray[Any]:
    try:
        found: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise DataError(f"{file}: not an .npy file of numbers ({error})") from error
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise DataError(f"{file}: {found.dtype} of {found.ndim} dims, integers of 1 dim are needed")
    return found
