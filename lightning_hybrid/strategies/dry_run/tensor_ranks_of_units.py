"""Collectives of a rank's layers between tensor ranks, and the activations that it saves of its shards."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor

from lightning_hybrid.graph.partition import Assignment
from lightning_hybrid.memory.recompute_policies import Policy
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.strategies.dry_run.messages_of_step import Messages, Operation
from lightning_hybrid.strategies.run.run_and_optimization_dataclasses import Run
from lightning_hybrid.strategies.techniques.plan_tensor_parallelism import TensorPlanner
from lightning_hybrid.tensor.plan.unit_plan import UnitPlan
from lightning_hybrid.tensor.shapes_only.counted_ranks import Collective
from lightning_hybrid.tensor.shapes_only.measure_sharded_unit import UnitUse, measure_unit


class TensorUnits:
    """The calls of tensor-parallel units in the step, each kind of which is measured once.

    Attributes:
        unmeasured: FQNs of units that do not run on meta tensors, each with the error.
    """

    def __init__(self, run: Run, planner: TensorPlanner | None) -> None:
        """Take a planned run, and the planner that has recorded its calls, if there is one."""
        self._run, self.unmeasured = run, dict[str, str]()
        self._plans = {} if run.shards is None or planner is None else run.shards.plans
        self._calls: Mapping[str, Any] = {} if planner is None else planner.planned_calls.arguments
        self._uses: dict[Hashable, UnitUse | None] = {}

    def messages(
        self, assignment: Assignment | None, stages: set[int], num_microbatches: int, rank: int
    ) -> list[Messages]:
        """Return the collectives of a rank in one training step.

        Args:
            assignment: The recorded step; None where nothing is recorded: each unit is called once by a microbatch.
            stages: Of the rank.
            num_microbatches: Of the batch of a replica.
            rank: Index of the rank among its tensor ranks.
        """
        found: dict[tuple[str, str], list[Collective]] = {}
        for fqn in self._plans:
            times = _calls_on(assignment, fqn, stages)
            use = self._use(fqn, rank) if times else None
            if use is None:
                continue
            parts = {"forward": use.forward, "backward": use.backward}
            if self._policy(fqn) == "full":
                parts["recomputed forward"] = use.recomputed
            for direction, done in parts.items():
                for each in done:
                    found.setdefault((direction, each.kind), []).extend([each] * times)
        size = self._run.setting.layout.tensor_parallel_size
        messages = []
        for (direction, kind), collectives in found.items():
            count, nbytes = len(collectives) * num_microbatches, sum(c.nbytes for c in collectives) * num_microbatches
            operation: Operation = kind  # type: ignore[assignment]
            messages.append(Messages("tensor", f"layers, {direction}", operation, size, count, nbytes))
        return messages

    def with_local_activations(self, assignment: Assignment, rank: int) -> Assignment:
        """Return a recorded step whose units save what a tensor rank saves of their shards."""
        nodes = []
        for node in assignment.graph.nodes:
            share = self._saved_share(node.unit, rank) if node.unit is not None and node.saved_bytes else 1.0
            nodes.append(
                node if share == 1.0 else dataclasses.replace(node, saved_bytes=round(share * node.saved_bytes))
            )
        return dataclasses.replace(assignment, graph=dataclasses.replace(assignment.graph, nodes=tuple(nodes)))

    def _saved_share(self, unit: str, rank: int) -> float:
        """The bytes that a node saves on a tensor rank, as a share of what the full layers save."""
        inside = [fqn for fqn in self._plans if fqn == unit or fqn.startswith(f"{unit}.")]
        pairs = [(self._use(fqn, rank), self._use(fqn, None)) for fqn in inside]
        known = [
            (local.saved_bytes, full.saved_bytes) for local, full in pairs if local is not None and full is not None
        ]
        total = sum(full for _, full in known)
        return sum(local for local, _ in known) / total if total else 1.0

    def _policy(self, fqn: str) -> Policy | None:
        recomputation = self._run.recomputation
        if recomputation is None:
            return None
        return next(
            (p for layer, p in recomputation.policies.items() if fqn == layer or fqn.startswith(f"{layer}.")), None
        )

    def _use(self, fqn: str, rank: int | None) -> UnitUse | None:
        """Measure a unit, sharded or with no rank unsharded, unless a unit of its kind has been."""
        plan, call = self._plans[fqn], self._calls.get(fqn)
        if call is None:
            return None
        unit = self._run.setting.module.get_submodule(fqn)
        is_first = None if rank is None else rank if _differs_by_rank(plan) else 0
        key = (_kind(plan), _shapes(call), _shapes(tuple(unit.parameters())), type(unit), is_first)
        if key not in self._uses:
            sharded = None if rank is None or not plan.num_sharded else plan
            try:
                context = self._run.setting.precision.forward_context()
                self._uses[key] = measure_unit(unit, sharded, call[0], call[1], rank or 0, context)
            except Exception as error:
                self._uses[key] = None
                self.unmeasured[fqn] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return self._uses[key]


def _differs_by_rank(plan: UnitPlan) -> bool:
    """Whether ranks have shards of different sizes."""
    return bool(plan.vocabulary) or any(getattr(p, "is_uneven", False) for p in plan.placements.values())


def _kind(plan: UnitPlan) -> Hashable:
    """What two units with one plan have in common: their placements."""
    return tuple((name, str(placement)) for name, placement in plan.placements.items())


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
        and node.unit is not None
        and (fqn == node.unit or fqn.startswith(f"{node.unit}.") or node.unit.startswith(f"{fqn}."))
    )
    return max(counts.values(), default=0)
