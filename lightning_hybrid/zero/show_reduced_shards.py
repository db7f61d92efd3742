"""Local shards of one group in the middle of a step: parameters hold them for a while, with reduced gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from lightning_hybrid.parts.gather_on_read import below_read_guards, unguard
from lightning_hybrid.zero.sharded_parameter_group import ParameterGroup


@contextlib.contextmanager
def reduced_shards(group: ParameterGroup) -> Iterator[list[nn.Parameter]]:
    """Let parameters hold this rank's shards inside, and their averaged gradients.

    What is written to the shards is kept; a gradient that is None at the end is freed.

    Yields:
        The parameters that have a gradient.
    """
    names = [name for name, gradient in group._gradients.items() if gradient is not None]
    parameters = [group.parameters[name] for name in names]
    full = [parameter.data for parameter in parameters]
    unguard(parameters, "replicas")
    _show(group, names)
    try:
        yield parameters
    finally:
        for name, parameter, data in zip(names, parameters, full, strict=True):
            if parameter.grad is None:
                group._gradients[name] = None
            parameter.grad = None
            shard, parameter.data = parameter.data, data
            if name in group._placements and group.is_full and group.has_own_shards:
                # What `reshard` writes back to the shard.
                group._shard_of(name, group._full[name], group._rank).copy_(shard)
        group.gather_on_read()


@below_read_guards
def _show(group: ParameterGroup, names: list[str]) -> None:
    if group.is_full and group.has_own_shards:  # with what the step has written
        group._copy_rebound()
        group._write_back()
    for name in names:
        parameter = group.parameters[name]
        parameter.grad = None
        if name in group._placements:
            parameter.data = group._shards.shown(name)
        parameter.grad = group._gradients[name]
