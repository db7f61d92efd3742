"""The choice of units: the smallest modules that a pipeline cut never enters.

The module tree is descended while a module has more than a stage's share of the parameters. A recording then opens
further units: one that dominates its stage, or one whose parameters are read outside its forward.

Captured inputs of a unit: tensors that it reads besides its arguments and its own members.

Such a tensor may be inside an object among the arguments (a cache with the keys of a learned prefix), belong to another
module (a table of positions that all layers receive), or be stored on the unit by an earlier call of it (the mean and
the deviation with which RevIN denormalizes at the end). Code around units, including other methods of a unit, may read
tensors stored there too.
"""

from __future__ import annotations

import contextlib
import dis
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torchmetrics import Metric

from lightning_hybrid.errors import WITHOUT_STAGES, StepError, UncapturedOutput
from lightning_hybrid.graph.partition import node_cost
from lightning_hybrid.step.standins.counts import CostCounter
from lightning_hybrid.step.standins.marks import Marks
from lightning_hybrid.step.standins.tensors import full_shape
from lightning_hybrid.step.tracing.mode import user_line
from lightning_hybrid.step.tracing.recording import Recording

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # without a forward


class UnitChoice:
    """The units of a step; recordings of the step correct the choice.

    Attributes:
        opened: FQNs of modules to descend into.
        closed: FQNs of modules without parameters that are units: such as a loss that branches on values, which cannot
            be recorded inside.
    """

    def __init__(self, root: nn.Module, num_stages: int, *, closes_mixtures: bool = False) -> None:
        """Begin with the choice by size; where ranks share experts, lists of them and their routers are never cut."""
        self._root, self._num_stages = root, num_stages
        self.opened, self.closed = set[str](), set[str]()
        self._mixtures = frozenset(_mixtures(root) if closes_mixtures and num_stages > 1 else ())

    def adopt(self, opened: set[str], closed: set[str]) -> None:
        """Take the choice that the ranks agree on."""
        self.opened, self.closed = opened, closed

    def choose(self) -> dict[str, nn.Module]:
        """Return the current units by FQN, in the order of the module tree.

        ``StepError`` is raised where a module has a full backward hook, and there are several stages.
        """
        names = self._root.named_modules() if self._num_stages > 1 else ()
        hooked = [fqn for fqn, module in names if has_backward_hooks(module)]
        if hooked:
            raise StepError(
                f"{hooked[0] or type(self._root).__name__} has a full backward hook, which torch sets up around its"
                " forward also where another stage runs that; register a hook on a tensor in the forward"
                f" (h.register_hook(...)), or {WITHOUT_STAGES}",
                entry="hook-stages",
            )
        return choose_units(self._root, self._num_stages, self.opened, self.closed, self._mixtures)

    def to_open(self, recording: Recording, cost: float, cuts: Sequence[str] | None) -> set[str]:
        """The units to open: those with one of the user's ``cuts`` inside; without these, all that cost more."""
        graph = recording.graph
        if cuts is not None:
            inside = {unit for unit in recording.units if any(cut.startswith(unit + ".") for cut in cuts)}
        else:
            costs: dict[str, float] = {}
            for node in graph.nodes:
                if node.unit:
                    costs[node.unit] = costs.get(node.unit, 0.0) + node_cost(node, graph)
            inside = {unit for unit, spent in costs.items() if spent > cost}
        return {unit for unit in inside - self._mixtures if _can_open(recording.units[unit])}

    def corrects(self, error: Exception) -> bool:
        """Whether other units may avoid ``error`` of a recording with the current ones; they are chosen from now on."""
        if isinstance(error, UncapturedOutput):
            is_new = error.unit not in self.opened | self.closed
            self.opened |= {error.unit} - self.closed
            return is_new
        fqn = _module_at_fault(error, self._root)
        if fqn is None or fqn in self.closed | self.opened or _sets_attributes(self._root.get_submodule(fqn)):
            return False
        self.closed.add(fqn)
        return True

    def missed(self, recording: Recording, units: Mapping[str, nn.Module]) -> set[str]:
        """The units whose insides a recorded step reads from outside, and that are not opened yet."""
        missed = set(recording.unopened)
        if self._num_stages > 1:
            classes = {type(units[fqn]) for fqn in recording.entered}  # layers of one class receive the same inputs
            missed |= {fqn for fqn, unit in units.items() if type(unit) in classes}
        missed = {unit for unit in missed if _can_open(units[unit])}
        if self._num_stages > 1:
            # Calls of an opened unit, and reads of tensors that they stored, may be on several stages.
            missed |= recording.left
        return missed - self.opened


def _module_at_fault(error: Exception, root: nn.Module) -> str | None:
    """The outermost module without parameters in whose forward an error was raised."""
    names = {id(module): fqn for fqn, module in root.named_modules() if fqn and not isinstance(module, Metric)}
    trace = error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        is_called = trace.tb_frame.f_code.co_name == "_call_impl"
        if is_called and isinstance(module, nn.Module) and id(module) in names and not num_elements(module):
            return names[id(module)]
        trace = trace.tb_next
    return None


def _sets_attributes(module: nn.Module) -> bool:
    """Whether the code of a module's class binds attributes outside ``__init__``, which only one stage would have."""
    classes = {base for inner in module.modules() for base in type(inner).__mro__}
    namespaces = [vars(base) for base in classes if not base.__module__.startswith(("torch.", "lightning", "builtins"))]
    functions = [value for members in namespaces for name, value in members.items() if name != "__init__"]
    codes: list[Any] = [function.__code__ for function in functions if isinstance(function, FunctionType)]
    while codes:
        code = codes.pop()
        if any(instruction.opname == "STORE_ATTR" for instruction in dis.get_instructions(code)):
            return True
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return False


def choose_units(
    root: nn.Module,
    num_stages: int,
    opened: Collection[str] = (),
    closed: Collection[str] = (),
    mixtures: Collection[str] = (),
) -> dict[str, nn.Module]:
    """The units of ``root`` by FQN, in the order of the module tree.

    A module with more than 1/``num_stages`` of all parameters is opened, but for ``mixtures``. So are ``opened`` ones,
    whatever their size; one without modules inside is no unit then. ``closed`` ones are units without parameters.
    """
    total = num_elements(root)
    units: dict[str, nn.Module] = {}
    visited: set[int] = set()

    def descend(fqn: str, module: nn.Module) -> None:
        if id(module) in visited:
            return
        visited.add(id(module))
        size = num_elements(module)
        if size == 0:
            if fqn and fqn in closed:
                units[fqn] = module
            return
        is_open = not fqn or isinstance(module, _CONTAINERS) or fqn in opened
        is_open |= size * num_stages > total and fqn not in mixtures
        is_open |= _has_inner_forward_hooks(module)
        if not fqn or (_can_open(module) and is_open) or isinstance(module, _CONTAINERS):
            for name, child in module.named_children():
                descend(f"{fqn}.{name}" if fqn else name, child)
        elif fqn and fqn not in opened:  # else its forward is glue
            units[fqn] = module

    descend("", root)
    return units


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether the module itself has full backward hooks or backward pre-hooks."""
    return bool(module._backward_pre_hooks or (module._backward_hooks and module._is_full_backward_hook))


def _has_inner_forward_hooks(module: nn.Module) -> bool:
    """Whether modules inside have forward hooks of the user; these run on every rank, outside of units."""
    return any(inner._forward_hooks for inner in module.modules() if inner is not module)


def _can_open(module: nn.Module) -> bool:
    """Whether ``module`` has modules inside that could be units."""
    return any(num_elements(child) for child in module.children())


def _mixtures(root: nn.Module) -> Iterator[str]:
    """FQNs of modules with a list of experts and a router."""
    return (fqn for fqn, module in root.named_modules() if _lists_of_experts(module))


def experts_in_layers(root: nn.Module) -> list[nn.Module]:
    """The lists of experts inside of members of other lists, whose layers they are parts of."""
    lists = (each for each in root.modules() if isinstance(each, (nn.ModuleList, nn.ModuleDict, nn.Sequential)))
    inside = {inner for each in lists for member in each.children() for inner in member.modules()}
    return [experts for module in inside for experts in _lists_of_experts(module)]


def _lists_of_experts(module: nn.Module) -> list[nn.Module]:
    """Lists of equal modules with a weight of as many rows beside them, which is of their router."""
    lists = [child for child in module.children() if isinstance(child, nn.ModuleList | nn.ModuleDict)]
    others = [child for child in module.children() if child not in lists]
    beside = [*module.parameters(recurse=False), *(p for child in others for p in child.parameters())]
    rows = {full_shape(parameter)[0] for parameter in beside if parameter.dim() == 2}
    return [each for each in lists if len(each) in rows and len(set(map(_structure, each.children()))) == 1]


def _structure(module: nn.Module) -> tuple[Any, ...]:
    return type(module), *((name, full_shape(parameter)) for name, parameter in module.named_parameters())


def num_elements(module: nn.Module) -> int:
    """Elements of the full parameters, whatever shard this rank has: all ranks choose the same units."""
    return sum(math.prod(full_shape(parameter)) for parameter in module.parameters())


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
        marks: Marks,
        costs: CostCounter,
        units: Mapping[str, nn.Module],
    ) -> None:
        self._parameters, self._marks, self._costs, self._units = parameters, marks, costs, units
        self._before: dict[str, dict[int, Tensor]] = {}  # attribute tensors of units before their first call
        self._after: dict[int, tuple[Tensor, str]] = {}  # attribute tensors stored by calls of units, and the unit
        self.entered: dict[str, None] = {}
        self.members: dict[str, None] = {}
        self.storing_units: dict[str, None] = {}

    @contextlib.contextmanager
    def watching(self, unit: str | None, arguments: Iterable[Tensor], owned: Iterable[str]) -> Iterator[None]:
        """Find captured inputs, of any shapes, while a unit runs; an operation (``unit`` is None) has none."""
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
                    elif member is None and tensor in self._marks:
                        self.entered[unit] = None
                        found += 1
            return found

        with self._costs.counting(count_captured):
            yield
        for key, tensor in _attribute_tensors_of(self._units[unit]).items():
            if key not in before and key not in argument_ids:
                self._after[key] = tensor, unit

    def reads_batch_alone(self, name: str, tensors: Iterable[Tensor], *, reads_model: bool) -> bool:
        """Whether an operation on tensors of any shapes reads nothing of the model; records units that stored one.

        A value of the model that comes from the attributes of a unit raises ``UncapturedOutput``, and one of an unknown
        source ``StepError``.
        """
        for tensor in tensors:
            _, unit = self._after.get(id(tensor), (None, None))
            if unit is not None and tensor not in self._marks:
                self.storing_units[unit] = None
            if reads_model or not isinstance(tensor, FakeTensor):
                continue
            message = (
                f"{user_line()}: {name} reads a captured output of a unit (stored in an attribute or in an object among"
                " its arguments); return it from its forward, or name a cut inside that module in pipeline_cuts"
            )
            if unit is not None:
                raise UncapturedOutput(unit, message, entry="captured-output")
            raise StepError(message, entry="captured-output")
        return not reads_model


def _attribute_tensors_of(unit: nn.Module) -> dict[int, Tensor]:
    found = (value for module in unit.modules() for value in module.__dict__.values())
    return {id(value): value for value in found if isinstance(value, Tensor)}
