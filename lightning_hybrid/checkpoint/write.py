"""Writer of distributed checkpoints: every rank writes its own boxes, through ``torch.distributed.checkpoint``.

Each rank computes by itself what to write (`assign_boxes`), so the ranks synchronize only once: when all have written,
the first one receives the list of all boxes and files, checks that each element of each tensor was
written once, and renames the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import math
import os
import pickle
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from lightning_hybrid.checkpoint import folder
from lightning_hybrid.checkpoint.flat import OPTIMIZERS, references, take_tensors
from lightning_hybrid.checkpoint.local import assign_boxes
from lightning_hybrid.errors import CheckpointError
from lightning_hybrid.mesh import Mesh

_MERGED = "state"  # of an optimizer: each rank has entries of its own
_SAME = "on_save_checkpoint must do the same on every rank"


BoxSpan = tuple[tuple[int, ...], tuple[int, ...]]  # the offsets and sizes of a box in its tensor
# A box: the key and shape of its tensor, its offsets, and its content.
Item = tuple[str, tuple[int, ...], tuple[int, ...], Tensor]
# Called before each piece of long work with the name of the piece, how many are done, and how many there are.
Tell = Callable[[str, int, int], None]


def tell_nothing(what: str, done: int, total: int) -> None:
    """Show no progress; the default ``Tell``."""


@dataclass
class Save:
    """The content that one rank writes in a save.

    Attributes:
        path: Path of the checkpoint.
        items: The boxes of this rank, with the keys and shapes of their tensors.
        meta: The rest, pickled by torch; only on the first rank.
        optimizers: The optimizers' states without tensors, as far as this rank has them; pickled.
        generators: The states of the replica's generators; only on its first rank.
        expected: The keys of all tensors of this rank's state.
        about: Entries of the manifest.
        error: The error because of which this rank has nothing to write; it is sent to the others.
        tell: Called before each box is written.
    """

    path: Path
    about: dict[str, Any]
    items: list[Item] = field(default_factory=list)
    meta: bytes = b""
    optimizers: bytes = b""
    generators: dict[str, Any] | None = None
    expected: set[str] = field(default_factory=set)
    error: Exception | None = None
    tell: Tell = tell_nothing


@dataclass
class _Report:
    """The message of a rank to the first one about its save."""

    optimizers: bytes = b""
    generators: dict[str, Any] | None = None
    expected: set[str] = field(default_factory=set)
    results: list[WriteResult] = field(default_factory=list)
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    chunks: list[tuple[str, ChunkStorageMetadata]] = field(default_factory=list)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    error: str = ""


class HostBuffers:
    """CPU memory that saves are copied to, reused by the next save."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def copied(self, key: str, offsets: tuple[int, ...], content: Tensor) -> Tensor:
        """Copy a box of any shape to memory on the CPU that nothing else writes."""
        entry = self._memory.get((key, offsets))
        if entry is None or entry.shape != content.shape or entry.dtype != content.dtype:
            entry = torch.empty(content.shape, dtype=content.dtype)
            self._memory[key, offsets] = entry
        return entry.copy_(content)


def prepare(
    checkpoint: Mapping[str, Any],
    path: Path,
    mesh: Mesh | None,
    about: dict[str, Any],
    *,
    buffers: HostBuffers | None = None,
    generators: dict[str, Any] | None = None,
) -> Save:
    """Collect the content that this rank writes of a checkpoint.

    Args:
        checkpoint: Lightning's checkpoint, with ``OwnedShards`` for sharded tensors.
        path: Path of the checkpoint.
        mesh: The process groups; None for one process.
        about: Entries of the manifest.
        buffers: Memory that tensors are copied to, so that training can go on; None if it waits.
        generators: States of the generators of this rank, which are saved for the first rank of each replica.

    Returns:
        The save; or one with an error, which `write` sends to all ranks, so that none waits for this one.
    """
    save = Save(path, about)
    try:
        _fill(save, dict(checkpoint), mesh, buffers)
    except Exception as error:
        return Save(path, about, error=error)
    if mesh is None or mesh.rank_in("replica") == 0:
        save.generators = generators
    return save


def _fill(save: Save, checkpoint: dict[str, Any], mesh: Mesh | None, buffers: HostBuffers | None) -> None:
    is_first = mesh is None or mesh.rank == 0
    rest, tensors = take_tensors(checkpoint, is_first=is_first)
    optimizers = rest.get(OPTIMIZERS, [])
    if OPTIMIZERS in rest:
        rest[OPTIMIZERS] = None  # saved in a separate file, since each rank has only some of them
    keys = {id(tensor): key for key, tensor in tensors.items()}
    for tensor, box in assign_boxes(tensors.values(), mesh):
        key, content = keys[id(tensor)], box.content
        if buffers is not None:
            content = buffers.copied(key, box.offsets, content)
        save.items.append((key, tensor.shape, box.offsets, content))
    save.meta = _pickled(rest) if is_first else b""
    save.optimizers = pickle.dumps(optimizers)
    save.expected = set(tensors)


def _pickled(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def write(save: Save, group: ProcessGroup | None, afterwards: Callable[[], None] = lambda: None) -> None:
    """Write, and wait until the checkpoint is complete; collective over all ranks.

    Args:
        save: The content of this rank.
        group: A group of all ranks that nothing else uses; None for one process.
        afterwards: Called on the first rank as soon as the checkpoint is complete, before the others are notified.

    Raises:
        CheckpointError: A rank could not write, or the ranks together did not write all.
    """
    rank = 0 if group is None else group.rank()
    report = _write_own(save, rank)
    reports = _gathered(report, group)
    error = _finish(save, reports, afterwards) if rank == 0 else ""
    error = _broadcast_error(error, group)
    if error:
        raise CheckpointError(error, entry="save-failed") from save.error


def _write_own(save: Save, rank: int) -> _Report:
    report = _Report(optimizers=save.optimizers, generators=save.generators, expected=save.expected)
    try:
        if save.error is not None:
            raise save.error
        target = folder.incomplete_path(save.path)
        target.mkdir(parents=True, exist_ok=True)
        (target / folder.MANIFEST).unlink(missing_ok=True)  # of a save that was killed as it ended
        report.results, report.files = Writer(target).write(BoxPlanner(save.items, save.tell), rank)
        for key, shape, offsets, content in save.items:
            report.tensors[key] = shape, content.dtype
            report.chunks.append((key, chunk_of(offsets, content)))
    except Exception as error:
        report.error = f"rank {rank}: {type(error).__name__}: {error}"
    return report


def _finish(save: Save, reports: Sequence[_Report], afterwards: Callable[[], None]) -> str:
    """Complete the checkpoint on the first rank; return the error message, or ""."""
    target = folder.incomplete_path(save.path)
    try:
        if errors := [report.error for report in reports if report.error]:
            raise CheckpointError("; ".join(errors), entry="save-failed")
        metadata = _merged_metadata(reports)
        optimizers = _merged_optimizers(reports)
        _check(metadata, references(optimizers).union(*(report.expected for report in reports)))
        files = {name: entry for report in reports for name, entry in report.files.items()}
        Writer(target).finish(metadata, [report.results for report in reports])
        contents = {folder.META: save.meta, folder.OPTIMIZERS: _pickled(optimizers)}
        # Ranks are in the order of their replicas, as far as they are the first ones.
        if generators := [report.generators for report in reports if report.generators is not None]:
            contents[folder.GENERATORS] = _pickled(generators)
        for name, content in contents.items():
            files[name] = folder.write_file(target / name, content)
        index = target / ".metadata"
        files[index.name] = {"bytes": index.stat().st_size, "sha256": folder.digest(index)}
        folder.finish(save.path, {**save.about, "files": files})
    except Exception as error:
        with contextlib.suppress(OSError):
            folder.remove(target)  # the disk may be full
        with contextlib.suppress(OSError):
            save.path.rmdir()  # the empty folder that reserved the name
        message = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        return f"the checkpoint {save.path} could not be written: {message}"
    try:
        afterwards()
    except OSError as error:
        return f"the checkpoint {save.path} is written, but what it replaces could not be removed: {error}"
    return ""


def _merged_metadata(reports: Sequence[_Report]) -> Metadata:
    tensors: dict[str, TensorStorageMetadata] = {}
    for report in reports:
        for key, (shape, dtype) in report.tensors.items():
            entry = tensors.setdefault(key, TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), []))
            if tuple(entry.size) != shape or entry.properties.dtype != dtype:
                raise CheckpointError(
                    f"ranks disagree on {key}: {tuple(entry.size)} of {entry.properties.dtype} and {shape} of {dtype};"
                    f" {_SAME}",
                    entry="save-covered",
                )
        for key, chunk in report.chunks:
            tensors[key].chunks.append(chunk)
    return Metadata(state_dict_metadata=dict(tensors))


def _merged_optimizers(reports: Sequence[_Report]) -> list[Any]:
    """The optimizers of the first rank, with the entries of all ranks."""
    first, *others = [pickle.loads(report.optimizers) for report in reports]  # sent by ranks of this run
    for other in others:
        for merged, entries in zip(first, other, strict=False):
            if isinstance(merged, dict) and isinstance(entries, dict):
                merged[_MERGED] = {**entries.get(_MERGED, {}), **merged.get(_MERGED, {})}
    return first


def _check(metadata: Metadata, expected: set[str]) -> None:
    """Check that every tensor was written, each element once; raises a CheckpointError otherwise."""
    lost = sorted(expected - metadata.state_dict_metadata.keys())
    if lost:
        raise CheckpointError(
            f"no rank wrote {', '.join(lost[:5])} ({len(lost)} tensors); {_SAME}", entry="save-covered"
        )
    for key, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        if message := covered(tuple(tensor.size), [(tuple(c.offsets), tuple(c.sizes)) for c in tensor.chunks]):
            raise CheckpointError(f"{key} of shape {tuple(tensor.size)} {message}; {_SAME}", entry="save-covered")


def covered(shape: tuple[int, ...], boxes: Sequence[BoxSpan]) -> str:
    """Check that every element of a tensor lies in exactly one of the boxes; return what is wrong, or ""."""
    for offsets, sizes in boxes:
        if any(start < 0 or start + size > end for start, size, end in zip(offsets, sizes, shape, strict=True)):
            return f"has a box outside of it, at {offsets} of sizes {sizes}"
    # How often each element is contained is the sum, over the corners before it, of these signs: equal signs are equal
    # numbers of boxes everywhere, and no pair of boxes needs to be compared.
    if _signed_corners(boxes) == _signed_corners([((0,) * len(shape), shape)]):
        return ""
    for (offsets, sizes), (other, lengths) in itertools.combinations(sorted(boxes), 2):
        if all(max(a, b) < min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, other, lengths, strict=True)):
            return f"has elements that two boxes contain, at {offsets} of sizes {sizes} and at {other} of {lengths}"
    saved = sum(math.prod(sizes) for _, sizes in boxes)
    return f"has {math.prod(shape)} elements, of which {saved} are saved"


def _signed_corners(boxes: Iterable[BoxSpan]) -> dict[tuple[int, ...], int]:
    """The corners of boxes, counted with the sign of the number of their dimensions that end there."""
    signs: Counter[tuple[int, ...]] = Counter()
    for offsets, sizes in boxes:
        ends = [((start, 1), (start + size, -1)) for start, size in zip(offsets, sizes, strict=True)]
        for corner in itertools.product(*ends):
            signs[tuple(place for place, _ in corner)] += math.prod(sign for _, sign in corner)
    return {corner: sign for corner, sign in signs.items() if sign}


# -- between ranks ----------------------------------------------------------------------------------------------------
# These use the methods of the group: torch.distributed's functions read the default group, which is another one while
# user code runs in the main thread.


def _gathered(report: _Report, group: ProcessGroup | None) -> list[_Report]:
    """Gather the reports of all ranks on the first; an empty list elsewhere."""
    if group is None:
        return [report]
    if group.rank() > 0:
        _send(report, 0, group)
        return []
    reports = [report]
    for rank in range(1, group.size()):
        try:
            reports.append(_received(rank, group))
        except RuntimeError as error:  # it has died; the error is sent to the other ranks
            reports.append(_Report(error=f"rank {rank} could not be reached: {error}"))
    return reports


def _broadcast_error(error: str, group: ProcessGroup | None) -> str:
    """Send the first rank's error message to all ranks."""
    if group is None:
        return error
    if group.rank() > 0:
        return str(_received(0, group))
    for rank in range(1, group.size()):
        with contextlib.suppress(RuntimeError):  # it has died
            _send(error, rank, group)
    return error


def _send(value: Any, rank: int, group: ProcessGroup) -> None:
    content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    group.send([torch.tensor([content.numel()])], rank, 0).wait()
    group.send([content], rank, 0).wait()


def _received(rank: int, group: ProcessGroup) -> Any:
    size = torch.zeros(1, dtype=torch.int64)
    group.recv([size], rank, 0).wait()
    content = torch.empty(int(size), dtype=torch.uint8)
    group.recv([content], rank, 0).wait()
    return pickle.loads(content.numpy().tobytes())


# -- torch.distributed.checkpoint -------------------------------------------------------------------------------------


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
