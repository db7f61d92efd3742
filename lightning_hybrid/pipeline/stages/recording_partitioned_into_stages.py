"""A trace variant: one recording of a step, partitioned into stages."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_hybrid.graph.partition import Assignment
from lightning_hybrid.graph.step_graph import Value
from lightning_hybrid.step.replay.stage import StageReplay
from lightning_hybrid.step.tracing.recording import Recording

Key: TypeAlias = tuple[int, int, int]  # the stages that send and receive, and the value
_BITS = {
    torch.float64: (torch.int64, 0x7FF8_5EED_0BAD_5EED),
    torch.float32: (torch.int32, 0x7FC5_EED1),
    torch.bfloat16: (torch.int16, 0x7FED),
    torch.float16: (torch.int16, 0x7EED),
}


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


# Missing gradients at a stage boundary: None is sent back as None and not as zeros.
# An optimizer skips a parameter without a gradient; with a zero gradient it applies weight decay. For such a value, a
# NaN with bits that no operation produces is sent back. Receivers check for it in the first batch of each trace, and
# from then on for the values that had no gradient in that batch: on a GPU each check waits for the message.


class MissingGradients:
    """Encodes and decodes the missing gradients of one trace.

    Attributes:
        is_new: Whether the backward of no batch with this trace has run.
    """

    def __init__(self) -> None:
        """Begin before the first batch."""
        self.is_new = True
        self._missing: set[Key] = set()

    def sent(self, key: Key, leaf: Tensor) -> Tensor:
        """The gradient to send back for a received value, or the encoding of None; of the shape of the value.

        Args:
            key: The stages, and the index of the value.
            leaf: The value, after the backward.
        """
        if leaf.grad is not None:
            return leaf.grad
        gradient = torch.zeros_like(leaf)
        if leaf.dtype in _BITS and leaf.numel() and self._is_checked(key):
            self._missing.add(key)
            integer, bits = _BITS[leaf.dtype]
            gradient.view(integer).fill_(bits)
        return gradient

    def received(self, key: Key, gradient: Tensor) -> Tensor | None:
        """The gradient of a value; None if the receiver had none.

        Args:
            key: The stages, and the index of the value.
            gradient: The tensor that was received for it, of the shape of the value, as is the result.
        """
        if gradient.dtype not in _BITS or not gradient.numel() or not self._is_checked(key):
            return gradient
        integer, bits = _BITS[gradient.dtype]
        if int(gradient.flatten()[:1].view(integer)) != bits:
            return gradient
        self._missing.add(key)
        return None

    def _is_checked(self, key: Key) -> bool:
        return self.is_new or key in self._missing
