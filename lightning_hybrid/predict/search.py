"""The search: layouts of a model on a cluster, predicted, ranked, with one reason against each family of the others."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lightning_hybrid.errors import PlanError
from lightning_hybrid.predict.candidates import Candidates, divisors
from lightning_hybrid.predict.costs.layers import ModelCosts
from lightning_hybrid.predict.evidence import time_error
from lightning_hybrid.predict.families import rejected_families
from lightning_hybrid.predict.hardware import Hardware
from lightning_hybrid.predict.layout import Allowed, NumberFormat, PlanLayout, spelled, spelled_fields
from lightning_hybrid.predict.memory import predict_memory
from lightning_hybrid.predict.plans import (
    OBJECTIVES,
    Objective,
    Plan,
    SearchResult,
    preferred,
    simplest_of_tied,
)
from lightning_hybrid.predict.time import predict_time
from lightning_hybrid.text import counted, sized

_STARTS = 16  # meshes from which options are improved one by one
_MOST_DEVICES = 1_000_000
_LARGEST_CLUSTER = 64  # multiple of the given devices up to which an error looks for a fit


def search_layouts(
    costs: ModelCosts,
    number_format: NumberFormat,
    hardware: Hardware,
    devices: int,
    num_nodes: int = 1,
    *,
    batch: int,
    is_replica_batch: bool = False,
    objective: Objective = "throughput",
    max_memory: float | None = None,
    fixed: Mapping[str, Any] | None = None,
    allowed: Allowed | None = None,
) -> SearchResult:
    """Search for the best layout.

    Of the layouts within the error bar of the fastest that fits with its error bar, one with the fewest kinds of
    parallelism wins; of those, step times within 3 % are a tie, in which the simplest wins. If none fits so, one that
    may not fit is chosen, which `Plan` tells; but ``max_memory`` and the memory of a host are exact.

    Args:
        costs: Of the model.
        number_format: Of parameters, gradients and states.
        hardware: Of the cluster; ``devices`` are those of a node, if there are several nodes.
        devices: Devices of each node.
        num_nodes: Number of nodes.
        batch: Samples of an optimizer step over all replicas.
        is_replica_batch: ``batch`` is that of each replica instead.
        objective: "throughput" is the most samples per second, "fewest_devices" the fewest that hold the model,
            "largest_batch" the most samples that are computed at a time.
        max_memory: Bytes of a device that may be used, at most; all if None.
        fixed: Fields of `PlanLayout` that are not chosen; "data" is the number of replicas, and "num_microbatches"
            that of microbatches, which is 1 for BatchNorm, and for a step without stages, unless it is set.
        allowed: What the model permits; everything if None.

    Raises:
        PlanError: There is no such cluster, or no layout fits it.
        ValueError: An unknown objective.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective={objective!r} is unknown; use one of {', '.join(OBJECTIVES)}")
    check_cluster(hardware, devices, num_nodes, batch)
    hardware = cluster_of(hardware, devices, num_nodes, max_memory)
    worlds = [devices * num_nodes]
    if objective == "fewest_devices":
        worlds = [*divisors(devices), *(devices * nodes for nodes in divisors(num_nodes)[1:])]
    is_one_batch = costs.has_batch_norm or bool(costs.why_no_stages)
    fixed = {**({"num_microbatches": 1} if is_one_batch else {}), **(fixed or {})}
    allowed = allowed or Allowed()
    pipeline, offload = allowed.pipeline and not costs.why_no_stages, allowed.offload and not hardware.is_host
    options = fixed, dataclasses.replace(allowed, pipeline=pipeline, offload=offload)
    searches = [
        _Search(Candidates(costs, hardware, ranks, batch, is_replica_batch, *options), number_format, objective)
        for ranks in worlds
    ]
    for search in itertools.chain(searches, searches[-1].last_resort()):
        if found := search.run():
            return found
    return searches[-1].within_error()


def cluster_of(hardware: Hardware, devices: int, num_nodes: int = 1, max_memory: float | None = None) -> Hardware:
    """Return the hardware with the devices of a node, and the memory, that a run uses."""
    if num_nodes > 1:
        hardware = dataclasses.replace(hardware, devices_per_node=min(devices, hardware.devices_per_node))
    if max_memory is not None:
        hardware = dataclasses.replace(hardware, memory=min(hardware.memory, max_memory), limit=max_memory)
    return hardware


def predict_plan(costs: ModelCosts, layout: PlanLayout, number_format: NumberFormat, hardware: Hardware) -> Plan:
    """Predict the memory of a layout and, if it may fit, its step time, with the correction of the costs."""
    correction = costs.correction
    plan = Plan(layout, predict_memory(costs, layout, number_format, hardware))
    if correction is not None:
        memory, error = correction.bytes(plan.memory, layout), correction.memory_error(layout)
        plan = dataclasses.replace(plan, memory=memory, memory_error=error)
    if not plan.may_fit:
        return plan
    time = predict_time(costs, layout, number_format, hardware)
    plan = dataclasses.replace(plan, time_error=time_error(costs, layout, number_format, hardware))
    if correction is None:
        return dataclasses.replace(plan, time=time)
    time = correction.time(time, layout)
    return dataclasses.replace(plan, time=time, time_error=correction.time_error(layout, time))


def check_cluster(hardware: Hardware, devices: int, num_nodes: int, batch: int = 1) -> None:
    """Refuse a cluster that there cannot be.

    Raises:
        PlanError: A number is no whole number of 1 or more, or the devices are more than a node has and no whole nodes.
    """
    for name, number in (("devices", devices), ("num_nodes", num_nodes), ("batch", batch)):
        if not isinstance(number, int) or number < 1:
            raise PlanError(f"{name}={number!r}: a plan needs a whole number of 1 or more", entry="plan-cluster")
    if devices * num_nodes > _MOST_DEVICES:
        most = f"a plan has {_MOST_DEVICES:,} devices at most"
        raise PlanError(f"devices={devices} * num_nodes={num_nodes}: {most}", entry="plan-cluster")
    node = hardware.devices_per_node
    if devices > node and devices % node:
        raise PlanError(
            f"devices={devices}: a node of {hardware.name} has {node} devices; set devices to {node} at most and"
            f" num_nodes to the number of nodes, or give a hardware file with devices_per_node = {devices}",
            entry="plan-cluster",
        )


class _Search:
    """One search on a fixed number of ranks; predictions are made once for each layout."""

    def __init__(self, candidates: Candidates, number_format: NumberFormat, objective: Objective) -> None:
        self.candidates, self.number_format = candidates, number_format
        self.objective: Objective = objective
        self.plans: dict[PlanLayout, Plan] = {}
        self._meshes = [self._with_objective(mesh) for mesh in candidates.meshes()]

    def plan(self, layout: PlanLayout) -> Plan:
        """Return a layout's predictions; the time only if it fits."""
        found = self.plans.get(layout)
        if found is None:
            found = predict_plan(self.candidates.costs, layout, self.number_format, self.candidates.hardware)
            self.plans[layout] = found
        return found

    def run(self) -> SearchResult | None:
        """Search; None if nothing fits."""
        starts = [start for mesh in self._meshes if (start := self._first_that_fits(mesh)) is not None]
        starts = starts or list(self._nearest_that_fits())
        starts.sort(key=self._score)
        alone = [start for start in starts[_STARTS:] if start.layout.has_replicas_alone]
        for start in [*starts[:_STARTS], *alone]:
            if not self._improve(start).fits_with_error:
                self._improve_what_fits_for_sure(start)
        best = self._best()
        while best is not None:
            rejected = tuple(rejected_families(best, self.candidates, self.plan, self.plans.values()))
            chosen, best = best, self._best()
            if best is chosen:  # it may predict a better one
                return SearchResult(tuple(self._ranked(best)), rejected, len(self.plans))
        return None

    def _best(self) -> Plan | None:
        """Return the best of the plans so far, or the simplest one that is tied with it."""
        fitting = [plan for plan in self.plans.values() if plan.fits]
        return self._simplest(min(fitting, key=self._score)) if fitting else None

    def _score(self, plan: Plan) -> tuple[float, ...]:
        seconds = plan.seconds_per_sample
        if self.objective == "largest_batch":
            return not plan.fits_with_error, -plan.layout.microbatch * plan.layout.data, seconds
        return (seconds,)

    def _with_objective(self, layout: PlanLayout) -> PlanLayout:
        """For the largest batch, a step is as many microbatches as its pipeline ranks keep busy."""
        if self.objective != "largest_batch":
            return layout
        count = 2 * layout.pipeline if layout.pipeline > 1 else 1
        return layout.replaced(microbatch=1, batch=layout.data * count)

    def _first_that_fits(self, frugal: PlanLayout) -> Plan | None:
        """Return the plan of a mesh that fits, the simplest one; with offload if no other does."""
        candidates = self.candidates
        if not self.plan(frugal).memory.fits:
            rescued = candidates.rescued(frugal)
            return plan if rescued is not None and (plan := self.plan(rescued)).fits else None
        plans = map(self.plan, candidates.levels(frugal))
        return next((plan for plan in plans if plan.fits), self.plan(frugal))

    def _nearest_that_fits(self) -> Iterator[Plan]:
        """Change one option at a time of the plan that lacks the least memory; yield what fits, if that helps."""
        nearest = min(self.plans.values(), key=_lacking, default=None)
        while nearest is not None and not nearest.fits:
            better = min(map(self.plan, self._neighbours(nearest.layout)), key=_lacking, default=nearest)
            if _lacking(better) >= _lacking(nearest):
                return
            nearest = better
        if nearest is not None:
            yield nearest

    def _improve_what_fits_for_sure(self, start: Plan) -> None:
        """Improve the simplest plan of a mesh that fits with its error bar, by others that do."""
        plans = map(self.plan, self.candidates.levels(start.layout))
        plan = next((each for each in plans if each.fits_with_error), None)
        while plan is not None:
            tried = map(self.plan, self._neighbours(plan.layout))
            better = min((each for each in tried if each.fits_with_error), key=self._score, default=plan)
            plan = better if self._score(better) < self._score(plan) else None

    def _neighbours(self, layout: PlanLayout) -> Iterable[PlanLayout]:
        yield from self.candidates.neighbours(layout)
        if self.objective == "largest_batch" and "microbatch" not in self.candidates.fixed:
            count, more = layout.num_microbatches, layout.microbatch
            while more:  # smaller and smaller, so that the largest one is found in a logarithmic number of predictions
                microbatch = layout.microbatch + more
                batch = layout.data * count * microbatch
                yield layout.replaced(microbatch=microbatch, batch=batch)
                more //= 4

    def _improve(self, plan: Plan) -> Plan:
        """Change one option at a time for the better, until none is."""
        while True:
            tried = map(self.plan, self._neighbours(plan.layout))
            better = min((each for each in tried if each.fits), key=self._score, default=plan)
            if self._score(better) >= self._score(plan):
                return plan
            plan = better

    def _simplest(self, best: Plan) -> Plan:
        """Return the preferred plan; its neighbours are tried too."""
        while True:
            for layout in self._neighbours(best.layout):
                self.plan(layout)
            fitting = [plan for plan in self.plans.values() if plan.fits]
            simplest = preferred(fitting, self._score)
            if simplest is best:
                return best
            best = simplest

    def _ranked(self, best: Plan) -> list[Plan]:
        """Return the chosen plan, then the best of each other mesh, or the simplest that is tied with it."""
        meshes: dict[tuple[int, ...], list[Plan]] = {}
        for plan in self.plans.values():
            if plan.may_fit and plan.layout.mesh != best.layout.mesh:
                meshes.setdefault(plan.layout.mesh, []).append(plan)
        chosen = self._score(best)[-1]
        fitting = ([plan for plan in plans if plan.fits] or plans for plans in meshes.values())
        others = [simplest_of_tied(plans, self._score, chosen) for plans in fitting]
        return [best, *sorted(others, key=self._score)]

    def last_resort(self) -> Iterator[_Search]:
        """Yield a search with tensor ranks that shard little, where nothing else divides the model."""
        candidates, data = self.candidates, self.candidates.fixed.get("data", 0)
        is_open = candidates.allowed.tensor and "tensor" not in candidates.fixed
        if not self.plans and is_open and data and candidates.ranks % data == 0:
            fixed = {**candidates.fixed, "tensor": candidates.ranks // data}
            yield _Search(dataclasses.replace(candidates, fixed=fixed), self.number_format, self.objective)

    def within_error(self) -> SearchResult:
        """Return the plan that lacks the least memory, if that is within the error bar of memory.

        Raises:
            PlanError: None does.
        """
        plans = [plan for plan in self.plans.values() if plan.may_fit]
        if not plans:
            raise self.nothing_fits()
        best = min(plans, key=lambda plan: (_lacking(plan), self._score(plan)))
        rejected = tuple(rejected_families(best, self.candidates, self.plan, self.plans.values()))
        return SearchResult(tuple(self._ranked(best)), rejected, len(self.plans))

    def nothing_fits(self) -> PlanError:
        """Return the error that names the nearest layout, and what is missing."""
        candidates, costs = self.candidates, self.candidates.costs
        if not self.plans:
            names = [name for name in ("pipeline", "data", "tensor", "context") if candidates.fixed.get(name, 1) > 1]
            product = math.prod(candidates.fixed[name] for name in names)
            if candidates.ranks % product:
                sizes = spelled_fields({name: candidates.fixed[name] for name in names}).replace(", ", " * ")
                return PlanError(
                    f"no layout of {costs.name} fits {counted(candidates.ranks, 'device')}: {sizes} as set"
                    f" does not divide {candidates.ranks}; set other sizes, or a number of devices that is a multiple"
                    f" of {product}",
                    entry="plan-nothing-fits",
                )
            batch = f"{candidates.batch} samples" + (" per replica" if candidates.is_replica_batch else "")
            return PlanError(
                f"no layout of {costs.name} fits {counted(candidates.ranks, 'device')}: a batch of {batch},"
                f" {costs.num_layers} layers and {costs.heads or 'an unknown number of'} heads cannot be divided over"
                f" them{_fixed_words(candidates.fixed)}; set the batch or the devices so that one divides the other",
                entry="plan-nothing-fits",
            )
        nearest = min(self.plans.values(), key=_lacking)
        memory = nearest.memory
        needs = f"{sized(memory.least)} ({nearest.largest_terms})"
        if memory.least <= memory.capacity:
            needs = f"{sized(memory.host)} of a node's host of {sized(memory.host_capacity)}"
        return PlanError(
            f"no layout of {costs.name} fits {counted(candidates.ranks, 'device')} of {sized(memory.capacity)}: the"
            f" nearest, {spelled(nearest.layout)}, needs {needs}, which is {sized(memory.missing)} too"
            f" much{_fixed_words(candidates.fixed)}; {self._advice()}",
            entry="plan-nothing-fits",
        )

    def _advice(self) -> str:
        costs, is_tried = self.candidates.costs, any(layout.spatial for layout in self.plans)
        if costs.most_rows and not is_tried:
            return "share the rows of images by spatial_parallel_size, or " + self._more_devices()
        return self._more_devices()

    def _more_devices(self) -> str:
        factor = 2
        while factor <= _LARGEST_CLUSTER:
            ranks = self.candidates.ranks * factor
            more = dataclasses.replace(self.candidates, ranks=ranks)
            search = _Search(more, self.number_format, self.objective)
            if any(search.plan(mesh).fits for mesh in more.meshes()):
                return f"use {ranks} devices, on which it fits, or devices with more memory"
            factor *= 2
        return "use a smaller microbatch, shorter samples, or devices with more memory"


def _lacking(plan: Plan) -> float:
    return plan.memory.missing


def _fixed_words(fixed: Mapping[str, Any]) -> str:
    return f" (with {spelled_fields(fixed)} as set)" if fixed else ""
