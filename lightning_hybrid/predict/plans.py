"""What is predicted of a layout, and what a search returns: `PredictedTime`, `PredictedMemory`, `Plan`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from lightning_hybrid.layout import Objective
from lightning_hybrid.predict.layout import PlanLayout, kinds_of_parallelism, simplicity
from lightning_hybrid.text import sized


@dataclass(frozen=True)
class PredictedTime:
    """Seconds of one optimizer step."""

    seconds: float  # the total
    # its parts by name, in seconds: "computation", "recomputation", "bubble", "tensor ranks", "context ranks",
    # "spatial ranks", "expert ranks", "pipeline messages", "replicas", "optimizer", "host", "kernel starts"
    terms: Mapping[str, float] = field(default_factory=dict)
    samples: int = 1  # samples of the step over all replicas
    flops_per_rank: float = 0.0  # floating-point operations of forward and backward of one rank, without recomputation

    @property
    def samples_per_second(self) -> float:
        """Throughput over all ranks."""
        return self.samples / self.seconds


@dataclass(frozen=True)
class PredictedMemory:
    """Bytes at the peak of a step."""

    # for each pipeline rank, its parts in bytes by name: "parameters", "gradients", "optimizer states", "activations",
    # "loss", "gathered", "communication buffers", "optimizer step", "framework"
    ranks: tuple[Mapping[str, float], ...]
    capacity: float = float("inf")  # bytes of a device
    # for each pipeline rank, bytes of these that the allocator keeps for later and gives back before it fails:
    # fragments, and the smaller one of what the backward and the optimizer's step take
    reclaimable: tuple[float, ...] = ()
    host: float = 0.0  # bytes of a node's host that the devices of the node have there together, at most
    host_capacity: float = float("inf")  # bytes of a node's host
    limit: float = float("inf")  # bytes of a device that may be used, which no error bar exceeds

    @property
    def peak(self) -> float:
        """Bytes of the pipeline rank that holds most, where memory is not short."""
        return max(sum(rank.values()) for rank in self.ranks)

    @property
    def tensors(self) -> float:
        """Bytes of tensors alone of the rank that holds most of them, without what the framework takes."""
        return max(sum(rank.values()) - rank.get("framework", 0.0) for rank in self.ranks)

    @property
    def least(self) -> float:
        """Bytes with which a step still runs."""
        return max(sum(terms.values()) - self.spare(rank) for rank, terms in enumerate(self.ranks))

    def spare(self, rank: int) -> float:
        """Return the reclaimable bytes of a pipeline rank."""
        return self.reclaimable[rank] if self.reclaimable else 0.0

    @property
    def fits(self) -> bool:
        """Whether a step runs in the memory of the device, and of the host."""
        return not self.missing

    @property
    def missing(self) -> float:
        """Bytes that the device or the host lacks."""
        return max(0.0, self.least - self.capacity) + max(0.0, self.host - self.host_capacity)

    @property
    def need(self) -> str:
        """What is needed of what there is, in words: of the device, or of the host where that is too small."""
        if self.least <= self.capacity < float("inf") and self.host > self.host_capacity:
            return f"{sized(self.host)} of the {sized(self.host_capacity)} of a node's host"
        return f"{sized(self.peak)} of {sized(self.capacity)}"


OBJECTIVES: tuple[Objective, ...] = ("throughput", "fewest_devices", "largest_batch")
TIE = 0.03  # relative difference of step times that measurements do not resolve
# Relative error bars of a prediction: the mean errors that the models are required to reach.
TIME_ERROR, MEMORY_ERROR = 0.08, 0.08


@dataclass(frozen=True)
class Plan:
    """A layout with its predictions; a layout that cannot fit has no time.

    Attributes:
        layout: The layout.
        memory: Its predicted memory.
        time: Its predicted step time.
        time_error: Relative error bar of the step time: as measured for what was compared, or a larger one.
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
    def is_calibrated(self) -> bool:
        """Whether steps like this one were compared with measurements."""
        return self.time_error <= TIME_ERROR

    @property
    def may_fit(self) -> bool:
        """Whether it fits if the memory is overestimated by the error bar."""
        memory = self.memory
        most = min(memory.capacity * (1 + self.memory_error), memory.limit)
        return memory.least <= most and memory.host <= memory.host_capacity

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
    """Why no plan of a family was chosen."""

    family: str  # its name, such as "tensor ranks across nodes"
    reason: str  # one reason, with both numbers
    layout: PlanLayout | None = None  # its best layout; None if the model or the cluster has none


@dataclass(frozen=True)
class SearchResult:
    """Plans in the order of preference."""

    plans: tuple[Plan, ...]  # the best plan of each mesh; the first is the chosen one
    rejected: tuple[Rejection, ...]  # the families that the chosen plan does not belong to
    evaluated: int  # layouts whose memory was predicted

    @property
    def best(self) -> Plan:
        """The chosen plan."""
        return self.plans[0]


def simplest_of_tied(
    plans: Collection[Plan], score: Callable[[Plan], tuple[float, ...]], chosen: float = float("inf")
) -> Plan:
    """Return the simplest plan within the tie of the best; one that fits with its error bar if there is any.

    Args:
        plans: With a time.
        score: Orders plans, the best first; its last number is compared within the tie, the others exactly.
        chosen: That number of the chosen plan: if the best is tied with it, so is the plan that is returned.
    """
    *first, least = min(map(score, plans))
    limit = (1 + TIE) * (chosen if least > chosen >= least / (1 + TIE) else least)
    tied = [plan for plan in plans if (found := score(plan))[:-1] == tuple(first) and found[-1] <= limit]
    return min(tied, key=lambda plan: (not plan.fits_with_error, simplicity(plan.layout), score(plan)))


def _is_simple(layout: PlanLayout) -> bool:
    """Whether replicas alone hold a layout, on their devices."""
    return layout.has_replicas_alone and not layout.offload


def preferred(plans: Collection[Plan], score: Callable[[Plan], tuple[float, ...]]) -> Plan:
    """Return the plan to choose: a simple one, unless another is faster by more than what is known.

    Replicas alone, without offload, win within the error bar of the fastest. Otherwise fewer kinds of parallelism win
    within the error of what was compared, since layouts of one model share the rest of the bar, and within the tie the
    simplest layout. A plan that may not fit is chosen where none fits with its error bar alone.
    """
    plans = [plan for plan in plans if plan.fits_with_error] or plans
    fastest = min(plans, key=score)
    *first, least = score(fastest)
    reached = [(plan, found[-1] / least - 1) for plan in plans if (found := score(plan))[:-1] == tuple(first)]
    within = [
        plan
        for plan, slower in reached
        if slower <= (fastest.time_error if _is_simple(plan.layout) else min(fastest.time_error, TIME_ERROR))
    ]
    fewest = min(kinds_of_parallelism(plan.layout) for plan in within)
    return simplest_of_tied([plan for plan in within if kinds_of_parallelism(plan.layout) == fewest], score)
