"""Empty initialisation: models built without storage; each rank's shard is filled with one process's values."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from torch import Tensor, nn

from lightning_hybrid.errors import InitialValueError
from lightning_hybrid.step.deferred_init.ops import StorageView
from lightning_hybrid.step.deferred_init.parameters import InitialValues, reset
from lightning_hybrid.step.standins.tensors import fill

if TYPE_CHECKING:
    from lightning_hybrid.pipeline.stages.plan import StagePlan


class EmptyInit:
    """Initial values of a module from ``trainer.init_module(empty_init=True)`` until setup has assigned them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._values = InitialValues(device)
        self._unset: list[tuple[str, Tensor, int]] = []
        self._taken: list[tuple[str, nn.Parameter, StorageView]] = []

    @classmethod
    def adopted(cls, root: nn.Module, before: EmptyInit | None, device: torch.device) -> EmptyInit | None:
        """Return the initial values of all meta tensors of a module, added to those recorded before, if any."""
        if any(tensor.is_meta for tensor in [*root.parameters(), *root.buffers()]):
            before = before or cls(device)
            before.adopt(root)
        return before

    def building(self) -> AbstractContextManager[None]:
        """Build modules inside with parameters without storage."""
        return self._values.building()

    def adopt(self, root: nn.Module) -> None:
        """Record all meta tensors, also ones that user code put there; make buffers real."""
        unrecorded: set[nn.Module] = set()
        buffers: dict[int, Tensor] = {}
        for fqn, module in root.named_modules():
            for parameter in module._parameters.values():
                if parameter is not None and parameter.is_meta:
                    if not self._values.has_record_of(parameter):
                        unrecorded.add(module)
                    self._values.adopt(module, parameter)
            for name, buffer in module._buffers.items():
                if buffer is None or not buffer.is_meta:
                    continue
                if id(buffer) not in buffers and self._values.has_record_of(buffer):
                    buffers[id(buffer)] = self._values.value(self._values.view_of(buffer)).to(self._device)
                elif id(buffer) not in buffers:
                    buffers[id(buffer)] = real = torch.empty_like(buffer, device=self._device)
                    self._unset.append((f"{fqn}.{name}" if fqn else name, real, real._version))
                    unrecorded.add(module)
                module._buffers[name] = buffers[id(buffer)]
        if unrecorded:
            with self._values.record_writes():
                reset(root, unrecorded)

    def hide(self, root: nn.Module) -> None:
        """Replace parameters without storage by absent ones, as parameters of other ranks are.

        Raises:
            InitialValueError: A tensor has no value.
        """
        unset = [name for name, buffer, version in self._unset if buffer._version == version]
        if unset:
            raise InitialValueError(
                f"{len(unset)} buffers such as {unset[0]} were built on the meta device and nothing gives them values;"
                " build the model with trainer.init_module(empty_init=True), which leaves buffers real, or give their"
                " modules a reset_parameters() method that sets them",
                entry="meta-buffer",
            )
        empty = [(name, parameter) for name, parameter in root.named_parameters() if parameter.is_meta]
        for name, parameter in empty:
            self._values.check(name, parameter)
        self._taken = [(name, p, self._values.take(p, self._device)) for name, p in empty]

    def fill(self, plan: StagePlan | None) -> bool:
        """Assign the parameters of this rank the values of rank 0, one by one; collective.

        Returns whether no other module waits for its values. ``plan`` is None where every rank holds all parameters.
        """
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        for name, parameter, view in self._taken:
            if world_size == 1 or dist.get_rank() == 0:
                content = self._values.value(view).to(self._device, parameter.dtype).contiguous()
            else:
                content = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
            if world_size > 1:
                dist.broadcast(content, src=0)
            if plan is None or plan.rank in plan.ranks_of(name):
                if content.stride() != parameter.stride():
                    content = torch.empty_strided(
                        parameter.shape, parameter.stride(), dtype=parameter.dtype, device=self._device
                    ).copy_(content)
                fill(parameter, nn.Parameter(content, requires_grad=parameter.requires_grad))
        self._taken = []
        return self._values.close()


def move_to_device(root: nn.Module, device: torch.device) -> None:
    """Call ``root.to(device)``, also where some tensors are on the meta device, and stay there."""
    if not any(tensor.is_meta for tensor in [*root.parameters(), *root.buffers()]):
        root.to(device)
        return
    root._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    _update_properties(root, device=device)
