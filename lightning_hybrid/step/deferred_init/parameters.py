"""Deferred initialisation: parameters built without storage, and their initial values.

Under ``InitialValues.building()`` a parameter made of uninitialised memory goes to the meta device as soon as a module
registers it; buffers, and parameters created from values, stay real. Operations of user code on it, there or by loading
a state dict, are recorded; the value that it would have had is computed when a rank needs it.

Modules built with parameters on the meta device, and no record of their values: plans need shapes only.

Initialisation by ``reset_parameters`` of modules that user code built on the meta device.

The operations on their parameters were not recorded, so each module's own ``reset_parameters`` is called again,
children before their parent, in order of definition. Then, where a module defines ``_init_weights`` (the idiom
``self.apply(self._init_weights)``), it is called on each of them below that module and not below a nearer one.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from lightning_hybrid.errors import InitialValueError
from lightning_hybrid.step.deferred_init.ops import RecordedInitOps, StorageView, is_on_meta
from lightning_hybrid.step.standins.tensors import drop


@dataclass
class _Parameter:
    """A parameter on meta; its version counter reveals writes that were not recorded."""

    parameter: Tensor
    view: StorageView
    version: int


class InitialValues:
    """Parameters without storage, and the recorded operations that give their initial values."""

    def __init__(self, device: torch.device) -> None:
        """Take ``device`` (the device on which values are drawn)."""
        self._recorded = RecordedInitOps(device)
        self._parameters: dict[int, _Parameter] = {}
        self._hooks: WeakKeyDictionary[nn.Module, RemovableHandle] = WeakKeyDictionary()
        self._is_recording = False

    def __deepcopy__(self, memo: Any) -> InitialValues:
        """Return this object: modules have hooks of it, and their copies share it."""
        return self

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Put parameters that modules register inside on the meta device."""
        handle = nn.modules.module.register_module_parameter_registration_hook(self._on_registration)
        try:
            with self.record_writes():
                yield
        finally:
            handle.remove()

    @contextlib.contextmanager
    def record_writes(self) -> Iterator[None]:
        """Record the operations inside on parameters without storage."""
        self._is_recording = True
        try:
            with self._recorded.recording():
                yield
        finally:
            self._is_recording = False
            # Those whose `data` was set are real now.
            self._parameters = {key: k for key, k in self._parameters.items() if is_on_meta(k.parameter)}
            for tracked in self._parameters.values():
                tracked.view, tracked.version = self._recorded.view_of(tracked.parameter), tracked.parameter._version

    def _on_registration(self, module: nn.Module, name: str, parameter: Any) -> None:
        if not isinstance(parameter, nn.Parameter) or is_lazy(parameter) or parameter.layout != torch.strided:
            return
        if not is_on_meta(parameter):
            if type(parameter) is not nn.Parameter or not self._recorded.is_uninitialized(parameter):
                return
            _move_to_meta(parameter)
        self.adopt(module, parameter)

    def adopt(self, module: nn.Module, parameter: Tensor) -> None:
        """Track a parameter of any shape on meta, and the values that ``load_state_dict`` of its module assigns."""
        if not self.is_adopted(parameter):
            view = self._recorded.view_of(parameter)
            self._parameters[id(parameter)] = _Parameter(parameter, view, parameter._version)
        if module not in self._hooks:
            self._hooks[module] = module.register_load_state_dict_pre_hook(self._on_load)

    def is_adopted(self, parameter: Tensor) -> bool:
        """Whether this parameter, of any shape, is tracked."""
        tracked = self._parameters.get(id(parameter))
        return tracked is not None and tracked.parameter is parameter

    def has_record_of(self, tensor: Tensor) -> bool:
        """Whether operations on a tensor of any shape on meta were recorded."""
        return self.is_adopted(tensor) or self._recorded.has_record_of(tensor)

    def _on_load(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
        """Record the values that a module is about to load: torch itself copies nothing to meta."""
        if self._is_recording or metadata.get("assign_to_params_buffers"):
            return
        for name, parameter in module._parameters.items():
            value = state.get(prefix + name)
            if parameter is None or not is_on_meta(parameter) or not isinstance(value, Tensor):
                continue
            if is_on_meta(value) or value.shape != parameter.shape:
                continue
            with torch.no_grad(), _disable_current_modes():
                self._recorded.run(torch.ops.aten.copy_.default, (parameter.detach(), value.detach()), {})
            state[prefix + name] = torch.empty_like(value, device="meta")  # the dict is load_state_dict's own copy
            if self.is_adopted(parameter):
                tracked = self._parameters[id(parameter)]
                tracked.view, tracked.version = self._recorded.view_of(parameter), parameter._version + 1

    def check(self, name: str, tensor: Tensor) -> None:
        """Check that a tensor on meta, of any shape, has recorded operations that give its value.

        ``InitialValueError`` is raised if it was never written, or written without a record.
        """
        if self.is_adopted(tensor) and self._parameters[id(tensor)].version != tensor._version:
            raise InitialValueError(
                f"{name} was written while it had no storage, outside of trainer.init_module(empty_init=True);"
                " write it inside, or build the model with empty_init=False",
                entry="meta-write",
            )
        if not self._recorded.is_written(self.view_of(tensor)):
            raise InitialValueError(
                f"{name} is on the meta device and nothing gives it a value; give its module a reset_parameters()"
                " method, load a checkpoint, or build the model with trainer.init_module(empty_init=True), which"
                " records operations on parameters and leaves buffers real",
                entry="meta-value",
            )

    def view_of(self, tensor: Tensor) -> StorageView:
        """The view, of its shape, of a recorded storage from which the value of a tensor on meta is computed."""
        if self.is_adopted(tensor) and not self._recorded.has_record_of(tensor):
            return self._parameters[id(tensor)].view  # its dtype was changed while operations were not recorded
        return self._recorded.view_of(tensor)

    def take(self, parameter: Tensor, device: torch.device) -> StorageView:
        """Make a parameter on meta absent, on ``device``; returns the view, of its shape, that gives its value."""
        view = self.view_of(parameter)
        drop(parameter, device)
        return view

    def value(self, view: StorageView) -> Tensor:
        """Compute the value of a view, a tensor of its shape, by replaying the recorded operations on it."""
        return self._recorded.value(view)

    def close(self) -> bool:
        """Remove the hooks from modules unless a parameter still needs its value; returns whether they were removed."""
        if any(is_on_meta(tracked.parameter) for tracked in self._parameters.values()):
            return False
        for handle in self._hooks.values():
            handle.remove()
        return True


_LARGE_NUMEL = 2**24
_MADE = (torch.empty, torch.rand, torch.randn)  # functions that take a size and a device


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put each parameter that a module registers inside on the meta device; buffers stay real.

    Initial values are neither computed nor kept: a module that reads values of its parameters while it is built fails.
    """
    handle = nn.modules.module.register_module_parameter_registration_hook(_on_registration)
    try:
        with _LargeOnMeta():
            yield
    finally:
        handle.remove()


class _LargeOnMeta(TorchFunctionMode):
    """A function mode in which large tensors without values, or of random ones, have no storage.

    The host may refuse to reserve it, and random numbers of a wide layer take seconds.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _MADE and kwargs.get("device") is None and "out" not in kwargs:
            sizes = {name: value for name, value in kwargs.items() if name != "generator"}
            meta = func(*args, **{**sizes, "device": "meta"})
            if meta.numel() > _LARGE_NUMEL:
                return meta
        return func(*args, **kwargs)


def _on_registration(module: nn.Module, name: str, parameter: Any) -> None:
    is_plain = type(parameter) is nn.Parameter and not is_lazy(parameter) and parameter.layout == torch.strided
    if is_plain and not parameter.is_meta:
        _move_to_meta(parameter)


def _move_to_meta(parameter: nn.Parameter) -> None:
    with _disable_current_modes():
        meta = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
        # The user's object stays the same, since other modules or an optimizer may refer to it.
        torch._C._swap_tensor_impl(parameter, nn.Parameter(meta, parameter.requires_grad))


# The second is the name in torch's attention and transformer.
_RESETS = ("reset_parameters", "_reset_parameters")


def reset(root: nn.Module, modules: set[nn.Module]) -> None:
    """Initialise the modules below ``root`` whose direct parameters or buffers have no values."""
    seen: set[nn.Module] = set()

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        if module in seen:
            return
        seen.add(module)
        below = [inner for child in module.children() for inner in walk(child)]
        if module in modules:
            initialise = _without_arguments(module, _RESETS)
            if initialise is not None:
                initialise()
            below.append(module)
        if below and (init_all := _without_arguments(module, ("_init_weights",))) is not None:
            init_all()
        elif (init_one := getattr(module, "_init_weights", None)) is not None and callable(init_one):
            for inner in below:
                init_one(inner)
        else:
            yield from below

    for _ in walk(root):
        pass


def _without_arguments(module: nn.Module, names: tuple[str, ...]) -> Callable[[], Any] | None:
    for name in names:
        method = getattr(module, name, None)
        if callable(method):
            takes = inspect.signature(method).parameters.values()
            if all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in takes):
                return method
    return None
