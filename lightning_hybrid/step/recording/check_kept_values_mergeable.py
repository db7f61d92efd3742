"""A check whether the kept values of microbatches merge to those of the batch.

Rows of samples are concatenated, means averaged. No other value of the model can be computed from microbatches (a
running sum, the last output, the number of correct predictions), and a parameter is written once per batch (the average
of a momentum teacher); such a step runs on the batch, unsplit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_hybrid.graph.step_graph import Node, StepGraph
from lightning_hybrid.step.batch_means.recognise_sums_over_samples import IDENTITIES, SUMS
from lightning_hybrid.step.objects.pytree import children_of, flatten
from lightning_hybrid.step.recording.values_kept_on_modules import RecordedCall
from lightning_hybrid.step.standins.absent_arrays_and_lists import is_absent_number
from lightning_hybrid.step.standins.absent_numbers import AbsentFloat
from lightning_hybrid.step.tracing.recording_dataclasses import Recording, ReturnedTensor

_EXTREMA = frozenset({"max", "amax", "any", "min", "amin", "all"})


def why_not_mergeable(
    recording: Recording, samples: int | None, *, full: Recording | None, total: int | None, is_returned: bool
) -> str:
    """Why the kept values of microbatches cannot be merged to those of the batch; empty if they can.

    Args:
        recording: Recording of the step on a microbatch.
        samples: Number of samples of the microbatch, if known.
        full: Recording of the step on the full batch, if it appends to lists and can be recorded there.
        total: Number of samples of the batch, if known.
        is_returned: Whether the output of the step is read.
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
    """Whether the value of the full batch cannot be computed from those of its microbatches.

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
        if node.unit is not None or len(node.inputs) != 1 or len(node.outputs) != 1:
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
