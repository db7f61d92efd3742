"""Adapters of ``torch.distributed.checkpoint``'s writer: a planner of boxes, and a writer that computes digests."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

# A box: the key and shape of its tensor, its offsets, and its content.
Item = tuple[str, tuple[int, ...], tuple[int, ...], Tensor]
# Called before each piece of long work with the name of the piece, how many are done, and how many there are.
Tell = Callable[[str, int, int], None]


def tell_nothing(what: str, done: int, total: int) -> None:
    """Show no progress; the default ``Tell``."""


def chunk_of(offsets: tuple[int, ...], content: Tensor) -> ChunkStorageMetadata:
    """The chunk metadata of a box in torch's index: its offsets, and the shape of ``content``."""
    return ChunkStorageMetadata(torch.Size(offsets), content.shape)


class BoxPlanner(SavePlanner):
    """The save planner that gives the boxes of one rank to torch's writer."""

    def __init__(self, items: Sequence[Item], tell: Tell = tell_nothing) -> None:
        self._contents: dict[MetadataIndex, Tensor] = {}
        self._items = list[WriteItem]()
        self._tell, self._num_resolved = tell, 0
        for key, shape, offsets, content in items:
            index = MetadataIndex(key, offsets)
            data = TensorWriteData(chunk_of(offsets, content), TensorProperties(content.dtype), torch.Size(shape))
            self._contents[index] = content
            self._items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        """Do nothing: the boxes are known."""

    def create_local_plan(self) -> SavePlan:
        """Plan one write per box."""
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Raise ``NotImplementedError``: ranks plan independently."""
        raise NotImplementedError

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the content of a box, of the shape of the box, and report progress."""
        self._tell(write_item.index.fqn, self._num_resolved, len(self._items))
        self._num_resolved += 1
        return self._contents[write_item.index]


@dataclass(frozen=True)
class _Prefix:
    """The prefix of a rank's file names, as torch's writer expects it in a plan."""

    prefix: str


class Writer(FileSystemWriter):
    """torch's writer, which also records the sizes and digests of its files."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, single_file_per_rank=True, sync_files=True, thread_count=1)
        self.fs = _Digesting()

    def write(self, boxes: BoxPlanner, rank: int) -> tuple[list[WriteResult], dict[str, dict[str, Any]]]:
        """Write the file of a rank; return the location of each box, and size and digest of the file by its name."""
        plan = SavePlan(boxes.create_local_plan().items, storage_data=_Prefix(f"__{rank}_"))
        results = self.write_data(plan, boxes).wait() if plan.items else []
        assert isinstance(self.fs, _Digesting)
        return results, self.fs.files

    def storage_meta(self) -> StorageMeta | None:
        """The storage metadata, without the temporary path of the folder."""
        return StorageMeta(save_id=self.save_id)


class _Digesting(FileSystem):
    """A file system that records the digest of each file that is written."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, Any]] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        with super().create_stream(path, mode) as raw:
            stream = _DigestedStream(raw)
            yield stream
            self.files[Path(path).name] = {"bytes": stream.size, "sha256": stream.digest.hexdigest()}


class _DigestedStream(io.RawIOBase):
    def __init__(self, raw: Any) -> None:
        self.digest, self.size = hashlib.sha256(), 0
        self._raw = raw

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self.digest.update(content)
        self.size += memoryview(content).nbytes
        self._raw.write(content)
        return memoryview(content).nbytes

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        if not self._raw.closed:
            self._raw.flush()

    def fileno(self) -> int:
        self._raw.flush()
        return int(self._raw.fileno())
