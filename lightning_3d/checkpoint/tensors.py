"""Tensors on disk, written and read by slices with torch.distributed.checkpoint (DCP) under the whole model's names.

The files are DCP's own format, so that `torch.distributed.checkpoint.load` and `format_utils` of any torch can read
them too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lightning_3d.checkpoint.slices import Slices, whole
from lightning_3d.errors import CheckpointError, listed
from lightning_3d.lightning_compat import read_dcp_metadata

METADATA_FILE = ".metadata"

Notes = dict[str, dict[str, str]]
"""Small facts beside the tensors: by topic, a mapping. Those of all ranks are merged."""


def write_tensors(folder: Path, collect: Callable[[], tuple[Mapping[str, Slices], Notes]]) -> None:
    """Write what all ranks hold into one folder. Collective over the world; only plans are sent, never tensor data.

    What several ranks hold is written once, by the one of them that has the least to write.

    Args:
        collect: gives this rank's slices, by name, and its notes. Slices of different ranks are either the same or do
            not overlap. An error that it raises reaches all ranks.

    Raises:
        CheckpointError: on all ranks, if one could not collect or write, or if a tensor is not covered by what the
            ranks hold.
    """
    try:
        dcp.save({}, storage_writer=dcp.FileSystemWriter(folder), planner=_SavePlanner(collect))
    except dcp.CheckpointException as failed:
        errors = {reason(error) for error, _ in failed.failures.values()}
        ranks = listed(sorted(failed.failures))
        raise CheckpointError(
            f"The checkpoint could not be written (rank {ranks}): {listed(sorted(errors))}"
        ) from failed


def reason(error: BaseException) -> str:
    """An error in a sentence about something larger. The text of an `OSError` names the file, its repr does not."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


class TensorFolder:
    """The tensors of one checkpoint, open for reading. Reading needs no other rank.

    Attributes:
        notes: what ranks noted at writing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metadata = read_dcp_metadata(folder / METADATA_FILE)
        self._tensors: dict[str, TensorStorageMetadata] = {
            name: entry
            for name, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.notes: Notes = self._metadata.planner_data or {}

    def names(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors whose names begin with `prefix`, by the rest of the name."""
        return {n.removeprefix(prefix): tuple(entry.size) for n, entry in self._tensors.items() if n.startswith(prefix)}

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].properties.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        return sum(prod(entry.size) * entry.properties.dtype.itemsize for entry in self._tensors.values())

    @property
    def files(self) -> dict[str, int]:
        """Files that hold tensors, and how many bytes at least each of them must have."""
        files: dict[str, int] = {}
        for place in self._metadata.storage_data.values():
            files[place.relative_path] = max(files.get(place.relative_path, 0), place.offset + place.length)
        return files

    def read_into(self, targets: Mapping[str, Slices]) -> None:
        """Fill slices in place, converted to their types. Reads only the saved pieces that overlap them.

        Raises:
            CheckpointError: a file cannot be read.
        """
        items = []
        for name, slices in targets.items():
            chunks = [ChunkStorageMetadata(torch.Size(at), part.size()) for at, part in slices.parts.items()]
            items += create_read_items_for_chunk_list(name, self._tensors[name], chunks)
        reader = dcp.FileSystemReader(self._folder)
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        try:
            with torch.no_grad():
                planner = _Targets(targets, LoadPlan(items))
                reader.read_data(planner.create_local_plan(), planner).wait()
        except Exception as error:  # whatever a damaged file makes of torch.load
            raise CheckpointError(f"The tensors in {self._folder} cannot be read: {reason(error)}.") from error

    def read(self, name: str) -> Tensor:
        """A whole tensor, on the CPU."""
        tensor = torch.empty(self._tensors[name].size, dtype=self.dtype(name))
        self.read_into({name: whole(tensor)})
        return tensor


class _SavePlanner(dcp.SavePlanner):
    """Plans the writing of `Slices`. Every rank offers what it holds; the coordinator leaves each piece to one rank."""

    def __init__(self, collect: Callable[[], tuple[Mapping[str, Slices], Notes]]) -> None:
        self._collect = collect

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self._held, self._notes = self._collect()

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                MetadataIndex(name, offset),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(offset), part.size()),
                    TensorProperties(dtype=part.dtype),
                    torch.Size(slices.shape),
                ),
            )
            for name, slices in self._held.items()
            for offset, part in slices.parts.items()
        ]
        return SavePlan(items, planner_data=self._notes)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        writers = _one_writer_each(all_plans)
        plans, metadata = create_default_global_save_plan(
            [
                dataclasses.replace(plan, items=[item for item in plan.items if writers[item.index] == rank])
                for rank, plan in enumerate(all_plans)
            ]
        )
        _require_whole(metadata)
        metadata.planner_data = {}
        for plan in all_plans:
            for key, noted in plan.planner_data.items():
                metadata.planner_data.setdefault(key, {}).update(noted)
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        assert write_item.index.offset is not None
        return self._held[write_item.index.fqn].parts[tuple(write_item.index.offset)]


def _one_writer_each(plans: list[SavePlan]) -> dict[MetadataIndex, int]:
    """For each piece the rank that writes it. Pieces with few holders choose first, then the largest: that is even."""
    holders: dict[MetadataIndex, list[int]] = {}
    size: dict[MetadataIndex, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            assert item.tensor_data is not None
            holders.setdefault(item.index, []).append(rank)
            size[item.index] = prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
    load = [0] * len(plans)
    writers = {}
    for index in sorted(holders, key=lambda index: (len(holders[index]), -size[index])):
        writers[index] = min(holders[index], key=load.__getitem__)
        load[writers[index]] += size[index]
    return writers


def _require_whole(metadata: Metadata) -> None:
    """Refuse a checkpoint in which part of a tensor is missing or there twice: it could be saved but not be loaded."""
    wrong = []
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        covered = sum(prod(chunk.sizes) for chunk in tensor.chunks)
        if covered != prod(tensor.size):
            wrong.append(f"{name}: {covered} of {prod(tensor.size)} elements")
    if wrong:
        raise CheckpointError(f"The ranks do not hold these tensors exactly once: {listed(wrong)}.")


class _Targets(dcp.LoadPlanner):
    """Tells DCP's reader where a piece belongs. The plan is made before: each rank reads for itself."""

    def __init__(self, targets: Mapping[str, Slices], plan: LoadPlan) -> None:
        self._targets = targets
        self._plan = plan

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Everything is known from the start."""

    def create_local_plan(self) -> LoadPlan:
        return self._plan

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise CheckpointError(f"{read_item.storage_index.fqn} is no tensor. It was not loaded.")

    def resolve_tensor(self, read_item: Any) -> Tensor:
        part = self._targets[read_item.dest_index.fqn].parts[tuple(read_item.dest_index.offset)]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        """`resolve_tensor` gave a view, so the data is where it belongs."""
