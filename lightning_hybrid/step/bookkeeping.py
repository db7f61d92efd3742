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

from lightning_hybrid.step.graph import Node, StepGraph
from lightning_hybrid.step.joined import weighted_mean
from lightning_hybrid.step.partition import Assignment
from lightning_hybrid.step.randomness import KeyedRandomness
from lightning_hybrid.step.recording import Recording, StepError
from lightning_hybrid.step.replay import ReplayWatch, StageReplay
from lightning_hybrid.step.sinks import find_sinks
from lightning_hybrid.step.totals import HANDED_ON, SUMS, Total, summed, total_over_samples
from lightning_hybrid.step.transaction import reachable
from lightning_hybrid.step.tree import flatten, unflatten

_NO_STAGE = -1


class BookkeepingReplay(StageReplay):
    """Runs a recorded step as a stage to which nothing belongs, and which knows the content of some values.

    Attributes:
        contents: Of values, by index.
        totals: The values among them that are the sum of ``count`` microbatches' and hold something else besides.
    """

    def __init__(self, recording: Recording, assignment: Assignment, root: nn.Module, randomness: KeyedRandomness):
        """Args: as ``StageReplay``."""
        super().__init__(recording, assignment, _NO_STAGE, root, randomness)
        self.root = root
        self.contents: dict[int, Tensor] = {}
        self.totals: Mapping[int, Total] = {}
        self.count = 1

    def watch(self, received: Mapping[int, Tensor], parameters: Mapping[int, str]) -> ReplayWatch:
        """One that answers reads."""
        return _BookkeepingWatch(self, received, parameters, self.randomness)


class _BookkeepingWatch(ReplayWatch):
    """Skips every event, and reads from contents that are known."""

    def __init__(self, replay: BookkeepingReplay, *rest: Any) -> None:
        super().__init__(replay, *rest)
        self._contents, self._totals, self._others = replay.contents, replay.totals, replay.count - 1
        self._bases: dict[int, Any] = {}
        self._state: set[int] = set()
        if self._totals:
            self._state = {id(leaf) for _, leaf in reachable(replay.root)} | {id(b) for b in replay.root.buffers()}

    def _skip(self, node: Node, leaves: list[Any]) -> Any:
        if any(node.index in total.bases for total in self._totals.values()):
            marked = [isinstance(leaf, Tensor) and self.mark_of(leaf) is not None for leaf in leaves]
            base = next((leaf for leaf, is_marked in zip(leaves, marked, strict=True) if not is_marked), None)
            if isinstance(base, Tensor) and (id(base) in self._state or not base.any()):
                self._bases[node.index] = base.clone()
            elif isinstance(base, int | float):
                self._bases[node.index] = base
        result = super()._skip(node, leaves)
        for value in node.outputs:
            if value in self._totals and value in self._contents:
                self._once(value, self._totals[value], node)
        return result

    def _once(self, value: int, total: Total, node: Node) -> None:
        """Have in a sum once what each microbatch has added to its own."""
        for index in total.bases:
            base = self._bases.get(index)
            is_zero = base is not None and not torch.as_tensor(base).any()
            if base is None or (total.is_arranged and not is_zero):
                raise StepError(
                    f"{node.line}: {node.name} makes a sum over the samples and something else, of which cannot be told"
                    " what it is for the whole batch; keep both apart, or set num_microbatches=1"
                )
            if not is_zero:
                self._contents[value] = self._contents[value] - self._others * base

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

_MOST = frozenset({"max", "amax", "any"})
_LEAST = frozenset({"min", "amin", "all"})


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
    if _adds_in_place(value, whole):
        return lambda parts, _: parts[-1]  # all microbatches wrote into one tensor
    if total_over_samples(value, part, whole, pairs) is not None:
        return summed
    small, large = part.values[pairs.get(value, value)], whole.values[value]
    if large.dynamic and large.shape:
        return _concatenate(0)
    if small.shape != large.shape:
        differ = [dim for dim, sizes in enumerate(zip(small.shape, large.shape, strict=False)) if len(set(sizes)) > 1]
        return _concatenate(differ[0]) if len(differ) == 1 and len(small.shape) == len(large.shape) else None
    maker = maker_of(value, whole)
    if maker is not None:
        name, (source,) = maker.name, maker.inputs
        over = whole.values[source]
        if over.dynamic or part.values[pairs.get(source, source)].shape != over.shape:  # it is taken over the samples
            if name in SUMS:
                return summed
            if name in _MOST:
                return lambda parts, _: torch.stack(list(parts)).amax(0)
            if name in _LEAST:
                return lambda parts, _: torch.stack(list(parts)).amin(0)
    dtype = getattr(torch, large.dtype)
    return weighted_mean if dtype.is_floating_point or dtype.is_complex else None


def is_of_all_samples(value: int, graph: StepGraph, samples: int) -> bool:
    """Whether a value is a sum, maximum or minimum over the samples: joined otherwise than by their share."""
    maker = maker_of(value, graph)
    return maker is not None and maker.name in SUMS | _MOST | _LEAST and samples in graph.values[maker.inputs[0]].shape


def _adds_in_place(value: int, graph: StepGraph) -> bool:
    """Whether a value is what the module had before the step, with something added: ``self.counts += new``."""
    node = graph.made_by(value)
    return node.name in ("add_", "__iadd__") and graph.cloned.isdisjoint(node.inputs)


def maker_of(value: int, graph: StepGraph) -> Node | None:
    """The operation of one value that another comes from, beneath copies and casts."""
    while True:
        node = graph.made_by(value)
        if node.unit is not None or len(node.inputs) != 1 or len(node.outputs) != 1:
            return None
        if node.name not in HANDED_ON:
            return node
        value = node.inputs[0]


def _concatenate(dim: int) -> Join:
    return lambda parts, _: torch.cat(list(parts), dim)
