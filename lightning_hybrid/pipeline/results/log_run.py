"""A run of a step on its full batch for its logs alone: what it logs beside values of its graph.

``math.exp(loss.item())``, ``float(len(x))`` and ``y.std()`` of a batch are no means over its microbatches. Python
computes them, so no graph has them. Once the numbers that the step reads from the model are known for the full batch
(the mean loss), the step runs on it without the model's arithmetic, and those reads return these numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_hybrid.graph.step_graph import StepGraph
from lightning_hybrid.pipeline.results.log_capture import LogCapture
from lightning_hybrid.pipeline.results.log_entry import Key, keyed
from lightning_hybrid.pipeline.stages.recording_partitioned_into_stages import TraceVariant
from lightning_hybrid.pipeline.stages.select_recorded_trace import Call, TraceCache
from lightning_hybrid.pipeline.stages.stages_of_parameters_and_buffers import StagePlan
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.step.batch.means import matching_values
from lightning_hybrid.step.module_state.snapshots import ModuleSnapshot
from lightning_hybrid.step.recording.kept import skippable_modules


class LogRun:
    """The run of one step on one batch; created before the step may write into its batch.

    Attributes:
        reads: The scalars of a microbatch's graph that the step reads as numbers.
    """

    def __init__(
        self,
        root: nn.Module,
        names: Mapping[int, str],
        call: Call,
        batch: Any,
        pairs: Mapping[int, int],
        full: TraceVariant,
        randomness: KeyedRandomness,
    ) -> None:
        """Prepare the run.

        Args:
            root: The user's module.
            names: FQN by id of its parameters and tracked buffers.
            call: The call of the step.
            batch: The full batch.
            pairs: The values of a microbatch by those of the batch.
            full: The trace of the batch.
            randomness: Keys the random numbers of the step.
        """
        self._root, self._names, self._call, self._batch = root, names, call, batch
        self._full, self._randomness = full, randomness
        values = full.recording.graph.values
        self._read = {v: pairs[v] for v in full.recording.values_read if v in pairs and not values[v].shape}
        self.reads = tuple(dict.fromkeys(self._read.values()))

    def numbers(self, read: Mapping[int, float]) -> dict[Key, float]:
        """The numbers that the step logs of its batch and of what it reads; those of its graph are left out.

        Args:
            read: The numbers of the full batch, by index in ``reads``; NaN where they are not known.
        """
        graph, logs = self._full.recording.graph, LogCapture(1)
        contents = {
            value: torch.tensor(read[index], dtype=getattr(torch, graph.values[value].dtype))
            for value, index in self._read.items()
            if not math.isnan(read[index])
        }
        start = ModuleSnapshot(self._root, without=skippable_modules(self._root, [self._full.recording]))
        try:
            what = self._root, self._names, self._batch, self._full, self._randomness, contents
            self._call.rerun(*what, around=logs.microbatch(self._root, 0))
        except Exception:  # what it logs is then combined as that of other steps
            return {}
        finally:
            start.restore()
        found = {key: entry.values[0] for key, entry in keyed(logs.entries()) if entry.is_plain}
        return {key: number for key, number in found.items() if not math.isnan(number)}


class LogRuns:
    """Decides which steps of one module need a run for their logs."""

    def __init__(self, root: nn.Module, plan: StagePlan, traces: TraceCache, randomness: KeyedRandomness) -> None:
        self._root, self._plan, self._traces, self._randomness = root, plan, traces, randomness
        self._needless: set[TraceVariant] = set()

    def of(self, call: Call, batch: Any, variants: Sequence[TraceVariant]) -> LogRun | None:
        """The run of a step whose microbatches have these traces; None if it would log what they log."""
        first = variants[0]
        logged = first.recording.logged
        if len(variants) == 1 or not logged or first in self._needless or _differ(variants):
            return None
        full = self._traces.trace_of_full_batch(call, batch)
        if full is None or _differ((first, full)):
            return None
        if any(node.sized_by == "values of the model" for node in full.recording.graph.nodes):  # it guesses sizes
            return None
        if call.name not in self._traces.reads_batch and logged == full.recording.logged:
            self._needless.add(first)
            return None
        given = self._traces.unwritten(call, batch)
        pairs = matching_values(first.recording.graph, full.recording.graph)
        return LogRun(self._root, self._plan.names(), call, given, pairs, full, self._randomness)


def _differ(variants: Sequence[TraceVariant]) -> bool:
    first, *others = (variant.recording.graph for variant in dict.fromkeys(variants))
    return any(_operations(other) != _operations(first) for other in others)


def _operations(graph: StepGraph) -> list[tuple[str, tuple[int, ...]]]:
    return [(node.name, node.inputs) for node in graph.nodes]
