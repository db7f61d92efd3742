"""Deferred initialisation: parameters built without storage, and their initial values.

Under ``InitialValues.building()`` a parameter made of uninitialised memory goes to the meta device as soon as a module
registers it; buffers, and parameters made from values, stay. What user code then does to it, there or by loading a
state dict, is noted; the value that it would have had is made when a rank keeps it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from lightning_hybrid.step.deferred_init.recorded_init_ops import InitialValueError, NotedOperations, Part, is_on_meta
from lightning_hybrid.step.standins.absent_tensors import drop


@dataclass
class _Parameter:
    """A parameter on meta; its version tells writes that nobody noted."""

    parameter: Tensor
    part: Part
    version: int


class InitialValues:
    """Parameters without storage, and the values that they will have."""

    def __init__(self, device: torch.device) -> None:
        """Args: device: where values are drawn."""
        self._noted = NotedOperations(device)
        self._parameters: dict[int, _Parameter] = {}
        self._hooks: WeakKeyDictionary[nn.Module, RemovableHandle] = WeakKeyDictionary()
        self._is_noting = False

    def __deepcopy__(self, memo: Any) -> InitialValues:
        """Modules hold hooks of this object; their copies mean the same one."""
        return self

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Parameters that modules register inside have no storage."""
        handle = nn.modules.module.register_module_parameter_registration_hook(self._on_registration)
        try:
            with self.noting():
                yield
        finally:
            handle.remove()

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """What is done inside to parameters without storage is noted."""
        self._is_noting = True
        try:
            with self._noted.watching():
                yield
        finally:
            self._is_noting = False
            # Those that were given data are real now.
            self._parameters = {key: k for key, k in self._parameters.items() if is_on_meta(k.parameter)}
            for known in self._parameters.values():
                known.part, known.version = self._noted.part(known.parameter), known.parameter._version

    def _on_registration(self, module: nn.Module, name: str, parameter: Any) -> None:
        if not isinstance(parameter, nn.Parameter) or is_lazy(parameter) or parameter.layout != torch.strided:
            return
        if not is_on_meta(parameter):
            if type(parameter) is not nn.Parameter or not self._noted.is_fresh(parameter):
                return
            with _disable_current_modes():
                meta = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
                # The user's object stays: an optimizer may come to hold it.
                torch._C._swap_tensor_impl(parameter, nn.Parameter(meta, parameter.requires_grad))
        self.adopt(module, parameter)

    def adopt(self, module: nn.Module, parameter: Tensor) -> None:
        """From now on know a parameter that is on meta, and what ``load_state_dict`` of its module gives it."""
        if not self.is_adopted(parameter):
            self._parameters[id(parameter)] = _Parameter(parameter, self._noted.part(parameter), parameter._version)
        if module not in self._hooks:
            self._hooks[module] = module.register_load_state_dict_pre_hook(self._on_load)

    def is_adopted(self, parameter: Tensor) -> bool:
        """Whether this parameter is known."""
        known = self._parameters.get(id(parameter))
        return known is not None and known.parameter is parameter

    def knows(self, tensor: Tensor) -> bool:
        """Whether operations on a tensor on meta were noted."""
        return self.is_adopted(tensor) or self._noted.knows(tensor)

    def _on_load(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
        """Note the values that a module is about to load: torch itself copies nothing to meta."""
        if self._is_noting or metadata.get("assign_to_params_buffers"):
            return
        for name, parameter in module._parameters.items():
            value = state.get(prefix + name)
            if parameter is None or not is_on_meta(parameter) or not isinstance(value, Tensor):
                continue
            if is_on_meta(value) or value.shape != parameter.shape:
                continue
            with torch.no_grad(), _disable_current_modes():
                self._noted.run(torch.ops.aten.copy_.default, (parameter.detach(), value.detach()), {})
            state[prefix + name] = torch.empty_like(value, device="meta")  # the dict is load_state_dict's own copy
            if self.is_adopted(parameter):
                known = self._parameters[id(parameter)]
                known.part, known.version = self._noted.part(parameter), parameter._version + 1

    def check(self, name: str, tensor: Tensor) -> None:
        """Make sure that a tensor on meta has a value to be made.

        Raises:
            InitialValueError: Nothing was written to it, or something that was not noted.
        """
        if self.is_adopted(tensor) and self._parameters[id(tensor)].version != tensor._version:
            raise InitialValueError(
                f"{name} was written while it had no storage, outside of trainer.init_module(empty_init=True);"
                " write it inside, or build the model with empty_init=False"
            )
        if not self._noted.is_written(self.part(tensor)):
            raise InitialValueError(
                f"{name} is on the meta device and nothing gives it a value; give its module a reset_parameters()"
                " method, load a checkpoint, or build the model with trainer.init_module(empty_init=True), which keeps"
                " what is done to parameters and leaves buffers real"
            )

    def part(self, tensor: Tensor) -> Part:
        """What it takes to make the value of a tensor on meta."""
        if self.is_adopted(tensor) and not self._noted.knows(tensor):
            return self._parameters[id(tensor)].part  # its dtype was changed when nobody watched
        return self._noted.part(tensor)

    def take(self, parameter: Tensor, device: torch.device) -> Part:
        """Make a parameter on meta absent, answering ``device``; what it takes to make its value."""
        part = self.part(parameter)
        drop(parameter, device)
        return part

    def value(self, part: Part) -> Tensor:
        """The value; see ``NotedOperations.value``."""
        return self._noted.value(part)

    def close(self) -> bool:
        """Let go of the modules, if no parameter waits for its value any more; whether that is so."""
        if any(is_on_meta(known.parameter) for known in self._parameters.values()):
            return False
        for handle in self._hooks.values():
            handle.remove()
        return True
