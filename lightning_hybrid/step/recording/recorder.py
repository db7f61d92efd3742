"""The mode that runs each operation of a step on stand-ins and notes it as a node of the step graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_hybrid.graph.step_graph import Node, SizedBy, StepGraph, Value
from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.step.batch_means.mean_ops import averages
from lightning_hybrid.step.module_state.attribute_tensors import found_on
from lightning_hybrid.step.module_state.snapshot import ArgumentState
from lightning_hybrid.step.objects.pytree import flatten, memory_of, open_class
from lightning_hybrid.step.recording.captured_inputs import SideWays, event_on_stand_ins
from lightning_hybrid.step.recording.choose_units import BufferOf
from lightning_hybrid.step.recording.dynamic_sizes import SizesRead
from lightning_hybrid.step.recording.escaped_values import find_kept, numbers_among
from lightning_hybrid.step.recording.guards import Looks
from lightning_hybrid.step.recording.inner_derivatives import GraphWanted, gone_through, is_derivative
from lightning_hybrid.step.recording.mutated_batch_tensors import OpenedForWriting, written_statistics
from lightning_hybrid.step.recording.unit_dedup import LikeUnits
from lightning_hybrid.step.standins.absent_tensors import make_absent
from lightning_hybrid.step.standins.cost_counter import CostWatch
from lightning_hybrid.step.standins.fake_kernel_fallback import (
    NO_FAKE_KERNEL,
    SIZED_BY_DATA,
    index_by_numbers,
)
from lightning_hybrid.step.tracing.finiteness_checks import Answer, taken_for
from lightning_hybrid.step.tracing.func_transforms import refuse_transforms
from lightning_hybrid.step.tracing.metric_nodes import SinkRehearsal
from lightning_hybrid.step.tracing.op_signature import asked_of, picks_rows
from lightning_hybrid.step.tracing.recording import Leaf, Recording, Template, no_loss, pass_backward, returned_by
from lightning_hybrid.step.tracing.step_mode import TEXT_READS, StepWatch, user_line


class RecordWatch(StepWatch):
    """Runs every event on stand-ins and notes it as a node."""

    is_recording = True

    def __init__(
        self,
        parameters: Mapping[int, str],
        costs: CostWatch,
        buffers: Mapping[int, BufferOf],
        rehearsal: SinkRehearsal,
        units: Mapping[str, nn.Module],
        looks: Looks,
        randomness: KeyedRandomness,
        *,
        whole_graph: bool,
    ) -> None:
        """Args: parameters: FQN by id of the stand-ins. buffers: see ``buffers_of``. The others: of the recording."""
        super().__init__(parameters, randomness)
        self._buffers = buffers
        self._rehearsal = rehearsal
        self._looks = looks
        self.units = units
        self._alike = None if whole_graph else LikeUnits(costs)
        self._found_buffers: set[str] = set()
        self.opened = OpenedForWriting(buffers, self.mark_of)
        self._costs = costs
        self._nodes: list[Node] = []
        self._templates: list[Template] = []
        self._values: list[Value] = []
        self._bytes: dict[str, int] = {}
        self._cloned: set[int] = set()
        self._by_memory: dict[int, list[Tensor]] = {}
        self._member_memory: dict[int, str] = {}  # of parameters and tracked buffers: their FQN
        self._kept_alive: list[Any] = []
        self._sized_by_data = False
        self._sizes = SizesRead()
        self._taken: Answer | None = None  # of what the operation under way makes
        self.side_ways = SideWays(parameters, self.mark_of, costs, units)

    def is_absent_here(self, tensor: Tensor) -> bool:
        """Everything that came from a parameter is absent while recording."""
        return isinstance(tensor, FakeTensor) or self.mark_of(tensor) is not None

    def size_read(self, tensor: Tensor) -> None:
        """It may become a number that other stages need."""
        self._sizes.read(self.mark_of(tensor))

    def is_dynamic(self, value: int) -> bool:
        """As far as is known when it is made."""
        return self._values[value].dynamic

    def taken_for(self, value: int) -> Answer | None:
        """As it was made."""
        return self._values[value].taken

    def sink_method(self, fqn: str, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Metrics are rehearsed on a copy."""
        return self._rehearsal.run(fqn, method)

    def read_here(self, name: str, result: Any, args: Any) -> Any:
        """A number read from the batch may become a size: shapes from here on are not known from shapes alone."""
        if name in ("item", "__int__", "__index__", "tolist", "numpy", "__array__"):
            self._sized_by_data = True
        if name not in TEXT_READS:
            self._looks.note("the content of the batch")
        return result

    def event(
        self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], owned: tuple[str, ...]
    ) -> Any:
        """Run one operation on stand-ins; a node, unless it touches the batch alone."""
        leaves, spec = flatten((args, kwargs))
        given = len(leaves)
        is_unit = name.startswith("@")
        held = found_on(self.units[name[1:]], self.mark_of, self.parameters, owned) if is_unit else []
        leaves += [tensor for _, tensor in held]  # a unit reads what lies on its modules as it does its arguments
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        marks = [self.mark_of(tensor) for tensor in tensors]
        inputs = tuple(mark for mark in marks if mark is not None)
        direct = tuple(self.parameters[id(t)] for t in tensors if id(t) in self.parameters)
        if not owned:
            self._note_unit_buffers(tensors)
        if self.side_ways.reads_batch_alone(name, tensors, known=bool(inputs or direct or owned)):
            if name in SIZED_BY_DATA or (name == "__getitem__" and any(t.dtype is torch.bool for t in tensors[1:])):
                self._looks.note("the content of the batch")
            result = run(*args, **kwargs)
            self.opened.note_detached(name, args, result)
            return result
        asked = asked_of(name, leaves, self.mark_of, self.parameters)
        self.opened.open(name, args, kwargs)
        for tensor in tensors:
            if id(tensor) in self.parameters:
                self._bytes[self.parameters[id(tensor)]] = tensor.numel() * tensor.element_size()
                self._member_memory[memory_of(tensor)] = self.parameters[id(tensor)]
        if name == "backward":
            return pass_backward(user_line(), is_replayed=self.guesses is None)
        through: tuple[int, ...] = ()
        if is_derivative(name):
            if self._alike is not None and self._alike.reused:
                raise GraphWanted
            made = [out for _, out in self._kept_alive]
            through = gone_through(self._nodes, made, args, kwargs, self.mark_of, self.parameters)
        versions = [tensor._version for tensor in tensors]
        flops, moved = self._costs.flops, self._costs.moved_bytes
        unit = name[1:] if name.startswith("@") else None
        with self.side_ways.watched(unit, tensors, owned):
            if unit is not None and self._alike is not None:
                arguments = unit, self.units[unit], leaves[:given], spec
                out, sized_by = self._alike.run(*arguments, lambda: self._run(name, run, args, kwargs))
            else:
                out, sized_by = self._run(name, run, args, kwargs)
        parameters = tuple(dict.fromkeys((*direct, *owned, *self.side_ways.members)))
        for parameter in parameters:
            self._bytes.setdefault(parameter, 0)
        dynamic = bool(sized_by) or self._sized_by_data or any(self._values[v].dynamic for v in inputs)

        # A tensor whose version moved was written in place: the object now is a new value. Binding `.data` moves none.
        writes = [t for t, version in zip(tensors, versions, strict=True) if t._version != version]
        writes += written_statistics(name, args, kwargs)
        if name == "__set__" or (name.startswith("_foreach_") and name.endswith("_")):
            writes = [tensors[0]]
            if id(tensors[0]) in self.parameters:
                self._member_memory[memory_of(tensors[0])] = self.parameters[id(tensors[0])]
        # Also through `parameter.data` and other views.
        members = {id(t): self.parameters.get(id(t), self._member_memory.get(memory_of(t))) for t in writes}
        written_names = tuple(dict.fromkeys(member for member in members.values() if member is not None))
        self._taken = None if self.asked is None else taken_for(name, run, args, kwargs, self)
        written: list[tuple[int, int]] = []
        for tensor in {id(t): t for t in writes}.values():
            if id(tensor) in self.parameters:
                continue
            old = self.mark_of(tensor)
            if old is not None:
                self._cloned.add(old)
            value = self._new_value(tensor, dynamic)
            written.append((next(i for i, leaf in enumerate(leaves) if leaf is tensor), value))
        aliases = self._sharing_memory(writes)
        out_leaves, out_spec = flatten(out)
        once = {id(leaf): leaf for leaf in out_leaves}  # a tensor may be there twice
        known = {key: self._describe(leaf, leaves, dynamic) for key, leaf in once.items()}
        described = tuple(known[id(leaf)] for leaf in out_leaves)
        outputs = [leaf.value for leaf in described if leaf.value is not None] + [value for _, value in written]
        self._templates.append(Template(described, out_spec, tuple(written), tuple(place for place, _ in held), asked))
        self._nodes.append(
            Node(
                index=len(self._nodes),
                name=name,
                inputs=inputs,
                parameters=parameters,
                outputs=tuple(dict.fromkeys(outputs)),
                written=written_names,
                aliases=aliases,
                reads=self._sizes.among(leaves, marks, numbers_among(leaves, self.numbers_read)),
                together=through,
                flops=self._costs.flops - flops,
                moved_bytes=self._costs.moved_bytes - moved,
                line=user_line(),
                picks_rows=picks_rows(name, args),
                sized_by=sized_by,
                averages=averages(name, args, kwargs, self.is_of_the_model, numbers_read=self._sized_by_data),
            )
        )
        self._sizes.made(self._nodes[-1])
        self._kept_alive.append((leaves, out))  # ids and marks stay unique while recording
        return out

    def _note_unit_buffers(self, tensors: list[Tensor]) -> None:
        """A buffer that a unit may write, read around it, is right at the unit's home only."""
        known = (self._buffers.get(id(tensor)) for tensor in tensors)
        self._found_buffers.update(buffer.name for buffer in known if buffer is not None and buffer.inside)

    def _run(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, SizedBy]:
        """The result on stand-ins, and what its size depends on but shapes."""
        args, sized_by = index_by_numbers(name, args)
        if name == "masked_select" and sized_by == "the content of the batch":
            return args[0][args[1]], sized_by
        self._costs.guessed = False
        before = ArgumentState(flatten((args, kwargs))[0]) if name.startswith("@") else None
        try:
            out = run(*args, **kwargs)
            return out, "values of the model" if self._costs.guessed else sized_by
        except NO_FAKE_KERNEL as error:
            if before is not None:
                before.restore()
            return event_on_stand_ins(self.units, name, run, args, kwargs, error), "values of the model"

    def _describe(self, leaf: Any, inputs: list[Any], dynamic: bool) -> Leaf:
        for place, given in enumerate(inputs):
            if leaf is given and leaf is not None and not isinstance(leaf, bool | int | float | str):
                mark = self.mark_of(leaf) if isinstance(leaf, Tensor) else None
                return Leaf(value=mark, input=place)
        if not isinstance(leaf, Tensor):
            open_class(leaf)
            return Leaf(constant=leaf)
        return Leaf(value=self._new_value(leaf, dynamic))

    def _new_value(self, tensor: Tensor, dynamic: bool) -> int:
        index = len(self._values)
        if not isinstance(tensor, FakeTensor):
            refuse_transforms("an operation")
        like = tensor if isinstance(tensor, FakeTensor) else make_absent(tensor)
        strides = tuple(like.stride()) if like.layout is torch.strided else ()
        dtype, where = str(like.dtype).removeprefix("torch."), str(like.device)
        grad, taken = tensor.requires_grad, self._taken
        self._values.append(Value(index, tuple(like.shape), dtype, strides, grad, dynamic, where, taken))
        self.mark(tensor, index)
        self._by_memory.setdefault(memory_of(tensor), []).append(tensor)
        return index

    def _sharing_memory(self, writes: list[Tensor]) -> tuple[int, ...]:
        """The values that are seen to change when these tensors are written."""
        others = [other for t in writes for other in self._by_memory.get(memory_of(t), ()) if other is not t]
        return tuple(dict.fromkeys(mark for other in others if (mark := self.mark_of(other)) is not None))

    def finish(
        self,
        root: nn.Module,
        name: str,
        result: Any,
        units: Mapping[str, nn.Module],
        owned: Mapping[str, tuple[str, ...]],
        *,
        loss_required: bool,
    ) -> Recording:
        """Close the recording: what was returned, what was kept, what it all cost."""
        for members in owned.values():
            for member in members:
                self._bytes.setdefault(member, 0)
        for module_fqn, module in root.named_modules():
            for member, tensor in [*module._parameters.items(), *module._buffers.items()]:
                full = f"{module_fqn}.{member}" if module_fqn else member
                if tensor is not None and full in self._bytes:
                    self._bytes[full] = tensor.numel() * tensor.element_size()
        returned, loss = returned_by(result, self.mark_of)
        if loss_required and (loss is None or not self._values[loss].requires_grad):
            raise no_loss(name, result)
        kept = find_kept(root, result, self)
        called = {node.unit for node in self._nodes if node.unit is not None}
        read_around = {p for node in self._nodes if node.unit is None for p in node.parameters}
        unopened = frozenset(
            fqn for fqn, members in owned.items() if fqn not in called and read_around.intersection(members)
        )
        graph = StepGraph(
            step=name,
            nodes=tuple(self._nodes),
            values=tuple(self._values),
            parameter_bytes=dict(self._bytes),
            returned=returned,
            loss=loss,
            kept=kept.values,
            cloned=frozenset(self._cloned),
            draws=tuple(self._costs.drawing),
            buffers=frozenset(name for name, _ in root.named_buffers()),
            asked=frozenset(self.asked or ()),
        )
        parts = tuple(self._templates), dict(units), dict(owned), kept.places, unopened
        found = frozenset(self._found_buffers | self.opened.buffers)
        looked, aside = self._looks.first, self.side_ways.found()
        return Recording(graph, *parts, found, self.numbers_read, *kept.numbers, looked, kept.returns, **aside)
