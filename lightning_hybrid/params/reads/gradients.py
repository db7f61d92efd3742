"""Gradients of parameters that ranks share, for code of a training step outside of layers: full ones, gathered on read.

    read     all ranks agree on it, and gather the shards; further reads find the same tensor
    write    into the full tensor; each rank's shard follows once a backward, a clip or an optimizer uses it
    use      a full tensor follows the shards that a backward, a clip or an optimizer has changed: code may refer to it

What is written, or changed, is found by content: `.data` and views of NumPy count no versions.

[Note: the same gradients] Ranks see other batches, but run the same lines: whether a gradient is gathered, or still
here, must not depend on a rank. So ranks agree on what has changed, and an expert without tokens on this rank gets
zeros where another rank has a gradient of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.collectives.tensors import LinearMap, on_group_device
from lightning_hybrid.params.guards import below_read_guards
from lightning_hybrid.params.reads.agreement import HookAgreement
from lightning_hybrid.params.shards import LocalShards
from lightning_hybrid.step.objects.tensors import gradient_dtype
from lightning_hybrid.step.tracing.functions import NotIntercepted

_AHEAD = 16 << 20  # bytes of gradients that one agreement covers, if code reads one after the other
_SAME, _CHANGED, _OTHER = range(3)  # what has become of a gradient, over ranks the largest


@dataclass
class _Gradient:
    """The full gradient of a parameter that code has read or set."""

    full: Tensor | None  # None: no rank has a gradient
    local: Tensor | None  # this rank's shard
    before: Tensor | None = None  # the content of the shard when it was last equal to the full gradient
    is_current: bool = True  # whether they are equal, but for what code writes into the full one


class FullGradients:
    """Full gradients of sharded parameters during a training step."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        shards: LocalShards,
        agreement: HookAgreement,
        further: Collection[str] = (),
    ) -> None:
        """Take parameters by FQN, in one order on all ranks, which the ranks of the agreement share.

        ``further`` are those that other ranks share too: their gradients are gathered over all, elsewhere.
        """
        self._parameters, self._shards, self._agreement = dict(parameters), shards, agreement
        self._group, self._further = agreement.group, frozenset(further)
        self._order = list(parameters)
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters.values())}
        self._gradients: dict[str, _Gradient] = {}
        self._last_read = -2

    @below_read_guards
    def get(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient, of full shape, of a sharded parameter; collective unless it is here."""
        number = self._numbers[id(parameter)]
        name = self._order[number]
        if not self._is_current(name):
            self._gather(self._ahead(number) if number == self._last_read + 1 else [name])
        self._last_read = number
        return self._gradients[name].full

    @below_read_guards
    @torch.no_grad()
    def set(self, parameter: nn.Parameter, full: Tensor | None) -> None:
        """Set the gradient of a sharded parameter; ``full`` has the full shape."""
        name = self._order[self._numbers[id(parameter)]]
        if full is None:
            parameter.grad = None
        elif name in self._gradients and self._gradients[name].full is full:
            return
        else:
            parameter.grad = self._shards.shard_of(name, parameter, full.detach()).clone()
        self._gradients[name] = _Gradient(full, parameter.grad)

    @below_read_guards
    @torch.no_grad()
    def settle(self) -> None:
        """Write what code has written into full gradients to the shards, which may change from now on."""
        for name, gradient in self._gradients.items():
            if gradient.is_current and gradient.full is not None and gradient.local is not None:
                now = self._shards.shard_of(name, gradient.local, gradient.full)
                if not torch.equal(now, gradient.local):  # a write would invalidate a graph behind it
                    gradient.local.copy_(now)
                gradient.before = gradient.local.detach().clone()
            gradient.is_current = False

    @below_read_guards
    @torch.no_grad()
    def refresh(self) -> None:
        """Let full gradients follow their shards after these were used; collective if there are any."""
        names = [name for name, gradient in self._gradients.items() if not gradient.is_current]
        if not names:
            return
        news = on_group_device(torch.tensor([self._news_of(name) for name in names], dtype=torch.int32), self._group)
        dist.all_reduce(news, dist.ReduceOp.MAX, group=self._group)
        for name, what in zip(names, news.tolist(), strict=True):
            if what == _OTHER:
                del self._gradients[name]
            elif what == _SAME:
                self._gradients[name].is_current = True
            elif (full := self._gradients[name].full) is not None:
                full.copy_(self._shards.unshard(name, self._local(name)))
                self._gradients[name] = _Gradient(full, self._local(name))

    def forget(self) -> None:
        """Drop full gradients at the end of a step."""
        self.settle()
        self._gradients, self._last_read = {}, -2

    def _is_current(self, name: str) -> bool:
        return name in self._gradients and self._gradients[name].is_current

    def _local(self, name: str) -> Tensor:
        local = self._parameters[name].grad
        assert local is not None
        return local

    def _news_of(self, name: str) -> int:
        gradient, local = self._gradients[name], self._parameters[name].grad
        if local is not gradient.local:
            return _OTHER
        is_same = local is None or gradient.before is None or torch.equal(local, gradient.before)
        return _SAME if is_same else _CHANGED

    def _ahead(self, number: int) -> list[str]:
        found, size = list[str](), 0
        for name in self._order[number:]:
            parameter = self._parameters[name]
            size += self._shards.full_shape(name, parameter).numel() * parameter.element_size()
            if self._is_current(name) or (found and (size > _AHEAD or name in self._further)):
                break
            found.append(name)
        return found

    def _gather(self, names: Sequence[str]) -> None:
        self._agreement.agree_on("training_step", f"reads the gradient of {names[0]!r}")
        parameters = [self._parameters[name] for name in names]
        agree_on_presence(parameters, self._group)
        for name, parameter in zip(names, parameters, strict=True):
            local = parameter.grad
            full = None if local is None else joined(local, self._shards, name)
            before = self._gradients.get(name)
            if before is not None and before.full is not None and full is not None and before.local is local:
                with torch.no_grad():
                    full = before.full.copy_(full)  # code may refer to it
            self._gradients[name] = _Gradient(full, local)


class _JoinedShards(NotIntercepted, LinearMap):
    """The same, and no operation of a recorded step."""


def joined(local: Tensor, shards: LocalShards, name: str) -> Tensor:
    """The tensor of full shape of a shard of a parameter, or of a gradient of it, as a function of it; collective.

    All ranks compute the same of the full tensor, so each has the full gradient, of which the shard's is a shard.
    """
    like = local.detach()
    full: Tensor = _JoinedShards.apply(
        local, lambda shard: shards.unshard(name, shard), lambda full: shards.shard_of(name, like, full).contiguous()
    )
    return full


@torch.no_grad()
def agree_on_presence(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Give shards without a gradient one of zeros, if another rank of the group has a gradient; collective."""
    has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
    has = on_group_device(has, group)
    dist.all_reduce(has, dist.ReduceOp.MAX, group=group)
    for parameter, one_has in zip(parameters, has.tolist(), strict=True):
        if one_has and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
