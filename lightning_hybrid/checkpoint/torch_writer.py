"""``torch.distributed.checkpoint``'s writer, told by each rank what it writes, and asked for sizes and digests."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Generator, Iterable
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


def chunk_of(offsets: tuple[int, ...], content: Tensor) -> ChunkStorageMetadata:
    """A box as torch's index has it."""
    return ChunkStorageMetadata(torch.Size(offsets), content.shape)


class Boxes(SavePlanner):
    """Gives the boxes of one rank to torch's writer."""

    def __init__(self, items: Iterable[Item]) -> None:
        """Args: items: the boxes."""
        self._contents: dict[MetadataIndex, Tensor] = {}
        self._items = []
        for key, shape, offsets, content in items:
            index = MetadataIndex(key, offsets)
            data = TensorWriteData(chunk_of(offsets, content), TensorProperties(content.dtype), torch.Size(shape))
            self._contents[index] = content
            self._items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        """Nothing is left to know."""

    def create_local_plan(self) -> SavePlan:
        """The boxes."""
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Ranks know what to write without each other."""
        raise NotImplementedError

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """As it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The content of a box."""
        return self._contents[write_item.index]


@dataclass(frozen=True)
class _Prefix:
    """Of the files of a rank, as torch's writer looks for it in a plan."""

    prefix: str


class Writer(FileSystemWriter):
    """torch's writer, which also knows the sizes and digests of its files."""

    def __init__(self, path: Path) -> None:
        """Args: path: the folder."""
        super().__init__(path, single_file_per_rank=True, sync_files=True, thread_count=1)
        self.fs = _Digesting()

    def write(self, boxes: Boxes, rank: int) -> tuple[list[WriteResult], dict[str, dict[str, Any]]]:
        """Write the file of a rank; where each box lies in it, and its size and digest by its name."""
        plan = SavePlan(boxes.create_local_plan().items, storage_data=_Prefix(f"__{rank}_"))
        results = self.write_data(plan, boxes).wait() if plan.items else []
        assert isinstance(self.fs, _Digesting)
        return results, self.fs.files

    def storage_meta(self) -> StorageMeta | None:
        """Without the path that the folder has while it is written."""
        return StorageMeta(save_id=self.save_id)


class _Digesting(FileSystem):
    """Files of which the digest is known once they are written."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, Any]] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """A stream that is digested on its way."""
        with super().create_stream(path, mode) as raw:
            stream = _DigestedStream(raw)
            yield stream
            self.files[Path(path).name] = {"bytes": stream.size, "sha256": stream.digest.hexdigest()}


class _DigestedStream(io.RawIOBase):
    def __init__(self, raw: Any) -> None:
        self.digest, self.size = hashlib.sha256(), 0
        self._raw = raw

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, content: Any) -> int:
        """To the file and the digest."""
        self.digest.update(content)
        self.size += memoryview(content).nbytes
        self._raw.write(content)
        return memoryview(content).nbytes

    def tell(self) -> int:
        """Bytes so far."""
        return self.size

    def flush(self) -> None:
        """To the system."""
        if not self._raw.closed:
            self._raw.flush()

    def fileno(self) -> int:
        """Of the file."""
        self._raw.flush()
        return int(self._raw.fileno())
