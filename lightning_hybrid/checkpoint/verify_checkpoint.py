"""Verification of a distributed checkpoint: its files are as they were written, and each element is in one box."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_hybrid.checkpoint import checkpoint_folder as folder
from lightning_hybrid.checkpoint.dcp_planner_and_writer import Tell, tell_nothing
from lightning_hybrid.checkpoint.flat_state import OPTIMIZERS, references
from lightning_hybrid.checkpoint.read_checkpoint_folder import SavedFolder


def problems(path: Path, *, weights_only: bool = True, tell: Tell = tell_nothing) -> Iterator[str]:
    """List what is wrong with the checkpoint in a folder, one sentence each; every byte is read.

    Args:
        path: The folder.
        weights_only: Whether to refuse all but tensors and plain Python values.
        tell: Called before each file is read.

    Raises:
        CheckpointError: It is no checkpoint, or not complete.
    """
    saved = SavedFolder(path, weights_only=weights_only, digests=False)  # below, one by one
    files = saved.manifest["files"]
    for number, (name, entry) in enumerate(files.items()):
        tell(name, number, len(files))
        if folder.digest(path / name) != entry["sha256"]:
            yield f"{name} has other content than when it was written"
    for index, info in saved.metadata.storage_data.items():
        entry = files.get(info.relative_path)
        if entry is None or info.offset + info.length > entry["bytes"]:
            yield f"{index.fqn} at {tuple(index.offset or ())} is outside of {info.relative_path}"
    for key, tensor in saved.tensors.items():
        if error := covered(tuple(tensor.size), [(tuple(c.offsets), tuple(c.sizes)) for c in tensor.chunks]):
            yield f"{key} of shape {tuple(tensor.size)} {error}"
    rest = saved.rest()
    referenced = references(rest) | references(rest.get(OPTIMIZERS, []))
    for key in sorted(referenced - saved.tensors.keys()):
        yield f"{key} is referenced but missing"
    for key in sorted(saved.tensors.keys() - referenced):
        yield f"{key} is saved but not referenced"


def covered(shape: tuple[int, ...], boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> str:
    """Check that every element of a tensor lies in exactly one of the boxes; return what is wrong, or "".

    ``shape`` is that of the full tensor; each box is its offsets and sizes.
    """
    for offsets, sizes in boxes:
        if any(start < 0 or start + size > end for start, size, end in zip(offsets, sizes, shape, strict=True)):
            return f"has a box outside of it, at {offsets} of sizes {sizes}"
    ordered = sorted(boxes)
    for number, (offsets, sizes) in enumerate(ordered):
        for other, lengths in ordered[number + 1 :]:
            if all(a < b + m and b < a + n for a, n, b, m in zip(offsets, sizes, other, lengths, strict=True)):
                return f"has elements that two boxes contain, at {offsets} of sizes {sizes} and at {other} of {lengths}"
    saved = sum(math.prod(sizes) for _, sizes in boxes)
    return "" if saved == math.prod(shape) else f"has {math.prod(shape)} elements, of which {saved} are saved"
