"""What a checkpoint contains, in a table, and what is wrong with one."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_hybrid.checkpoint import folder
from lightning_hybrid.checkpoint.convert import read_file
from lightning_hybrid.checkpoint.flat import OPTIMIZERS, references, take_tensors
from lightning_hybrid.checkpoint.read import SavedFolder
from lightning_hybrid.checkpoint.write import Tell, covered, tell_nothing
from lightning_hybrid.layout import SIZE_OPTIONS
from lightning_hybrid.text import columns, counted


def summary(path: Path, *, weights_only: bool = True) -> dict[str, Any]:
    """Return what a folder or file contains as plain values: layout, step and versions, and each tensor by its key."""
    if path.is_file():
        state, about = read_file(path, weights_only=weights_only)
        found = take_tensors(state, is_first=True)[1]
        sizes = {key: (tensor.shape, tensor.dtype, 1) for key, tensor in found.items()}
        about = {**about, "files": {path.name: {"bytes": path.stat().st_size}}}
        about["versions"].pop("torch")  # that of this process
    else:
        saved = SavedFolder(path, weights_only=weights_only, digests=False)  # no tensor is read
        sizes = {key: (t.size, t.properties.dtype, len(t.chunks)) for key, t in saved.tensors.items()}
        about = saved.manifest
    tensors = {
        key: {
            "shape": list(shape),
            "dtype": str(dtype).removeprefix("torch."),
            "bytes": math.prod(shape) * dtype.itemsize,
            "boxes": boxes,
        }
        for key, (shape, dtype, boxes) in sorted(sizes.items())
    }
    return {name: about[name] for name in ("step", "epoch", "layout", "versions", "files")} | {"tensors": tensors}


def table(content: Mapping[str, Any], *, lists_all: bool = False) -> str:
    """Format what `summary` returns: layout, step and versions, and a line for each tensor, or each kind of them.

    Tensors of a kind have names that differ only in numbers, as those of equal layers do; an optimizer has one kind
    for each state.
    """
    versions = {name: version for name, version in content["versions"].items() if version}
    tensors, files = content["tensors"], content["files"]
    total = sum(tensor["bytes"] for tensor in tensors.values())
    head = [
        f"step {content['step']}, epoch {content['epoch']}",
        f"saved under {describe_layout(content['layout'])}",
        f"versions: {', '.join(f'{name} {version}' for name, version in versions.items())}",
        f"{counted(len(tensors), 'tensor')} of {total:,} bytes in {counted(len(files), 'file')} of"
        f" {sum(f['bytes'] for f in files.values()):,} bytes",
        *_numbers_by_part(tensors),
    ]
    if lists_all:
        rows = [
            (key, str(tensor["shape"]), tensor["dtype"], f"{tensor['bytes']:,}", str(tensor["boxes"]))
            for key, tensor in tensors.items()
        ]
        return "\n".join([*head, "", *columns([("tensor", "shape", "dtype", "bytes", "pieces"), *rows], right=3)])
    kinds = dict[tuple[str, str], list[Mapping[str, Any]]]()
    for key, tensor in tensors.items():
        kinds.setdefault((_kind(key), tensor["dtype"]), []).append(tensor)
    rows = []
    for (kind, dtype), found in kinds.items():
        shapes = dict.fromkeys(str(tensor["shape"]) for tensor in found)
        shape = next(iter(shapes)) if len(shapes) == 1 else f"{len(shapes)} shapes"
        rows.append((kind, shape, dtype, str(len(found)), f"{sum(tensor['bytes'] for tensor in found):,}"))
    lines = columns([("tensors", "shape", "dtype", "count", "bytes"), *rows], right=3)
    return "\n".join([*head, "", *lines, "", "--all lists every tensor, with the pieces that it is saved in"])


def _numbers_by_part(tensors: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for the model, the optimizers and others, with how many numbers of each type they have."""
    parts: dict[str, Counter[str]] = {}
    for key, tensor in tensors.items():
        parts.setdefault(key.partition("/")[0], Counter())[tensor["dtype"]] += math.prod(tensor["shape"])
    return [
        f"{part}: {', '.join(f'{number:,} numbers of {dtype}' for dtype, number in numbers.items())}"
        for part, numbers in parts.items()
    ]


def _kind(key: str) -> str:
    """The key of a tensor with a star for each number; for the parameter, in a state of an optimizer."""
    first, *path = key.split("/")
    if first == "optimizer":
        return "/".join([first, path[0], "*", path[-1]])
    return "/".join([first, *(re.sub(r"\b\d+\b", "*", part) for part in path)])


def describe_layout(axes: Mapping[str, Any]) -> str:
    """The sizes, widths of stages and the stage of ZeRO, by the options that set them, without defaults."""
    sizes = {
        SIZE_OPTIONS.get(axis, axis): size for axis, size in axes.items() if axis not in ("dp_replicate", "dp_shard")
    }
    shards, copies, zero = axes.get("dp_shard", 1), axes.get("dp_replicate", 1), sizes.pop("zero_stage", 0)
    sizes |= {"data_parallel_size": copies * shards}
    if not zero or copies > 1:  # all replicas by default
        sizes["shard_size"] = shards
    shown = {option: size for option, size in sizes.items() if size not in (0, 1)}
    if zero:
        shown["zero_stage"] = zero
    return ", ".join(f"{option}={size}" for option, size in shown.items()) or "one process"


def problems(path: Path, *, weights_only: bool = True, tell: Tell = tell_nothing) -> Iterator[str]:
    """List what is wrong with the checkpoint in a folder, one sentence each; every byte is read.

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
