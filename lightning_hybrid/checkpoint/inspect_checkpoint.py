"""A table of what a distributed checkpoint contains, for `lightning-hybrid checkpoint inspect`."""

from __future__ import annotations

import math

from lightning_hybrid.checkpoint.reading import SavedFolder


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
