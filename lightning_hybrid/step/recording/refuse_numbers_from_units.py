"""Refusal of units that compute a Python number from values of the model: code around them may branch on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
from torch import Tensor, nn

from lightning_hybrid.errors import UncapturedOutput
from lightning_hybrid.step.guards.plain_attribute_state import plain_state
from lightning_hybrid.step.module_state.state_snapshots_and_reachable_leaves import reachable_leaves
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.standins.fake_kernel_fallback import run_on_stand_ins
from lightning_hybrid.step.tracing.intercept_step_operations import user_line

_NUMBERS = (float, int, numpy.generic, numpy.ndarray)


def run_event_on_stand_ins(
    units: Mapping[str, nn.Module], name: str, run: Callable[..., Any], args: Any, kwargs: Any, error: Exception
) -> Any:
    """Run an operation or a unit that fake kernels cannot run while a step is recorded, by ``run_on_stand_ins``.

    Args:
        units: The units by FQN.
        name: Name of the operation; for a unit ``"@"`` and its FQN.
        run: The operation or the forward of the unit.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        error: The error of the fake kernels.

    Raises:
        UncapturedOutput: A unit computes a number of stand-ins, a plain float on which Python lets code branch.
    """
    if not name.startswith("@"):
        return run_on_stand_ins(run, args, kwargs, error)
    unit = units[name[1:]]
    argument_ids = {id(leaf) for leaf in flatten((args, kwargs))[0]}
    numbers = _number_attributes(unit)
    # A module without parameters is a unit for its results alone: state that it keeps would be on one stage only.
    state = None if any(True for _ in unit.parameters()) else _state_of(unit)
    out = run_on_stand_ins(run, args, kwargs, error, unit)
    attributes = _number_attributes(unit).items()
    where = ""
    if any(id(number) not in argument_ids for number in _numbers_inside(out)):
        where = "it returns a number"
    elif changed := [attribute for attribute, number in attributes if numbers.get(attribute, number) is not number]:
        where = f"it keeps a number as self.{changed[0]}"
    elif state is not None and _state_of(unit) != state:
        where = "it keeps state of its batch"
    if where:
        message = (
            f"{user_line()}: {name[1:]} computes a number from values of the model, and {where}, which other pipeline"
            " stages do not have; return the tensor"
        )
        raise UncapturedOutput(name[1:], message, entry="number-output")
    return out


def _number_attributes(unit: nn.Module) -> dict[str, Any]:
    return {
        f"{fqn}.{name}" if fqn else name: value
        for fqn, module in unit.named_modules()
        for name, value in module.__dict__.items()
        if isinstance(value, float | numpy.floating | numpy.ndarray)
    }


def _state_of(unit: nn.Module) -> Any:
    tensors = [*unit.buffers(), *(leaf for _, leaf in reachable_leaves(unit, plain=False) if isinstance(leaf, Tensor))]
    return plain_state(list(unit.modules())), [(id(tensor), tensor._version) for tensor in tensors]


def _numbers_inside(out: Any) -> Iterator[Any]:
    """The numbers in tuples, lists and mappings; those inside a distribution are its arguments and do not count."""
    if isinstance(out, _NUMBERS):
        yield out
    elif isinstance(out, list | tuple | Mapping):
        for item in out.values() if isinstance(out, Mapping) else out:
            yield from _numbers_inside(item)
