"""Inspection of a distributed checkpoint: a table of its contents, and a check of its integrity."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from lightning_hybrid.checkpoint import checkpoint_folder as folder
from lightning_hybrid.checkpoint.flat_state import OPTIMIZERS, references
from lightning_hybrid.checkpoint.reading import SavedFolder
from lightning_hybrid.checkpoint.writing import covered


def table(saved: SavedFolder) -> str:
    """Format a table: layout, step and versions, and a line for each tensor."""
    manifest = saved.manifest
    sizes = {axis: size for axis, size in manifest["layout"].items() if size > 1}
    versions = {name: version for name, version in manifest["versions"].items() if version}
    rows = []
    total = 0
    for key, tensor in sorted(saved.tensors.items()):
        num_bytes = math.prod(tensor.size) * tensor.properties.dtype.itemsize
        total += num_bytes
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        rows.append((key, str(list(tensor.size)), dtype, f"{num_bytes:,}", str(len(tensor.chunks))))
    files = manifest["files"]
    head = [
        f"step {manifest['step']}, epoch {manifest['epoch']}",
        f"saved under {', '.join(f'{axis}={size}' for axis, size in sizes.items()) or 'one process'}",
        f"versions: {', '.join(f'{name} {version}' for name, version in versions.items())}",
        f"{len(rows)} tensors of {total:,} bytes in {len(files)} files of {sum(f['bytes'] for f in files.values()):,}",
    ]
    columns = [("tensor", "shape", "dtype", "bytes", "boxes"), *rows]
    widths = [max(len(row[column]) for row in columns) for column in range(5)]
    lines = [
        f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]:>{widths[3]}}  {row[4]:>5}"
        for row in columns
    ]
    return "\n".join([*head, "", *lines])


def problems(path: Path, *, weights_only: bool = True) -> Iterator[str]:
    """List what is wrong with a checkpoint, one sentence each; every byte is read.

    Args:
        path: The folder.
        weights_only: Whether the rest may contain only tensors and plain Python values.

    Raises:
        CheckpointError: It is no checkpoint, or not complete.
    """
    saved = SavedFolder(path, weights_only=weights_only)
    files = saved.manifest["files"]
    for name, entry in files.items():
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
    referenced = {*references(rest), *references(rest.get(OPTIMIZERS, []))}
    for key in sorted(referenced - saved.tensors.keys()):
        yield f"{key} is referenced but missing"
    for key in sorted(saved.tensors.keys() - referenced):
        yield f"{key} is saved but not referenced"
