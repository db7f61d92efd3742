"""Writer of distributed checkpoints: every rank writes its own boxes, in the format of torch.distributed.checkpoint.

Each rank computes by itself what to write (`assign_boxes`), so the ranks synchronize only once: when all have written,
the first one receives the list of all boxes and files, checks that each element of each tensor was
written once, and renames the folder.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import pickle
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

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
        about: Entries of the manifest.
        items: The boxes of this rank, with the keys and shapes of their tensors.
        meta: The rest, pickled by torch; only on the first rank.
        report: What else the first rank is sent.
        error: The error because of which this rank has nothing to write; it is sent to the others.
        tell: Called before each box is written.
    """

    path: Path
    about: dict[str, Any]
    items: list[Item] = field(default_factory=list)
    meta: bytes = b""
    report: Report = field(default_factory=lambda: Report())
    error: Exception | None = None
    tell: Tell = tell_nothing


@dataclass
class Report:
    """The message of a rank to the first one about its save.

    Attributes:
        optimizers: The optimizers' states without tensors, as far as the rank has them; pickled.
        generators: The states of the replica's generators; only on its first rank.
        expected: The keys of all tensors of the rank's state.
        boxes: For each that it wrote, key, shape and dtype of the tensor, place in it, and place in the rank's file.
        files: Entries of the manifest.
        error: Why it could not write.
    """

    optimizers: bytes = b""
    generators: dict[str, Any] | None = None
    expected: set[str] = field(default_factory=set)
    boxes: list[tuple[str, tuple[int, ...], torch.dtype, BoxSpan, _StorageInfo]] = field(default_factory=list)
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
    """Collect the content that this rank writes of Lightning's checkpoint, with ``OwnedShards`` for sharded tensors.

    With ``buffers`` tensors are copied, so that training can go on. An error is one of the save, which `write` sends to
    all ranks, so that none waits for this one. ``mesh`` is None for one process.
    """
    save = Save(path, about)
    try:
        _fill(save, dict(checkpoint), mesh, buffers)
    except Exception as error:
        return Save(path, about, error=error)
    if mesh is None or mesh.rank_in("replica") == 0:
        save.report.generators = generators
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
    save.report.optimizers, save.report.expected = pickle.dumps(optimizers), set(tensors)


def _pickled(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def write(save: Save, group: ProcessGroup | None, afterwards: Callable[[], None] = lambda: None) -> None:
    """Write, and wait until the checkpoint is complete; collective over ``group``, which nothing else uses.

    ``afterwards`` is called on the first rank when it is complete, before the others are notified.

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


def _write_own(save: Save, rank: int) -> Report:
    report = save.report
    try:
        if save.error is not None:
            raise save.error
        target = folder.incomplete_path(save.path)
        target.mkdir(parents=True, exist_ok=True)
        (target / folder.MANIFEST).unlink(missing_ok=True)  # of a save that was killed as it ended
        if save.items:
            _write_boxes(save, target / f"__{rank}_0.distcp", report)
    except Exception as error:
        report.error = f"rank {rank}: {type(error).__name__}: {error}"
    return report


def _write_boxes(save: Save, path: Path, report: Report) -> None:
    """Write the boxes of a rank to its file, each as `torch.save` does, and report their places."""
    with folder.DigestedFile(path) as file:
        for number, (key, shape, offsets, content) in enumerate(save.items):
            save.tell(key, number, len(save.items))
            here = content.detach().cpu()
            if here.untyped_storage().nbytes() != here.nbytes:
                here = here.clone()  # a view would be saved with all of its storage
            start = file.size
            torch.save(here, file)  # type: ignore[arg-type]  # a writer is all it needs
            place = _StorageInfo(path.name, start, file.size - start)
            report.boxes.append((key, shape, content.dtype, (offsets, tuple(content.shape)), place))
    report.files[path.name] = file.entry


def _finish(save: Save, reports: Sequence[Report], afterwards: Callable[[], None]) -> str:
    """Complete the checkpoint on the first rank; return the error message, or ""."""
    target = folder.incomplete_path(save.path)
    try:
        if errors := [report.error for report in reports if report.error]:
            raise CheckpointError("; ".join(errors), entry="save-failed")
        metadata = _merged_metadata(reports)
        optimizers = _merged_optimizers(reports)
        _check(metadata, references(optimizers).union(*(report.expected for report in reports)))
        files = {name: entry for report in reports for name, entry in report.files.items()}
        contents = {
            folder.INDEX: pickle.dumps(metadata),
            folder.META: save.meta,
            folder.OPTIMIZERS: _pickled(optimizers),
        }
        # Ranks are in the order of their replicas, as far as they are the first ones.
        if generators := [report.generators for report in reports if report.generators is not None]:
            contents[folder.GENERATORS] = _pickled(generators)
        for name, content in contents.items():
            files[name] = folder.write_file(target / name, content)
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


def _merged_metadata(reports: Sequence[Report]) -> Metadata:
    """The index of all boxes, as torch.distributed.checkpoint writes it."""
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for key, shape, dtype, (offsets, sizes), place in (box for report in reports for box in report.boxes):
        entry = tensors.setdefault(key, TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), []))
        if tuple(entry.size) != shape or entry.properties.dtype != dtype:
            raise CheckpointError(
                f"ranks disagree on {key}: {tuple(entry.size)} of {entry.properties.dtype} and {shape} of {dtype};"
                f" {_SAME}",
                entry="save-covered",
            )
        entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        places[MetadataIndex(key, offsets)] = place
    return Metadata(dict(tensors), None, places, StorageMeta(save_id=str(uuid.uuid4())), CURRENT_DCP_VERSION)


def _merged_optimizers(reports: Sequence[Report]) -> list[Any]:
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


def _gathered(report: Report, group: ProcessGroup | None) -> list[Report]:
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
            reports.append(Report(error=f"rank {rank} could not be reached: {error}"))
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
