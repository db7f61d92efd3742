"""Values that a step keeps on its modules or returns, and whether microbatches tell those of the batch.

Entries that a step appends to lists of its modules, and what it returns, are joined: rows of samples are concatenated,
means averaged. Nothing else that is kept of the model can be told from microbatches (a running sum, the last output,
the number of correct predictions); such a step runs on the whole batch at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from lightning_hybrid.graph.step_graph import Node, StepGraph
from lightning_hybrid.step.batch_means.sums_over_samples import HANDED_ON, SUMS
from lightning_hybrid.step.module_state.snapshot import ModuleState, Place, is_state, reachable
from lightning_hybrid.step.objects.pytree import children_of, flatten, map_leaves
from lightning_hybrid.step.recording.escaped_values import is_absent_number
from lightning_hybrid.step.standins.absent_arrays import is_number_of_others, line_read_at
from lightning_hybrid.step.standins.absent_tensors import AbsentFloat, is_absent, values_behind
from lightning_hybrid.step.tracing.metric_nodes import find_sinks
from lightning_hybrid.step.tracing.recording import Recording, ReturnedTensor, StepError
from lightning_hybrid.step.tracing.step_mode import StepWatch

# FQN of the module, its attribute, and the key where that is a dict of lists.
ListPlace: TypeAlias = tuple[str, str, Any]

_EXTREMA = frozenset({"max", "amax", "any", "min", "amin", "all"})


def lists_of(root: nn.Module) -> dict[ListPlace, list[Any]]:
    """The lists that modules hold in an attribute, or in a dict there."""
    found: dict[ListPlace, list[Any]] = {}
    for fqn, module in root.named_modules():
        for name, value in module.__dict__.items():
            if type(value) is list and is_state(name):
                found[fqn, name, None] = value
            elif isinstance(value, dict) and value and is_state(name) and not name.endswith("_hooks"):
                found |= {(fqn, name, key): held for key, held in value.items() if type(held) is list}
    return found


class Appended(NamedTuple):
    """What a step leaves on its modules, by where it does.

    Attributes:
        appended: As ``Recording.appended``.
        kept_otherwise: As there.
        rows_kept: As there.
    """

    appended: tuple[Any, ...] = ()
    kept_otherwise: str = ""
    rows_kept: tuple[tuple[Place, tuple[int, ...]], ...] = ()


def find_appended(
    root: nn.Module, before: ModuleState, old: Sequence[Any], watch: StepWatch, recording: Recording
) -> Appended:
    """What a recorded step appends to lists, and what it keeps otherwise.

    Args:
        root: The user's module, as the step left it.
        before: What the modules held before the step.
        old: The leaves that were reachable from them.
        watch: Of the recording.
        recording: Of the step.
    """
    known, passed = {id(leaf) for leaf in old}, without_state(root, [recording])
    kept = {place: "a tensor of the model" for place, _ in recording.kept if place.attribute != "_buffers"}
    of_batch: dict[Place, tuple[int, ...]] = {}
    for place, leaf in reachable(root, plain=not recording.numbers_kept):
        if id(leaf) in known or place in kept:
            continue
        if recording.numbers_kept and is_absent_number(leaf):
            kept[place] = "a number read from the model"
        elif isinstance(leaf, Tensor) and leaf.dim() and not is_absent(leaf):
            of_batch[place] = tuple(leaf.shape)
    if not kept and not of_batch:
        return Appended()
    lists, lengths = lists_of(root), before.lengths()
    starts = {key: lengths[id(held)] for key, held in lists.items() if id(held) in lengths}
    inside = {fqn for fqn, module in root.named_modules() if module in passed}
    bound = [(p, shape) for p, shape in of_batch.items() if p.module not in inside and entry_of(p, starts) is None]

    def described(leaf: Any) -> Any:
        return ReturnedTensor(tuple(leaf.shape), watch.mark_of(leaf)) if isinstance(leaf, Tensor) else leaf

    grown: dict[ListPlace, int] = {}
    otherwise = ""
    for place, what in kept.items():
        key = entry_of(place, starts)
        if key is None:
            otherwise = otherwise or f"{place} keeps {what}"
        else:
            grown[key] = starts[key]
    appended = tuple(
        tuple(map_leaves(described, entry) for entry in lists[key][start:]) for key, start in grown.items()
    )
    return Appended(appended, otherwise, tuple(bound))


def entry_of(place: Place, lengths: Mapping[ListPlace, int]) -> ListPlace | None:
    """The list of which a place is in a new entry; None if it is in none.

    Args:
        place: Where something is kept.
        lengths: Of the lists that were there before.
    """
    for depth, key in enumerate([None, *place.path[:1]]):
        found = (place.module, place.attribute, key)
        length = lengths.get(found)
        if length is not None and len(place.path) > depth:
            return found if place.path[depth] >= length else None
    return None


def refuse_absent_numbers(root: nn.Module, recordings: Sequence[Recording], read_at: str) -> None:
    """See that no number of the model that is on other ranks alone stays on the modules after a step.

    Args:
        root: The user's module.
        recordings: Of the step.
        read_at: Where a number was read last.

    Raises:
        StepError: One does.
    """
    for place, leaf in reachable(root, without_state(root, recordings)):
        if is_number_of_others(leaf):
            raise StepError(
                f"{line_read_at(leaf, read_at)}: {place} keeps a number read from the model, which the step did not"
                " when it was recorded: keep it in every batch, or keep the tensor instead (loss.detach())"
            )


def without_state(root: nn.Module, recordings: Sequence[Recording]) -> set[nn.Module]:
    """The modules whose attributes are no side effects of the step: a rank that skips their calls does not write them.

    Args:
        root: The user's module.
        recordings: Of the step.
    """
    units = [unit for recording in recordings for unit in recording.units.values()]
    return {module for outer in (*units, *find_sinks(root).values()) for module in outer.modules()}


def why_not_joined(
    recording: Recording, samples: int | None, *, whole: Recording | None, total: int | None, is_returned: bool
) -> str:
    """Why what the microbatches leave does not tell what the batch does; empty if it does.

    Args:
        recording: Of the step on a microbatch.
        samples: Of the microbatch, if known.
        whole: Of the step on the whole batch, if it appends to lists and can be recorded there.
        total: Samples of the batch, if known.
        is_returned: Whether what the step returns is read.
    """
    graph = recording.graph
    if recording.kept_otherwise:
        return recording.kept_otherwise
    rows = next((place for place, shape in recording.rows_kept if samples is not None and samples in shape), None)
    if rows is not None:
        return f"{rows} keeps a row for each sample"
    known = recording.appended if whole is None else whole.appended
    if len(known) != len(recording.appended):
        return f"{graph.step} appends to other lists in the whole batch"
    for part, all_of_it in zip(recording.appended, known, strict=True):
        sizes = (samples, samples) if whole is None else (samples, total)
        if len(part) > 1 and (len(part), len(all_of_it)) == sizes:  # an entry per sample
            continue
        pairs = zip(part, all_of_it, strict=False)
        if len(part) != len(all_of_it) or any(_is_unclear(*pair, graph, *sizes) for pair in pairs):
            return f"{graph.step} appends to a list what is neither a row per sample nor a mean over samples"
    if not is_returned:
        return ""
    if any(map(is_absent_number, flatten(recording.returns)[0])):
        return f"{graph.step} returns a number read from the model"
    returns = recording.returns
    if _is_unclear(returns, returns, graph, samples, samples):
        return f"{graph.step} returns what is neither a row per sample nor a mean over samples"
    return ""


def _is_unclear(part: Any, whole: Any, graph: StepGraph, samples: int | None, total: int | None) -> bool:
    """Whether it cannot be told from a part what something is in the whole batch.

    Args:
        part: A value that a microbatch leaves.
        whole: The same of the whole batch, or of the microbatch if that is not known.
        graph: Of the step on the microbatch.
        samples: Of the microbatch.
        total: Of ``whole``.
    """
    if isinstance(part, ReturnedTensor):
        return samples is not None and _is_unclear_tensor(part, whole, graph, samples, total)
    if is_absent_number(part):
        [one, *others] = values_behind(part) or (None,)
        if one is None or others or not isinstance(part, AbsentFloat) or graph.values[one].shape:
            return True
        number = ReturnedTensor((), one)
        return samples is not None and _is_unclear_tensor(number, number, graph, samples, total)
    inside, of_whole = children_of(part), children_of(whole)
    if inside is None or of_whole is None:
        return type(part) is int and part == samples
    if (isinstance(part, list | tuple) and len(part) == samples) or len(inside[0]) != len(of_whole[0]):
        return True
    return any(_is_unclear(*each, graph, samples, total) for each in zip(inside[0], of_whole[0], strict=True))


def _is_unclear_tensor(part: ReturnedTensor, whole: Any, graph: StepGraph, samples: int, total: int | None) -> bool:
    value = None if part.value is None else graph.values[part.value]
    if not part.shape:
        if part.value is None or value is None or part.value == graph.loss:
            return False
        exact = not value.dtype.startswith(("float", "bfloat", "complex"))
        return exact or _is_of_all_samples(part.value, graph, samples) or _is_picked(part.value, graph)
    if value is not None and value.dynamic:
        return any(node.name == "bincount" for node in graph.nodes)  # of a length that depends on data alone
    has_rows = isinstance(whole, ReturnedTensor) and whole.shape[:1] == (total,) and whole.shape[1:] == part.shape[1:]
    return part.shape[0] != samples or not has_rows or _is_picked(part.value, graph)


def _maker_of(value: int | None, graph: StepGraph) -> Node | None:
    """The operation of one value that another comes from, beneath copies and casts."""
    while value is not None:
        node = graph.made_by(value)
        if node.unit is not None or len(node.inputs) != 1 or len(node.outputs) != 1:
            return None
        if node.name not in HANDED_ON:
            return node
        value = node.inputs[0]
    return None


def _is_of_all_samples(value: int, graph: StepGraph, samples: int) -> bool:
    """Whether a value is a sum, maximum or minimum over the samples."""
    maker = _maker_of(value, graph)
    return maker is not None and maker.name in SUMS | _EXTREMA and samples in graph.values[maker.inputs[0]].shape


def _is_picked(value: int | None, graph: StepGraph) -> bool:
    """Whether a value is rows of the samples picked by their numbers: ``out[:8]``."""
    maker = _maker_of(value, graph)
    return maker is not None and maker.picks_rows
