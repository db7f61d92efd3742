"""Once more through the user's step, for its bookkeeping alone: ``self.losses.append(loss.item())``.

In one process the step runs once per batch and its numbers are there. So once the numbers of all microbatches are
known on every rank, the step runs on the whole batch without any of its arithmetic: operations of the model are
skipped, and what is read of their results is what the microbatches gave, joined. What that run leaves on the modules
is what one process would have there, and the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_hybrid.step.graph import StepGraph
from lightning_hybrid.step.joined import weighted_mean
from lightning_hybrid.step.partition import Assignment
from lightning_hybrid.step.randomness import KeyedRandomness
from lightning_hybrid.step.recording import Recording
from lightning_hybrid.step.replay import ReplayWatch, StageReplay
from lightning_hybrid.step.sinks import find_sinks
from lightning_hybrid.step.tree import flatten, unflatten

_NO_STAGE = -1


class BookkeepingReplay(StageReplay):
    """Runs a recorded step as a stage to which nothing belongs, and which knows the content of some values."""

    def __init__(self, recording: Recording, assignment: Assignment, root: nn.Module, randomness: KeyedRandomness):
        """Args: as ``StageReplay``."""
        super().__init__(recording, assignment, _NO_STAGE, root, randomness)
        self.contents: Mapping[int, Tensor] = {}

    def watch(self, received: Mapping[int, Tensor], parameters: Mapping[int, str]) -> ReplayWatch:
        """One that answers reads."""
        return _BookkeepingWatch(self, received, parameters, self.randomness)


class _BookkeepingWatch(ReplayWatch):
    """Skips every event, and reads from contents that are known."""

    def __init__(self, replay: BookkeepingReplay, *rest: Any) -> None:
        super().__init__(replay, *rest)
        self._contents = replay.contents

    def _read(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        leaves, spec = flatten((args, kwargs))
        known = [self._content(leaf) for leaf in leaves]
        if any(isinstance(leaf, FakeTensor) for leaf in known):
            return super()._read(name, func, args, kwargs)
        args, kwargs = unflatten(known, spec)
        return func(*args, **kwargs)

    def _content(self, leaf: Any) -> Any:
        value = self.mark_of(leaf) if isinstance(leaf, Tensor) else None
        return leaf if value is None else self._contents.get(value, leaf)


def without_state(root: nn.Module, recordings: Sequence[Recording]) -> set[nn.Module]:
    """The modules whose attributes are no bookkeeping of the step: a rank that skips their calls does not write them.

    Args:
        root: The user's module.
        recordings: Of the step.
    """
    units = [unit for recording in recordings for unit in recording.units.values()]
    return {module for outer in (*units, *find_sinks(root).values()) for module in outer.modules()}


# --- how the values of microbatches become that of the batch ---------------------------------------------------------

Join = Callable[[Sequence[Tensor], Sequence[float]], Tensor]

_SUMS = frozenset({"sum", "nansum", "count_nonzero"})
_MOST = frozenset({"max", "amax", "any"})
_LEAST = frozenset({"min", "amin", "all"})
# They change nothing but what a number is kept as.
_HANDED_ON = frozenset(
    {"detach", "clone", "contiguous", "to", "cpu", "cuda", "float", "double", "half", "bfloat16", "long", "int"}
    | {"get_data", "type_as", "item", "view_as"}
)


def alike(part: StepGraph, whole: StepGraph) -> dict[int, int]:
    """The values of a step on the whole batch that it makes on a microbatch too, each with that.

    Operations that make a value per sample (``list(output)``) make more on the whole batch: those are nobody's like.
    """
    pairs: dict[int, int] = {}
    for small, large in zip(part.nodes, whole.nodes, strict=True):
        if len(small.outputs) == len(large.outputs):
            pairs.update(zip(large.outputs, small.outputs, strict=True))
    return pairs


def same_operations(part: StepGraph, whole: StepGraph) -> bool:
    """Whether a step does and keeps the same on a microbatch as on the whole batch."""
    if [node.name for node in part.nodes] != [node.name for node in whole.nodes]:
        return False
    pairs = alike(part, whole)
    if tuple(pairs.get(value) for value in whole.kept) != part.kept:
        return False
    nodes = zip(part.nodes, whole.nodes, strict=True)
    return all(tuple(pairs.get(value, value) for value in large.inputs) == small.inputs for small, large in nodes)


def how_to_join(value: int, part: StepGraph, whole: StepGraph, pairs: Mapping[int, int]) -> Join | None:
    """How the contents of a value in the microbatches make its content in the whole batch; None if that is not known.

    Args:
        value: In the graph of the whole batch.
        part: The step on a microbatch.
        whole: The step on all of them.
        pairs: What is ``alike`` in the two.
    """
    small, large = part.values[pairs.get(value, value)], whole.values[value]
    if large.dynamic and large.shape:
        return _concatenate(0)
    if small.shape != large.shape:
        differ = [dim for dim, sizes in enumerate(zip(small.shape, large.shape, strict=False)) if len(set(sizes)) > 1]
        return _concatenate(differ[0]) if len(differ) == 1 and len(small.shape) == len(large.shape) else None
    maker = _maker(value, whole)
    if maker is not None:
        name, source = maker
        over = whole.values[source]
        if over.dynamic or part.values[pairs.get(source, source)].shape != over.shape:  # it is taken over the samples
            if name in _SUMS:
                return lambda parts, _: torch.stack(list(parts)).sum(0).to(parts[0].dtype)
            if name in _MOST:
                return lambda parts, _: torch.stack(list(parts)).amax(0)
            if name in _LEAST:
                return lambda parts, _: torch.stack(list(parts)).amin(0)
    dtype = getattr(torch, large.dtype)
    return weighted_mean if dtype.is_floating_point or dtype.is_complex else None


def is_of_all_samples(value: int, graph: StepGraph, samples: int) -> bool:
    """Whether a value is a sum, maximum or minimum over the samples: joined otherwise than by their share."""
    maker = _maker(value, graph)
    return maker is not None and maker[0] in _SUMS | _MOST | _LEAST and samples in graph.values[maker[1]].shape


def _maker(value: int, graph: StepGraph) -> tuple[str, int] | None:
    """The operation that a value comes from, beneath copies and casts, and what it was given."""
    while True:
        node = next((node for node in graph.nodes if value in node.outputs), None)
        if node is None or node.unit is not None or len(node.inputs) != 1 or len(node.outputs) != 1:
            return None
        if node.name not in _HANDED_ON:
            return node.name, node.inputs[0]
        value = node.inputs[0]


def _concatenate(dim: int) -> Join:
    return lambda parts, _: torch.cat(list(parts), dim)
