"""A trace variant: one recording of a step, partitioned into stages."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from lightning_hybrid.graph.partition import Assignment
from lightning_hybrid.graph.step_graph import Value
from lightning_hybrid.pipeline.stages.send_none_gradients import MissingGradients
from lightning_hybrid.step.replay.execute_stage_by_rerunning_step import StageReplay
from lightning_hybrid.step.tracing.recording_dataclasses import Recording


@dataclass(frozen=True, eq=False)
class TraceVariant:
    """One recording of a step with its assignment to stages; microbatches of different shapes have different ones.

    Attributes:
        assignment: The stages that compute and need each value.
        replays: By stage, for the stages of this rank.
    """

    assignment: Assignment
    replays: Mapping[int, StageReplay]

    @cached_property
    def digest(self) -> int:
        """A checksum of the nodes that lead to messages and to the loss; ranks compare it to check their traces."""
        graph = self.assignment.graph
        needed = {value for sent in self.assignment.portals.values() for value in sent} | {graph.loss}
        names = []
        for node in reversed(graph.nodes):
            if not needed.isdisjoint(node.outputs):
                needed.update(node.inputs, node.reads)
                names.append(node.name)
        sent = [(pair, [graph.values[v].shape for v in values]) for pair, values in self.assignment.portals.items()]
        return zlib.crc32(repr((names, sent)).encode())

    @property
    def loss(self) -> int:
        """The value that is the loss of a training step."""
        assert self.assignment.graph.loss is not None
        return self.assignment.graph.loss

    @cached_property
    def missing_grads(self) -> MissingGradients:
        """The values without a gradient, as far as batches have shown them."""
        return MissingGradients()

    @property
    def recording(self) -> Recording:
        """The recording of the step."""
        return next(iter(self.replays.values())).recording

    @cached_property
    def written(self) -> frozenset[str]:
        """FQNs of the parameters and tracked buffers that the step itself writes."""
        return frozenset(name for node in self.assignment.graph.nodes for name in node.written)

    @cached_property
    def unit_stages(self) -> Mapping[str, int]:
        """The stage that first runs a unit, by FQN, in the order in which they run."""
        stages: dict[str, int] = {}
        for node, stage in zip(self.assignment.graph.nodes, self.assignment.node_stage, strict=True):
            if node.unit is not None:
                stages.setdefault(node.unit, stage)
        return stages

    @cached_property
    def gradient_portals(self) -> Mapping[tuple[int, int], tuple[int, ...]]:
        """The portals through which gradients are sent back, with the indices of their values."""
        return self.assignment.gradient_portals()

    @cached_property
    def largest_message(self) -> int:
        """Bytes of the largest message of a microbatch."""
        values = self.assignment.graph.values
        sizes = [
            sum(math.prod(values[i].shape) * getattr(torch, values[i].dtype).itemsize for i in sent)
            for sent in self.assignment.portals.values()
        ]
        return max(sizes, default=0)

    def message_values(self, direction: str, source: int, target: int) -> list[Value]:
        """The values of one message."""
        key = direction, source, target
        if key not in self._message_values:
            forward = direction == "forward"
            portals = self.assignment.portals if forward else self.gradient_portals
            indices = portals.get((source, target) if forward else (target, source), ())
            self._message_values[key] = [self.assignment.graph.values[index] for index in indices]
        return self._message_values[key]

    @cached_property
    def _message_values(self) -> dict[tuple[str, int, int], list[Value]]:
        return {}
