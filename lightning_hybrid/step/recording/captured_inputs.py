"""Captured inputs of a unit: tensors that it reads beside its arguments and its own members.

It may come in an object that the unit is given (a cache with the keys of a learned prefix), belong to another module
(a table of positions that all layers are handed), or be left on the unit by an earlier call of it (the mean and the
deviation by which RevIN undoes in the end what it did first). Code around units, other methods of theirs among it, may
read what is left there too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_hybrid.step.module_state.snapshot import reachable
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.recording.guards import plain_state
from lightning_hybrid.step.standins.cost_counter import CostWatch
from lightning_hybrid.step.standins.fake_kernel_fallback import run_on_stand_ins
from lightning_hybrid.step.tracing.backward_hooks import has_backward_hooks
from lightning_hybrid.step.tracing.recording import StepError
from lightning_hybrid.step.tracing.step_mode import user_line

_NUMBERS = (float, int, numpy.generic, numpy.ndarray)


class LeftOnUnit(StepError):
    """Code around units reads a value of the model that a call of one left in its attributes.

    Attributes:
        unit: Which, by FQN; recorded as code around units, what it does is seen.
    """

    def __init__(self, unit: str, message: str) -> None:
        super().__init__(message)
        self.unit = unit


class SideWays:
    """Sees what the kernels inside a unit are given.

    Attributes:
        units: The units that read values of the step so: to be opened, so that what they read is seen.
        members: FQNs of what the unit that ran last reads of other modules.
        left: The units that left in their attributes what a later call of them, or code around them, reads.
    """

    def __init__(
        self,
        parameters: Mapping[int, str],
        mark_of: Callable[[Tensor], int | None],
        costs: CostWatch,
        modules: Mapping[str, nn.Module],
    ) -> None:
        """Args: parameters: FQN by id of the stand-ins. mark_of: which value it is. modules: the units, by FQN."""
        self._parameters, self._mark_of, self._costs, self._modules = parameters, mark_of, costs, modules
        self._before: dict[str, dict[int, Tensor]] = {}  # what units had before their first call
        self._after: dict[int, tuple[Tensor, str]] = {}  # what calls of units made and left, and which
        self.units: dict[str, None] = {}
        self.members: dict[str, None] = {}
        self.left: dict[str, None] = {}

    def found(self) -> dict[str, Any]:
        """What a recording tells of it."""
        return {"entered": frozenset(self.units), "left": frozenset(self.left)}

    @contextlib.contextmanager
    def watched(self, unit: str | None, given: Iterable[Tensor], owned: Iterable[str]) -> Iterator[None]:
        """While an operation runs; ``unit`` is None where it is none, and its arguments are all that it reads."""
        self.members = {}
        if unit is None:
            yield
            return
        known = {id(tensor) for tensor in given}
        own = frozenset(owned)
        has = _in_attributes(self._modules[unit])
        fresh = has.keys() - self._before.setdefault(unit, has).keys()

        def given_to(arguments: Any) -> int:
            found = 0
            for argument in arguments:
                for tensor in argument if isinstance(argument, list | tuple) else (argument,):
                    if not isinstance(tensor, Tensor) or id(tensor) in known:
                        continue
                    member = self._parameters.get(id(tensor))
                    if member is not None and member not in own:
                        self.members[member] = None
                        found += 1
                    elif id(tensor) in fresh:
                        self.left[unit] = None
                        found += 1
                    elif member is None and self._mark_of(tensor) is not None:
                        self.units[unit] = None
                        found += 1
            return found

        self._costs.given_to = given_to
        try:
            yield
        finally:
            self._costs.given_to = None
        for key, tensor in _in_attributes(self._modules[unit]).items():
            if key not in has and key not in known:
                self._after[key] = tensor, unit

    def reads_batch_alone(self, name: str, tensors: Iterable[Tensor], *, known: bool) -> bool:
        """Whether an operation reads nothing of the model; notes who left what it reads.

        Args:
            name: Of the operation.
            tensors: Its arguments.
            known: Some of them are parameters or known to be values of the model.

        Raises:
            LeftOnUnit: A value of the model comes from the attributes of a unit.
            StepError: A value of the model comes from nobody knows where.
        """
        for tensor in tensors:
            _, unit = self._after.get(id(tensor), (None, None))
            if unit is not None and self._mark_of(tensor) is None:
                self.left[unit] = None
            if known or not isinstance(tensor, FakeTensor):
                continue
            message = (
                f"{user_line()}: {name} reads a tensor that left a unit on a side way (an attribute or an object it was"
                " given); return it from the module's forward, or name a cut inside that module in pipeline_cuts"
            )
            if unit is not None and not has_backward_hooks(self._modules[unit]):
                raise LeftOnUnit(unit, message)
            raise StepError(message)
        return not known


def event_on_stand_ins(
    units: Mapping[str, nn.Module], name: str, run: Callable[..., Any], args: Any, kwargs: Any, error: Exception
) -> Any:
    """Run an operation, or a unit, on stand-ins while a step is recorded; see ``run_on_stand_ins``.

    Args:
        units: By FQN.
        name: Of the operation; of a unit ``"@"`` and its FQN.
        run: What to run.
        args: Its arguments.
        kwargs: Likewise.
        error: Why fake kernels did not do.

    Raises:
        LeftOnUnit: A unit makes a number of values of the model, which code around it may decide by.
    """
    if not name.startswith("@"):
        return run_on_stand_ins(run, args, kwargs, error)
    unit = units[name[1:]]
    made = _NumbersOfUnit(unit, (args, kwargs))
    # A module without parameters is a unit for its results alone: what it keeps would be on one stage.
    before = None if any(True for _ in unit.parameters()) else _state_of(unit)
    out = run_on_stand_ins(run, args, kwargs, error, unit)
    where = made(out)
    if before is not None and not where and _state_of(unit) != before:
        where = "it keeps something of its batch"
    if where:
        message = (
            f"{user_line()}: {name[1:]} makes a number of values of the model, and {where}, which other pipeline"
            " stages do not have; return the tensor"
        )
        raise LeftOnUnit(name[1:], message)
    return out


class _NumbersOfUnit:
    """Plain numbers that a unit has made of values: they are those of stand-ins, and Python lets code decide by them.

    Code around units that asks for a number gets one that is known to be absent; a unit gives what it has computed.
    """

    def __init__(self, unit: nn.Module, given: Any) -> None:
        """Before it runs on stand-ins; args: unit: the module. given: its arguments."""
        self._unit, self._given = unit, {id(leaf) for leaf in flatten(given)[0]}
        self._before = self._kept()

    def __call__(self, out: Any) -> str:
        """Where such a number is; args: out: what the unit returned."""
        if any(id(number) not in self._given for number in _numbers_in(out)):
            return "it returns a number"
        kept = self._kept().items()
        name = next((name for name, number in kept if self._before.get(name, number) is not number), None)
        return "" if name is None else f"it keeps a number as self.{name}"

    def _kept(self) -> dict[str, Any]:
        return {
            f"{fqn}.{name}" if fqn else name: held
            for fqn, module in self._unit.named_modules()
            for name, held in module.__dict__.items()
            if isinstance(held, float | numpy.floating | numpy.ndarray)
        }


def _state_of(unit: nn.Module) -> Any:
    tensors = [*unit.buffers(), *(leaf for _, leaf in reachable(unit, plain=False) if isinstance(leaf, Tensor))]
    return plain_state(list(unit.modules())), [(id(tensor), tensor._version) for tensor in tensors]


def _numbers_in(out: Any) -> Iterator[Any]:
    """The numbers in tuples, lists and mappings; those of a distribution are what it was made with."""
    if isinstance(out, _NUMBERS):
        yield out
    elif isinstance(out, list | tuple | Mapping):
        for item in out.values() if isinstance(out, Mapping) else out:
            yield from _numbers_in(item)


def _in_attributes(unit: nn.Module) -> dict[int, Tensor]:
    found = (value for module in unit.modules() for value in module.__dict__.values())
    return {id(value): value for value in found if isinstance(value, Tensor)}


def with_their_like(entered: Iterable[str], units: Mapping[str, nn.Module]) -> set[str]:
    """These units and all of the same classes: layers are given the same things."""
    kinds = {type(units[fqn]) for fqn in entered}
    return {fqn for fqn, unit in units.items() if type(unit) in kinds}
