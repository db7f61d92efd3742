"""`PlanTechnique`: what the planner knows of one way of training; it knows no technique but by this class.

a candidate   settings, and what of them the model and the run permit -> frugal, levels, changes
its bytes     kinds that are shards or elsewhere; what layers save
its seconds   terms of a layer, and of a step
its words     arguments of the strategy, families of layouts, simplicity
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from lightning_hybrid.predict.hardware import Hardware

# Made of techniques, or with them, so that their types are not here.
Allowed: TypeAlias = Any
Candidates: TypeAlias = Any
LayerCosts: TypeAlias = Any
LayerWork: TypeAlias = Any
LayersOfRank: TypeAlias = Any
Parameters: TypeAlias = Any
PlanLayout: TypeAlias = Any
StepModel: TypeAlias = Any


@dataclass(frozen=True)
class Family:
    """Layouts with one property.

    Attributes:
        name: For reports.
        has: Whether a layout is one of them.
        impossible: Why the model or the cluster has none of them; empty if it may.
        field: The field of a layout that decides, which may be fixed.
        place: Among all families of a report.
    """

    name: str
    has: Callable[[PlanLayout], bool]
    impossible: Callable[[Candidates], str] = lambda candidates: ""
    field: str = ""
    place: int = 0


class PlanTechnique:
    """One way of training in candidates, predictions and reports; each method does nothing by default.

    Attributes:
        settings: Fields of a layout, with the values that leave the technique unused.
        limits: Fields of `Allowed`, with the values that permit everything.
        options: Options of the strategy that name one field of a layout each.
        short: Their words in ``--layout``, where these are others.
        none_is_set: Whether None of an option turns the technique off, and is not the default.
        size: The field that is a number of ranks, if it has one.
        routing_proof: A note of models that route tokens: plans with several such ranks are subject to a proof.
    """

    settings: ClassVar[Mapping[str, Any]] = {}
    limits: ClassVar[Mapping[str, Any]] = {}
    options: ClassVar[Mapping[str, str]] = {}
    short: ClassVar[Mapping[str, str]] = {}
    none_is_set: ClassVar[bool] = False
    size: ClassVar[str] = ""
    routing_proof: ClassVar[str] = ""

    # Candidates

    def permitted(self, allowed: Allowed, hardware: Hardware) -> Mapping[str, Any]:
        """Return the limits that the hardware sets besides."""
        return {}

    def sizes(self, room: int, candidates: Candidates) -> Iterable[Mapping[str, Any]]:
        """Return the fields of each number of ranks among ``room`` replicas and context ranks."""
        return ({},)

    def frugal(self, layout: PlanLayout, candidates: Candidates) -> Mapping[str, Any]:
        """Return the fields of a mesh with which it is expected to take the least memory."""
        return {}

    def levels(self, layout: PlanLayout, candidates: Candidates) -> Iterable[Mapping[str, Any]]:
        """Yield the fields of each value that the first fit of a mesh is searched among, the simplest first."""
        return ({},)

    def changes(self, layout: PlanLayout, candidates: Candidates) -> Iterator[Mapping[str, Any]]:
        """Yield the fields of each layout that differs in this technique alone."""
        yield from ()

    def followed(self, layout: PlanLayout, candidates: Candidates) -> Mapping[str, Any]:
        """Return the fields that follow from other techniques."""
        return {}

    def rescues(self, layout: PlanLayout, candidates: Candidates) -> Iterator[Mapping[str, Any]]:
        """Yield the fields to try where the most frugal layout of a mesh does not fit."""
        yield from ()

    def kept(self, best: PlanLayout) -> Mapping[str, Any]:
        """Return the fields in which compared layouts of replicas alone are the chosen one."""
        return {}

    def of_replicas(self, layout: PlanLayout, candidates: Candidates) -> Iterator[Mapping[str, Any]]:
        """Yield the fields of layouts of replicas alone that reports compare."""
        yield from ()

    # Bytes

    def sharded(self, layout: PlanLayout) -> Collection[str]:
        """Return which of "parameters", "gradients" and "states" are shards over replicas."""
        return ()

    def gathers(self, layout: PlanLayout) -> bool:
        """Whether layers run with parameters that are there for a moment."""
        return False

    def reduces_by_layer(self, layout: PlanLayout) -> bool:
        """Whether full gradients are there for a moment."""
        return False

    def reduces_in_buckets(self, layout: PlanLayout) -> bool:
        """Whether gradients go through buckets to their shards."""
        return False

    def routed_ranks(self, layout: PlanLayout) -> int:
        """Return the ranks that share parameters among which tokens are routed."""
        return 1

    def keeps(self, layout: PlanLayout) -> str:
        """Return what layers save for the backward: all ("none" is computed again), "selective", or "full"."""
        return "none"

    def elsewhere(self, layout: PlanLayout) -> Collection[str]:
        """Return the terms of memory that are not on the device."""
        return ()

    # Seconds

    def forwards(self, layout: PlanLayout) -> int:
        """Return how often the backward runs the forwards of layers that repeat."""
        return 0

    def repeated(self, layer: LayerCosts, layout: PlanLayout, work: LayerWork) -> Mapping[str, tuple[float, float]]:
        """Return further seconds of a layer, and the part in which the device waits for kernels, by term."""
        return {}

    def layer_terms(self, step: StepModel, layer: LayerCosts, size: float, passes: int) -> dict[str, float]:
        """Return the seconds of messages of a layer whose results have ``size`` bytes, in its forwards and backward."""
        return {}

    def optimizer_terms(self, step: StepModel, own: Parameters, stepped: float) -> dict[str, float] | None:
        """Return the seconds of the optimizer's step on ``stepped`` parameters; None on the device."""
        return None

    def replica_seconds(self, step: StepModel, layers: LayersOfRank, computed: float) -> float | None:
        """Return the seconds of messages between replicas beside computation; None for all-reduces of gradients."""
        return None

    def runs_within_layers(self, layout: PlanLayout) -> bool:
        """Whether messages between replicas run within forwards and backwards."""
        return False

    # Words

    def arguments(self, layout: PlanLayout) -> dict[str, Any]:
        """Return the arguments of the strategy that differ from its defaults."""
        return {}

    def check(self, name: str, value: Any) -> None:
        """Refuse a value of an option that there is not, with a ``ValueError``."""

    def value(self, value: Any, options: Mapping[str, Any]) -> Any:
        """Return the value of the field that an option of the strategy sets."""
        return value

    def families(self, devices_per_node: int) -> Iterable[Family]:
        """Return families of layouts; reports give a reason against each family without the chosen plan."""
        return ()

    def simplicity(self, layout: PlanLayout) -> Mapping[int, float]:
        """Return numbers that order layouts from the simplest, by their place in the comparison."""
        return {}

    def difference(self, layout: PlanLayout, other: PlanLayout) -> float:
        """Return how much two layouts differ besides the number of fields that do."""
        return 0.0
