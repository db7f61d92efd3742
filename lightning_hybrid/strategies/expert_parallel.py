"""Expert parallelism in a strategy: find the experts as the first step is recorded, share them, say what was found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.experts.found import ExpertCalls, FoundExperts
from lightning_hybrid.experts.sharded import SharedExperts, by_reason, describe_experts, placements_of
from lightning_hybrid.layout import LayoutError
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.parts.held import AxisCut
from lightning_hybrid.pipeline.executor import Variant
from lightning_hybrid.step.randomness import KeyedRandomness
from lightning_hybrid.tensor.positions import Dealt, collect, dealt_of
from lightning_hybrid.tensor.ranks import GroupRanks
from lightning_hybrid.tensor.shards import ModelShards


class ExpertPlanner:
    """Finds the experts of one module while its first step is recorded.

    Attributes:
        summary: What was found, in words.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, chunks: int, randomness: KeyedRandomness) -> None:
        """Before the recording.

        Args:
            module: The user's, whole.
            mesh: The ranks.
            chunks: Of the experts of each rank, whose messages overlap with computation.
            randomness: Keys what modules draw.
        """
        self._module, self._mesh = module, mesh
        self._chunks, self._randomness = chunks, randomness
        self._calls = ExpertCalls()
        self.summary = ""

    @contextmanager
    def watching(self, variant: Variant) -> Iterator[None]:
        """See the modules while the step is recorded inside."""
        with self._calls.watching(variant.recording.units):
            yield

    def plan(self, cuts: Sequence[AxisCut], shards: ModelShards | None) -> SharedExperts:
        """Find the experts on the first rank, and share them; collective over the world.

        Args:
            cuts: What is cut before.
            shards: Layers that tensor and context ranks share, if they do.

        Raises:
            LayoutError: There are no experts that the ranks can share; on every rank.
            RuntimeError: The search failed; on every rank.
        """
        size = self._mesh.size("ep")
        box: list[Any] = [None]
        if self._mesh.rank == 0:
            try:
                with torch.random.fork_rng(devices=[]):
                    box[0] = self._calls.find(self._module, size)
            except Exception as error:
                box[0] = f"{type(error).__name__}: {error}"
        dist.broadcast_object_list(box, src=0)
        found = box[0]
        if not isinstance(found, FoundExperts):
            raise RuntimeError(f"no experts were found for expert_parallel_size={size}: {found}")
        if not found.adapters:
            reasons = "; ".join(f"{fqns}: {reason}" for fqns, reason in by_reason(found.whole))
            numbers = "a size that divides the number of experts, or " if found.whole else ""
            raise LayoutError(
                f"expert_parallel_size={size} finds no experts that {size} ranks can share"
                f" ({reasons or 'no module has stacked experts or a list of them that its tokens choose from'});"
                f" set {numbers}expert_parallel_size=1, or register an adapter with"
                " lightning_hybrid.experts.register_experts"
            )
        self._calls = ExpertCalls()
        self.summary = describe_experts(found.adapters, found.whole, size)
        placements = placements_of(self._module, found.adapters, size, cuts)
        cut = AxisCut(self._mesh.group("ep"), placements, axis="ep", places=self._mesh.places("ep"))
        context = None
        if shards is not None and self._mesh.size("cp") > 1:
            shards.share_experts(placements)
            context = OverContext(self._mesh.group("cp"), shards)
        return SharedExperts(
            self._module, found.adapters, cut, chunks=self._chunks, randomness=self._randomness, context=context
        )


class OverContext:
    """See ``ContextRows``."""

    def __init__(self, group: dist.ProcessGroup, shards: ModelShards) -> None:
        """Args: group: the context ranks. shards: the layers that they share."""
        self._ranks, self._shards = GroupRanks(group), shards

    def _of(self, number: int) -> Dealt:
        return Dealt(0, number, self._ranks)

    def see_own(self, names: Iterable[str]) -> bool:
        """See ``ContextRows``."""
        return any(map(self._shards.sees_own_positions, names))

    def range_of(self, number: int) -> tuple[int, int]:
        """See ``ContextRows``."""
        lengths = self._of(number).lengths
        first = sum(lengths[: self._ranks.rank])
        return first, first + lengths[self._ranks.rank]

    def share(self, rows: Tensor) -> Tensor:
        """See ``ContextRows``."""
        return dealt_of(rows, self._of(rows.shape[0]))

    def joined(self, share: Tensor, number: int) -> Tensor:
        """See ``ContextRows``."""
        return collect(share, self._of(number))
