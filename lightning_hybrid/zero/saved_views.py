"""Tensors that a layer saves for the backward: views of its parameters are saved as offsets, while these are freed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_hybrid.step.standins.counts import PackedByOuterHooks
from lightning_hybrid.zero.group import ParameterGroup

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class ParameterView(NamedTuple):
    """A view of a full parameter that a backward needs."""

    group: ParameterGroup
    name: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


class SavedViews:
    """Hooks on the tensors that layers save, which keep no full parameter alive.

    Torch calls the innermost hooks alone, so these call those around them, of checkpoints and of users, which would see
    the same tensors without ZeRO.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        full: Callable[[ParameterView], Tensor],
        is_freed: Callable[[], bool],
    ) -> None:
        self._groups, self._full, self._is_freed = list(groups), full, is_freed
        self._outer: Any = None
        self._hooks = self._pack, self._unpack  # the same objects always: compiled code guards them

    @contextlib.contextmanager
    def of_layer(self) -> Iterator[None]:
        """Save what the code inside saves, unless it saves nothing, or parameters stay."""
        if not (self._groups and self._is_freed()) or not torch.is_grad_enabled() or _is_transformed():
            yield
            return
        before, self._outer = self._outer, _top_hooks(False)
        try:
            with saved_tensors_hooks(*self._hooks):
                yield
        finally:
            self._outer = before

    def _pack(self, tensor: Tensor) -> Tensor | ParameterView | PackedByOuterHooks:
        view = view_of(self._groups, tensor)
        if self._outer is None:
            return tensor if view is None else view
        pack, unpack = self._outer
        if view is not None and type(tensor) is nn.Parameter:
            # The parameter's own data will change; what others keep must not.
            tensor = nn.Parameter(tensor.data, tensor.requires_grad)
        packed = pack(tensor)
        return PackedByOuterHooks(view if view is not None and packed is tensor else packed, unpack)

    def _unpack(self, saved: Tensor | ParameterView | PackedByOuterHooks) -> Tensor:
        if isinstance(saved, PackedByOuterHooks):
            packed = saved.packed
            return saved.unpack(self._full(packed) if isinstance(packed, ParameterView) else packed)
        return self._full(saved) if isinstance(saved, ParameterView) else saved


def view_of(groups: Sequence[ParameterGroup], tensor: Tensor) -> ParameterView | None:
    """Describe a saved tensor that is a view of a parameter by its size and strides; None for others, of any shape."""
    if type(tensor) in (Tensor, nn.Parameter):
        for group in groups:
            name = group.name_of_storage(tensor.untyped_storage())
            if name is not None and tensor.dtype == group.parameters[name].dtype:
                return ParameterView(group, name, tensor.size(), tensor.stride(), tensor.storage_offset())
    return None


def _is_transformed() -> bool:
    return bool(torch._C._are_functorch_transforms_active())
