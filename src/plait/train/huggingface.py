"""Hugging Face directories: read by rectangles straight into any layout, and written from a checkpoint, file by file.

No rank and no command ever holds the whole model: reading takes what is asked for, writing goes tensor by tensor. Only
safetensors are read; a pickle is refused by name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from plait.checkpoint.files import DTYPES, File, header_of, size_of, write_file
from plait.checkpoint.manifest import MANIFEST, WEIGHT, Facts, Manifest, Part, key_of, write_manifest
from plait.checkpoint.manifest import Tensor as Held
from plait.checkpoint.save import versions
from plait.checkpoint.source import Source, read_part
from plait.models.hf import HEAD, NAMES, Rectangle, names_in, origins, shapes_in_hf
from plait.spec.errors import DataError, SaveFailed, UsageError
from plait.spec.families import from_hf_config, to_hf_config
from plait.spec.model import ModelSpec

CONFIG, INDEX, WHOLE = "config.json", "model.safetensors.index.json", "model.safetensors"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
OTHER_MODEL = f"the weights are of another model than its {CONFIG} or the run describes, or files are missing"
SHARD_BYTES = 5 * 10**9


def is_huggingface(folder: Path) -> bool:
    """Whether a directory looks like one of theirs, be it with a part missing."""
    return any((folder / name).exists() for name in (CONFIG, INDEX, WHOLE))


def spec_of(folder: Path) -> ModelSpec:
    """The model that a directory's config.json describes."""
    _need_config(folder)
    return from_hf_config(_json(folder / CONFIG))


def _need_config(folder: Path) -> None:
    if not (folder / CONFIG).exists():
        raise UsageError(f"{folder}: weights without a {CONFIG}", f"put the model's {CONFIG} beside them")


class HuggingFace:
    """An open directory of theirs, whose tensors are read under our names. Close it, or use it as a context.

    Raises DataError where tensors are missing, unknown or of another shape, BrokenCheckpoint where a file is damaged.
    """

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        _need_config(folder)
        self.folder, self.spec = folder, spec
        self._open = ExitStack()
        self._files = {name: self._open.enter_context(File(folder / name)) for name in _files_of(folder)}
        self._where = {key: file for file in self._files.values() for key in file.entries}
        least = spec.layers + (spec.moe.count if spec.moe else 0)  # before each of them is given its name
        if len(self._where) < least:
            problem = f"{folder}: {len(self._where)} tensors, and the model has {least} layers and experts"
            raise DataError(problem, OTHER_MODEL)
        self._names = names_in(self._where, spec)
        self._origins, self._sizes = origins(spec), {t.name: t.size for t in spec.parameters()}
        for name, (shape, _) in shapes_in_hf(spec).items():
            key = self._names[name]
            if self._where[key].entries[key].shape != shape:
                there = self._where[key].entries[key].shape
                raise DataError(f"{key} is {there}, and the model needs {shape}", OTHER_MODEL)
        self._table = NAMES[spec.family][0].theirs
        self._twin = HEAD if spec.tied and HEAD in self._where and self._names[self._table] != HEAD else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def dtype(self) -> str:
        """That of the first matrix."""
        key = next(iter(self._names.values()))
        return self._where[key].entries[key].dtype

    def read(self, name: str, rectangle: Rectangle) -> Tensor:
        """A rectangle of one of our tensors, on the CPU, in the dtype of the file."""
        origin = self._origins.get(name)
        if origin is None:  # the load that a router remembers: even
            return torch.full([b - a for a, b in rectangle], 1 / self._sizes[name])
        return origin.read(rectangle, self._theirs)

    def _theirs(self, name: str, rectangle: Rectangle) -> Tensor:
        key = self._names[name]
        found = self._part(key, rectangle)
        if self._twin is not None and name == self._table and not torch.equal(found, self._part(self._twin, rectangle)):
            raise DataError(f"{self._twin} and {key} differ, and model.tied says that they are one", "model.tied=false")
        return found

    def _part(self, key: str, rectangle: Rectangle) -> Tensor:
        file = self._where[key]
        entry = file.entries[key]
        whole = tuple((0, size) for size in entry.shape)
        return read_part(file, entry.start, rectangle, whole, getattr(torch, entry.dtype))


def _files_of(folder: Path) -> list[str]:
    if (folder / INDEX).exists():
        where = _json(folder / INDEX).get("weight_map")
        if not isinstance(where, dict) or not where:
            problem = f"{folder / INDEX}: weight_map is {where!r}, where a table of tensors and files is needed"
            raise DataError(problem, "take the index that belongs to these files")
        return sorted({_plain_name(name) for name in where.values()})
    if (folder / WHOLE).exists():
        return [WHOLE]
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if pickles:
        raise UsageError(
            f"{folder}: {pickles[0]} is a pickle, which could run code: not read", "save it as safetensors"
        )
    raise UsageError(f"{folder}: neither {WHOLE} nor {INDEX}", "a Hugging Face directory holds one of them")


def _plain_name(name: object) -> str:
    if not isinstance(name, str) or not name or Path(name).name != name:
        raise DataError(f"{INDEX}: {name!r} is not the name of a file beside it")
    return name


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read: {error}", "it should be JSON, as Hugging Face writes it") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path}: {type(found).__name__} where a table is needed", "it should be Hugging Face's")
    return found


def export(manifest: Manifest, folder: Path, dtype: str | None = None, shard_bytes: int = SHARD_BYTES) -> list[str]:
    """Write a checkpoint as a directory that transformers opens; the names of its files.

    `dtype` None: the dtype that the run computed in. Raises UsageError where the folder is taken, DataError where a
    value has no room in fp16.
    """
    run = manifest.facts.run
    spec = ModelSpec.model_validate_json(json.dumps(run["model"]))
    dtype = dtype or run.get("precision", {}).get("compute", manifest.facts.dtype)
    config = {**to_hf_config(spec), "torch_dtype": dtype}
    with _made(folder) as building:
        (building / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        with Source(manifest) as source:
            names = _write_shards(building, spec, dtype, source, shard_bytes)
        tokenizer = run.get("data", {}).get("tokenizer")
        for name in TOKENIZER if tokenizer else ():
            there = Path(tokenizer) if name == TOKENIZER[0] else Path(tokenizer).with_name(name)
            if there.exists():
                shutil.copyfile(there, building / name)
    return [CONFIG, *names]


@contextmanager
def _made(folder: Path) -> Iterator[Path]:
    """A new directory beside `folder` to write into, which takes its place at the end; after an error neither is there.

    Raises UsageError where it is taken or cannot be made, SaveFailed where a file of it cannot be written.
    """
    building = folder.with_name(f"{folder.name}.building")
    try:
        if folder.exists() and any(folder.iterdir()):
            raise UsageError(f"{folder} exists and is not empty", "name another directory")
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made: {error.strerror or error}", "name another directory") from error
    try:
        yield building
        if folder.exists():
            folder.rmdir()
        building.rename(folder)
    except OSError as error:
        hint = "make room or name another directory; nothing of it was kept"
        raise SaveFailed(f"{folder}: cannot be written: {error.strerror or error}", hint) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _write_shards(folder: Path, spec: ModelSpec, dtype: str, source: Source, limit: int) -> list[str]:
    theirs = shapes_in_hf(spec)
    shards: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    room = limit
    for name, (shape, _) in theirs.items():
        size = torch.Size(shape).numel() * DTYPES[dtype][1]
        if size > room and shards[-1]:
            shards.append([])
            room = limit
        shards[-1].append((name, dtype, shape))
        room -= size
    count = len(shards)
    names = [WHOLE] if count == 1 else [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
    for file, entries in zip(names, shards, strict=True):
        header = header_of(entries, {"format": "pt"})
        write_file(folder / file, header, size_of(header, entries), _contents(entries, spec, source))
    if count > 1:
        total = sum(torch.Size(shape).numel() for shape, _ in theirs.values()) * DTYPES[dtype][1]
        where = {name: file for file, entries in zip(names, shards, strict=True) for name, _, _ in entries}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        names.append(INDEX)
    return names


def _contents(entries: list[tuple[str, str, tuple[int, ...]]], spec: ModelSpec, source: Source) -> Iterator[memoryview]:
    """The bytes of each of their tensors, one at a time."""
    theirs, found = shapes_in_hf(spec), origins(spec)
    shapes = {t.name: t.shape for t in spec.parameters()}
    for name, dtype, _ in entries:
        ours = theirs[name][1]
        origin = found[ours[0]]
        if origin.experts:
            index = origin.experts.index(name)
            value = source.read(ours[0], ((index, index + 1), *((0, n) for n in shapes[ours[0]][1:])))[0]
        else:
            value = torch.cat([source.read(our, tuple((0, n) for n in shapes[our])) for our in ours])
            value = value.T if origin.transposed else value
        cast = value.to(getattr(torch, dtype)).contiguous()
        if dtype == "float16" and not torch.isfinite(cast).all():
            raise DataError(f"{name} has values beyond fp16's {torch.finfo(torch.float16).max:g}", "use bfloat16")
        yield cast.reshape(-1).view(torch.uint8).numpy().data


def take_in(folder: Path, target: Path) -> list[str]:
    """Write one of their directories as a checkpoint of no step, in float32 or wider; the names of its files."""
    spec = spec_of(folder)
    with HuggingFace(folder, spec) as source, _made(target) as building:
        tensors = {t.name: t.shape for t in spec.parameters()}
        wholes = {name: tuple((0, size) for size in shape) for name, shape in tensors.items()}
        dtype = "float64" if source.dtype == "float64" else "float32"
        entries = [(key_of(WEIGHT, name, wholes[name]), dtype, shape) for name, shape in tensors.items()]
        header = header_of(entries, {})
        contents = (
            source.read(name, whole).to(getattr(torch, dtype)).contiguous().reshape(-1).view(torch.uint8).numpy().data
            for name, whole in wholes.items()
        )
        file = "weights.safetensors"
        checksums = write_file(building / file, header, size_of(header, entries), contents)
        tokenizer = folder / TOKENIZER[0]
        run = {
            "model": spec.model_dump(mode="json"),
            "precision": {"compute": source.dtype},
            "data": {"tokenizer": str(tokenizer.absolute()) if tokenizer.exists() else None},
        }
        facts = Facts(0, 0, 0, None, {}, run, {}, "", dtype, versions())
        held = {name: Held(shape, (WEIGHT,), (Part(wholes[name], file),)) for name, shape in tensors.items()}
        write_manifest(Manifest(building, facts, {file: checksums}, held))
    return [file, MANIFEST]
