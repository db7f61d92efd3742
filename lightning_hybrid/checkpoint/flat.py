"""Flat state of a checkpoint: named tensors, and the rest of the tree. Keys do not depend on any layout.

    model/<FQN>                                  tensors of the module's state dict
    optimizer/<number>/<FQN>/<name of the state>
    <path in the checkpoint>                     other tensors, such as a callback's average

In the rest, each tensor is replaced by a reference: a dict with one entry, which `torch.load(weights_only=True)` reads.
So are the scalars of optimizers (``step``), of which there is one for each parameter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.checkpoint.local import OwnedShards, unsharded
from lightning_hybrid.errors import CheckpointError

REFERENCE = "tensor of the checkpoint"
_NUMBER = "number of the checkpoint"
MODULE, OPTIMIZERS = "state_dict", "optimizer_states"
# Smaller tensors outside of the module's state stay in the rest.
_SMALL_NUMEL = 1024
Path = tuple[Any, ...]


def take_tensors(tree: Any, *, is_first: bool) -> tuple[Any, dict[str, OwnedShards]]:
    """Separate a checkpoint into the rest, with references, and its tensors by key; the first rank saves plain ones."""
    tensors: dict[str, OwnedShards] = {}
    keys: dict[Any, tuple[Any, str]] = {}  # by identity: tied parameters are saved once

    def leaf(path: Path, value: Any) -> Any:
        if not isinstance(value, OwnedShards) and not _is_large(path, value):
            if type(value) is Tensor and value.dim() == 0 and path[:1] == (OPTIMIZERS,):
                return {_NUMBER: [value.item(), str(value.dtype).removeprefix("torch.")]}
            return value.detach().clone() if type(value) in (Tensor, nn.Parameter) else value
        identity = _identity(value)
        if identity not in keys:
            key = key_of(path)
            if key in tensors:
                raise CheckpointError(
                    f"two tensors of the checkpoint have the key {key!r}; rename one of them", entry="save-keys"
                )
            keys[identity] = value, key
            tensors[key] = value if isinstance(value, OwnedShards) else unsharded(value, counts=is_first)
        return {REFERENCE: keys[identity][1]}

    return _mapped(tree, leaf, ()), tensors


def put_tensors(tree: Any, tensor: Callable[[str], Any]) -> Any:
    """Replace the references in a rest by what ``tensor`` returns for their keys; the inverse of `take_tensors`."""

    def leaf(_: Path, value: Any) -> Any:
        if not _is_reference(value):
            return value
        if REFERENCE in value:
            return tensor(value[REFERENCE])
        number, dtype = value[_NUMBER]
        return torch.tensor(number, dtype=getattr(torch, dtype))

    return _mapped(tree, leaf, ())


def references(tree: Any) -> set[str]:
    """The keys of the tensors that a rest refers to."""
    keys: set[str] = set()
    put_tensors(tree, keys.add)
    return keys


def key_of(path: Path) -> str:
    """The key of the tensor at a path in Lightning's checkpoint."""
    if path[0] == MODULE:
        path = ("model", *path[1:])
    elif path[0] == OPTIMIZERS and path[2:3] == ("state",):
        path = ("optimizer", path[1], *path[3:])
    return "/".join(map(str, path))


def torch_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an optimizer state by name to torch's form, by number."""
    numbers: dict[Any, Any] = {name: number for number, name in enumerate(state["names"])}
    entries = {numbers.get(name, name): entry for name, entry in state["state"].items()}
    order = sorted(entries, key=lambda key: (not isinstance(key, int), key))
    return {"state": {key: entries[key] for key in order}, "param_groups": state["param_groups"]}


def named_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `torch_state`, by ``param_names`` where torch has saved them, and by numbers otherwise."""
    names: list[str] = []
    for group in state["param_groups"]:
        names += map(str, group.get("param_names", [f"#{number}" for number in group["params"]]))
    entries = {names[key] if isinstance(key, int) else key: entry for key, entry in state["state"].items()}
    return {"state": entries, "param_groups": state["param_groups"], "names": names}


def _mapped(tree: Any, leaf: Callable[[Path, Any], Any], path: Path) -> Any:
    if type(tree) in (dict, OrderedDict) and not _is_reference(tree):
        return type(tree)((key, _mapped(value, leaf, (*path, key))) for key, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(_mapped(value, leaf, (*path, number)) for number, value in enumerate(tree))
    return leaf(path, tree)


def _is_reference(value: Any) -> bool:
    return type(value) is dict and len(value) == 1 and (REFERENCE in value or _NUMBER in value)


def _is_large(path: Path, value: Any) -> bool:
    if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided or value.is_quantized:
        return False
    is_state = path[:1] == (OPTIMIZERS,) and value.dim() > 0  # another layout may shard it
    return path[:1] == (MODULE,) or is_state or value.numel() > _SMALL_NUMEL


def _identity(value: Any) -> Any:
    """A key that is equal for aliases of one tensor: loading a file makes a separate object for each name."""
    if isinstance(value, OwnedShards) or value.numel() == 0:
        return id(value)
    return value.data_ptr(), tuple(value.shape), value.stride(), value.dtype
