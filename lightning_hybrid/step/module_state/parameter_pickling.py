"""Pickles and copies of parameters that this rank does not hold in full.

In hooks of the user the modes that gather on read (`parts.reads`, `pipeline.global_reads`) show full contents to
`copy` and `pickle` too. Where none of them is active, a shard or a tensor without content would pass for the parameter.
"""

from __future__ import annotations

import copyreg
import pickle
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._utils import _rebuild_parameter, _rebuild_parameter_with_state
from torch.overrides import _get_current_function_mode_stack

from lightning_hybrid.step.standins.absent_tensors import FAKE_MODE, WHOLE_SHAPE, is_absent, user_attributes

_COPY = "__deepcopy__"
_ADVICE = (
    "do it on all ranks in a hook of the module or of a callback, such as on_train_batch_end, or after fit, when the"
    " module is full on every rank; trainer.save_checkpoint(...) writes a checkpoint"
)


class NotHere(pickle.PicklingError):
    """A copy or pickle is made of a parameter whose content is on other ranks."""


def copy_in_full(parameter: Tensor, shape: torch.Size) -> None:
    """From now on this rank holds a shard of a parameter, and copies and pickles are of the full one.

    Args:
        parameter: Its ``data`` is the shard, but where a mode shows the full one.
        shape: Of the full one.
    """
    parameter.__dict__[WHOLE_SHAPE] = shape
    parameter.__dict__[_COPY] = _CopyInFull(parameter)
    copyreg.dispatch_table.setdefault(type(parameter), _reduced_parameter)


def copy_as_it_is(parameter: Tensor) -> None:
    """This rank holds all of the parameter again."""
    del parameter.__dict__[WHOLE_SHAPE], parameter.__dict__[_COPY]


class _CopyInFull:
    """In the place of the parameter's own ``__deepcopy__``."""

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter

    def __call__(self, memo: dict[int, Any]) -> Any:
        if id(self._parameter) not in memo:
            _check_full(self._parameter, "copied")
        return type(self._parameter).__deepcopy__(self._parameter, memo)


def _check_full(parameter: Tensor, done: str) -> None:
    shape = parameter.__dict__.get(WHOLE_SHAPE)
    if shape is None or is_absent(parameter):
        return
    here = tuple(parameter.data.shape)
    if here != tuple(shape):
        raise NotHere(
            f"a parameter of shape {tuple(shape)}, of which this rank holds a shard of shape {here}, is {done} where"
            f" its shards are not gathered; {_ADVICE}"
        )


def _reduced_parameter(parameter: nn.Parameter) -> Any:
    """The full parameter with the attributes that the user gave it."""
    _check_full(parameter, "pickled")
    function, given = parameter.__reduce_ex__(2)
    if function is not _rebuild_parameter_with_state:
        return function, given
    attributes = user_attributes(parameter)
    return (function, (*given[:3], attributes)) if attributes else (_rebuild_parameter, given[:3])


def reduced(tensor: Tensor, content: Tensor) -> Any:
    """What `pickle` is to write for a tensor of the user's, which may be an absent parameter.

    Args:
        tensor: Whose attributes count.
        content: Its full content.
    """
    with torch._C.DisableTorchFunction():
        full = content.detach()
        if isinstance(tensor, nn.Parameter):
            full = nn.Parameter(full, requires_grad=tensor.requires_grad)
        else:
            full = full.requires_grad_(tensor.requires_grad)
        full.__dict__.update(user_attributes(tensor))
        return full.__reduce_ex__(2)


def _reduced_absent(tensor: FakeTensor) -> Any:
    """What a mode gives for a tensor that is not here."""
    if tensor.fake_mode is not FAKE_MODE:
        return tensor.__reduce_ex__(2)
    shown = torch._C._is_torch_function_mode_enabled() and any(
        getattr(mode, "gives_contents", False) for mode in _get_current_function_mode_stack()
    )
    if not shown:
        raise NotHere(
            f"a tensor of shape {tuple(tensor.shape)} is pickled where it has no content: that is on other ranks, or"
            f" the step is being recorded; {_ADVICE}"
        )
    return tensor.__reduce_ex__(2)


copyreg.dispatch_table.setdefault(FakeTensor, _reduced_absent)
