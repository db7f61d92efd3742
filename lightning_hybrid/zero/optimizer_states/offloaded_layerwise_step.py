"""Optimizer step layer by layer, on the device of its states: the host, a file, or the compute device.

A step that treats each parameter by itself may take them in any order and in any number of calls. So one layer after
the other is stepped, and only that layer's states, and its copies of parameters and gradients where those are on
another device, are in memory meanwhile; the new values go back to the device of the parameters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.step.standins.absent_tensors import is_absent
from lightning_hybrid.zero.devices_storing_local_shards import HOST
from lightning_hybrid.zero.memory_mapped_states import Region, StateFile, aligned, state_tensors
from lightning_hybrid.zero.optimizer_states.offloaded_states_base import OffloadedStates
from lightning_hybrid.zero.optimizer_states.temporarily_replace_optimizer_step import (
    STEP_HOOKS,
    call_step_hooks,
    step_after_closure,
)
from lightning_hybrid.zero.optimizer_states.try_optimizer_step import state_element_sizes


class LayerwiseStep(OffloadedStates):
    """The states of one optimizer that treats each parameter by itself."""

    def __init__(
        self,
        optimizer: Optimizer,
        layers: Sequence[Sequence[Tensor]],
        folder: str | None,
        regions: Mapping[int, Region] | None = None,
        *,
        states_on: torch.device = HOST,
        numel: Callable[[Tensor], int] = Tensor.numel,
    ) -> None:
        """Replace the optimizer's step.

        Args:
            optimizer: Built, and not stepped yet; some parameters may be absent; `why_not_layerwise` is empty for it.
            layers: The parameters of each layer, in the order of stepping.
            folder: For the file; None for memory.
            regions: Regions of files that hold the parameters themselves, by their ids.
            states_on: Device of the states, and of the step.
            numel: Number of elements of a parameter that are stepped here.

        Raises:
            OffloadError: There is no room in the folder, or it cannot be written.
        """
        present = {id(p) for group in optimizer.param_groups for p in group["params"] if not is_absent(p)}
        self._layers = [members for layer in layers if (members := [p for p in layer if id(p) in present])]
        by_id = regions or {}
        self._regions = [{by_id[id(p)] for p in members if id(p) in by_id} for members in self._layers]
        super().__init__(optimizer, states_on, (region for found in self._regions for region in found))
        if folder is not None and self._layers:
            sizes = state_element_sizes(optimizer)
            assert sizes is not None
            self.file = StateFile(folder, [_bytes_of(members, sizes, numel) for members in self._layers])
            self._files.add(self.file)
        self._in_file: set[int] = set()  # data_ptr() of tensors in the file
        self._original = optimizer.step
        self._undo = step_after_closure(optimizer, self._step, reason="offloaded states, layer by layer")

    def adopt(self) -> None:
        """Copy states that were loaded to the file."""
        for number, members in enumerate(self._layers):
            self._put_in_file(number, members)

    def is_in_file(self, value: Tensor) -> bool:
        """Whether the memory of a state of any shape is in the file."""
        return value.data_ptr() in self._in_file

    def _step(self, kwargs: dict[str, Any]) -> None:
        optimizer, file = self._optimizer, self.file
        self.check()
        all_parameters = [group["params"] for group in optimizer.param_groups]
        hooks = {name: optimizer.__dict__.get(name) for name in STEP_HOOKS}
        call_step_hooks(optimizer, hooks["_optimizer_step_pre_hooks"])
        try:
            for name in STEP_HOOKS:  # once per step, not once per layer
                optimizer.__dict__[name] = OrderedDict()
            for number, members in enumerate(self._layers):
                is_last = number + 1 == len(self._layers)
                if file is not None:
                    if not is_last:
                        Region(file, number + 1).read_ahead()
                    Region(file, number).load()
                for region in () if is_last else self._regions[number + 1]:
                    region.read_ahead()
                ids = {id(p) for p in members}
                for group, parameters in zip(optimizer.param_groups, all_parameters, strict=True):
                    group["params"] = [p for p in parameters if id(p) in ids]
                self._step_layer(number, members, kwargs)
        finally:
            for group, parameters in zip(optimizer.param_groups, all_parameters, strict=True):
                group["params"] = parameters
            for name, saved in hooks.items():
                optimizer.__dict__[name] = saved
        call_step_hooks(optimizer, hooks["_optimizer_step_post_hooks"])

    def _step_layer(self, number: int, members: Sequence[Tensor], kwargs: dict[str, Any]) -> None:
        moved = [p for p in members if p.device != self._states_on]
        originals = [(p, p.data, p.grad) for p in moved]
        for p, data, grad in originals:
            p.grad = None
            p.data = data.to(self._states_on)
            p.grad = None if grad is None else grad.to(self._states_on)
            self._move_states(self._optimizer.state.get(p, {}))
        try:
            self._original(**kwargs)
        finally:
            for p, data, grad in originals:
                data.copy_(p.data)
                p.grad = None
                p.data = data
                p.grad = grad
        self._put_in_file(number, members)
        for region in self._regions[number]:
            region.evict()

    def _move_states(self, entry: dict[str, Any]) -> None:
        """Move states that were loaded, or made when the optimizer was built, from the parameter's device."""
        for name, value in entry.items():
            # Step counts are on the host wherever the rest is, except for capturable optimizers.
            is_count = isinstance(value, Tensor) and not value.dim() and self._states_on != HOST
            if isinstance(value, Tensor) and not is_count and value.device != self._states_on:
                entry[name] = value.to(self._states_on)

    @torch.no_grad()
    def _put_in_file(self, number: int, members: Sequence[Tensor]) -> None:
        """Copy states that the step has made or replaced to their offsets in the file, if there is one."""
        if self.file is None:
            return
        region, offset = Region(self.file, number), 0
        for p in members:
            for name, value in state_tensors(self._optimizer.state.get(p)).items():
                if value.data_ptr() not in self._in_file:
                    slot = region.tensor(offset, value)
                    slot.copy_(value)
                    self._optimizer.state[p][name] = slot
                    self._in_file.add(slot.data_ptr())
                offset += aligned(value.nbytes)
        region.evict()


def _bytes_of(members: Sequence[Tensor], sizes: Sequence[int | None], numel: Callable[[Tensor], int]) -> int:
    return sum(aligned(numel(p) * (size or p.element_size())) for p in members for size in sizes)
