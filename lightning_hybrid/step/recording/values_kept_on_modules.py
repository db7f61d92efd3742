"""Values that a step keeps on its modules: entries that it appends to lists there, and those kept in other ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from lightning_hybrid.errors import StepError
from lightning_hybrid.step.module_state.state_snapshots_and_reachable_leaves import (
    AttributePath,
    ModuleSnapshot,
    is_state,
    reachable_leaves,
)
from lightning_hybrid.step.recording.escaped_tensors_and_read_numbers import describe_tensors
from lightning_hybrid.step.standins.absent_arrays_and_lists import has_absent_content, is_absent_number, line_of_read
from lightning_hybrid.step.standins.absent_tensors import is_absent
from lightning_hybrid.step.tracing.intercept_step_operations import StepMode
from lightning_hybrid.step.tracing.recording_dataclasses import Recording
from lightning_hybrid.step.tracing.torchmetrics_as_graph_nodes import find_sinks

# FQN of the module, its attribute, and the key if the attribute is a dict of lists.
ListPath: TypeAlias = tuple[str, str, Any]


def find_lists(root: nn.Module) -> dict[ListPath, list[Any]]:
    """The lists that modules hold in an attribute, or in a dict there."""
    found: dict[ListPath, list[Any]] = {}
    for fqn, module in root.named_modules():
        for name, value in module.__dict__.items():
            if type(value) is list and is_state(name):
                found[fqn, name, None] = value
            elif isinstance(value, dict) and value and is_state(name) and not name.endswith("_hooks"):
                found |= {(fqn, name, key): entry for key, entry in value.items() if type(entry) is list}
    return found


class RecordedCall(NamedTuple):
    """An entry of a list of calls that are made after the step: once per batch, and never one per sample.

    Attributes:
        target: Which object is called.
        name: The method.
        args: Its arguments by position.
        kwargs: Its arguments by name.
    """

    target: str
    name: str
    args: dict[int, Any]
    kwargs: dict[str, Any]


class KeptValues(NamedTuple):
    """Values that a step keeps on its modules: the fields of these names of a ``Recording``."""

    appended: tuple[Any, ...] = ()
    kept_elsewhere: str = ""
    kept_batch_tensors: tuple[tuple[AttributePath, tuple[int, ...]], ...] = ()


def find_kept_values(
    root: nn.Module, before: ModuleSnapshot, old: Sequence[Any], watch: StepMode, recording: Recording
) -> KeptValues:
    """Find the values that a recorded step appends to lists, and those that it keeps in other ways.

    Args:
        root: The user's module, after the step.
        before: State of the modules before the step.
        old: Leaves that were reachable from the modules before the step.
        watch: The function mode of the recording.
        recording: The recording of the step.
    """
    old_ids, without = {id(leaf) for leaf in old}, skippable_modules(root, [recording])
    kept = {location: "a tensor of the model" for location, _ in recording.kept if location.attribute != "_buffers"}
    of_batch: dict[AttributePath, tuple[int, ...]] = {}
    for location, leaf in reachable_leaves(root, plain=bool(recording.numbers_kept)):
        if id(leaf) in old_ids or location in kept:
            continue
        if recording.numbers_kept and is_absent_number(leaf):
            kept[location] = "a number read from the model"
        elif isinstance(leaf, Tensor) and leaf.dim() and not is_absent(leaf):
            of_batch[location] = tuple(leaf.shape)
    if not kept and not of_batch:
        return KeptValues()
    lists, lengths = find_lists(root), before.lengths()
    starts = {key: lengths[id(entries)] for key, entries in lists.items() if id(entries) in lengths}
    inside = {fqn for fqn, module in root.named_modules() if module in without}
    bound = [
        (p, shape) for p, shape in of_batch.items() if p.module not in inside and list_containing(p, starts) is None
    ]
    grown: dict[ListPath, int] = {}
    otherwise = ""
    for location, description in kept.items():
        key = list_containing(location, starts)
        if key is None:
            otherwise = otherwise or f"{location} keeps {description}"
        else:
            grown[key] = starts[key]
    appended = tuple(
        tuple(describe_tensors(entry, watch) for entry in lists[key][start:]) for key, start in grown.items()
    )
    return KeptValues(appended, otherwise, tuple(bound))


def list_containing(location: AttributePath, lengths: Mapping[ListPath, int]) -> ListPath | None:
    """The list in which a path lies in a newly appended entry, by the ``lengths`` of the lists before; None if none."""
    for depth, key in enumerate([None, *location.path[:1]]):
        found = (location.module, location.attribute, key)
        length = lengths.get(found)
        if length is not None and len(location.path) > depth:
            return found if location.path[depth] >= length else None
    return None


def refuse_absent_numbers(root: nn.Module, recordings: Sequence[Recording], read_at: str) -> None:
    """Check that no number of the model that only other ranks have stays on the modules after a step.

    Raises:
        StepError: A number does; the last one was read at the line ``read_at``.
    """
    for location, leaf in reachable_leaves(root, skippable_modules(root, recordings)):
        if has_absent_content(leaf):
            raise StepError(
                f"{line_of_read(leaf, read_at)}: {location} keeps a number read from the model, which the step did not"
                " when it was recorded; keep it in every batch, or keep the tensor instead (loss.detach())",
                entry="kept-later",
            )


def skippable_modules(root: nn.Module, recordings: Sequence[Recording]) -> set[nn.Module]:
    """The modules inside units and metrics: a rank that skips their calls does not write their attributes."""
    units = [unit for recording in recordings for unit in recording.units.values()]
    return {module for outer in (*units, *find_sinks(root).values()) for module in outer.modules()}
