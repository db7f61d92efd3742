"""A table of what a distributed checkpoint contains, for `lightning-hybrid checkpoint inspect`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning_hybrid.checkpoint.read_checkpoint_folder import SavedFolder

_OPTIONS = {
    "pp": "pipeline_parallel_size",
    "tp": "tensor_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_parallel_size",
}


def summary(saved: SavedFolder) -> dict[str, Any]:
    """Return what a checkpoint contains as plain values: layout, step and versions, and each tensor by its key."""
    manifest = saved.manifest
    tensors = {
        key: {
            "shape": list(tensor.size),
            "dtype": str(tensor.properties.dtype).removeprefix("torch."),
            "bytes": math.prod(tensor.size) * tensor.properties.dtype.itemsize,
            "boxes": len(tensor.chunks),
        }
        for key, tensor in sorted(saved.tensors.items())
    }
    return {name: manifest[name] for name in ("step", "epoch", "layout", "versions", "files")} | {"tensors": tensors}


def table(saved: SavedFolder) -> str:
    """Format a table: layout, step and versions, and a line for each tensor."""
    content = summary(saved)
    versions = {name: version for name, version in content["versions"].items() if version}
    tensors, files = content["tensors"], content["files"]
    rows = [
        (key, str(tensor["shape"]), tensor["dtype"], f"{tensor['bytes']:,}", str(tensor["boxes"]))
        for key, tensor in tensors.items()
    ]
    total = sum(tensor["bytes"] for tensor in tensors.values())
    head = [
        f"step {content['step']}, epoch {content['epoch']}",
        f"saved under {describe_layout(content['layout'])}",
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


def describe_layout(axes: Mapping[str, int]) -> str:
    """The sizes above 1 of the axes of ranks, by the options of the strategy that set them."""
    sizes = {_OPTIONS.get(axis, axis): size for axis, size in axes.items() if axis not in ("dp_replicate", "dp_shard")}
    shards = axes.get("dp_shard", 1)
    sizes |= {"data_parallel_size": axes.get("dp_replicate", 1) * shards, "shard_size": shards}
    return ", ".join(f"{option}={size}" for option, size in sizes.items() if size > 1) or "one process"
