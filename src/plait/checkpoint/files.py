"""One safetensors file: written as a stream with a checksum for every block, read by ranges whose blocks are checked.

The format is eight bytes of length, a JSON header, and the tensors' bytes one after the other; nothing in it can run.
A file of someone else's has no checksums, and is read all the same. No torch: tensors are bytes here.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from plait.spec.errors import BrokenCheckpoint

# torch's name of a dtype -> the format's name, bytes
DTYPES: Mapping[str, tuple[str, int]] = {
    "float64": ("F64", 8), "float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2),
}  # fmt: skip
NAMES = {name: (dtype, size) for dtype, (name, size) in DTYPES.items()}
ALIGNMENT = 8
SMALLEST_BLOCK, MOST_BLOCKS = 1 << 16, 1 << 12
MOST_HEADER = 100 << 20  # the format's own limit

_LENGTH = struct.Struct("<Q")


class Entry(NamedTuple):
    """One tensor of a file: torch's name of its dtype, its shape, and where its bytes begin and end."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Checksums:
    """Size of a file, and CRC-32 of each of its blocks of `block` bytes."""

    size: int
    block: int
    sums: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; sums as eight hexadecimal digits each."""
        return {"size": self.size, "block": self.block, "sums": "".join(f"{s:08x}" for s in self.sums)}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Checksums:
        text = found["sums"]
        return cls(found["size"], found["block"], tuple(int(text[i : i + 8], 16) for i in range(0, len(text), 8)))


class _Sums:
    """The checksums of a stream's blocks."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.size, self.sums = 0, [0]

    def add(self, content: memoryview) -> None:
        at = 0
        while at < len(content):
            take = min(self.block - self.size % self.block, len(content) - at)
            if self.size % self.block == 0 and self.size:
                self.sums.append(0)
            self.sums[-1] = zlib.crc32(content[at : at + take], self.sums[-1])
            self.size, at = self.size + take, at + take

    def checksums(self) -> Checksums:
        return Checksums(self.size, self.block, tuple(self.sums))


def header_of(entries: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Length and header of a file that holds these (key, dtype, shape), in this order."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for key, dtype, shape in entries:
        name, width = DTYPES[dtype]
        table[key] = {"dtype": name, "shape": list(shape), "data_offsets": [at, at + math.prod(shape) * width]}
        at = table[key]["data_offsets"][1]
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _LENGTH.size) % ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


def size_of(header: bytes, entries: Iterable[tuple[str, str, tuple[int, ...]]]) -> int:
    """Bytes of the whole file."""
    return len(header) + sum(math.prod(shape) * DTYPES[dtype][1] for _, dtype, shape in entries)


def write_file(path: Path, header: bytes, size: int, contents: Iterable[memoryview]) -> Checksums:
    """Write a file of `size` bytes and see it to the disk. Raises OSError where there is no room or no leave."""
    block = SMALLEST_BLOCK
    while block * MOST_BLOCKS < size:
        block *= 2
    sums = _Sums(block)
    with path.open("wb") as file, ThreadPoolExecutor(1) as beside:  # neither a write nor a sum holds the interpreter
        file.write(header)
        sums.add(memoryview(header))
        for content in contents:
            summed = beside.submit(sums.add, content)
            file.write(content)
            summed.result()
        file.flush()
        os.fsync(file.fileno())
    assert sums.size == size, f"{sums.size} bytes written, the header says {size}"
    return sums.checksums()


class File:
    """A safetensors file open for reading. `checksums` None: it is someone else's, and only its form can be judged.

    `taken` counts the bytes read. Raises BrokenCheckpoint, which names the file and the reason.
    """

    def __init__(self, path: Path, checksums: Checksums | None = None) -> None:
        self.path, self.checksums = path, checksums
        self.taken = 0
        self._block: tuple[int, memoryview] | None = None
        try:
            self._handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise BrokenCheckpoint(path, error.strerror or str(error)) from error
        try:
            self.size = os.fstat(self._handle).st_size
            if checksums is not None and self.size != checksums.size:
                raise BrokenCheckpoint(path, f"{self.size} bytes, the manifest says {checksums.size}")
            self.entries, self.metadata = self._header()
        except BaseException:
            os.close(self._handle)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._handle)

    def entry(self, key: str) -> Entry:
        """Where a tensor is."""
        if key not in self.entries:
            raise BrokenCheckpoint(self.path, f"holds no tensor {key}")
        return self.entries[key]

    def read_into(self, target: memoryview, start: int) -> None:
        """Fill `target` with the bytes from `start` on."""
        if self.checksums is None:
            self._take(target, start)
            return
        block, at = self.checksums.block, 0
        while at < len(target):
            index, offset = divmod(start + at, block)
            there = self._checked_block(index)
            take = min(len(there) - offset, len(target) - at)
            target[at : at + take] = there[offset : offset + take]
            at += take

    def _checked_block(self, index: int) -> memoryview:
        if self._block is not None and self._block[0] == index:
            return self._block[1]
        assert self.checksums is not None
        low = index * self.checksums.block
        content = memoryview(bytearray(min(self.checksums.block, self.size - low)))
        self._take(content, low)
        if zlib.crc32(content) != self.checksums.sums[index]:
            raise BrokenCheckpoint(self.path, f"bytes {low} to {low + len(content)} are not those that were written")
        self._block = index, content
        return content

    def _take(self, target: memoryview, start: int) -> None:
        at = 0
        while at < len(target):
            try:
                got = os.preadv(self._handle, [target[at:]], start + at)
            except OSError as error:
                raise BrokenCheckpoint(self.path, f"cannot be read: {error.strerror}") from error
            if got == 0:
                raise BrokenCheckpoint(self.path, f"ends at byte {start + at}, {start + len(target)} are needed")
            at += got
        self.taken += at

    def _header(self) -> tuple[dict[str, Entry], dict[str, str]]:
        head = bytearray(_LENGTH.size)
        self.read_into(memoryview(head), 0)
        (length,) = _LENGTH.unpack(head)
        if length > min(MOST_HEADER, self.size - _LENGTH.size):
            raise BrokenCheckpoint(self.path, f"a header of {length} bytes in a file of {self.size}: not safetensors")
        text = bytearray(length)
        self.read_into(memoryview(text), _LENGTH.size)
        try:
            table = json.loads(text)
            metadata = table.pop("__metadata__", {})
            base = _LENGTH.size + length
            self._refuse_unknown_dtypes(table)
            entries = {key: _entry(found, base, self.size) for key, found in table.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            told = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise BrokenCheckpoint(self.path, f"its header is not that of safetensors: {told}") from error
        return entries, metadata

    def _refuse_unknown_dtypes(self, table: Mapping[str, Any]) -> None:
        """A sound file may hold dtypes that plait does not read."""
        for key, found in table.items():
            if found["dtype"] not in NAMES:
                raise BrokenCheckpoint(self.path, f"{key} is {found['dtype']}, and plait reads {', '.join(NAMES)}")


def _entry(found: Mapping[str, Any], base: int, size: int) -> Entry:
    """One row of a header; ValueError where it contradicts itself or the file's size."""
    (dtype, width), shape = NAMES[found["dtype"]], tuple(int(n) for n in found["shape"])
    start, stop = (base + int(n) for n in found["data_offsets"])
    if not base <= start <= stop <= size or min(shape, default=0) < 0 or stop - start != math.prod(shape) * width:
        raise ValueError(f"shape {shape} of {dtype} in bytes {start} to {stop} of {size}")
    return Entry(dtype, shape, start, stop)
