"""Collectives of a rank's layers between tensor ranks, and the activations that it saves of its shards."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.experts.parallel.width import TensorShardedExperts, WidthSharding
from lightning_hybrid.graph.partition import Assignment
from lightning_hybrid.memory.recompute.policies import Policy
from lightning_hybrid.params.placement import shard_tensor
from lightning_hybrid.run.run import Run
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.techniques.experts import ExpertParallel
from lightning_hybrid.techniques.technique import Messages, Operation
from lightning_hybrid.techniques.tensor import TensorParallel
from lightning_hybrid.tensor.collectives import Collective, CountedRanks
from lightning_hybrid.tensor.plan import UnitPlan
from lightning_hybrid.tensor.proof.measure import UnitUse, measure_unit

Place = tuple[int, int]  # indices among tensor ranks and among context ranks


class TensorUnits:
    """The calls of tensor-parallel units in the step; each kind of call is measured once.

    Attributes:
        unmeasured: FQNs of units that do not run on meta tensors, each with the error.
    """

    def __init__(self, run: Run) -> None:
        """Take a planned run, whose calls are recorded."""
        planner, experts = run.technique(TensorParallel), run.technique(ExpertParallel)
        self._widths: Mapping[str, WidthSharding] = {} if experts is None else experts.widths
        self._run, self.unmeasured = run, dict[str, str]()
        self._plans = run.plans
        self._calls: Mapping[str, Any] = {} if planner is None else planner.planned_calls.arguments
        self._uses: dict[Hashable, UnitUse | None] = {}

    def messages(
        self, assignment: Assignment | None, stages: set[int], num_microbatches: int, place: Place
    ) -> list[Messages]:
        """Return the collectives of a rank in one training step.

        Args:
            assignment: The recorded step; None where nothing is recorded: each unit is called once by a microbatch.
            stages: Of the rank.
            num_microbatches: Of the batch of a replica.
            place: Indices of the rank among its tensor ranks, and among its context ranks.
        """
        found: dict[tuple[str, str, str], list[Collective]] = {}
        for fqn in self._plans:
            times = _calls_on(assignment, fqn, stages)
            use = self._use(fqn, place) if times else None
            if use is None:
                continue
            parts = {"forward": use.forward, "backward": use.backward}
            if self._policy(fqn) == "full":
                parts["recomputed forward"] = use.recomputed
            for direction, done in parts.items():
                for each in done:
                    found.setdefault((direction, each.kind, each.axis), []).extend([each] * times)
        layout = self._run.setting.layout
        sizes = {"tensor": layout.tensor_parallel_size, "context": layout.context_parallel_size}
        messages = []
        for (direction, kind, axis), collectives in found.items():
            count, nbytes = len(collectives) * num_microbatches, sum(c.nbytes for c in collectives) * num_microbatches
            operation: Operation = kind  # type: ignore[assignment]
            messages.append(Messages(axis, f"layers, {direction}", operation, sizes[axis], count, nbytes))
        return messages

    def with_local_activations(self, assignment: Assignment, place: Place) -> Assignment:
        """Return a recorded step whose units save what a rank saves of their shards; ``place`` as in `messages`."""
        nodes = []
        for node in assignment.graph.nodes:
            share = self._saved_share(node.unit, place) if node.unit and node.saved_bytes else 1.0
            nodes.append(
                node if share == 1.0 else dataclasses.replace(node, saved_bytes=round(share * node.saved_bytes))
            )
        return dataclasses.replace(assignment, graph=dataclasses.replace(assignment.graph, nodes=tuple(nodes)))

    def _saved_share(self, unit: str, place: Place) -> float:
        """The bytes that a node saves on a rank, as a share of what the full layers save."""
        inside = [fqn for fqn in self._plans if fqn == unit or fqn.startswith(f"{unit}.")]
        pairs = [(self._use(fqn, place), self._use(fqn, None)) for fqn in inside]
        known = [
            (local.saved_bytes, full.saved_bytes) for local, full in pairs if local is not None and full is not None
        ]
        total = sum(full for _, full in known)
        return sum(local for local, _ in known) / total if total else 1.0

    def _policy(self, fqn: str) -> Policy | None:
        policies = self._run.policies.items()
        return next((policy for layer, policy in policies if fqn == layer or fqn.startswith(f"{layer}.")), None)

    def _use(self, fqn: str, place: Place | None) -> UnitUse | None:
        """Measure a unit, sharded or with no place unsharded, unless a unit of its kind has been."""
        plan, call = self._plans[fqn], self._calls.get(fqn)
        if call is None:
            return None
        unit = self._run.setting.module.get_submodule(fqn)
        where = (0, 0) if place is not None and not _differs_by_rank(plan) else place
        widths = {name[len(fqn) + 1 :]: w for name, w in self._widths.items() if f"{name}.".startswith(f"{fqn}.")}
        key = (_kind(plan), str(widths), _shapes(call), _shapes(tuple(unit.parameters())), type(unit), where)
        if key not in self._uses:
            is_sharded = place is not None and (plan.is_sharded or widths)
            rank, context_rank = place or (0, 0)
            try:
                around = self._run.setting.precision.forward_context()
                of_rank = plan if is_sharded else None
                shard = partial(_shard_experts, widths) if is_sharded and widths else None
                self._uses[key] = measure_unit(unit, of_rank, call[0], call[1], rank, around, context_rank, shard)
            except Exception as error:
                self._uses[key] = None
                self.unmeasured[fqn] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return self._uses[key]


def _shard_experts(
    widths: Mapping[str, WidthSharding], unit: nn.Module, ranks: CountedRanks
) -> AbstractContextManager[Any]:
    """Shard the experts of a copy on meta tensors; return a context in which they run on one tensor rank."""
    for name, width in widths.items():
        parameters = unit.get_submodule(name)._parameters
        for parameter, placement in width.placements.items():
            full = unit.get_submodule(name).get_parameter(parameter)
            shard = shard_tensor(full.detach(), placement, ranks.rank, ranks.size)
            parameters[parameter] = nn.Parameter(shard, requires_grad=full.requires_grad)
    experts, stack = TensorShardedExperts(unit, widths, ranks), ExitStack()
    stack.enter_context(experts.local_widths())
    stack.enter_context(experts.running())
    return stack


def _differs_by_rank(plan: UnitPlan) -> bool:
    """Whether ranks have shards of different sizes."""
    return (
        bool(plan.vocabulary)
        or plan.positions is not None
        or any(getattr(p, "is_uneven", False) for p in plan.placements.values())
    )


def _kind(plan: UnitPlan) -> Hashable:
    """What two units with one plan have in common: their placements, and how positions are sharded."""
    return str(plan.positions), tuple((name, str(placement)) for name, placement in plan.placements.items())


def _shapes(value: Any) -> Hashable:
    leaves = flatten(value)[0]
    return tuple((tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, Tensor) else str(type(x)) for x in leaves)


def _calls_on(assignment: Assignment | None, fqn: str, stages: set[int]) -> int:
    """How often a rank calls a unit for one microbatch."""
    if assignment is None:
        return 1
    pairs = zip(assignment.graph.nodes, assignment.node_stage, strict=True)
    counts = Counter(
        node.unit
        for node, stage in pairs
        if stage in stages
        and node.unit
        and (fqn == node.unit or fqn.startswith(f"{node.unit}.") or node.unit.startswith(f"{fqn}."))
    )
    return max(counts.values(), default=0)
