"""The choice of units: the smallest modules that a cut never enters.

The module tree is descended while a module holds more than a stage's share of the parameters. What the recording then
shows (a unit that dominates its stage, or one whose parameters are read around its forward) opens further units.
"""

from __future__ import annotations

import dis
import math
from collections.abc import Collection, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn
from torchmetrics import Metric

from lightning_hybrid.graph.partition import node_cost
from lightning_hybrid.step.objects.pytree import memory_of
from lightning_hybrid.step.recording.captured_inputs import LeftOnUnit, with_their_like
from lightning_hybrid.step.standins.absent_tensors import whole_shape
from lightning_hybrid.step.tracing.backward_hooks import has_backward_hooks
from lightning_hybrid.step.tracing.recording import Recording, StepError

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # they have no forward


class UnitChoice:
    """The units of a step, which recordings of it correct.

    Attributes:
        opened: FQNs of modules to descend into.
        closed: FQNs of modules without parameters that are units: such as a loss that branches on values, which no
            recording can follow inside.
    """

    def __init__(self, root: nn.Module, num_stages: int) -> None:
        """Args: root: the user's LightningModule. num_stages: of the pipeline."""
        self._root, self._num_stages = root, num_stages
        self.opened, self.closed = set[str](), set[str]()

    def choose(self) -> dict[str, nn.Module]:
        """The units now; see ``choose_units``."""
        return choose_units(self._root, self._num_stages, self.opened, self.closed)

    def corrects(self, error: Exception) -> bool:
        """Whether the step may be recorded with other units, which are chosen from now on.

        Args:
            error: Why it was not with these.
        """
        if isinstance(error, LeftOnUnit):
            is_new = error.unit not in self.opened | self.closed
            self.opened |= {error.unit} - self.closed
            return is_new
        fqn = _module_at_fault(error, self._root)
        if fqn is None or fqn in self.closed | self.opened or _sets_attributes(self._root.get_submodule(fqn)):
            return False
        self.closed.add(fqn)
        return True

    def missed(self, recording: Recording, units: Mapping[str, nn.Module]) -> set[str]:
        """The units that have turned out to be read from outside, and are not opened yet."""
        return missed_units(recording, units, self._num_stages) - self.opened


def _module_at_fault(error: Exception, root: nn.Module) -> str | None:
    """The outermost module without parameters in whose forward an error was raised."""
    names = {id(module): fqn for fqn, module in root.named_modules() if fqn and not isinstance(module, Metric)}
    trace = error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        is_called = trace.tb_frame.f_code.co_name == "_call_impl"
        if is_called and isinstance(module, nn.Module) and id(module) in names and not _count(module):
            return names[id(module)]
        trace = trace.tb_next
    return None


def _sets_attributes(module: nn.Module) -> bool:
    """Whether the code of a module's class binds attributes after it was built, which only one stage would have."""
    classes = {base for inner in module.modules() for base in type(inner).__mro__}
    own = [vars(base) for base in classes if not base.__module__.startswith(("torch.", "lightning", "builtins"))]
    functions = [held for members in own for name, held in members.items() if name != "__init__"]
    left: list[Any] = [function.__code__ for function in functions if isinstance(function, FunctionType)]
    while left:
        code = left.pop()
        if any(instruction.opname == "STORE_ATTR" for instruction in dis.get_instructions(code)):
            return True
        left += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return False


def choose_units(
    root: nn.Module, num_stages: int, opened: Collection[str] = (), closed: Collection[str] = ()
) -> dict[str, nn.Module]:
    """The units of ``root`` by FQN, in the order of the module tree.

    Args:
        root: The user's LightningModule.
        num_stages: Number of stages; a module with more than 1/num_stages of all parameters is opened.
        opened: FQNs of modules to descend into whatever their size; one with nothing inside is no unit then.
        closed: FQNs of modules without parameters that are units all the same.

    Raises:
        StepError: Modules with full backward hooks, which are never opened, leave too few.
    """
    total = _count(root)
    units: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def descend(fqn: str, module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        size = _count(module)
        if size == 0:
            if fqn and (fqn in closed or has_backward_hooks(module)):
                units[fqn] = module
            return
        is_open = not fqn or isinstance(module, _CONTAINERS) or fqn in opened or size * num_stages > total
        is_open |= _is_listened_to(module)
        if not fqn or (_can_open(module) and is_open) or isinstance(module, _CONTAINERS):
            for name, child in module.named_children():
                descend(f"{fqn}.{name}" if fqn else name, child)
        elif fqn and (fqn not in opened or has_backward_hooks(module)):  # else its forward is glue
            units[fqn] = module

    descend("", root)
    whole = [fqn for fqn, unit in units.items() if has_backward_hooks(unit) and _has_parts(unit)]
    count = sum(_count(unit) > 0 for unit in units.values())
    if whole and count < num_stages:
        raise StepError(
            f"{whole[0]} has a full backward hook, which sees where it begins and ends, so that it must lie on one"
            f" stage; {num_stages} stages need as many modules with parameters, and there are {count} such; register"
            " the hook on modules inside it, or set pipeline_parallel_size to less"
        )
    return units


def _is_listened_to(module: nn.Module) -> bool:
    """Whether the user's forward hooks see what goes on inside; they run on every rank, outside of units."""
    return any(inner._forward_hooks for inner in module.modules() if inner is not module)


def missed_units(recording: Recording, units: Mapping[str, nn.Module], num_stages: int) -> set[str]:
    """The units whose insides the step reads from outside, so that they are to be opened.

    Args:
        recording: Of the step.
        units: By FQN.
        num_stages: Of the pipeline.
    """
    if num_stages == 1:
        return {unit for unit in recording.unopened if _can_open(units[unit])}
    entered = with_their_like(recording.entered, units)
    missed = {unit for unit in recording.unopened | entered if _can_open(units[unit])}
    # Its calls, and what reads what they left, may lie on several.
    return missed | {unit for unit in recording.left if not has_backward_hooks(units[unit])}


def _can_open(module: nn.Module) -> bool:
    """Whether there is something smaller inside ``module`` that could be a unit, and it may lie on several stages."""
    return not has_backward_hooks(module) and _has_parts(module)


def _has_parts(module: nn.Module) -> bool:
    return any(_count(child) for child in module.children())


def to_open(recording: Recording, cost: float, cuts: Sequence[str] | None) -> set[str]:
    """The units with smaller ones inside that are to be opened: those with a cut in them, or else the costly ones.

    Args:
        recording: Of the step.
        cost: What a unit may cost, all its calls together.
        cuts: FQNs of units; None if they are not the user's.
    """
    graph = recording.graph
    if cuts is not None:
        inside = {unit for unit in recording.units if any(cut.startswith(unit + ".") for cut in cuts)}
    else:
        costs: dict[str, float] = {}
        for node in graph.nodes:
            if node.unit is not None:
                costs[node.unit] = costs.get(node.unit, 0.0) + node_cost(node, graph)
        inside = {unit for unit, spent in costs.items() if spent > cost}
    return {unit for unit in inside if _can_open(recording.units[unit])}


def _count(module: nn.Module) -> int:
    """Elements of the whole parameters, whatever part of them this rank holds: all ranks choose the same units."""
    return sum(math.prod(whole_shape(parameter)) for parameter in module.parameters())


def owned_members(unit: nn.Module, names: Mapping[int, str]) -> tuple[str, ...]:
    """FQNs of the parameters and tracked buffers that a unit holds; ``names`` are all of them, by id."""
    tensors = [*unit.parameters(), *unit.buffers()]
    return tuple(dict.fromkeys(names[id(tensor)] for tensor in tensors if id(tensor) in names))


class BufferOf(NamedTuple):
    """A buffer of the user's module.

    Attributes:
        name: Its FQN.
        inside: Whether it lives inside a unit.
        memory: See ``memory_of``.
    """

    name: str
    inside: bool
    memory: int


def buffers_of(root: nn.Module, units: Mapping[str, nn.Module]) -> dict[int, BufferOf]:
    """The buffers of a module, by their id."""
    inside = {id(buffer) for unit in units.values() for buffer in unit.buffers()}
    return {id(b): BufferOf(name, id(b) in inside, memory_of(b)) for name, b in root.named_buffers()}
