"""A dry run as plain values: the stages of a world, and what chosen ranks of it hold and send."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.params.boxes import shard_of
from lightning_hybrid.planning.dry_run.messages import (
    bytes_of_casts,
    gradient_messages,
    local_names,
    pipeline_messages,
    program_of,
    sent_by_axis,
)
from lightning_hybrid.planning.dry_run.tensor import TensorUnits
from lightning_hybrid.planning.dry_run.world import run_of_rank
from lightning_hybrid.planning.plan import PlanRequest, RunPlan, make_plan
from lightning_hybrid.predict.ranks import RankMemory
from lightning_hybrid.run.description.memory import memory_of_ranks, memory_of_stages
from lightning_hybrid.run.run import Run
from lightning_hybrid.schedule.program import Program
from lightning_hybrid.step.standins.tensors import full_shape
from lightning_hybrid.tensor.search.unit import NOT_SEARCHED

ChooseRanks = Callable[[ParallelLayout], Sequence[int]]


def dry_run(
    lightning: ModuleType,
    module: Any,
    fit_arguments: Mapping[str, Any],
    devices: int,
    options: Mapping[str, Any],
    precision: str,
    choose_ranks: ChooseRanks,
    *,
    num_nodes: int = 1,
    with_shapes: bool = False,
    on_phase: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Plan a run, and describe what some of its ranks hold and send.

    Args:
        lightning: The namespace of the module.
        module: The user's module, whose parameters may be on the meta device; not to be used afterwards.
        fit_arguments: Arguments of ``Trainer.fit``.
        devices: The number of ranks.
        options: Arguments of the strategy.
        precision: Lightning's name of the precision.
        choose_ranks: Returns the ranks to describe.
        num_nodes: The number of nodes, which divides the number of ranks.
        with_shapes: Whether to add the shape of each parameter's shard.
        on_phase: Receives the name of each phase as it begins.
    """
    request = PlanRequest(num_nodes, has_storage=False, first_microbatch=True, on_phase=on_phase)
    plan = make_plan(lightning, module, fit_arguments, devices, options, precision, request)
    run, batch = plan.run, plan.batch
    layout = run.setting.layout
    content: dict[str, Any] = {"ranks": layout.world_size, "nodes": num_nodes, "refused": plan.refusal, "rank": []}
    content["offloaded"] = run.setting.options.offloaded
    content |= {"samples": batch.samples, "num_microbatches": batch.num_microbatches, "table": plan.table}
    if plan.refusal is not None:
        plan.print_error()
        return content
    on_phase("building the program of the pipeline")
    content["tensor_plans"] = {fqn: each.lines() for fqn, each in run.plans.items()}
    described = _Described(plan, layout.world_size // num_nodes, with_shapes=with_shapes)
    ranks = choose_ranks(layout)
    for number, rank in enumerate(ranks):
        if number % max(1, len(ranks) // 8) == 0:
            on_phase(f"describing rank {rank} ({number + 1} of {len(ranks)})")
        content["rank"].append(described.rank(rank))
    content["notes"] = described.notes()
    return content


class _Described:
    """Describes ranks of a planned run."""

    def __init__(self, planned: RunPlan, ranks_per_node: int, *, with_shapes: bool) -> None:
        run = planned.run
        self._run, self._per_node = run, ranks_per_node
        self._optimizers, self._count = planned.optimizers, planned.batch.num_microbatches
        self._memories: dict[tuple[int, ...], list[RankMemory]] = {}
        self._with_shapes = with_shapes
        self._program: Program | None = program_of(run, self._count)
        self._units = TensorUnits(run)
        self._assignment = run.assignment or planned.recorded

    def rank(self, rank: int) -> dict[str, Any]:
        """Return what one rank holds and sends."""
        run = run_of_rank(self._run, rank)
        mesh: Any = run.mesh
        stages = [0] if run.plan is None or not run.is_pipelined else list(run.plan.stages)
        memory = self._memory(run, stages)
        if not run.is_pipelined:
            memory = dataclasses.replace(memory, messages=bytes_of_casts(run))
        messages = [*pipeline_messages(run, self._program), *gradient_messages(run, self._count)]
        messages += self._units.messages(self._assignment, set(stages), self._count, _place(run))
        described = {
            "rank": rank,
            "node": rank // self._per_node,
            "coordinates": dataclasses.asdict(mesh.coordinates),
            "stages": stages,
            "units": self._units_of(stages),
            "parameters": sum(math.prod(local) for _, (_, local) in self._shapes(run)),
            "groups": {axis: list(group.ranks) for axis, group in mesh.groups.items() if group.size() > 1},
            "nodes_of_groups": {
                axis: len({each // self._per_node for each in group.ranks})
                for axis, group in mesh.groups.items()
                if group.size() > 1
            },
            "bytes": memory.offloaded_to(run.setting.options.offloaded).sizes,
            "messages": [{**dataclasses.asdict(each), "sent_bytes": round(each.sent_bytes)} for each in messages],
            "sent_bytes": sent_by_axis(messages),
        }
        if self._with_shapes:
            described["shapes"] = {
                name: {"local": list(local), "full": list(full)} for name, (full, local) in self._shapes(run)
            }
        return described

    def _memory(self, run: Run, stages: Sequence[int]) -> RankMemory:
        """Estimate the memory of a rank by a rank that has the same shards in its pipeline."""
        key = (
            *_place(run),
            *(each.group.rank() for each in run.parts.shardings),
        )
        if key not in self._memories:
            self._memories[key] = self._memory_of_pipeline(run)
        return self._memories[key][stages[0] % len(self._memories[key])]

    def _memory_of_pipeline(self, run: Run) -> list[RankMemory]:
        """Estimate the memory of each pipeline rank, with the activations of its tensor shards."""
        assignment = self._assignment
        local = None if assignment is None else self._units.with_local_activations(assignment, _place(run))
        return memory_of_ranks(memory_of_stages(run, self._optimizers, self._count, local), run)

    def _units_of(self, stages: Iterable[int]) -> list[str]:
        if self._assignment is None:
            return []
        pairs = zip(self._assignment.graph.nodes, self._assignment.node_stage, strict=True)
        return list(dict.fromkeys(node.unit for node, stage in pairs if stage in stages and node.unit))

    def _shapes(self, run: Run) -> Iterable[tuple[str, tuple[tuple[int, ...], tuple[int, ...]]]]:
        parameters = dict(run.setting.module.named_parameters())
        shardings = run.parts.shardings
        for name in local_names(run):
            full = full_shape(parameters[name])
            yield name, (full, shard_of(shardings, name, full).shape)

    def notes(self) -> list[str]:
        """Return what the figures leave out."""
        layout, found = self._run.setting.layout, []
        plans = self._run.plans
        unsearched = [
            f for f, plan in plans.items() if any(NOT_SEARCHED in r for r in plan.replicated_reasons.values())
        ]
        if unsearched:
            others = f" and {len(unsearched) - 1} more" if unsearched[1:] else ""
            found.append(
                f"{unsearched[0]}{others}: left unsharded, since no plan was found on a narrow copy (the reason is with"
                " its plan); a run searches it at full width, as lightning-hybrid explain does"
            )
        for fqn, error in self._units.unmeasured.items():
            found.append(
                f"messages of {fqn} between tensor ranks are not counted: it does not run on meta tensors: {error}"
            )
        if any(plan.positions is not None for plan in plans.values()):
            found.append(
                "sequences are sharded between layers: their messages are an estimate, counted as if each layer got and"
                " gave full sequences"
            )
        if layout.joins_replicas:
            found.append("tokens that are sent to experts are not counted: the router decides on them")
        return found


def _place(run: Run) -> tuple[int, int]:
    """The indices of a rank among its tensor ranks, and among its context ranks."""
    return run.mesh.rank_in("tp"), run.mesh.rank_in("cp")
