"""What each parameter of a run holds, and the only code that exchanges it.

A parameter is the user's own object for a whole run; only what it holds changes, and each change is one of these:

    FULL ── shard ──► SHARD ── gather ──► GATHERED ── free ──► FREED
      ▲                │ ▲ ▲                 │  ▲                │
      └── unshard ─────┘ │ └── reshard ──────┘  └── gather ──────┤
                         └────────────── reshard ────────────────┘

    any ── swap_in ──► SWAPPED ── swap_out ──► as before

Absent parameters, of another stage, hold nothing; they are made and filled in `step.standins.absent_tensors`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import Enum, auto
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_hybrid.step.standins.tensors import FULL_SHAPE, is_absent

_HOLDS = "_hybrid_holds"  # attribute of a parameter that is gathered or freed
_SWAPS = "_hybrid_swaps"  # attribute of a parameter that holds something else: how many swaps are open
_KEEP: Any = object()


class State(Enum):
    """What a parameter holds on this rank."""

    FULL = auto()  # all of it: before a run shards it and after the run, or because no axis shards it
    SHARD = auto()  # this rank's shard: between steps, and in layers that compute on shards
    GATHERED = auto()  # what replicas shard, joined for a layer that runs; tensor ranks may still have shards of it
    FREED = auto()  # a stand-in of the gathered shape without memory: between a layer's forward and its backward
    SWAPPED = auto()  # something else for a while: a copy on the host or in float32, or the full one at an owner
    ABSENT = auto()  # nothing: it is of another stage


def state_of(parameter: Tensor) -> State:
    """The state of a parameter of any shape."""
    attributes = parameter.__dict__
    if is_absent(parameter):
        return State.ABSENT
    if _SWAPS in attributes:
        return State.SWAPPED
    return cast(State, attributes.get(_HOLDS, State.SHARD if FULL_SHAPE in attributes else State.FULL))


def _exchange(parameter: Tensor, data: Tensor, allowed: Collection[State]) -> None:
    state = state_of(parameter)
    assert state in allowed, f"a parameter that is {state.name} cannot become what only {allowed} may"
    parameter.data = data


_FROM_FULL = (State.FULL,)
_FROM_SHARD = (State.SHARD,)
_FROM_SHARD_OR_FREED = (State.SHARD, State.FREED)
_FROM_GATHERED = (State.GATHERED,)
_FROM_ALL_OF_ZERO = (State.SHARD, State.GATHERED, State.FREED)


def shard(parameter: Tensor, local: Tensor) -> None:
    """Keep this rank's shard, of its own shape, of a full parameter, from now until `unshard`."""
    shape = parameter.shape
    _exchange(parameter, local, _FROM_FULL)
    parameter.__dict__[FULL_SHAPE] = shape


def unshard(parameter: Tensor, full: Tensor) -> None:
    """Hold the full parameter, of the full shape, again, without a gradient."""
    _exchange(parameter, full, _FROM_SHARD)
    parameter.grad = None
    del parameter.__dict__[FULL_SHAPE]


def gather(parameter: Tensor, full: Tensor) -> None:
    """Hold the tensor of full shape while a layer runs; the shard is kept elsewhere."""
    _exchange(parameter, full, _FROM_SHARD_OR_FREED)
    parameter.__dict__[_HOLDS] = State.GATHERED


def free(parameter: Tensor, freed: Tensor) -> None:
    """Hold a stand-in of the full shape, without memory, until a backward comes."""
    _exchange(parameter, freed, _FROM_GATHERED)
    parameter.__dict__[_HOLDS] = State.FREED


def reshard(parameter: Tensor, local: Tensor) -> None:
    """Hold this rank's shard, of its own shape, again, after a step, whatever it has come to."""
    _exchange(parameter, local, _FROM_ALL_OF_ZERO)
    parameter.__dict__.pop(_HOLDS, None)


def move(tensor: Tensor, content: Tensor) -> None:
    """Let a parameter, a state or a buffer of any shape hold equal content in other memory: of a device or a file."""
    tensor.data = content


def swap_in(parameter: Tensor, data: Tensor, gradient: Tensor | None = _KEEP) -> None:
    """Let a parameter hold other data, of any shape, dtype and device, and another gradient, until `swap_out`."""
    parameter.__dict__[_SWAPS] = parameter.__dict__.get(_SWAPS, 0) + 1
    _put(parameter, data, gradient)


def swap_out(parameter: Tensor, data: Tensor, gradient: Tensor | None = _KEEP) -> None:
    """Let a parameter hold again what it held before `swap_in`, of whatever shape."""
    swaps = parameter.__dict__.pop(_SWAPS, 0)  # none if the code that swaps has failed
    if swaps > 1:
        parameter.__dict__[_SWAPS] = swaps - 1
    _put(parameter, data, gradient)


@contextlib.contextmanager
def swapped(
    contents: Iterable[tuple[Tensor, Tensor, Tensor | None]],
    after: Callable[[Tensor, Tensor], Any] = lambda p, data: None,
) -> Iterator[None]:
    """Let each parameter hold other data, of any shape, and another gradient inside.

    ``after`` is called before it holds its own again, with the parameter and that data.
    """
    before = []
    try:
        for parameter, data, gradient in contents:
            before.append((parameter, parameter.data, parameter.grad))
            swap_in(parameter, data, gradient)
        yield
    finally:
        for parameter, data, gradient in before:
            after(parameter, data)
            swap_out(parameter, data, gradient)


def _put(parameter: Tensor, data: Tensor, gradient: Tensor | None) -> None:
    if gradient is _KEEP:
        parameter.data = data
        return
    parameter.grad = None  # torch refuses data of another shape or device beside a gradient
    parameter.data = data
    parameter.grad = gradient


def set_gradient_dtype(parameter: Tensor, dtype: torch.dtype | None) -> None:
    """Add the gradients of a parameter of any shape in a dtype from now on; None for its own, whatever that will be."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient, parameter.grad = parameter.grad, None
        parameter.grad_dtype = dtype
        if gradient is not None:
            gradient, data = gradient.detach().to(dtype or parameter.dtype), parameter.data
            swap_in(parameter, data.new_empty(()).expand(gradient.shape), gradient)  # a full one may be beside a shard
            swap_out(parameter, data)


def set_class(parameter: nn.Parameter, kind: type[nn.Parameter]) -> None:
    """Let torch dispatch the operations of a parameter on another class."""
    cast(Any, parameter).__class__ = kind


def guard_state(state: Tensor, shape: Sequence[int]) -> nn.Parameter:
    """Let an optimizer state that is a shard be one of a parameter of this full shape, whose reads can be guarded."""
    cast(Any, state).__class__ = nn.Parameter
    state.__dict__[FULL_SHAPE] = tuple(shape)
    return cast(nn.Parameter, state)


def release_state(state: nn.Parameter) -> None:
    """Undo ``guard_state``."""
    del state.__dict__[FULL_SHAPE]
    cast(Any, state).__class__ = Tensor


def sharded_in(root: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of a module that are a shard on this rank now, by FQN."""
    return [(n, p) for n, p in root.named_parameters() if FULL_SHAPE in p.__dict__ and not is_absent(p)]
