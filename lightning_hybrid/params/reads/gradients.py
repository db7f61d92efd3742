"""Gradients of experts that ranks share, for code of a training step outside of layers: full ones, gathered on read.

    read     all ranks agree on it, and gather the shards; further reads find the same tensor
    write    into the full tensor; each rank's shard follows once a backward, a clip or an optimizer uses it

[Note: the same gradients] Ranks see other batches, but run the same lines: whether a gradient is gathered, or still
here, must not depend on a rank. So full gradients are dropped at the lines that use shards, whatever has changed, and
an expert without tokens on this rank gets zeros where another rank has a gradient of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.collectives.tensors import on_group_device
from lightning_hybrid.params.guards import below_read_guards
from lightning_hybrid.params.reads.agreement import HookAgreement
from lightning_hybrid.params.shards import LocalShards

_AHEAD = 16 << 20  # bytes of gradients that one agreement covers, if code reads one after the other


class FullGradients:
    """Full gradients of sharded parameters, from a read until shards are used."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        shards: LocalShards,
        group: dist.ProcessGroup,
        agreement: HookAgreement,
    ) -> None:
        """Take parameters by FQN, in one order on all ranks, and the ranks of ``group`` that share them."""
        self._parameters, self._shards, self._group, self._agreement = dict(parameters), shards, group, agreement
        self._order = list(parameters)
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters.values())}
        self._full: dict[str, Tensor | None] = {}  # None: no rank has a gradient
        self._last_read = -2

    @below_read_guards
    def get(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient, of full shape, of a sharded parameter; collective unless it is here."""
        number = self._numbers[id(parameter)]
        name = self._order[number]
        if name not in self._full:
            self._gather(self._ahead(number) if number == self._last_read + 1 else [name])
        self._last_read = number
        return self._full[name]

    @below_read_guards
    @torch.no_grad()
    def set(self, parameter: nn.Parameter, full: Tensor | None) -> None:
        """Set the gradient of a sharded parameter; ``full`` has the full shape."""
        name = self._order[self._numbers[id(parameter)]]
        if full is None:
            parameter.grad = None
        elif self._full.get(name) is not full:
            parameter.grad = self._shards.shard_of(name, parameter, full.detach()).clone()
        self._full[name] = full

    @below_read_guards
    @torch.no_grad()
    def settle(self) -> None:
        """Write what code has written into full gradients to the shards, and drop them."""
        for name, full in self._full.items():
            local = self._parameters[name].grad
            if full is not None and local is not None:  # also where `.data` was written, which counts no version
                local.copy_(self._shards.shard_of(name, local, full))
        self._full, self._last_read = {}, -2

    def _ahead(self, number: int) -> list[str]:
        found, size = list[str](), 0
        for name in self._order[number:]:
            parameter = self._parameters[name]
            size += self._shards.full_shape(name, parameter).numel() * parameter.element_size()
            if name in self._full or (found and size > _AHEAD):
                break
            found.append(name)
        return found

    @torch.no_grad()
    def _gather(self, names: Sequence[str]) -> None:
        self._agreement.agree_on("training_step", f"reads the gradient of {names[0]!r}")
        parameters = [self._parameters[name] for name in names]
        agree_on_presence(parameters, self._group)
        for name, parameter in zip(names, parameters, strict=True):
            local = parameter.grad
            self._full[name] = None if local is None else self._shards.unshard(name, local)


@torch.no_grad()
def agree_on_presence(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Give shards without a gradient one of zeros, if another rank of the group has a gradient; collective."""
    has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
    has = on_group_device(has, group)
    dist.all_reduce(has, dist.ReduceOp.MAX, group=group)
    for parameter, one_has in zip(parameters, has.tolist(), strict=True):
        if one_has and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
