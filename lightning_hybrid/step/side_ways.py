"""What a unit reads beside its arguments and its own members.

It may come in an object that the unit is given (a cache with the keys of a learned prefix), belong to another module
(a table of positions that all layers are handed), or be left on the unit by an earlier call of it (the mean and the
deviation by which RevIN undoes in the end what it did first). Code around units, other methods of theirs among it, may
read what is left there too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_hybrid.step.backward_hooks import has_backward_hooks
from lightning_hybrid.step.costs import CostWatch
from lightning_hybrid.step.recording import StepError
from lightning_hybrid.step.watch import user_line


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


def _in_attributes(unit: nn.Module) -> dict[int, Tensor]:
    found = (value for module in unit.modules() for value in module.__dict__.values())
    return {id(value): value for value in found if isinstance(value, Tensor)}


def with_their_like(entered: Iterable[str], units: Mapping[str, nn.Module]) -> set[str]:
    """These units and all of the same classes: layers are given the same things."""
    kinds = {type(units[fqn]) for fqn in entered}
    return {fqn for fqn, unit in units.items() if type(unit) in kinds}
