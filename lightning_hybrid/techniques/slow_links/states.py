"""Tensors of parameters that callbacks keep, as checkpoints of any layout have them: full tensors by FQN."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.checkpoint.local import OwnedShards
from lightning_hybrid.params.shards import LocalShards
from lightning_hybrid.step.standins.tensors import full_shape, is_absent


class ParameterStates(Optimizer):
    """States of parameters, each of the shape of the local shard, in the form in which an optimizer's are saved.

    It takes no steps.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take states, by FQN, then by name.

        ``named`` has parameters of other ranks too.
        """
        super().__init__(list(named.values()), {})
        for name, entry in states.items():
            self.state[named[name]] = dict(entry)


def save_states(
    optimizer: Optimizer, module: nn.Module, stated: Collection[str], gather: Callable[[Optimizer], dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the states of an optimizer of the module's parameters, as a checkpoint has them; collective.

    ``stated`` are FQNs of parameters that have a state on the ranks that hold them; ``gather`` returns the state dict
    of an optimizer as a checkpoint has it.

    Returns:
        By FQN, full tensors on the first rank and nothing elsewhere; or what each rank writes of them to a folder.
    """
    saved = gather(optimizer)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = {
        names[id(parameters[key])] if isinstance(key, int) else key: entry
        for key, entry in saved.get("state", {}).items()
    }
    if "names" not in saved or not states:
        return states
    # All ranks write the same tree, to which each adds the tensors that it has.
    template = next(iter(states.values()))
    every = {names[id(parameter)]: parameter for parameter in parameters if names[id(parameter)] in stated}
    return {name: states.get(name) or _elsewhere(parameter, template) for name, parameter in every.items()}


def _elsewhere(parameter: Tensor, template: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a parameter that other ranks have, with the names of another parameter's."""
    shape = tuple(full_shape(parameter))
    return {
        key: OwnedShards(shape, leaf.dtype, ()) if isinstance(leaf, OwnedShards) else leaf
        for key, leaf in template.items()
    }


def local_states(
    states: Mapping[str, Mapping[str, Any]], module: nn.Module, parts: LocalShards
) -> dict[str, dict[str, Any]]:
    """Select the states of this rank's parameters from full ones, by FQN, and shard them."""
    local: dict[str, dict[str, Any]] = {}
    with torch._C.DisableTorchFunction():
        for name, parameter in module.named_parameters():
            if name not in states or is_absent(parameter):
                continue
            shape = parts.full_shape(name, parameter)
            local[name] = {
                key: parts.shard(name, value) if _has(shape, value) else value for key, value in states[name].items()
            }
    return local


def _has(shape: torch.Size, value: Any) -> bool:
    return isinstance(value, Tensor) and value.shape == shape
