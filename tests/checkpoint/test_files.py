"""Files and manifests: what the format's own library reads of ours, and that every damage is seen and named."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from plait.checkpoint.files import SMALLEST_BLOCK, Checksums, File, header_of, size_of, write_file
from plait.checkpoint.manifest import Facts, Manifest, Part, Tensor, key_of, read_manifest, write_manifest
from plait.checkpoint.overlap import overlap, runs
from plait.checkpoint.source import read_part
from plait.placement.cuts import Rectangle, area
from plait.spec.errors import BrokenCheckpoint

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def random_values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64).to(dtype)


def write(path: Path, tensors: dict[str, torch.Tensor]) -> Checksums:
    entries = [(key, str(value.dtype).removeprefix("torch."), tuple(value.shape)) for key, value in tensors.items()]
    header = header_of(entries, {"made": "here"})
    contents = (memoryview(value.reshape(-1).view(torch.uint8).numpy()) for value in tensors.values())
    return write_file(path, header, size_of(header, entries), contents)


def test_the_formats_own_library_reads_our_files(tmp_path: Path) -> None:
    tensors = {f"{name}@0,0": random_values((13, 7), dtype) for name, dtype in DTYPES.items()}
    tensors["one@3"] = random_values((5,), torch.float32)
    write(tmp_path / "a.safetensors", tensors)
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert file.metadata() == {"made": "here"} and set(file.keys()) == set(tensors)
        assert all(torch.equal(file.get_tensor(key), value) for key, value in tensors.items())


def every_rectangle(dice: random.Random, shape: tuple[int, ...]) -> Rectangle:
    edges = [sorted(dice.sample(range(size + 1), 2)) for size in shape]
    return tuple((low, high) for low, high in edges)


@pytest.mark.parametrize("shape", [(40,), (17, 11), (5, 7, 6)])
def test_any_part_of_any_rectangle_is_read_as_it_was_written(shape: tuple[int, ...], tmp_path: Path) -> None:
    dice = random.Random(str(shape))
    value = random_values(shape, torch.float32)
    for _ in range(40):
        held, wanted = every_rectangle(dice, shape), every_rectangle(dice, shape)
        part = value[tuple(slice(*edge) for edge in held)].contiguous()
        sums = write(tmp_path / "a", {"other": value, "x": part})
        common = overlap(held, wanted)
        if common is None:
            continue
        with File(tmp_path / "a", sums) as file:
            found = read_part(file, file.entry("x").start, common, held, value.dtype)
        assert torch.equal(found, value[tuple(slice(*edge) for edge in common)])
        assert sum(stop - start for start, stop in runs(common, held)) == area(common)


def test_reading_a_part_takes_its_bytes_and_at_most_two_blocks_more(tmp_path: Path) -> None:
    value = random_values((4096, 1024), torch.float32)
    sums = write(tmp_path / "a", {"x": value})
    whole = ((0, 4096), (0, 1024))
    with File(tmp_path / "a", sums) as file:
        header = file.taken
        read_part(file, file.entry("x").start, ((1000, 1512), (0, 1024)), whole, value.dtype)
        assert 512 * 4096 <= file.taken - header <= 512 * 4096 + 2 * SMALLEST_BLOCK


def a_manifest(folder: Path) -> Manifest:
    folder.mkdir()
    value = random_values((300, 100), torch.float32)
    sums = write(folder / "r.safetensors", {key_of("weight", "x", ((0, 300), (0, 100))): value})
    facts = Facts(3, 3, 24, 1.5, {"value": 1.0}, {}, {}, "data", "float32", {"plait": "0"})
    part = Part(((0, 300), (0, 100)), "r.safetensors")
    manifest = Manifest(folder, facts, {"r.safetensors": sums}, {"x": Tensor((300, 100), ("weight",), (part,))})
    write_manifest(manifest)
    return manifest


def test_a_manifest_comes_back_equal_and_nothing_else_is_left_in_the_folder(tmp_path: Path) -> None:
    manifest = a_manifest(tmp_path / "a")
    assert read_manifest(tmp_path / "a") == manifest
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"manifest.json", "r.safetensors"}


@pytest.mark.parametrize("file", ["manifest.json", "r.safetensors"])
def test_every_single_flipped_bit_is_seen(file: str, tmp_path: Path) -> None:
    manifest = a_manifest(tmp_path / "a")
    path, dice = tmp_path / "a" / file, random.Random(file)
    content = path.read_bytes()
    places = [*range(0, 64), *(dice.randrange(len(content)) for _ in range(200)), len(content) - 1]
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << dice.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(BrokenCheckpoint, match=file):
            read_all(read_manifest(tmp_path / "a"))
    path.write_bytes(content)
    read_all(manifest)


def read_all(manifest: Manifest) -> None:
    for name, sums in manifest.files.items():
        with File(manifest.folder / name, sums) as file:
            file.read_into(memoryview(bytearray(sums.size)), 0)


@pytest.mark.parametrize("missing", [1, 100, 60_000])
def test_a_truncated_file_is_refused_with_both_sizes(missing: int, tmp_path: Path) -> None:
    manifest = a_manifest(tmp_path / "a")
    path = tmp_path / "a" / "r.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-missing])
    with pytest.raises(BrokenCheckpoint, match=rf"r\.safetensors: {size - missing} bytes, the manifest says {size}"):
        read_all(manifest)
