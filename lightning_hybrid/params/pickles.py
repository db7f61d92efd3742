"""Pickles and copies of parameters that this rank has as a shard, or not at all.

In hooks of the user the modes of `params.reads` show full contents to `copy` and `pickle` too. Where none of them is
active, a shard or an absent tensor would be copied as the parameter.
"""

from __future__ import annotations

import contextlib
import copyreg
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._utils import _rebuild_parameter, _rebuild_parameter_with_state
from torch.overrides import _get_current_function_mode_stack

from lightning_hybrid.errors import NotOnThisRank
from lightning_hybrid.step.standins.tensors import FAKE_MODE, FULL_SHAPE, is_absent, user_attributes

_DEEPCOPY = "__deepcopy__"
_ADVICE = (
    "do it on all ranks in a hook of the module or of a callback, such as on_train_batch_end, or after fit, when the"
    " module is full on every rank; trainer.save_checkpoint(...) writes a checkpoint"
)


def guard_copies(parameter: Tensor) -> None:
    """Let copies and pickles of a parameter of any shape, now a shard on this rank, be full, or raise at once.

    The parameter's ``data`` is the shard, except where a mode shows the full one.
    """
    parameter.__dict__[_DEEPCOPY] = partial(_copy_full, parameter)
    copyreg.dispatch_table.setdefault(type(parameter), _pickle_parameter)


def copy_as_is(parameter: Tensor) -> None:
    """Undo ``guard_copies``: this rank has the parameter in its full shape again."""
    del parameter.__dict__[_DEEPCOPY]


def _copy_full(parameter: Tensor, memo: dict[int, Any]) -> Any:
    """The ``__deepcopy__`` of a sharded parameter."""
    if id(parameter) not in memo:
        _check_full(parameter, "copied")
    return type(parameter).__deepcopy__(parameter, memo)


def _check_full(parameter: Tensor, done: str) -> None:
    shape = parameter.__dict__.get(FULL_SHAPE)
    if shape is None or is_absent(parameter):
        return
    here = tuple(parameter.data.shape)
    if here != tuple(shape):
        raise NotOnThisRank(
            f"a parameter of shape {tuple(shape)}, of which this rank holds a shard of shape {here}, is {done} where"
            f" its shards are not gathered; {_ADVICE}",
            entry="pickle",
        )


def _pickle_parameter(parameter: nn.Parameter) -> Any:
    """Reduce a full parameter with the attributes that the user set."""
    _check_full(parameter, "pickled")
    function, arguments = parameter.__reduce_ex__(2)
    if function is not _rebuild_parameter_with_state:
        return function, arguments
    attributes = user_attributes(parameter)
    return (function, (*arguments[:3], attributes)) if attributes else (_rebuild_parameter, arguments[:3])


def reduce_for_pickle(tensor: Tensor, content: Tensor) -> Any:
    """The reduced value that `pickle` writes for a tensor of the user of any shape, which may be absent.

    ``content`` is in its full shape; the attributes of ``tensor`` are written with it.
    """
    with torch._C.DisableTorchFunction():
        full = content.detach()
        if isinstance(tensor, nn.Parameter):
            full = nn.Parameter(full, requires_grad=tensor.requires_grad)
        else:
            full = full.requires_grad_(tensor.requires_grad)
        full.__dict__.update(user_attributes(tensor))
        return full.__reduce_ex__(2)


@contextlib.contextmanager
def pickles_by(reduce: Callable[[Tensor], Any]) -> Iterator[None]:
    """Inside, plain tensors of any shape are reduced for pickles by a function of a mode, while modes are on.

    torch (2.13) calls no mode for a tensor without Python attributes.
    """

    def reduce_plain(tensor: Tensor) -> Any:
        if not torch._C._is_torch_function_mode_enabled():
            return tensor.__reduce_ex__(2)
        with torch._C.DisableTorchFunction():
            return reduce(tensor)

    before = copyreg.dispatch_table.get(Tensor)
    copyreg.pickle(Tensor, reduce_plain)
    try:
        yield
    finally:
        if before is None:
            del copyreg.dispatch_table[Tensor]
        else:
            copyreg.dispatch_table[Tensor] = before


def _pickle_absent(tensor: FakeTensor) -> Any:
    """Reduce an absent tensor where a mode supplies its content; refuse otherwise."""
    if tensor.fake_mode is not FAKE_MODE:
        return tensor.__reduce_ex__(2)
    is_supplied = torch._C._is_torch_function_mode_enabled() and any(
        getattr(mode, "gives_contents", False) for mode in _get_current_function_mode_stack()
    )
    if not is_supplied:
        raise NotOnThisRank(
            f"a tensor of shape {tuple(tensor.shape)} is pickled where it has no content: that is on other ranks, or"
            f" the step is being recorded; {_ADVICE}",
            entry="pickle",
        )
    return tensor.__reduce_ex__(2)


copyreg.dispatch_table.setdefault(FakeTensor, _pickle_absent)
