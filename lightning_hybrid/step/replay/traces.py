"""The tree of recorded traces, and the dry run that finds out which of them a microbatch takes.

All recordings of a step form a tree: two with a common prefix share it. A dry run runs the user's step without any
operation of the model and walks down the tree::

    embed -> block.0 -> block.1 -> head -> loss
                |                              -> square -> sum -> add    a penalty in every fourth batch
                 -> block.2 -> head -> loss                               a layer is dropped

Where it leaves the tree, the step has to be recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_hybrid.graph.step_graph import Value
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.step.module_state.attributes import look_up
from lightning_hybrid.step.module_state.snapshots import AttributePath, ModuleSnapshot
from lightning_hybrid.step.objects.names import TEXT_READS
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.recording.reads import find_escaped_values, is_sized_by_data, number_in_buffer
from lightning_hybrid.step.replay.stage import SkippingMode
from lightning_hybrid.step.standins.tensors import MARK, fill, make_placeholder, swap_in_place
from lightning_hybrid.step.tracing.mode import CurrentRun, user_line
from lightning_hybrid.step.tracing.recording import Recording, Template, returned_values
from lightning_hybrid.step.tracing.refusals import signature_of

Trace = TypeVar("Trace")
# Number of sets of sizes that are cached for one operation.
_MOST_SIZES = 1000


class UnknownTrace(BaseException):
    """The step takes a trace that is not recorded; no exception that user code might catch. Its text says where."""


class _TreeNode:
    """One operation after one prefix of the step."""

    def __init__(self, template: Template, values: dict[int, Value]) -> None:
        self.template = template
        self.values = values
        self.sizes: set[Hashable] = set()
        self.visible: set[int] = set()  # values whose tensor may be referred to after the operation
        self.next: dict[Hashable, list[_TreeNode]] = {}
        self.names: dict[str, None] = {}  # of the next operations
        self.ends: dict[Hashable, Any] = {}
        self.placeholders: dict[int, FakeTensor] = {}


class TraceTree(Generic[Trace]):
    """The recorded traces of one step, for batches of one signature.

    Attributes:
        units: The modules that are one operation each.
        without: Modules inside units, whose state the dry run does not see because it skips their calls.
        count: Number of traces.
        reads_batch: Whether a dry run has read the content of its batch, by which the step may branch.
    """

    def __init__(self, units: Mapping[str, nn.Module], without: Collection[nn.Module]) -> None:
        self.units, self.without, self.count, self.reads_batch = units, without, 0, False
        self._inside = set(without)
        self._attribute_paths: dict[str, tuple[AttributePath, ...]] = {}
        self._start = _TreeNode(Template((), None, ()), {})

    def add(self, root: nn.Module, recording: Recording, trace: Trace) -> None:
        """Add a recording with the units of this tree; a dry run that takes its trace returns ``trace``."""
        graph, position = recording.graph, self._start
        visible = {*graph.returned, *graph.kept, *graph.cloned}
        for node, template in zip(graph.nodes, recording.templates, strict=True):
            values = {value: graph.values[value] for value in node.outputs}
            if template.attribute_inputs:
                paths = (*self._attribute_paths.get(node.name, ()), *template.attribute_inputs)
                self._attribute_paths[node.name] = tuple(dict.fromkeys(paths))
            signature, sizes = template.signature
            children = position.next.setdefault(signature, [])
            position.names[node.name] = None
            new = _TreeNode(template, values)
            position = next((child for child in children if _same_structure(child, template, values)), new)
            if position not in children:
                children.append(position)
            if len(position.sizes) < _MOST_SIZES:
                position.sizes.add(sizes)
            position.visible.update(visible.intersection(values))
        modules = dict(root.named_modules())
        kept = [value for location, value in recording.kept if modules.get(location.module) not in self._inside]
        end = graph.returned, graph.loss, _unique(kept), bool(recording.numbers_kept), _unique(recording.values_read)
        self.count += end not in position.ends
        position.ends[end] = trace

    def dry_run(
        self,
        root: nn.Module,
        step: Callable[[], Any],
        parameters: Mapping[int, str],
        current: CurrentRun,
        randomness: KeyedRandomness,
        before: ModuleSnapshot,
    ) -> Trace:
        """Run ``step`` without the operations of the model, and return its trace, or raise ``UnknownTrace``.

        ``before`` is the state of the modules before, without those inside of units; the rest is as for
        ``StageReplay.run``.
        """
        watch = _DryRun(self._start, self.units, self._attribute_paths, parameters, randomness)
        try:
            with current.watched_by(watch), randomness.watching(True), watch:
                result = step()
            if watch.numbers_read and (name := number_in_buffer(root, before, self._inside)):
                raise UnknownTrace(f"it writes a number read from the model into buffer {name!r}")
            return self._trace_at_end(root, result, watch)
        finally:
            self.reads_batch |= watch.reads_batch
            watch.undo()

    def _trace_at_end(self, root: nn.Module, result: Any, watch: _DryRun) -> Trace:
        kept = find_escaped_values(root, result, watch, self._inside)
        end = (
            *returned_values(result, watch.marks),
            _unique(value for _, value in kept.paths),
            bool(kept.numbers[0]),
            tuple(watch.values_read),
        )
        if end not in watch.position.ends:
            keeps = ", ".join(str(location) for location, _ in kept.paths) or "nothing of the model"
            raise UnknownTrace(
                f"it ends after {watch.reached} and keeps {keeps}, where other runs continue, or return or keep"
                " something else"
            )
        trace: Trace = watch.position.ends[end]
        return trace


def _unique(values: Any) -> tuple[int, ...]:
    return tuple(dict.fromkeys(values))


def _same_structure(position: _TreeNode, template: Template, values: Mapping[int, Value]) -> bool:
    return (
        {value: _without_dynamic_shape(made) for value, made in position.values.items()}
        == {value: _without_dynamic_shape(made) for value, made in values.items()}
        and position.template.written == template.written
        and [(leaf.value, leaf.input) for leaf in position.template.leaves]
        == [(leaf.value, leaf.input) for leaf in template.leaves]
    )


def _without_dynamic_shape(value: Value) -> Value:
    """The metadata of a value that does not depend on the content of the batch."""
    return replace(value, shape=(), stride=()) if value.dynamic else value


class _DryRun(SkippingMode):
    """Skips every event, as one of the traces below the current tree node does."""

    def __init__(
        self,
        start: _TreeNode,
        units: Mapping[str, nn.Module],
        attribute_paths: Mapping[str, tuple[AttributePath, ...]],
        parameters: Mapping[int, str],
        randomness: KeyedRandomness,
    ) -> None:
        super().__init__(parameters, randomness)
        self.units = units
        self._attribute_paths = attribute_paths
        self.position, self.reached = start, "the start"
        self.values: dict[int, Value] = {}
        self.reads_batch = False
        self._device = randomness.device
        self._rewritten: list[tuple[Tensor, Tensor]] = []  # (tensor, placeholder with its content)

    def read_here(self, name: str, result: Any, args: Any) -> Any:
        """Note a read of the content of the batch."""
        self.reads_batch = self.reads_batch or name not in TEXT_READS
        return result

    def event(
        self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], owned: tuple[str, ...]
    ) -> Any:
        """Find the operation among the recorded next ones, and skip it."""
        leaves = flatten((args, kwargs))[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if name in self._attribute_paths:
            found = look_up(self.units[name[1:]], self._attribute_paths[name])
            marked = [leaf for leaf in found if leaf in self.marks]
            leaves, tensors = [*leaves, *marked], [*tensors, *marked]
        if not owned and not any(t in self.marks or id(t) in self.parameters for t in tensors):
            self.reads_batch = self.reads_batch or is_sized_by_data(name, tensors)
            return run(*args, **kwargs)
        signature, sizes = signature_of(name, leaves, self.marks, self.parameters)
        children = self.position.next.get(signature, ())
        position = next((child for child in children if sizes in child.sizes), None)
        if position is None and children:
            position = self._child_of_shape(name, run, args, kwargs, children)
            if position is not None and len(position.sizes) < _MOST_SIZES:
                position.sizes.add(sizes)
        if position is None:
            recorded = ", ".join(self.position.names) or "the end of the step"
            raise UnknownTrace(f"{name} ({user_line()}) comes after {self.reached}, where other runs have {recorded}")
        self.position, self.reached = position, name
        self.values.update(position.values)
        return self.rebuild(position.template, leaves)

    def _child_of_shape(
        self, name: str, run: Callable[..., Any], args: Any, kwargs: Any, children: Sequence[_TreeNode]
    ) -> _TreeNode | None:
        """The child whose recorded results have the shapes and dtypes that the operation produces now."""
        dynamic = (c for c in children if c.values and all(value.dynamic for value in c.values.values()))
        found = next(dynamic, None)
        if found is not None or name.startswith(("@", "metric:")):
            return found
        try:
            made = [leaf for leaf in flatten(run(*args, **kwargs))[0] if isinstance(leaf, Tensor)]
        except Exception:  # it cannot run on stand-ins; a recording has fallbacks
            return None
        kinds = [(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in made]
        for child in children:
            values = [child.values.get(leaf.value) for leaf in child.template.leaves if leaf.value is not None]
            if [(value.shape, value.dtype) for value in values if value is not None] == kinds:
                return child
        return None

    def made(self, value: int) -> FakeTensor:
        cached = self.position.placeholders
        if value in self.position.visible:
            return make_placeholder(self.values[value], self._device)
        if value not in cached:
            cached[value] = make_placeholder(self.values[value], self._device)
        return cached[value]

    def rewrite(self, written: Tensor, value: int) -> None:
        if not isinstance(written, FakeTensor):
            placeholder = make_placeholder(self.values[value], self._device)
            fill(written, placeholder)
            self._rewritten.append((written, placeholder))
        self.marks.set(written, value)

    def undo(self) -> None:
        """Restore the content of the tensors that the step has written in place."""
        for written, placeholder in reversed(self._rewritten):
            swap_in_place(written, placeholder)
            written.__dict__.pop(MARK, None)
