"""The replay of one stage: the user's code is run, but only the operations of this stage are executed.

Node k of the graph is executed if it belongs to the stage, or skipped; a skipped node returns the received tensor
if another stage sent it here, and an absent stand-in otherwise. So Python side effects happen on every rank, and only
the tensor operations of other stages are missing.

A replay of a stage without operations runs the Python side effects alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function

from lightning_hybrid.batch.means import Share, weighted_by_share
from lightning_hybrid.batch.metrics import FullBatchMetrics
from lightning_hybrid.batch.scalars import ScalarResults, scalar_nodes
from lightning_hybrid.errors import WITHOUT_STAGES, StepError
from lightning_hybrid.graph.partition import Assignment
from lightning_hybrid.graph.step_graph import SINK, Node
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.step.module_state.attributes import look_up, put
from lightning_hybrid.step.module_state.snapshots import AttributePath
from lightning_hybrid.step.objects.pytree import flatten, flatten_call, rebuild_call, unflatten
from lightning_hybrid.step.replay.divergence import Divergence, dtype_changed, shape_changed
from lightning_hybrid.step.standins.tensors import (
    ShardedTensorBase,
    fill,
    make_placeholder,
    materialize,
    materialize_call,
)
from lightning_hybrid.step.tracing.functions import functions_with_repeated_draws, user_functions
from lightning_hybrid.step.tracing.instrument import checkpointed, intercepted_step
from lightning_hybrid.step.tracing.metrics import find_sinks
from lightning_hybrid.step.tracing.mode import CurrentRun, StepMode, user_line
from lightning_hybrid.step.tracing.recording import Recording, Template

_HOOK_SETUP_EVENT = "apply:BackwardHookFunction"  # of hooks on all modules, or set in a run


@dataclasses.dataclass
class StageRun:
    """Results of one stage on one microbatch."""

    result: Any  # output of the step; tensors of other stages in it are absent
    made: dict[int, Tensor]  # the values that other stages, the backward or the user's attributes need, by index
    # absent tensors that user code may still refer to, as (value index, tensor)
    placeholders: list[tuple[int, FakeTensor]]
    numbers_read: str = ""  # line at which a number was last read from a tensor that is absent here; empty if none was
    scalars: ScalarResults = dataclasses.field(default_factory=ScalarResults)  # the scalars that the stage computed

    def kept(self, wanted: Collection[int], earlier: StageRun | None) -> StageRun:
        """What outlives the step: detached values among ``wanted``, joined with an earlier stage of the rank."""
        made = {} if earlier is None else dict(earlier.made)
        made |= {index: value.detach() for index, value in self.made.items() if index in wanted}
        scalars = self.scalars if earlier is None else self.scalars.joined(earlier.scalars)
        return dataclasses.replace(self, made=made, scalars=scalars)


class SkippingMode(StepMode):
    """Skips operations: what they return and write is rebuilt from the recording."""

    @abstractmethod
    def made(self, value: int) -> Tensor:
        """The tensor that stands for a value, of its shape."""

    @abstractmethod
    def rewrite(self, written: Tensor, value: int) -> None:
        """Turn the user's tensor, of any shape, that an operation writes in place into the written value."""

    def rebuild(self, template: Template, leaves: Sequence[Any]) -> Any:
        """The result of an operation whose arguments have these leaves, in the containers of the recorded result."""
        result: list[Any] = []
        tensors: dict[int, Tensor] = {}  # a tensor may occur twice
        for leaf in template.leaves:
            if leaf.input is not None:
                result.append(leaves[leaf.input])
            elif leaf.value is None:
                result.append(leaf.constant)
            else:
                if leaf.value not in tensors:
                    tensors[leaf.value] = self.made(leaf.value)
                result.append(tensors[leaf.value])
        for leaf, described in zip(result, template.leaves, strict=True):
            if described.value is not None:
                self.marks.set(leaf, described.value)
        for position, value in template.written:
            self.rewrite(leaves[position], value)
        return unflatten(result, template.spec)


class StageReplay:
    """Runs one stage of one recorded step, a microbatch at a time."""

    def __init__(
        self,
        recording: Recording,
        assignment: Assignment,
        root: nn.Module,
        randomness: KeyedRandomness,
        stage: int = -1,
        contents: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> None:
        """Take ``stage`` (by default one without operations, for a run of the Python side effects alone).

        ``contents`` are full tensors by value index, of any shapes: reads of these values return their content.
        """
        self.recording = recording
        self.assignment = assignment
        self.stage = stage
        self.randomness = randomness
        graph = recording.graph
        wanted = {v for (source, _), sent in assignment.portals.items() if source == stage for v in sent}
        wanted.update(v for v in (*graph.returned, *graph.kept) if assignment.value_stage[v] == stage)
        self.wanted = {value: getattr(torch, graph.values[value].dtype) for value in wanted}
        self.placeholders: dict[int, FakeTensor] = {}
        self.wanted_after = frozenset((*graph.returned, *graph.kept))
        # A loss that is the only output is never passed to user code: one stand-in serves all microbatches. Outputs of
        # validation or prediction are passed.
        only_loss = graph.step == "training_step" and graph.returned == (graph.loss,)
        self.returned_or_kept = frozenset((*(() if only_loss else graph.returned), *graph.kept))
        self.sinks = find_sinks(root)
        self.drawing_functions = user_functions() if graph.draws else []
        self.drawing = {fqn: root.get_submodule(fqn) for fqn in graph.draws if fqn}
        self.device = randomness.device
        self.scalar_nodes = scalar_nodes(graph)
        self.contents = contents

    def run(
        self,
        step: Callable[[], Any],
        received: Mapping[int, Tensor],
        parameters: Mapping[int, str],
        current: CurrentRun,
        shares: Mapping[int, Share] | None = None,
        metrics: FullBatchMetrics | None = None,
    ) -> StageRun:
        """Run ``step`` on one microbatch, and execute only the operations of this stage.

        ``received`` are full tensors that other stages sent, of any shapes, by value index; ``parameters`` FQNs of all
        parameters and tracked buffers by id; ``shares`` weights of operations that average, by node index. ``metrics``
        are given where this is one of several microbatches. ``StepChanged`` is raised where the step runs other
        operations than recorded.
        """
        watch = self.watch(received, parameters)
        watch.shares, watch.metrics = shares or {}, metrics
        watch.uncompiled = current.uncompiled
        with current.watched_by(watch), self.randomness.watching(True), watch:
            result = step()
        watch.check_complete(result)
        return StageRun(result, watch.results, watch.placeholders, watch.numbers_read, watch.scalars)

    def watch(self, received: Mapping[int, Tensor], parameters: Mapping[int, str]) -> ReplayWatch:
        """Create the function mode for one run; ``received`` are full tensors of the microbatch's shapes."""
        return ReplayWatch(self, received, parameters)


class ReplayWatch(SkippingMode):
    """Executes the events of one stage and skips the others."""

    def __init__(self, replay: StageReplay, received: Mapping[int, Tensor], parameters: Mapping[int, str]) -> None:
        super().__init__(parameters, replay.randomness)
        self.units, self._templates = replay.recording.units, replay.recording.templates
        graph = replay.recording.graph
        self._nodes, self.values, self._cloned = graph.nodes, graph.values, graph.cloned
        self._replay, self._received, self._stage = replay, received, replay.stage
        self._node_stage, self._value_stage = replay.assignment.node_stage, replay.assignment.value_stage
        self.shares: Mapping[int, Share] = {}
        self.metrics: FullBatchMetrics | None = None
        self.scalars = ScalarResults()
        self._next, self.changes = 0, Divergence(graph)
        self.results: dict[int, Tensor] = {}
        self.placeholders: list[tuple[int, FakeTensor]] = []

    def is_absent_here(self, tensor: Tensor) -> bool:
        """Whether a tensor, of any shape, is in this run a value of another stage that was not received."""
        mark = self.marks.of(tensor)
        if mark is None:
            return isinstance(tensor, FakeTensor)
        return self._value_stage[mark] != self._stage and mark not in self._received

    def is_elsewhere(self, tensor: Tensor) -> bool:
        """Whether a tensor, of any shape, is a value of another stage, received or not."""
        mark = self.marks.of(tensor)
        return mark is not None and self._value_stage[mark] != self._stage

    def _read(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if not self._replay.contents:
            return super()._read(name, func, args, kwargs)
        leaves, spec = flatten((args, kwargs))
        marks = [self.marks.of(leaf) for leaf in leaves]
        contents = self._replay.contents
        filled = [leaf if mark is None else contents.get(mark, leaf) for leaf, mark in zip(leaves, marks, strict=True)]
        if any(isinstance(leaf, FakeTensor) for leaf in filled):
            return super()._read(name, func, args, kwargs)
        args, kwargs = unflatten(filled, spec)
        return func(*args, **kwargs)

    def size_read(self, tensor: Tensor) -> None:
        """Record the read of a shape: the cause to report if the step then diverges from its recording."""
        if (mark := self.marks.of(tensor)) is not None:
            self.changes.size_read(mark, tensor, user_line)

    def event(
        self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], owned: tuple[str, ...]
    ) -> Any:
        """Execute one operation, or skip it if it belongs to another stage."""
        leaves, plain = flatten_call(args, kwargs)
        num_arguments = len(leaves)
        paths: Sequence[AttributePath] = ()
        if name[:1] == "@" and self._next < len(self._templates):
            paths = self._templates[self._next].attribute_inputs
        if paths:
            leaves = [*leaves, *look_up(self.units[name[1:]], paths)]
        inputs: list[int] = []
        tracked, replace, stale = bool(owned), False, False
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if (mark := self.marks.of(leaf)) is not None:
                    inputs.append(mark)
                    replace = replace or isinstance(leaf, FakeTensor)
                elif id(leaf) in self.parameters:
                    tracked = True
                elif isinstance(leaf, FakeTensor):
                    stale = True
        if not inputs and not tracked:
            return run(*args, **kwargs)
        node = self._match(name, inputs)
        if self._node_stage[node.index] != self._stage:
            return self._skip(node, leaves)
        if stale:
            raise StepError(
                f"{user_line()}: {name} on stage {self._stage} reads a tensor that an earlier microbatch or batch left"
                " on the module, or a transform of torch.func made, and that is on another stage; keep it in a plain"
                " attribute, not a buffer, with num_microbatches=1, apply transforms inside one layer, or"
                f" {WITHOUT_STAGES}",
                entry="earlier-tensor",
            )
        if replace:
            leaves = [self._resolve(leaf) for leaf in leaves]
            args, kwargs = rebuild_call(leaves[:num_arguments], args, kwargs, plain)
            if paths:
                put(self.units[name[1:]], paths, leaves[num_arguments:])
        if node.name.startswith(SINK):
            args, kwargs = materialize_call(args, kwargs)
        if node.index in self.shares:
            run = weighted_by_share(name, node.averages, run, self.shares[node.index])
        # A second run would find on its modules what the next microbatch stored there.
        is_checkpointed = self.checkpoint_depth and node.unit and not paths
        out = checkpointed(run, args, kwargs) if is_checkpointed else run(*args, **kwargs)
        out, out_leaves = self._record_result(node, leaves, out)
        if self.metrics is not None and node.index in self._replay.scalar_nodes:
            repeatable = None if node.index in self.shares else run
            template, origin = self._templates[node.index], self.metrics.origin
            self.scalars.record(node, repeatable, args, kwargs, out_leaves, template, self.marks, origin)
        return out

    def _record_result(self, node: Node, leaves: list[Any], out: Any) -> tuple[Any, list[Any]]:
        """Mark the tensors of a result, and those written in place, with their values; the result and its leaves."""
        template = self._templates[node.index]
        out_leaves = flatten(out)[0] if template.spec is not None or not isinstance(out, Tensor) else [out]
        if any(isinstance(leaf, ShardedTensorBase) for leaf in out_leaves):
            out = self._with_full_tensors(out, out_leaves, template)
        if len(out_leaves) != len(template.leaves):
            for leaf in leaves:
                if isinstance(leaf, Tensor):
                    self.size_read(leaf)
            now = f"returned {len(out_leaves)} leaves instead of {len(template.leaves)}"
            raise self.changes.of_operation(node, now)
        for leaf, described in zip(out_leaves, template.leaves, strict=True):
            if described.value is not None:
                self._record_value(leaf, described.value)
        for position, value in template.written:
            self._record_value(leaves[position], value)
        return out, out_leaves

    def _with_full_tensors(self, out: Any, leaves: list[Any], template: Template) -> Any:
        """Gather the values that leave this run; user code then has the full tensors too."""
        for position, described in enumerate(template.leaves[: len(leaves)]):
            if described.value in self._replay.wanted:
                leaves[position] = materialize(leaves[position])
        return leaves[0] if isinstance(out, Tensor) else unflatten(leaves, flatten(out)[1])

    def _record_value(self, tensor: Tensor, value: int) -> None:
        self.marks.set(tensor, value)
        recorded = self.values[value]
        # Other stages use the recorded shape.
        if tensor.shape != recorded.shape and not recorded.dynamic and self._replay.assignment.num_stages > 1:
            raise shape_changed(user_line(), recorded.shape, tensor.shape)
        if value in self._replay.wanted and value not in self.results:
            tensor = materialize(tensor)
            if tensor.dtype is not self._replay.wanted[value]:  # other ranks read its bytes as the recorded dtype
                raise dtype_changed(user_line(), self._replay.wanted[value], tensor.dtype)
            self.results[value] = tensor.clone() if value in self._cloned else tensor

    def _resolve(self, leaf: Any) -> Any:
        if isinstance(leaf, FakeTensor):
            mark = self.marks.of(leaf)
            assert mark is not None, "an executed node reads a value that was never sent"
            return self._received_value(mark)
        return leaf

    def _received_value(self, value: int) -> Tensor:
        if value not in self._received:
            raise StepError(
                f"{user_line()}: stage {self._stage} reads a value of stage {self._value_stage[value]} that nothing"
                " sends, or that was computed from a captured input of a module (inside an object); pass it as a"
                f" tensor, name a cut inside that module in pipeline_cuts, or {WITHOUT_STAGES}",
                entry="unsent-value",
            )
        tensor = self._received[value]
        self.marks.set(tensor, value)
        return tensor

    def _skip(self, node: Node, leaves: list[Any]) -> Any:
        template = self._templates[node.index]
        if template.spec is None and not template.written and len(template.leaves) == 1:
            (only,) = template.leaves
            if only.input is None and only.value is not None:  # most nodes make one new tensor
                is_received = only.value in self._received
                made = self._received[only.value] if is_received else self._placeholder(only.value)
                self.marks.set(made, only.value)
                return made
        if node.name == _HOOK_SETUP_EVENT:
            raise StepError(
                f"{user_line()}: torch sets up a full backward hook around a module that another stage runs; register a"
                f" hook on a tensor in its forward (h.register_hook(...)), or {WITHOUT_STAGES}",
                entry="hook-inside",
            )
        return self.rebuild(template, leaves)

    def made(self, value: int) -> Tensor:
        """The received tensor of a value, or a stand-in, of its shape."""
        return self._received_value(value) if value in self._received else self._placeholder(value)

    def rewrite(self, written: Tensor, value: int) -> None:
        """Fill the user's tensor, of any shape, with what was received, or make it absent."""
        if value in self._received:
            fill(written, self._received_value(value).clone())
        elif not isinstance(written, FakeTensor):
            fill(written, make_placeholder(self.values[value], self._replay.device))
        self.marks.set(written, value)
        if value in self._replay.returned_or_kept and isinstance(written, FakeTensor):
            self.placeholders.append((value, written))

    def _placeholder(self, value: int) -> FakeTensor:
        if value in self._replay.returned_or_kept:
            placeholder = make_placeholder(self.values[value], self._replay.device)
            self.placeholders.append((value, placeholder))
            return placeholder
        if value in self._cloned:  # written in place later: the object will become another value
            return make_placeholder(self.values[value], self._replay.device)
        # Nothing refers to it after the run, so every run may return the same one.
        if value not in self._replay.placeholders:
            self._replay.placeholders[value] = make_placeholder(self.values[value], self._replay.device)
        return self._replay.placeholders[value]

    def _match(self, name: str, inputs: list[int]) -> Node:
        if self._next >= len(self._nodes):
            change = f"the step continues with {name} at {user_line()} where it ended when it was recorded"
            raise self.changes.error(change)
        node = self._nodes[self._next]
        if node.name != name or node.inputs != tuple(inputs):
            raise self.changes.of_operation(node, f"is now {self.changes.operation(name, inputs, user_line())}")
        self._next += 1
        return node

    def check_complete(self, result: Any) -> None:
        """Check that the step has reached its recorded end, and returns the recorded values."""
        if self._next != len(self._nodes):
            node = self._nodes[self._next]
            raise self.changes.of_operation(node, "is missing now")
        self.changes.check_returned(result, self.marks)


@contextlib.contextmanager
def instrumented(replays: Collection[StageReplay], randomness: KeyedRandomness) -> Iterator[CurrentRun]:
    """Instrument the user's modules for all replays that will run inside; their recordings may have different units."""
    units: dict[str, nn.Module] = {}
    owned: dict[str, tuple[str, ...]] = {}
    drawing: dict[str, nn.Module] = {}
    sinks: dict[str, nn.Module] = {}
    functions: dict[type[Function], None] = {}
    for replay in dict.fromkeys(replays):
        units.update(replay.recording.units)
        owned.update(replay.recording.owned)
        drawing.update(replay.drawing)
        functions.update(dict.fromkeys(replay.drawing_functions))
        sinks = replay.sinks
    current = CurrentRun()
    again = functions_with_repeated_draws(functions, randomness)
    with randomness.modules(drawing), again, intercepted_step(current, randomness, units, owned, sinks):
        yield current
