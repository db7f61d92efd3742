"""Captured inputs of a unit: tensors that it reads besides its arguments and its own members.

Such a tensor may be inside an object among the arguments (a cache with the keys of a learned prefix), belong to another
module (a table of positions that all layers receive), or be stored on the unit by an earlier call of it (the mean and
the deviation with which RevIN denormalizes at the end). Code around units, including other methods of a unit, may read
tensors stored there too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_hybrid.errors import StepError, UncapturedOutput
from lightning_hybrid.step.standins.count_flops_bytes_and_draws import CostCounter
from lightning_hybrid.step.tracing.full_backward_hooks_of_units import has_backward_hooks
from lightning_hybrid.step.tracing.intercept_step_operations import user_line


class CapturedInputs:
    """Finds captured inputs by the arguments of the kernels inside a unit.

    Attributes:
        entered: Units that capture values of the step; to be opened, so that these reads are recorded.
        members: FQNs of the parameters and buffers of other modules that the unit that ran last reads.
        storing_units: Units that stored in their attributes tensors that later calls, or code around them, read.
    """

    def __init__(
        self,
        parameters: Mapping[int, str],
        mark_of: Callable[[Tensor], int | None],
        costs: CostCounter,
        units: Mapping[str, nn.Module],
    ) -> None:
        self._parameters, self._mark_of, self._costs, self._units = parameters, mark_of, costs, units
        self._before: dict[str, dict[int, Tensor]] = {}  # attribute tensors of units before their first call
        self._after: dict[int, tuple[Tensor, str]] = {}  # attribute tensors stored by calls of units, and the unit
        self.entered: dict[str, None] = {}
        self.members: dict[str, None] = {}
        self.storing_units: dict[str, None] = {}

    @contextlib.contextmanager
    def watching(self, unit: str | None, arguments: Iterable[Tensor], owned: Iterable[str]) -> Iterator[None]:
        """Find captured inputs while a unit runs; other operations (``unit`` is None) read their arguments alone.

        Args:
            unit: FQN of the unit.
            arguments: The tensors among its arguments, of any shapes.
            owned: FQNs of its parameters and tracked buffers.
        """
        self.members = {}
        if unit is None:
            yield
            return
        argument_ids = {id(tensor) for tensor in arguments}
        owned_names = frozenset(owned)
        before = _attribute_tensors_of(self._units[unit])
        stored = before.keys() - self._before.setdefault(unit, before).keys()

        def count_captured(kernel_arguments: Any) -> int:
            found = 0
            for argument in kernel_arguments:
                for tensor in argument if isinstance(argument, list | tuple) else (argument,):
                    if not isinstance(tensor, Tensor) or id(tensor) in argument_ids:
                        continue
                    member = self._parameters.get(id(tensor))
                    if member is not None and member not in owned_names:
                        self.members[member] = None
                        found += 1
                    elif id(tensor) in stored:
                        self.storing_units[unit] = None
                        found += 1
                    elif member is None and self._mark_of(tensor) is not None:
                        self.entered[unit] = None
                        found += 1
            return found

        self._costs.on_kernel_arguments = count_captured
        try:
            yield
        finally:
            self._costs.on_kernel_arguments = None
        for key, tensor in _attribute_tensors_of(self._units[unit]).items():
            if key not in before and key not in argument_ids:
                self._after[key] = tensor, unit

    def reads_batch_alone(self, name: str, tensors: Iterable[Tensor], *, reads_model: bool) -> bool:
        """Whether an operation reads nothing of the model; records the units that stored a tensor it reads.

        Args:
            name: Name of the operation.
            tensors: Its arguments, of any shapes.
            reads_model: Whether some of them are parameters or recorded values of the model.

        Raises:
            UncapturedOutput: A value of the model comes from the attributes of a unit.
            StepError: A value of the model comes from an unknown source.
        """
        for tensor in tensors:
            _, unit = self._after.get(id(tensor), (None, None))
            if unit is not None and self._mark_of(tensor) is None:
                self.storing_units[unit] = None
            if reads_model or not isinstance(tensor, FakeTensor):
                continue
            message = (
                f"{user_line()}: {name} reads a captured output of a unit (stored in an attribute or in an object among"
                " its arguments); return it from its forward, or name a cut inside that module in pipeline_cuts"
            )
            if unit is not None and not has_backward_hooks(self._units[unit]):
                raise UncapturedOutput(unit, message, entry="captured-output")
            raise StepError(message, entry="captured-output")
        return not reads_model


def _attribute_tensors_of(unit: nn.Module) -> dict[int, Tensor]:
    found = (value for module in unit.modules() for value in module.__dict__.values())
    return {id(value): value for value in found if isinstance(value, Tensor)}
