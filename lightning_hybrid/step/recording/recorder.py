"""The function mode that runs each operation of a step on stand-ins and adds it to the step graph as a node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_hybrid.batch.means import averages
from lightning_hybrid.errors import UncapturedOutput
from lightning_hybrid.graph.step_graph import Node, SizedBy, StepGraph, Value
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.step.module_state.attributes import values_on_unit
from lightning_hybrid.step.module_state.snapshots import ArgumentSnapshot, reachable_leaves
from lightning_hybrid.step.objects.names import TEXT_READS
from lightning_hybrid.step.objects.pytree import Spec, flatten, register_container_class
from lightning_hybrid.step.objects.tensors import storage_id
from lightning_hybrid.step.recording.gradients import FullGraphNeeded, nodes_differentiated
from lightning_hybrid.step.recording.guards import UnguardedReads, plain_state
from lightning_hybrid.step.recording.kept import selects_rows
from lightning_hybrid.step.recording.layers import UnitDeduplicator
from lightning_hybrid.step.recording.mutated import BufferInfo, MutatedBatchTensors, written_statistics
from lightning_hybrid.step.recording.reads import (
    DynamicSizeReads,
    find_escaped_values,
    is_sized_by_data,
    masks_to_indices,
    values_behind_numbers,
)
from lightning_hybrid.step.recording.units import CapturedInputs
from lightning_hybrid.step.standins.counts import CostCounter, SavedTensors, Totals
from lightning_hybrid.step.standins.kernels import NO_FAKE_KERNEL, run_on_stand_ins
from lightning_hybrid.step.standins.tensors import make_absent
from lightning_hybrid.step.tracing.metrics import MetricDryRun
from lightning_hybrid.step.tracing.mode import StepMode, user_line
from lightning_hybrid.step.tracing.recording import Leaf, Recording, Template, returned_values
from lightning_hybrid.step.tracing.refusals import (
    check_backward_call,
    check_scalar,
    no_loss_error,
    refuse_transforms,
    signature_of,
)

_NUMBERS = (float, int, numpy.generic, numpy.ndarray)


class Recorder(StepMode):
    """Runs every event on stand-ins and records it as a node."""

    is_recording = True

    def __init__(
        self,
        parameters: Mapping[int, str],
        costs: CostCounter,
        buffers: Mapping[int, BufferInfo],
        metric_dry_run: MetricDryRun,
        units: Mapping[str, nn.Module],
        unguarded_reads: UnguardedReads,
        randomness: KeyedRandomness,
        *,
        full_graph: bool,
        absent_number: float | None,
        guesses: Iterator[Any] | None,
    ) -> None:
        super().__init__(parameters, randomness)
        self.absent_number, self.guesses = absent_number, guesses
        self._buffers = buffers
        self._metric_dry_run = metric_dry_run
        self._unguarded_reads = unguarded_reads
        self.units = units
        self._deduplicator = None if full_graph else UnitDeduplicator(costs)
        self._found_buffers: set[str] = set()
        self.mutated = MutatedBatchTensors(buffers, self.marks)
        self._costs = costs
        self._nodes: list[Node] = []
        self._templates: list[Template] = []
        self.values: list[Value] = []
        self._bytes: dict[str, int] = {}
        self._cloned: set[int] = set()
        self._by_memory: dict[int, list[Tensor]] = {}
        self._member_memory: dict[int, str] = {}  # of parameters and tracked buffers: their FQN
        self._kept_alive: list[Any] = []
        self._sized_by_data = False
        self._sizes = DynamicSizeReads()
        self.captured = CapturedInputs(parameters, self.marks, costs, units)

    def size_read(self, tensor: Tensor) -> None:
        """Record that user code reads the shape of a tensor; its sizes may become numbers that other stages need."""
        self._sizes.record_read(self.marks.of(tensor))

    def sink_method(self, fqn: str, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Run the method of a metric on a copy."""
        return self._metric_dry_run.run(fqn, method)

    def read_here(self, name: str, result: Any, args: Any) -> Any:
        """Record a read of batch content: the number may become a size, so later shapes depend on more than shapes."""
        if name in ("item", "__int__", "__index__", "tolist", "numpy", "__array__"):
            self._sized_by_data = True
        if name not in TEXT_READS:
            self._unguarded_reads.add("the content of the batch", of_batch=True)
        return result

    def event(
        self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], owned: tuple[str, ...]
    ) -> Any:
        """Run one operation on stand-ins, and record it as a node unless it reads the batch alone."""
        leaves, spec = flatten((args, kwargs))
        num_arguments, unit = len(leaves), name[1:] if name.startswith("@") else None
        attributes = [] if unit is None else values_on_unit(self.units[unit], self.marks, self.parameters, owned)
        leaves += [tensor for _, tensor in attributes]  # tensors on the modules of a unit are inputs like its arguments
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        marks = [self.marks.of(tensor) for tensor in tensors]
        inputs = tuple(mark for mark in marks if mark is not None)
        direct = tuple(self.parameters[id(t)] for t in tensors if id(t) in self.parameters)
        if not owned:
            self._record_unit_buffers(tensors)
        if self.captured.reads_batch_alone(name, tensors, reads_model=bool(inputs or direct or owned)):
            return self._run_on_batch(name, run, args, kwargs, tensors)
        signature = signature_of(name, leaves, self.marks, self.parameters)
        self.mutated.make_targets_absent(name, args, kwargs)
        self._record_bytes(tensors)
        if name == "backward":
            return check_backward_call(user_line(), is_replayed=self.guesses is None)
        through = self._differentiated_nodes(args, kwargs) if name == "grad" else ()
        versions = [tensor._version for tensor in tensors]
        before = self._costs.totals()
        with self.captured.watching(unit, tensors, owned):
            if unit is not None and self._deduplicator is not None:
                arguments = unit, self.units[unit], leaves[:num_arguments], spec
                out, sized_by = self._deduplicator.run(*arguments, lambda: self._run(name, run, args, kwargs))
            else:
                out, sized_by = self._run(name, run, args, kwargs)
                self._costs.count_saved(leaves[:num_arguments], out)
        parameters = tuple(dict.fromkeys((*direct, *owned, *self.captured.members)))
        self._bytes.update((parameter, 0) for parameter in parameters if parameter not in self._bytes)
        dynamic = bool(sized_by) or self._sized_by_data or any(self.values[v].dynamic for v in inputs)
        writes = self._written_tensors(name, args, kwargs, tensors, versions)
        written_names = self._members_of(writes)
        written, aliases = self._written_values(writes, leaves, dynamic), self._sharing_memory(writes)
        described, out_spec = self._describe_result(out, leaves, dynamic)
        paths = tuple(location for location, _ in attributes)
        self._templates.append(Template(described, out_spec, written, paths, signature))
        counted = self._costs.totals().since(before)
        is_checkpointed = bool(self.checkpoint_depth and unit is not None and not paths)
        outputs = [leaf.value for leaf in described if leaf.value is not None] + [value for _, value in written]
        node = Node(
            *(len(self._nodes), name, inputs, parameters, tuple(dict.fromkeys(outputs)), written_names, aliases),
            reads=self._sizes.reads_of(leaves, marks, values_behind_numbers(leaves, self.numbers_read)),
            together=through,
            **self._costs_of(counted, leaves, out, is_checkpointed=is_checkpointed),
            line=user_line(),
            selects_rows=selects_rows(name, args),
            sized_by=sized_by,
            averages=averages(name, args, kwargs, self.is_model_value, numbers_read=self._sized_by_data),
        )
        self._nodes.append(node)
        self._sizes.record(node)
        self._kept_alive.append((leaves, out))  # ids and marks stay unique while recording
        return out

    def _costs_of(self, counted: Totals, inputs: list[Any], out: Any, *, is_checkpointed: bool) -> dict[str, Any]:
        """The latest operation's costs; a unit that the user's glue checkpoints saves its inputs, and runs again."""
        saved = self._costs.saved
        if is_checkpointed:
            saved = SavedTensors(inputs=tuple(n for n, leaf in enumerate(inputs) if isinstance(leaf, Tensor)))
            counted = counted._replace(repeated_flops=counted.repeated_flops + counted.flops)
        values = self._values_saved(saved, inputs, out)
        return {**counted._asdict(), "saved_bytes": saved.inner_bytes, "saved_values": values}

    def _values_saved(self, saved: SavedTensors, inputs: list[Any], out: Any) -> tuple[int, ...]:
        """The values whose memory an operation saves, each by the first value that has it."""
        outputs = flatten(out)[0] if saved.outputs else []
        tensors = [inputs[position] for position in saved.inputs] + [outputs[position] for position in saved.outputs]
        firsts = [self._by_memory.get(storage_id(tensor), [None])[0] for tensor in tensors]
        return self.marks.among(firsts)

    def _run_on_batch(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Run an operation that reads nothing of the model; it is no node."""
        if is_sized_by_data(name, tensors):
            self._unguarded_reads.add("the content of the batch", of_batch=True)
        result = run(*args, **kwargs)
        self.mutated.record_detached(name, args, result)
        return result

    def _record_bytes(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if (name := self.parameters.get(id(tensor))) is not None:
                self._bytes[name] = tensor.numel() * tensor.element_size()
                self._member_memory[storage_id(tensor)] = name

    def _differentiated_nodes(self, args: Any, kwargs: Any) -> tuple[int, ...]:
        if self._deduplicator is not None and self._deduplicator.reused:
            raise FullGraphNeeded
        made = [out for _, out in self._kept_alive]
        return nodes_differentiated(self._nodes, made, args, kwargs, self.marks, self.parameters)

    def _written_tensors(
        self, name: str, args: Any, kwargs: Any, tensors: list[Tensor], versions: list[int]
    ) -> list[Tensor]:
        """The tensors that an operation has written in place: their version changed. Binding `.data` changes none."""
        writes = [t for t, version in zip(tensors, versions, strict=True) if t._version != version]
        writes += written_statistics(name, args, kwargs)
        if name == "__set__" or (name.startswith("_foreach_") and name.endswith("_")):
            writes = [tensors[0]]
            if id(tensors[0]) in self.parameters:
                self._member_memory[storage_id(tensors[0])] = self.parameters[id(tensors[0])]
        return writes

    def _members_of(self, writes: list[Tensor]) -> tuple[str, ...]:
        """FQNs of the members written, also through `parameter.data` and other views."""
        members = {id(t): self.parameters.get(id(t), self._member_memory.get(storage_id(t))) for t in writes}
        return tuple(dict.fromkeys(member for member in members.values() if member is not None))

    def _written_values(self, writes: list[Tensor], leaves: list[Any], dynamic: bool) -> tuple[tuple[int, int], ...]:
        """A new value for each tensor written in place, as (position among the leaves, value)."""
        written: list[tuple[int, int]] = []
        for tensor in {id(t): t for t in writes}.values():
            if id(tensor) in self.parameters:
                continue
            old = self.marks.of(tensor)
            if old is not None:
                self._cloned.add(old)
            value = self._new_value(tensor, dynamic)
            written.append((next(i for i, leaf in enumerate(leaves) if leaf is tensor), value))
        return tuple(written)

    def _describe_result(self, out: Any, leaves: list[Any], dynamic: bool) -> tuple[tuple[Leaf, ...], Spec | None]:
        out_leaves, out_spec = flatten(out)
        distinct = {id(leaf): leaf for leaf in out_leaves}  # a tensor may occur twice
        described = {key: self._describe(leaf, leaves, dynamic) for key, leaf in distinct.items()}
        return tuple(described[id(leaf)] for leaf in out_leaves), out_spec

    def _record_unit_buffers(self, tensors: list[Tensor]) -> None:
        """Record buffers of units that glue reads: a unit may write them, on its owner stage only."""
        buffers = (self._buffers.get(id(tensor)) for tensor in tensors)
        self._found_buffers.update(buffer.name for buffer in buffers if buffer is not None and buffer.inside)

    def _run(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, SizedBy]:
        """Return the result on stand-ins, and what its size depends on besides shapes."""
        args, sized_by = masks_to_indices(name, args)
        if name == "masked_select" and sized_by == "the content of the batch":
            return args[0][args[1]], sized_by
        self._costs.forget_shapes()
        before = ArgumentSnapshot(flatten((args, kwargs))[0]) if name.startswith("@") else None
        try:
            out = run(*args, **kwargs)
            return out, "values of the model" if self._costs.has_dynamic_shapes else sized_by
        except NO_FAKE_KERNEL as error:
            if before is not None:
                before.restore()
            return run_event_on_stand_ins(self.units, name, run, args, kwargs, error), "values of the model"

    def _describe(self, leaf: Any, inputs: list[Any], dynamic: bool) -> Leaf:
        for position, given in enumerate(inputs):
            if leaf is given and leaf is not None and not isinstance(leaf, bool | int | float | str):
                mark = self.marks.of(leaf)
                return Leaf(value=mark, input=position)
        if not isinstance(leaf, Tensor):
            register_container_class(leaf)
            return Leaf(constant=leaf)
        return Leaf(value=self._new_value(leaf, dynamic))

    def _new_value(self, tensor: Tensor, dynamic: bool) -> int:
        index = len(self.values)
        if not isinstance(tensor, FakeTensor):
            refuse_transforms("an operation")
        fake = tensor if isinstance(tensor, FakeTensor) else make_absent(tensor)
        strides = tuple(fake.stride()) if fake.layout is torch.strided else ()
        dtype, device = str(fake.dtype).removeprefix("torch."), str(fake.device)
        self.values.append(Value(index, tuple(fake.shape), dtype, strides, tensor.requires_grad, dynamic, device))
        self.marks.set(tensor, index)
        self._by_memory.setdefault(storage_id(tensor), []).append(tensor)
        return index

    def _sharing_memory(self, writes: list[Tensor]) -> tuple[int, ...]:
        """The values that change when these tensors are written, because they share memory with one."""
        others = [other for t in writes for other in self._by_memory.get(storage_id(t), ()) if other is not t]
        return self.marks.among(others)

    def finish(
        self, root: nn.Module, name: str, result: Any, owned: Mapping[str, tuple[str, ...]], *, loss_required: bool
    ) -> Recording:
        """Build the recording: the graph, returned and kept values, and bytes of the parameters."""
        for members in owned.values():
            for member in members:
                self._bytes.setdefault(member, 0)
        for module_fqn, module in root.named_modules():
            for member, tensor in [*module._parameters.items(), *module._buffers.items()]:
                fqn = f"{module_fqn}.{member}" if module_fqn else member
                if tensor is not None and fqn in self._bytes:
                    self._bytes[fqn] = tensor.numel() * tensor.element_size()
        returned, loss = returned_values(result, self.marks)
        if loss_required and (loss is None or not self.values[loss].requires_grad):
            raise no_loss_error(root, name, result)
        if loss_required:
            check_scalar(root, name, result, "a microbatch")
        kept = find_escaped_values(root, result, self)
        called = {node.unit for node in self._nodes if node.unit}
        read_around = {p for node in self._nodes if not node.unit for p in node.parameters}
        unopened = frozenset(
            fqn for fqn, members in owned.items() if fqn not in called and read_around.intersection(members)
        )
        graph = StepGraph(
            step=name,
            nodes=tuple(self._nodes),
            values=tuple(self.values),
            parameter_bytes=dict(self._bytes),
            returned=returned,
            loss=loss,
            kept=kept.values,
            cloned=frozenset(self._cloned),
            draws=tuple(self._costs.drawing),
            buffers=frozenset(name for name, _ in root.named_buffers()),
        )
        fields = tuple(self._templates), dict(self.units), dict(owned), kept.paths, unopened
        buffers = frozenset(self._found_buffers | self.mutated.buffers)
        entered, left = frozenset(self.captured.entered), frozenset(self.captured.storing_units)
        state = self._unguarded_reads.first, kept.returns
        return Recording(graph, *fields, buffers, self.numbers_read, *kept.numbers, *state, entered=entered, left=left)


def run_event_on_stand_ins(
    units: Mapping[str, nn.Module], name: str, run: Callable[..., Any], args: Any, kwargs: Any, error: Exception
) -> Any:
    """Run an operation or a unit that fake kernels cannot run while a step is recorded, by ``run_on_stand_ins``.

    ``UncapturedOutput`` is raised where a unit computes a number of stand-ins, a plain float on which Python lets code
    branch.
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
