"""What a search returns: `Plan`, `Rejection` and `SearchResult`; what it may choose from: `Allowed`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from lightning_hybrid.layout import Objective
from lightning_hybrid.planner.plan_layout import PlanLayout, RecomputeKind
from lightning_hybrid.planner.predictions import PredictedMemory, PredictedTime
from lightning_hybrid.planner.search.layout_options import simplicity
from lightning_hybrid.text import sized

OBJECTIVES: tuple[Objective, ...] = ("throughput", "fewest_devices", "largest_batch")
TIE = 0.03  # relative difference of step times that measurements do not resolve
# Relative error bars of a prediction: the mean errors that the models are required to reach.
TIME_ERROR, MEMORY_ERROR = 0.08, 0.08


@dataclass(frozen=True)
class Allowed:
    """What the model and the run permit.

    Attributes:
        pipeline: Whether the layers may be shared among pipeline ranks.
        tensor: Whether layers may be sharded over tensor ranks.
        context: Whether sequences may be sharded over context ranks.
        expert: Whether experts may be sharded.
        zero_stages: The stages of ZeRO.
        recompute: What the backward may recompute.
        schedules: Schedules of a pipeline, by name.
        offload: Whether the host may hold what ZeRO shards.
        largest_stages_per_rank: Most stages of one pipeline rank.
        positions_per_context_rank: Least positions of a context rank.
    """

    pipeline: bool = True
    tensor: bool = True
    context: bool = True
    expert: bool = True
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[RecomputeKind, ...] = ("none", "selective", "full")
    schedules: tuple[str, ...] = ("1f1b", "zero_bubble")
    offload: bool = True
    largest_stages_per_rank: int = 4
    positions_per_context_rank: int = 1024


@dataclass(frozen=True)
class Plan:
    """A layout with its predictions; a layout that does not fit has no time.

    Attributes:
        layout: The layout.
        memory: Its predicted memory.
        time: Its predicted step time.
        time_error: Relative error bar of the step time.
        memory_error: The same of the memory.
    """

    layout: PlanLayout
    memory: PredictedMemory
    time: PredictedTime | None = None
    time_error: float = TIME_ERROR
    memory_error: float = MEMORY_ERROR

    @property
    def fits(self) -> bool:
        """Whether its peak is at most the memory of a device."""
        return self.memory.fits

    @property
    def fits_with_error(self) -> bool:
        """Whether it fits even if the memory is underestimated by the error bar."""
        return self.memory.least * (1 + self.memory_error) <= self.memory.capacity

    @property
    def seconds_per_sample(self) -> float:
        """Seconds of a step, per sample of it; infinite without a time."""
        return float("inf") if self.time is None else self.time.seconds / self.time.samples

    @property
    def largest_terms(self) -> str:
        """The two largest terms of its memory, in words."""
        rank = max(self.memory.ranks, key=lambda terms: sum(terms.values()))
        largest = sorted(rank.items(), key=lambda item: -item[1])[:2]
        return ", ".join(f"{name} {sized(size)}" for name, size in largest)


@dataclass(frozen=True)
class Rejection:
    """Why no plan of a family was chosen.

    Attributes:
        family: Its name, such as "tensor ranks across nodes".
        reason: One reason, with both numbers.
        layout: Its best layout; None if the model or the cluster has none.
    """

    family: str
    reason: str
    layout: PlanLayout | None = None


@dataclass(frozen=True)
class SearchResult:
    """Plans in the order of preference.

    Attributes:
        plans: The best plan of each mesh; the first is the chosen one.
        rejected: The families that the chosen plan does not belong to.
        evaluated: Layouts whose memory was predicted.
    """

    plans: tuple[Plan, ...]
    rejected: tuple[Rejection, ...]
    evaluated: int

    @property
    def best(self) -> Plan:
        """The chosen plan."""
        return self.plans[0]


def simplest_of_tied(
    plans: Collection[Plan], score: Callable[[Plan], tuple[float, ...]], chosen: float = float("inf")
) -> Plan:
    """Return the simplest plan within the tie of the best, of those that fit with their error bar if there is one.

    Args:
        plans: With a time.
        score: Orders plans, the best first; its last number is compared within the tie, the others exactly.
        chosen: That number of the chosen plan: if the best is tied with it, so is the plan that is returned.
    """
    *first, least = min(map(score, plans))
    limit = (1 + TIE) * (chosen if least > chosen >= least / (1 + TIE) else least)
    tied = [plan for plan in plans if (found := score(plan))[:-1] == tuple(first) and found[-1] <= limit]
    return min(tied, key=lambda plan: (not plan.fits_with_error, simplicity(plan.layout), score(plan)))
