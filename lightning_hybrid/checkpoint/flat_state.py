"""A checkpoint as one flat set of named tensors, and the rest: keys do not depend on any layout.

    model/<FQN>                                  of the module's state dict
    optimizer/<number>/<FQN>/<name of the state>
    <path in the checkpoint>                     whatever else holds tensors, such as a callback's average

In the rest, a tensor's place is taken by a dict with one entry, which `torch.load(weights_only=True)` reads. So is that
of the bare numbers of optimizers (``step``), of which there is one for each parameter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.checkpoint.checkpoint_folder import CheckpointError
from lightning_hybrid.checkpoint.owned_shards import Held, whole

REFERENCE = "tensor of the checkpoint"
_NUMBER = "number of the checkpoint"
MODULE, OPTIMIZERS = "state_dict", "optimizer_states"
# What is smaller, and no part of the module, stays where it is.
_SMALL_NUMEL = 1024
Path = tuple[Any, ...]


def take_tensors(tree: Any, *, is_first: bool, path: Path = ()) -> tuple[Any, dict[str, Held]]:
    """Take the tensors out of a checkpoint.

    Args:
        tree: Lightning's checkpoint, or a part of it; ``Held`` stands for what ranks hold parts of.
        is_first: Whether this is the first rank, whose plain tensors count.
        path: Of the part.

    Returns:
        The rest, and the tensors by key.

    Raises:
        CheckpointError: Two have the same key.
    """
    tensors: dict[str, Held] = {}
    keys: dict[Any, tuple[Any, str]] = {}  # by what stands there: tied parameters are saved once

    def leaf(place: Path, value: Any) -> Any:
        if not isinstance(value, Held) and not _is_large(place, value):
            if type(value) is Tensor and value.dim() == 0 and place[:1] == (OPTIMIZERS,):
                return {_NUMBER: [value.item(), str(value.dtype).removeprefix("torch.")]}
            return value.detach().clone() if type(value) in (Tensor, nn.Parameter) else value
        known = _identity(value)
        if known not in keys:
            key = key_of(place)
            if key in tensors:
                raise CheckpointError(f"two tensors of the checkpoint have the key {key!r}; rename one of them")
            keys[known] = value, key
            tensors[key] = value if isinstance(value, Held) else whole(value, counts=is_first)
        return {REFERENCE: keys[known][1]}

    return _mapped(tree, leaf, path), tensors


def put_tensors(tree: Any, tensor: Callable[[str], Any]) -> Any:
    """A checkpoint of which the tensors are in their places again; the inverse of `take_tensors`.

    Args:
        tree: The rest.
        tensor: Gives one, by key.
    """

    def leaf(_: Path, value: Any) -> Any:
        if not _is_reference(value):
            return value
        if REFERENCE in value:
            return tensor(value[REFERENCE])
        number, dtype = value[_NUMBER]
        return torch.tensor(number, dtype=getattr(torch, dtype))

    return _mapped(tree, leaf, ())


def references(tree: Any) -> Iterator[str]:
    """The keys of the tensors that a rest asks for."""
    found: list[str] = []
    put_tensors(tree, found.append)
    return iter(found)


def key_of(path: Path) -> str:
    """The key of the tensor at a place of Lightning's checkpoint."""
    if path[0] == MODULE:
        path = ("model", *path[1:])
    elif path[0] == OPTIMIZERS and path[2:3] == ("state",):
        path = ("optimizer", path[1], *path[3:])
    return "/".join(map(str, path))


def torch_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an optimizer by number, as torch has it, from one by name."""
    numbers: dict[Any, Any] = {name: number for number, name in enumerate(state["names"])}
    entries = {numbers.get(name, name): entry for name, entry in state["state"].items()}
    order = sorted(entries, key=lambda key: (not isinstance(key, int), key))
    return {"state": {key: entries[key] for key in order}, "param_groups": state["param_groups"]}


def named_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `torch_state`, with the names that torch knows, if it does, and numbers otherwise."""
    names: list[str] = []
    for group in state["param_groups"]:
        known = group.get("param_names", [f"#{number}" for number in group["params"]])
        names += map(str, known)
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
    is_state = path[:1] == (OPTIMIZERS,) and value.dim() > 0  # another layout may cut it
    return path[:1] == (MODULE,) or is_state or value.numel() > _SMALL_NUMEL


def _identity(value: Any) -> Any:
    """The same for what is one tensor, which a file gives to each of its names as an object of its own."""
    if isinstance(value, Held) or value.numel() == 0:
        return id(value)
    return value.data_ptr(), tuple(value.shape), value.stride(), value.dtype
