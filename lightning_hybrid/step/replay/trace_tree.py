"""The tree of known traces, and the dry run that finds out which of them a microbatch takes.

All recordings of a step are a tree: two that begin alike share their beginning. A rehearsal runs the user's step
without any of the model's arithmetic and walks down the tree::

    embed -> block.0 -> block.1 -> head -> loss
                |                              -> square -> sum -> add    a penalty in every fourth batch
                 -> block.2 -> head -> loss                               a layer fell out

Where it leaves the tree, the step is to be recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_hybrid.graph.step_graph import Value
from lightning_hybrid.randomness.keyed_draws import KeyedRandomness
from lightning_hybrid.step.module_state.attribute_tensors import look_up
from lightning_hybrid.step.module_state.snapshot import ModuleState, Place
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.recording.escaped_values import find_kept, number_in_buffer
from lightning_hybrid.step.replay.stage_replay import put_together
from lightning_hybrid.step.standins.absent_tensors import MARK, exchange, fill, make_placeholder
from lightning_hybrid.step.tracing.finiteness_checks import Answer
from lightning_hybrid.step.tracing.op_signature import asked_of
from lightning_hybrid.step.tracing.recording import Recording, Template, returned_by
from lightning_hybrid.step.tracing.step_mode import Current, StepWatch, user_line

Way = TypeVar("Way")
# So many sets of sizes are remembered for one operation.
_MOST_SIZES = 1000


class NotKnown(BaseException):
    """The step leaves the ways that are known; no exception that user code might catch. Its text says where."""


class _Point:
    """One operation, at the end of one beginning of the step."""

    def __init__(self, template: Template, values: dict[int, Value]) -> None:
        self.template = template
        self.values = values
        self.sizes: set[Hashable] = set()
        self.held: set[int] = set()  # values of which someone may hold the tensor after the operation
        self.next: dict[Hashable, list[_Point]] = {}
        self.names: dict[str, None] = {}  # of the operations that are next
        self.ends: dict[Hashable, Any] = {}
        self.placeholders: dict[int, FakeTensor] = {}


class Ways(Generic[Way]):
    """Those of one step, for batches of one signature.

    Attributes:
        units: The modules that are one operation each.
        without: Modules of which the rehearsal knows nothing, as it skips their calls.
        count: How many ways there are.
    """

    def __init__(self, units: Mapping[str, nn.Module], without: Collection[nn.Module]) -> None:
        """Args: units, without: see above."""
        self.units = units
        self.without = without
        self.count = 0
        self._inside = set(without)
        self._held: dict[str, tuple[Place, ...]] = {}
        self._start = _Point(Template((), None, ()), {})

    def add(self, root: nn.Module, recording: Recording, way: Way) -> None:
        """Add a recording.

        Args:
            root: The user's module.
            recording: With the units of these ways.
            way: What a rehearsal that takes this way returns.
        """
        graph, point = recording.graph, self._start
        held = {*graph.returned, *graph.kept, *graph.cloned}
        for node, template in zip(graph.nodes, recording.templates, strict=True):
            values = {value: graph.values[value] for value in node.outputs}
            if template.held:
                self._held[node.name] = tuple(dict.fromkeys((*self._held.get(node.name, ()), *template.held)))
            asked, sizes = template.asked
            children = point.next.setdefault(asked, [])
            point.names[node.name] = None
            point = next((child for child in children if _alike(child, template, values)), _Point(template, values))
            if point not in children:
                children.append(point)
            if len(point.sizes) < _MOST_SIZES:
                point.sizes.add(sizes)
            point.held.update(held.intersection(values))
        modules = dict(root.named_modules())
        kept = [value for place, value in recording.kept if modules.get(place.module) not in self._inside]
        end = graph.returned, graph.loss, _once(kept), bool(recording.numbers_kept), _once(recording.values_read)
        self.count += end not in point.ends
        point.ends[end] = way

    def rehearse(
        self,
        root: nn.Module,
        step: Callable[[], Any],
        parameters: Mapping[int, str],
        current: Current,
        randomness: KeyedRandomness,
        before: ModuleState,
    ) -> Way:
        """Run ``step`` without the model's arithmetic, and see which way it takes.

        Args:
            root: The user's module.
            step: Runs the user's step on one microbatch.
            parameters: FQN by id of all parameters and tracked buffers of the module.
            current: Of ``installed``.
            randomness: Keys what glue draws.
            before: What the modules hold now, but for those inside of units.

        Raises:
            NotKnown: It takes one that is not known.
        """
        watch = _Rehearsal(self._start, self.units, self._held, parameters, randomness)
        current.watch = watch
        try:
            with randomness.watching(True), watch:
                result = step()
            if watch.numbers_read and (name := number_in_buffer(root, before, self._inside)):
                raise NotKnown(f"it writes a number read from the model into buffer {name!r}")
            return self._way_to(root, result, watch)
        finally:
            current.watch = None
            watch.undo()

    def _way_to(self, root: nn.Module, result: Any, watch: _Rehearsal) -> Way:
        kept = find_kept(root, result, watch, self._inside)
        end = (
            *returned_by(result, watch.mark_of),
            _once(value for _, value in kept.places),
            bool(kept.numbers[0]),
            watch.values_told(),
        )
        if end not in watch.point.ends:
            keeps = ", ".join(str(place) for place, _ in kept.places) or "nothing of the model"
            raise NotKnown(
                f"it ends after {watch.reached} and keeps {keeps}, where other runs go on, or return or keep"
                " something else"
            )
        way: Way = watch.point.ends[end]
        return way


def _once(values: Any) -> tuple[int, ...]:
    return tuple(dict.fromkeys(values))


def _alike(point: _Point, template: Template, values: Mapping[int, Value]) -> bool:
    return (
        {value: _known(made) for value, made in point.values.items()}
        == {value: _known(made) for value, made in values.items()}
        and point.template.written == template.written
        and [(leaf.value, leaf.input) for leaf in point.template.leaves]
        == [(leaf.value, leaf.input) for leaf in template.leaves]
    )


def _known(value: Value) -> Value:
    """What is known of a value before the batch is there."""
    return replace(value, shape=(), stride=()) if value.dynamic else value


class _Rehearsal(StepWatch):
    """Skips every event, as one of the ways below the last point does it."""

    def __init__(
        self,
        start: _Point,
        units: Mapping[str, nn.Module],
        held: Mapping[str, tuple[Place, ...]],
        parameters: Mapping[int, str],
        randomness: KeyedRandomness,
    ) -> None:
        super().__init__(parameters, randomness)
        self.units = units
        self._held = held
        self.point, self.reached = start, "the start"
        self._values: dict[int, Value] = {}
        self._device = randomness.device
        self._rewritten: list[tuple[Tensor, Tensor]] = []  # with what holds its content meanwhile

    def is_absent_here(self, tensor: Tensor) -> bool:
        """All that came from a parameter is."""
        return isinstance(tensor, FakeTensor) or self.mark_of(tensor) is not None

    def is_dynamic(self, value: int) -> bool:
        """As it was recorded."""
        return self._values[value].dynamic

    def taken_for(self, value: int) -> Answer | None:
        """As it was recorded."""
        return self._values[value].taken

    def event(
        self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], owned: tuple[str, ...]
    ) -> Any:
        """Find the operation among those that are known here, and skip it."""
        leaves = flatten((args, kwargs))[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if name in self._held:
            found = look_up(self.units[name[1:]], self._held[name])
            held = [leaf for leaf in found if isinstance(leaf, Tensor) and self.mark_of(leaf) is not None]
            leaves, tensors = [*leaves, *held], [*tensors, *held]
        if not owned and not any(self.mark_of(t) is not None or id(t) in self.parameters for t in tensors):
            return run(*args, **kwargs)
        asked, sizes = asked_of(name, leaves, self.mark_of, self.parameters)
        children = self.point.next.get(asked, ())
        point = next((child for child in children if sizes in child.sizes), None)
        if point is None and children:
            point = self._found_by_shape(name, run, args, kwargs, children)
            if point is not None and len(point.sizes) < _MOST_SIZES:
                point.sizes.add(sizes)
        if point is None:
            known = ", ".join(self.point.names) or "the end of the step"
            raise NotKnown(f"{name} ({user_line()}) comes after {self.reached}, where other runs have {known}")
        self.point, self.reached = point, name
        self._values.update(point.values)
        return put_together(point.template, leaves, self._placeholder, self.mark, self._rewrite)

    def _found_by_shape(
        self, name: str, run: Callable[..., Any], args: Any, kwargs: Any, children: Sequence[_Point]
    ) -> _Point | None:
        """The one that makes what comes out with these sizes."""
        dynamic = (c for c in children if c.values and all(value.dynamic for value in c.values.values()))
        found = next(dynamic, None)
        if found is not None or name.startswith(("@", "metric:")):
            return found
        try:
            made = [leaf for leaf in flatten(run(*args, **kwargs))[0] if isinstance(leaf, Tensor)]
        except Exception:  # no stand-in can do it: a recording knows how
            return None
        kinds = [(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in made]
        for child in children:
            values = [child.values.get(leaf.value) for leaf in child.template.leaves if leaf.value is not None]
            if [(value.shape, value.dtype) for value in values if value is not None] == kinds:
                return child
        return None

    def _placeholder(self, value: int) -> FakeTensor:
        known = self.point.placeholders
        if value in self.point.held:
            return make_placeholder(self._values[value], self._device)
        if value not in known:
            known[value] = make_placeholder(self._values[value], self._device)
        return known[value]

    def _rewrite(self, written: Tensor, value: int) -> None:
        if not isinstance(written, FakeTensor):
            placeholder = make_placeholder(self._values[value], self._device)
            fill(written, placeholder)
            self._rewritten.append((written, placeholder))
        self.mark(written, value)

    def undo(self) -> None:
        """Give the tensors that the step has written in place their content back."""
        for written, holder in reversed(self._rewritten):
            exchange(written, holder)
            written.__dict__.pop(MARK, None)
