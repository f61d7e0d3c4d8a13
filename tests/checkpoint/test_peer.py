"""torch.distributed.checkpoint: why it is not the base of ours. Where one of these fails, it has changed."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from tests.launching import on_ranks


def test_its_writer_of_safetensors_keeps_only_the_last_of_two_rectangles_of_one_tensor(tmp_path: Path) -> None:
    """A ZeRO shard that ends inside a row is two rectangles of one tensor on one rank."""
    on_ranks(1, lambda rank, world: write_two(tmp_path))


def write_two(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    pieces = {(0, 2): whole[:1, 2:], (1, 0): whole[1:2]}

    def item(offset: tuple[int, int]) -> WriteItem:
        chunk = ChunkStorageMetadata(torch.Size(offset), pieces[offset].size())
        data = TensorWriteData(chunk, TensorProperties(dtype=whole.dtype), whole.size())
        return WriteItem(MetadataIndex("x", offset), WriteItemType.SHARD, tensor_data=data)

    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            return pieces[tuple(write_item.index.offset or ())].contiguous()  # type: ignore[index]

    writer = dcp.HuggingFaceStorageWriter(path=str(tmp_path), save_distributed=True)
    writer.set_up_storage_writer(True)
    (plan,) = writer.prepare_global_plan([SavePlan([item(offset) for offset in pieces])])
    writer.write_data(plan, Planner()).wait()
    (file,) = tmp_path.rglob("*.safetensors")
    with safe_open(file, framework="pt") as found:
        assert list(found.keys()) == ["x"]
        assert torch.equal(found.get_tensor("x"), pieces[1, 0]), "2 of 6 elements are gone, without a word"


def test_its_other_writer_pickles_its_metadata(tmp_path: Path) -> None:
    on_ranks(1, lambda rank, world: dcp.save({"x": torch.ones(3)}, checkpoint_id=str(tmp_path)) and None)
    content = (tmp_path / ".metadata").read_bytes()
    assert content[:1] == pickle.PROTO and b"torch.distributed.checkpoint" in content
