"""Conversion of a distributed checkpoint to one ordinary Lightning file and back, without the model."""

from __future__ import annotations

import os
import pickle
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.checkpoint.flat import OPTIMIZERS, named_state, put_tensors, torch_state
from lightning_hybrid.checkpoint.read import ReadRequest, SavedFolder
from lightning_hybrid.checkpoint.write import Tell, prepare, tell_nothing, write
from lightning_hybrid.errors import CheckpointError
from lightning_hybrid.step.objects.tensors import subclasses_as_dicts

_LARGE_BYTES = 1 << 20


def to_file(source: Path, target: Path, *, weights_only: bool = True, tell: Tell = tell_nothing) -> None:
    """Convert a folder to one file, which is replaced atomically when it is complete.

    Tensors are read one by one into memory-mapped scratch files beside the target.

    Raises:
        CheckpointError: The folder is not complete, or no checkpoint.
    """
    saved = SavedFolder(source, weights_only=weights_only)
    rest = saved.rest()
    if OPTIMIZERS in rest:
        rest[OPTIMIZERS] = [torch_state(state) for state in rest[OPTIMIZERS]]
    target.parent.mkdir(parents=True, exist_ok=True)
    loaded: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:

        def tensor(key: str) -> Tensor:
            if key not in loaded:
                tell(key, len(loaded), len(saved.tensors))
                described = saved.metadata_of(key)
                loaded[key] = _on_disk(Path(scratch), described.size, described.properties.dtype)
                saved.read([ReadRequest(key, loaded[key])])
            return loaded[key]

        complete = Path(scratch) / "complete"
        with complete.open("wb") as file:
            filled = put_tensors(rest, tensor)
            if OPTIMIZERS in filled:
                filled[OPTIMIZERS] = saved.with_subclasses(filled[OPTIMIZERS])
            torch.save(filled, file)
            file.flush()
            os.fsync(file.fileno())
        saved.wait_for_digests()
        os.replace(complete, target)


def _on_disk(scratch: Path, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """An empty tensor; a large one is mapped to a file that is unlinked, so that no other process can open it."""
    num_bytes = size.numel() * dtype.itemsize
    if num_bytes < _LARGE_BYTES:
        return torch.empty(size, dtype=dtype)
    path = scratch / "tensor"
    storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=num_bytes)
    path.unlink()
    return torch.empty(0, dtype=dtype).set_(storage, 0, size)  # type: ignore[call-overload]


def to_folder(source: Path, target: Path, *, weights_only: bool = True, tell: Tell = tell_nothing) -> None:
    """Convert one file, which is memory-mapped, to a folder, which is replaced atomically when it is complete.

    A file has numbers for the parameters of optimizers, so their states are matched by order.

    Raises:
        CheckpointError: It is no checkpoint, or cannot be written.
    """
    state, about = read_file(source, weights_only=weights_only)
    write(replace(prepare(state, target, None, about), tell=tell), None)


def read_file(source: Path, *, weights_only: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a file contains, memory-mapped, with optimizers' states by name; and the entries of a manifest."""
    try:
        checkpoint = torch.load(source, map_location="cpu", mmap=True, weights_only=weights_only)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise CheckpointError(
            f"{source} cannot be read as a checkpoint of tensors and plain Python values ({str(error)[:300]}...); if"
            " you trust it and it is one, pass --trust",
            entry="untrusted",
        ) from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise CheckpointError(f"{source} is no checkpoint of Lightning: it has no 'state_dict'", entry="other-kind")
    state: dict[str, Any] = dict(checkpoint)
    if OPTIMIZERS in state:
        state[OPTIMIZERS] = [named_state(subclasses_as_dicts(one)) for one in state[OPTIMIZERS]]
    about = {
        "layout": state.get("hybrid3d", {}).get("layout", {}),
        "versions": {"torch": torch.__version__, "lightning": state.get("pytorch-lightning_version")},
        "step": state.get("global_step"),
        "epoch": state.get("epoch"),
    }
    return state, about
