"""Steps whose results microbatches alone do not give, and which therefore run on their full batch too, or only so.

A second run of a step has its Python side effects only: ``self.losses.append(loss.item())``.
In a single process the numbers of a step are available when its Python reads them. On a rank of a pipeline they are
received after the step. So a step that stores or returns numbers of the model runs on its full batch, and once the
numbers are on every rank it runs again without the model's arithmetic, and reads the exchanged numbers. The changes of
that run on the modules stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.batch.means import matching_values
from lightning_hybrid.batch.split import batch_size_of
from lightning_hybrid.errors import StepError
from lightning_hybrid.pipeline.logs import Key, LogCapture, keyed
from lightning_hybrid.pipeline.runtime.executor import fill_placeholders
from lightning_hybrid.pipeline.stages.plan import StagePlan, TraceVariant
from lightning_hybrid.pipeline.stages.traces import Call, Microbatches, TraceCache
from lightning_hybrid.step.module_state.snapshots import ModuleSnapshot, TensorSnapshot
from lightning_hybrid.step.objects.cache import BoundedLRUDict
from lightning_hybrid.step.objects.pytree import tensors_inside
from lightning_hybrid.step.recording.kept import skippable_modules, why_not_mergeable
from lightning_hybrid.step.standins.numbers import is_known
from lightning_hybrid.step.standins.tensors import is_absent


class SideEffectRun:
    """The second run of one step on one batch; created before the step runs."""

    def __init__(self, plan: StagePlan, call: Call, batch: Any, variant: TraceVariant) -> None:
        """Snapshot the modules before a step with this trace runs on a batch."""
        self._plan, self._root, self._call = plan, plan.root, call
        self._batch, self._variant = batch, variant
        self._without = skippable_modules(plan.root, [variant.recording])
        self._start = ModuleSnapshot(plan.root, without=self._without)
        self._watched = [(tensor, tensor._version) for tensor in tensors_inside(batch)]

    def returned(self, contents: Mapping[int, Tensor]) -> Any:
        """Run the step again, and return its output; ``StepError`` if it cannot run so.

        ``contents`` are the values of the model that all ranks have, by index, in their shapes.
        """
        kept = self._variant.recording.numbers_kept
        if any(tensor._version != version for tensor, version in self._watched):
            raise StepError(
                f"{kept}, and the step writes into its batch in place; let it write into a copy",
                entry="side-effects-batch",
            )
        written = _Buffers(self._root, self._without)
        self._start.restore()  # the step may have branched on a buffer that it has written since
        try:
            run = self._call.rerun(self._plan, self._batch, self._variant, contents)
        except Exception as error:
            raise StepError(
                f"{kept}, and the step failed where only its side effects run ({type(error).__name__}: {error});"
                " make the step do the same each time it runs on a batch, or keep the tensor (loss.detach()) instead",
                entry="side-effects",
            ) from error
        finally:
            written.restore()
        fill_placeholders(run, contents)
        return run.result


class _Buffers:
    """A snapshot of the buffers that user code around layers may write, after the step."""

    def __init__(self, root: nn.Module, without: set[nn.Module]) -> None:
        dicts = [module._buffers for module in root.modules() if module not in without]
        self._dicts = [(buffers, dict(buffers)) for buffers in dicts]
        present = {id(b): b for buffers in dicts for b in buffers.values() if b is not None and not is_absent(b)}
        self._contents = [TensorSnapshot(buffer) for buffer in present.values()]

    def restore(self) -> None:
        """Restore the buffers and their contents."""
        for buffers, members in self._dicts:
            buffers.clear()
            buffers.update(members)
        for content in self._contents:
            content.restore()


# Batches may come in ever new sizes.
_MAX_REASONS = 512


class UnsplitSteps:
    """Selects the steps of one module whose batches are not split.

    Attributes:
        names: Names of such steps, so far.
    """

    def __init__(self, choice: TraceCache, warn: Callable[[str, str], None]) -> None:
        """Set up on a trace cache; ``warn`` is called once with the name of such a step, and the reason."""
        self.names: set[str] = set()
        self._traces, self._warn = choice, warn
        self._reasons: BoundedLRUDict[tuple[TraceVariant, int | None, bool], str] = BoundedLRUDict(_MAX_REASONS)

    def adopts(self, call: Call, given: Microbatches) -> bool:
        """Whether the batches of a step, which would run on these microbatches, must not be split from now on."""
        batch = given.batch
        for variant, samples in dict.fromkeys(zip(given.variants, given.sizes, strict=True)):
            key = variant, samples, call.shares_output
            if key not in self._reasons:
                full = self._traces.trace_of_full_batch(call, batch) if variant.recording.appended else None
                self._reasons[key] = why_not_mergeable(
                    variant.recording,
                    samples,
                    full=None if full is None else full.recording,
                    total=batch_size_of(batch),
                    is_returned=call.shares_output,
                )
            if self._reasons[key]:
                return self.adopt(call.name, self._reasons[key])
        if line := self._branches_at(call, given):
            return self.adopt(
                call.name, f"{line}: a microbatch takes a branch, by its content, that its batch does not take"
            )
        return False

    def add(self, *names: str) -> None:
        """Split no batch of these steps from now on."""
        self.names.update(names)

    def adopt(self, name: str, reason: str) -> bool:
        """Split no batch of a step from now on, for this reason; returns True."""
        self._warn(name, reason)
        self.names.add(name)
        return True

    def _branches_at(self, call: Call, given: Microbatches) -> str:
        """The first line that a microbatch runs and its batch does not, or reversely, by their content; "" if none.

        A branch by a random number or by state is none: a microbatch takes it as another batch would.
        """
        if call.name not in self._traces.reads_batch:
            return ""
        full = self._traces.trace_of_full_batch(call, given.batch)
        if full is None:
            return ""
        for variant, microbatch in zip(given.variants, given.parts, strict=True):
            if _path(variant) != _path(full):  # alone, it draws what the batch draws
                alone = self._traces.trace_of_full_batch(call, microbatch)
                if alone is not None and (others := _path(alone) ^ _path(full)):
                    return min(others)[0]
        return ""


def _path(variant: TraceVariant) -> frozenset[tuple[str, str]]:
    """The operations of the user's code around units, each with its line; how often it runs does not matter."""
    return frozenset((node.line, node.name) for node in variant.recording.graph.nodes)


class LogRun:
    """The run of one step on one batch; created before the step may write into its batch.

    Attributes:
        reads: The scalars of a microbatch's graph that the step reads as numbers.
    """

    def __init__(self, plan: StagePlan, call: Call, batch: Any, pairs: Mapping[int, int], full: TraceVariant) -> None:
        """Prepare the run on a batch of trace ``full``; ``pairs`` maps its values to a microbatch's."""
        self._plan, self._call, self._batch, self._full = plan, call, batch, full
        values = full.recording.graph.values
        self._read = {v: pairs[v] for v in full.recording.values_read if v in pairs and not values[v].shape}
        self.reads = tuple(dict.fromkeys(self._read.values()))

    def numbers(self, read: Mapping[int, float]) -> dict[Key, float]:
        """The numbers that the step logs of its batch and of what it reads, without numbers of its graph.

        ``read`` has the numbers of the full batch, by index in ``reads``; ``ABSENT`` where they are not known.
        """
        graph, logs = self._full.recording.graph, LogCapture(1)
        contents = {
            value: torch.tensor(read[index], dtype=getattr(torch, graph.values[value].dtype))
            for value, index in self._read.items()
            if is_known(read[index])
        }
        root = self._plan.root
        start = ModuleSnapshot(root, without=skippable_modules(root, [self._full.recording]))
        try:
            self._call.rerun(self._plan, self._batch, self._full, contents, logs.microbatch(root, 0))
        except Exception:  # what it logs is then combined as that of other steps
            return {}
        finally:
            start.restore()
        found = {key: entry.values[0] for key, entry in keyed(logs.entries()) if entry.is_plain}
        return {key: number for key, number in found.items() if is_known(number)}


class LogRuns:
    """Decides which steps of one module need a run for their logs."""

    def __init__(self, plan: StagePlan, traces: TraceCache) -> None:
        self._plan, self._traces = plan, traces
        self._needless: set[TraceVariant] = set()

    def repeat(self, variants: Sequence[TraceVariant]) -> bool:
        """Whether microbatches with these traces log numbers from outside of the graph as their batch logs them."""
        return variants[0] in self._needless

    def of(self, call: Call, batch: Any, variants: Sequence[TraceVariant]) -> LogRun | None:
        """The run of a step whose microbatches have these traces; None if it would log what they log."""
        first = variants[0]
        logged = first.recording.logged
        if len(variants) == 1 or not logged or first in self._needless or differ(variants):
            return None
        full = self._traces.trace_of_full_batch(call, batch)
        if full is None or differ((first, full)):
            return None
        if any(node.sized_by == "values of the model" for node in full.recording.graph.nodes):  # it guesses sizes
            return None
        # A number read from the model is another for the batch than for its parts, though the traces do not show it.
        has_read = any(number is not None and math.isnan(number) for _, number in logged)
        if call.name not in self._traces.reads_batch and not has_read and logged == full.recording.logged:
            self._needless.add(first)
            return None
        given = self._traces.unwritten(call, batch)
        pairs = matching_values(first.recording.graph, full.recording.graph)
        return LogRun(self._plan, call, given, pairs, full)


def differ(variants: Sequence[TraceVariant]) -> bool:
    """Whether microbatches with these traces run different operations."""
    first, *others = (variant.recording.graph for variant in dict.fromkeys(variants))
    return any(other.operations != first.operations for other in others)
