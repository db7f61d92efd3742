"""Optimizer step layer by layer, on the device of its states: the host, a file, or the compute device.

A step that treats each parameter by itself may take them in any order and in any number of calls. So one layer after
the other is stepped, and only that layer's states, and its copies of parameters and gradients where those are on
another device, are in memory meanwhile; the new values go back to the device of the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.host_copies import HostCopies
from lightning_hybrid.optimizers.host_pipeline import HostStepPipeline
from lightning_hybrid.optimizers.moved import MovedStates
from lightning_hybrid.optimizers.replacement import (
    Place,
    only_parameters,
    step_after_closure,
    step_hooks_once,
    without_step_hooks,
)
from lightning_hybrid.optimizers.state_file import HOST, Region, StateFile, aligned, state_tensors
from lightning_hybrid.optimizers.trial import skips_missing_gradients, state_element_sizes
from lightning_hybrid.params import store
from lightning_hybrid.step.standins.tensors import is_absent


class LayerwiseStep(MovedStates):
    """The states of one optimizer that treats each parameter by itself."""

    def __init__(
        self,
        optimizer: Optimizer,
        layers: Sequence[Sequence[Tensor]],
        folder: str | None,
        regions: Mapping[int, Region] | None = None,
        *,
        states_on: torch.device = HOST,
    ) -> None:
        """Replace the optimizer's step.

        Some parameters may be absent, others added later. ``layers`` are in the order of stepping; ``folder`` is for
        the file; ``regions`` are of files that hold the parameters themselves, by their ids.

        Raises:
            OffloadError: There is no room in the folder, or it cannot be written.
        """
        self._all_layers = [list(layer) for layer in layers]
        self._folder, self._by_id = folder, dict(regions or {})
        self._layers: list[list[Tensor]] = []
        self._regions: list[set[Region]] = []
        self._layer_of: dict[int, int] = {}  # by id of a parameter
        self._stepped: set[int] = set()  # ids of parameters stepped before the optimizer's own step
        self._offsets: dict[int, int] = {}  # of the states of each parameter in its region
        super().__init__(optimizer, states_on, ())
        self._add_parameters()
        self._skips_missing = skips_missing_gradients(optimizer)
        self._pipeline = self._pipeline_to_host()
        self._in_file: set[int] = set()  # data_ptr() of tensors in the file
        self._original = optimizer.step
        self._undo = step_after_closure(optimizer, self._step, Place.STATES, reason="offloaded states, by layer")

    def _add_parameters(self) -> None:
        """Take the optimizer's parameters, also ones that were added to it since, layer by layer.

        Raises:
            OffloadError: There is no room for their states.
        """
        members = [p for group in self._optimizer.param_groups for p in group["params"]]
        added = {id(p): p for p in members if id(p) not in self._layer_of and not is_absent(p)}
        if not added:
            return
        layers = [found for layer in self._all_layers if (found := [p for p in layer if added.pop(id(p), None) is p])]
        if added:  # of modules that did not exist when the layers were found
            layers.append(list(added.values()))
        for number, layer in enumerate(layers, len(self._layers)):
            self._layer_of |= {id(p): number for p in layer}
        self._layers += layers
        self._regions += [{self._by_id[id(p)] for p in layer if id(p) in self._by_id} for layer in layers]
        self._files |= {region.file for found in self._regions for region in found}
        if self._folder is not None:
            self._extend_file(self._folder, layers)

    def _extend_file(self, folder: str, layers: Sequence[Sequence[Tensor]]) -> None:
        """Make a region of the file for each of these layers."""
        sizes: dict[int, list[int | None]] = {}  # by id of a parameter
        for number, group in enumerate(self._optimizer.param_groups):
            of_group = state_element_sizes(self._optimizer, number)
            assert of_group is not None
            sizes |= {id(p): of_group for p in group["params"]}
        lengths = []
        for members in layers:
            ends = [0, *accumulate(_bytes_of(p, sizes[id(p)]) for p in members)]
            self._offsets |= {id(p): start for p, start in zip(members, ends[:-1], strict=True)}
            lengths.append(ends[-1])
        if self.file is None:
            self.file = StateFile(folder, lengths)
            self._files.add(self.file)
        else:
            self.file.extend(lengths)

    def _pipeline_to_host(self) -> HostStepPipeline | None:
        devices = {p.device for members in self._layers for p in members}
        if self._states_on.type != "cpu" or {device.type for device in devices} != {"cuda"} or len(devices) > 1:
            return None
        return HostStepPipeline(self._optimizer, HostCopies(devices.pop()))

    @property
    def host_optimizer(self) -> Optimizer | None:
        """The copy of the optimizer that steps on the host; None where the optimizer itself does."""
        return None if self._pipeline is None else self._pipeline.host_optimizer

    def adopt(self) -> None:
        """Copy states that were loaded to the file."""
        self._add_parameters()
        for number, members in enumerate(self._layers):
            self._put_in_file(number, members)

    def is_in_file(self, value: Tensor) -> bool:
        """Whether the memory of a state of any shape is in the file."""
        return value.data_ptr() in self._in_file

    def step_subset(self, parameters: Sequence[Tensor]) -> None:
        """Step some parameters, of any shape, whose gradients are final; the optimizer's own step skips them."""
        if not self._stepped:
            self._add_parameters()
            self.check()
        self._stepped.update(map(id, parameters))
        by_layer: dict[int, list[Tensor]] = {}
        for p in parameters:
            by_layer.setdefault(self._layer_of[id(p)], []).append(p)
        with without_step_hooks(self._optimizer):
            for number, members in by_layer.items():
                self._begin_layer(number, members, {}, following=number - 1)

    def _step(self, kwargs: dict[str, Any]) -> None:
        stepped = set(self._stepped)
        self._add_parameters()
        if not stepped:
            self.check()
        self._stepped.clear()
        with step_hooks_once(self._optimizer):
            for number, members in enumerate(self._layers):
                if left := [p for p in members if id(p) not in stepped]:
                    self._begin_layer(number, left, kwargs, following=number + 1)
            if self._pipeline is not None:
                self._pipeline.wait()

    def _begin_layer(self, number: int, members: Sequence[Tensor], kwargs: dict[str, Any], *, following: int) -> None:
        """Step parameters of one layer, at once or in the pipeline; reads the layer ``following`` ahead."""
        if self._pipeline is not None:
            ready = members if not self._skips_missing else [p for p in members if p.grad is not None]
            if all(p.grad is not None and not p.grad.is_sparse for p in ready):
                for p in ready:
                    self._move_states(self._optimizer.state.get(p, {}))
                self._pipeline.submit(
                    ready,
                    kwargs,
                    before=partial(self._load, number, following),
                    after=partial(self._put_in_file, number, ready),
                )
                return
            self._pipeline.wait()
        self._load(number, following)
        with only_parameters(self._optimizer, set(map(id, members))):
            self._step_layer(number, members, kwargs)

    def _load(self, number: int, following: int) -> None:
        """Read the states of a layer that are in a file, and begin to read another layer's."""
        has_following = 0 <= following < len(self._layers)
        if self.file is not None:
            if has_following:
                Region(self.file, following).read_ahead()
            Region(self.file, number).load()
        for region in self._regions[following] if has_following else ():
            region.read_ahead()

    def _step_layer(self, number: int, members: Sequence[Tensor], kwargs: dict[str, Any]) -> None:
        moved = [p for p in members if p.device != self._states_on]
        for p in moved:
            self._move_states(self._optimizer.state.get(p, {}))
        to = self._states_on
        held = ((p, p.data.to(to), None if p.grad is None else p.grad.to(to)) for p in moved)
        with store.swapped(held, lambda p, data: data.copy_(p.data)):
            self._original(**kwargs)
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
        region = Region(self.file, number)
        for p in members:
            offset = self._offsets[id(p)]
            for name, value in state_tensors(self._optimizer.state.get(p)).items():
                if value.data_ptr() not in self._in_file:
                    slot = region.tensor(offset, value)
                    slot.copy_(value)
                    self._optimizer.state[p][name] = slot
                    self._in_file.add(slot.data_ptr())
                offset += aligned(value.nbytes)
        region.evict()

    def close(self) -> None:
        """Restore the optimizer's own step; states are read from the file, or lost with it."""
        if self._pipeline is not None:
            self._pipeline.close()
        super().close()


def _bytes_of(p: Tensor, sizes: Sequence[int | None]) -> int:
    return sum(aligned(p.numel() * (size or p.element_size())) for size in sizes)
