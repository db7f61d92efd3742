"""State dicts of a module, made of other tensors than those it holds, and loaded into shards; shapes of states."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.errors import CheckpointError
from lightning_hybrid.optimizers.trial import can_step_shards, is_of_torch, state_shapes
from lightning_hybrid.params.shards import LocalShards
from lightning_hybrid.patching import temporary_hook
from lightning_hybrid.step.standins.tensors import full_shape, is_absent

_LISTED = 4


def saved_tensors(root: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers, of any shapes, under torch's keys, whatever hooks make of them."""
    return {
        f"{fqn}.{name}" if fqn else name: tensor
        for fqn, module in root.named_modules(remove_duplicate=False)
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and name not in module._non_persistent_buffers_set
    }


def own_state(root: nn.Module, *, is_copy: bool = False) -> dict[str, Any]:
    """Call the module's ``state_dict``; the method of its class for a copy whose method an average has replaced."""
    state: dict[str, Any] = type(root).state_dict(root) if is_copy else root.state_dict()
    return state


@contextlib.contextmanager
def holding(root: nn.Module, full: Mapping[int, Tensor]) -> Iterator[None]:
    """Let a module hold tensors of full shapes, by the id of what it has in their place.

    So methods and hooks of the user that leave out, rename and compute entries of a state dict compute full ones.
    """
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    put: dict[int, Tensor] = {}
    dicts: list[Any] = [members for module in root.modules() for members in (module._parameters, module._buffers)]
    try:
        for members in dicts:
            for name, tensor in members.items():
                if id(tensor) in full:
                    value = full[id(tensor)]
                    if isinstance(tensor, nn.Parameter):
                        value = put.setdefault(id(tensor), nn.Parameter(value, requires_grad=tensor.requires_grad))
                    replaced.append((members, name, tensor))
                    members[name] = value
        yield
    finally:
        for members, name, tensor in replaced:
            members[name] = tensor


def state_with(root: nn.Module, values: Mapping[str, Any], *, is_copy: bool = False) -> dict[str, Any]:
    """Return the state dict that the module's methods and hooks make of other ``values`` of its tensors, by key.

    They may leave out, rename and add entries.
    """

    def put(fqn: str, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in (*module._parameters, *module._buffers):
            if prefix + name in state and (key := f"{fqn}.{name}" if fqn else name) in values:
                state[prefix + name] = values[key]

    with contextlib.ExitStack() as stack:
        for fqn, module in root.named_modules():
            handle = module.register_state_dict_post_hook(temporary_hook(module, partial(put, fqn)))
            stack.callback(handle.remove)
            hooks: Any = module._state_dict_hooks  # an OrderedDict
            hooks.move_to_end(handle.id, last=False)  # before hooks of the user
        return own_state(root, is_copy=is_copy)


def load_module_state(
    root: nn.Module, state: Mapping[str, Any], shards: LocalShards, *, strict: bool, prefix: str = ""
) -> None:
    """Load a full state dict into this rank's parameters, or shards of them.

    ``strict`` requires the same names. ``prefix`` is that of the sharded module's names in ``root``, where that is a
    submodule of ``root``.
    """
    if differing := state_mismatches(root, state, shards, strict=strict, prefix=prefix):
        raise CheckpointError(differing, entry="other-model")
    with torch.no_grad():
        for key, value in nn.Module.state_dict(root).items():
            if key not in state or not isinstance(value, Tensor):
                continue
            name = key.removeprefix(prefix)
            if not is_absent(value):
                value.copy_(shards.shard_of(name, value, state[key]))


def shard_loading_hook(shards: LocalShards, root: nn.Module) -> Callable[..., None]:
    """Make a hook for ``root.load_state_dict``, called by user code too, that loads its shards of a full state."""
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    keys = {key: names[id(p)] for key, p in root.named_parameters(remove_duplicate=False)}

    def hook(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for key, name in keys.items():
            value = state.get(prefix + key)
            here = parameters.get(key)
            if not isinstance(value, Tensor) or here is None or is_absent(here):
                continue
            if value.shape == shards.full_shape(name, here):
                state[prefix + key] = shards.shard_of(name, here, value)

    return hook


def state_mismatches(
    root: nn.Module, state: Mapping[str, Any], shards: LocalShards, *, strict: bool, prefix: str = ""
) -> str:
    """Describe the names and shapes of a full state dict that do not match the module; "" if all match.

    The arguments are those of ``load_module_state``.
    """
    module_state = nn.Module.state_dict(root)
    shapes, lacking, unknown = [], [], []
    if strict:
        lacking = [f"{key} is in the model only" for key in module_state if key not in state]
        unknown = [f"{key} is in the checkpoint only" for key in state if key not in module_state]
    for key, value in module_state.items():
        if not isinstance(value, Tensor) or not isinstance(state.get(key), Tensor):
            continue
        shape = tuple(shards.full_shape(key.removeprefix(prefix), value))
        if shape != tuple(state[key].shape):
            shapes.append(f"{key} has shape {tuple(state[key].shape)} in the checkpoint and {shape} in the model")
    kinds = [differences for differences in (lacking, unknown, shapes) if differences]
    if not kinds:
        return ""
    count, each = sum(map(len, kinds)), max(1, _LISTED // len(kinds))
    listed = [difference for differences in kinds for difference in differences[:each]]
    return (
        f"the checkpoint does not match {type(root).__name__}: {count} names or shapes differ:"
        f" {'; '.join(listed)}{'; ...' if count > len(listed) else ''}; load a checkpoint of this model, or build the"
        " one that was saved"
    )


def check_state_shapes(
    optimizer: Optimizer, entries: Mapping[Any, Any], names: Sequence[str], *, is_sharded: bool
) -> None:
    """Check that states have the shapes that an optimizer gives them; alike on all ranks, and without messages.

    ``entries`` are full tensors of any device, and ``names`` FQNs, by the number of the parameter. Where ranks hold
    shards of parameters, an optimizer of the user's is tried too.
    """
    for number, (group, parameter) in enumerate(_parameters(optimizer)):
        entry, shape = entries.get(number), full_shape(parameter)
        found = _tensors(entry)
        if not found:
            continue
        expected = _expected(optimizer, group, parameter, found, is_sharded=is_sharded)
        for name, value in found.items():
            if expected.get(name, tuple(value.shape)) != tuple(value.shape):
                raise CheckpointError(
                    f"the checkpoint does not fit {type(optimizer).__name__}: the state {name!r} of {names[number]} has"
                    f" shape {tuple(value.shape)} in the checkpoint, not {expected[name]}, and the parameter has"
                    f" {shape}; load a checkpoint of this model and optimizer that was saved in full",
                    entry="other-optimizer",
                )


def check_kind(
    optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], entries: Mapping[Any, Any], path: str
) -> None:
    """Check that saved groups and states fit the class of an optimizer; alike on all ranks, and without messages.

    ``groups`` may lack what torch adds to those of its former versions. Settings, and so states, are the checkpoint's.
    """
    kind = type(optimizer)
    if not kind.__module__.startswith(("torch.", "lightning_hybrid.optim")) or len(groups) != len(
        optimizer.param_groups
    ):
        return
    differing = ""
    for saved, group in zip(groups, optimizer.param_groups, strict=True):
        twin = kind.__new__(kind)
        twin.__setstate__({"defaults": {}, "state": {}, "param_groups": [{**saved, "params": []}]})
        if lacking := (optimizer.defaults.keys() & group.keys()) - twin.param_groups[0].keys():
            differing = f"its group lacks {', '.join(sorted(lacking))}"
        elif saved.keys() != group.keys():
            differing = differing or _other_states(optimizer, twin, entries)
    if differing:
        raise CheckpointError(
            f"{path} does not fit {kind.__name__} of configure_optimizers: {differing}; return the class of optimizer"
            " that the checkpoint was saved with, or load its weights alone: load_from_checkpoint, and fit without"
            " ckpt_path",
            entry="other-optimizer",
        )


def _other_states(optimizer: Optimizer, twin: Optimizer, entries: Mapping[Any, Any]) -> str:
    """The states that an optimizer lacks, by the settings of its twin, and those it does not know; "" if none lacks."""
    for number, (_, parameter) in enumerate(_parameters(optimizer)):
        entry = entries.get(number) or {}
        expected = state_shapes(twin, 0, full_shape(parameter), parameter.dtype) or {}
        unknown, lacking = entry.keys() - expected.keys(), expected.keys() - entry.keys()
        if entry and unknown and lacking:
            return f"its states {', '.join(sorted(unknown))} are unknown, and {', '.join(sorted(lacking))} lacking"
    return ""


def _expected(
    optimizer: Optimizer, group: int, parameter: Tensor, found: Mapping[str, Tensor], *, is_sharded: bool
) -> dict[str, tuple[int, ...]]:
    shape = full_shape(parameter)
    if is_of_torch(optimizer):
        return state_shapes(optimizer, group, shape, parameter.dtype) or {}
    if not is_sharded or not can_step_shards(optimizer):
        return {}
    return {name: shape for name, value in found.items() if value.dim() == len(shape)}


def _parameters(optimizer: Optimizer) -> Iterator[tuple[int, Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            yield number, parameter


def _tensors(entry: Any) -> dict[str, Tensor]:
    """States of more than one number; states in tensors of a class of their own are quantized, in blocks."""
    if not isinstance(entry, dict):
        return {}
    return {name: value for name, value in entry.items() if type(value) is Tensor and value.dim()}
