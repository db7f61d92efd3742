"""Values that a step keeps on its modules, and whether the batch's can be merged from the microbatches'.

Rows of samples are concatenated, means averaged. No other value of the model can be computed from microbatches (a
running sum, the last output, the number of correct predictions), and a parameter is written once per batch (the average
of a momentum teacher); such a step runs on the batch, unsplit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from lightning_hybrid.batch.means import IDENTITIES, SUMS
from lightning_hybrid.errors import StepError
from lightning_hybrid.graph.step_graph import Node, StepGraph
from lightning_hybrid.step.module_state.snapshots import AttributePath, ModuleSnapshot, is_state, reachable_leaves
from lightning_hybrid.step.objects.pytree import children_of, flatten
from lightning_hybrid.step.recording.reads import describe_tensors, of_metric
from lightning_hybrid.step.standins.numbers import AbsentFloat, has_absent_content, is_absent_number, line_of_read
from lightning_hybrid.step.standins.tensors import is_absent
from lightning_hybrid.step.tracing.metrics import find_sinks
from lightning_hybrid.step.tracing.mode import StepMode
from lightning_hybrid.step.tracing.recording import Recording, ReturnedTensor

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
    """An entry of a list of calls that are made after the step: once per batch, and never one per sample."""

    target: str  # which object is called
    name: str  # the method
    args: dict[int, Any]  # its arguments by position
    kwargs: dict[str, Any]  # its arguments by name


def with_kept_values(
    root: nn.Module, before: ModuleSnapshot, old: Sequence[Any], watch: StepMode, recording: Recording
) -> Recording:
    """Add to a recording the values that its step appends to lists, and the values that it keeps in other ways.

    ``before`` is the state of the modules before the step, and ``old`` the leaves that were reachable from them then.
    """
    old_ids, without = {id(leaf) for leaf in old}, skippable_modules(root, [recording])
    kept = {location: "a tensor of the model" for location, _ in recording.kept if location.attribute != "_buffers"}
    of_batch: dict[AttributePath, tuple[int, ...]] = {}
    for location, leaf in reachable_leaves(root, plain=bool(recording.numbers_kept)):
        if id(leaf) in old_ids or location in kept:
            continue
        if recording.numbers_kept and is_absent_number(leaf) and not of_metric(root, location):
            kept[location] = "a number read from the model"
        elif isinstance(leaf, Tensor) and leaf.dim() and not is_absent(leaf):
            of_batch[location] = tuple(leaf.shape)
    if not kept and not of_batch:
        return recording
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
    return replace(recording, appended=appended, kept_elsewhere=otherwise, kept_batch_tensors=tuple(bound))


def list_containing(location: AttributePath, lengths: Mapping[ListPath, int]) -> ListPath | None:
    """The list in which a path lies in a newly appended entry, by the ``lengths`` of the lists before; None if none."""
    for depth, key in enumerate([None, *location.path[:1]]):
        found = (location.module, location.attribute, key)
        length = lengths.get(found)
        if length is not None and len(location.path) > depth:
            return found if location.path[depth] >= length else None
    return None


def refuse_absent_numbers(root: nn.Module, recordings: Sequence[Recording], read_at: str) -> None:
    """Refuse a number of the model that only other ranks have and that stays on the modules, read at ``read_at``."""
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


_EXTREMA = frozenset({"max", "amax", "any", "min", "amin", "all"})


def why_not_mergeable(
    recording: Recording, samples: int | None, *, full: Recording | None, total: int | None, is_returned: bool
) -> str:
    """Why the kept values of the batch cannot be merged from the microbatches'; empty if they can.

    ``recording`` is that of a microbatch of ``samples``; ``full`` that of the batch of ``total``, if the step appends
    to lists and can be recorded there.
    """
    graph = recording.graph
    if recording.kept_elsewhere:
        return recording.kept_elsewhere
    written = next((name for node in graph.nodes for name in node.written if name not in graph.buffers), None)
    if written is not None:
        return f"{graph.step} writes the parameter {written}"
    rows = next(
        (location for location, shape in recording.kept_batch_tensors if samples is not None and samples in shape), None
    )
    if rows is not None:
        return f"{rows} keeps a row for each sample"
    full_entries = recording.appended if full is None else full.appended
    if len(full_entries) != len(recording.appended):
        return f"{graph.step} appends to other lists on the full batch"
    for local, entries in zip(recording.appended, full_entries, strict=True):
        sizes = (samples, samples) if full is None else (samples, total)
        are_calls = len(local) > 0 and isinstance(local[0], RecordedCall)
        if not are_calls and len(local) > 1 and (len(local), len(entries)) == sizes:  # an entry per sample
            continue
        pairs = zip(local, entries, strict=False)
        if len(local) != len(entries) or any(_cannot_merge(*pair, graph, *sizes) for pair in pairs):
            return f"{graph.step} appends to a list an entry that is neither a row per sample nor a mean over samples"
    if not is_returned:
        return ""
    if any(map(is_absent_number, flatten(recording.returns)[0])):
        return f"{graph.step} returns a number read from the model"
    returns = recording.returns
    if _cannot_merge(returns, returns, graph, samples, samples):
        return f"{graph.step} returns a value that is neither a row per sample nor a mean over samples"
    return ""


def _cannot_merge(local: Any, full: Any, graph: StepGraph, samples: int | None, total: int | None) -> bool:
    """Whether the value of the full batch cannot be computed from its microbatches' values.

    ``local`` is the value of a microbatch of ``samples``, ``full`` that of the full batch of ``total`` samples, or
    ``local`` again if that is not known.
    """
    if isinstance(local, ReturnedTensor):
        return samples is not None and _cannot_merge_tensor(local, full, graph, samples, total)
    if is_absent_number(local):
        if not isinstance(local, AbsentFloat) or not local.values or not local.is_affine:
            return True
        numbers = [ReturnedTensor((), value) for value in local.values]
        return any(
            graph.values[value].shape
            or (samples is not None and _cannot_merge_tensor(number, number, graph, samples, total))
            for value, number in zip(local.values, numbers, strict=True)
        )
    inside, of_full = children_of(local), children_of(full)
    if inside is None or of_full is None:
        return type(local) is int and local == samples
    has_any_length = isinstance(local, list | tuple) and not hasattr(local, "_fields")
    if (has_any_length and len(local) == samples) or len(inside[0]) != len(of_full[0]):
        return True
    return any(_cannot_merge(*each, graph, samples, total) for each in zip(inside[0], of_full[0], strict=True))


def _cannot_merge_tensor(local: ReturnedTensor, full: Any, graph: StepGraph, samples: int, total: int | None) -> bool:
    value = None if local.value is None else graph.values[local.value]
    if not local.shape:
        if local.value is None or value is None or local.value == graph.loss:
            return False
        exact = not value.dtype.startswith(("float", "bfloat", "complex"))
        return exact or _is_reduction_over_samples(local.value, graph, samples) or _is_row_selection(local.value, graph)
    if value is not None and value.dynamic:
        return any(node.name == "bincount" for node in graph.nodes)  # its length depends on data alone
    has_rows = isinstance(full, ReturnedTensor) and full.shape[:1] == (total,) and full.shape[1:] == local.shape[1:]
    return local.shape[0] != samples or not has_rows or _is_row_selection(local.value, graph)


def _producer_of(value: int | None, graph: StepGraph) -> Node | None:
    """The single-input operation that produces a value, looking through copies and casts; None for others."""
    while value is not None:
        node = graph.made_by(value)
        if node.unit or len(node.inputs) != 1 or len(node.outputs) != 1:
            return None
        if node.name not in IDENTITIES:
            return node
        value = node.inputs[0]
    return None


def _is_reduction_over_samples(value: int, graph: StepGraph, samples: int) -> bool:
    """Whether a value is a sum, maximum or minimum over the samples."""
    producer = _producer_of(value, graph)
    return (
        producer is not None and producer.name in SUMS | _EXTREMA and samples in graph.values[producer.inputs[0]].shape
    )


def _is_row_selection(value: int | None, graph: StepGraph) -> bool:
    """Whether a value is rows of samples selected by index: ``out[:8]``."""
    producer = _producer_of(value, graph)
    return producer is not None and producer.selects_rows


def selects_rows(name: str, args: Sequence[Any]) -> bool:
    """Whether the operation ``name`` indexes the first dimension by an integer or a slice."""
    if name != "__getitem__":
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    plain = all(entry is None or entry is ... or type(entry) in (int, slice) for entry in index)
    first = index[0] if plain and index else None
    return type(first) is int or (isinstance(first, slice) and first != slice(None))
