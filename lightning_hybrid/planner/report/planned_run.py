"""`PlannedRun`: a search with what it was made for, as the reports show it; the Trainer's arguments of a plan."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from lightning_hybrid.planner.costs.layer_costs import ModelCosts
from lightning_hybrid.planner.hardware.hardware import Hardware
from lightning_hybrid.planner.plan_layout import NumberFormat
from lightning_hybrid.planner.search.layout_options import spelled, strategy_options
from lightning_hybrid.planner.search.plans_and_rejections import Plan, SearchResult


@dataclass(frozen=True)
class PlannedRun:
    """A search and its input.

    Attributes:
        result: Of the search.
        costs: Of the model.
        number_format: Of its parameters.
        hardware: Of the cluster.
        devices: Devices of each node.
        num_nodes: Number of nodes.
        precision: As the Trainer spells it.
    """

    result: SearchResult
    costs: ModelCosts
    number_format: NumberFormat
    hardware: Hardware
    devices: int
    num_nodes: int
    precision: str

    @property
    def title(self) -> str:
        """The model and the cluster in a line."""
        costs, devices = self.costs, self.devices * self.num_nodes
        nodes = f"{self.num_nodes} nodes of {self.devices}" if self.num_nodes > 1 else "one node"
        return (
            f"{costs.name}: {_count(costs.parameters)} parameters, {costs.num_layers} units, on {devices}"
            f" {self.hardware.name} ({nodes}), {self.precision}"
        )

    def trainer_arguments(self, plan: Plan) -> str:
        """Return the Trainer of a plan in Python, with the batch size that its loader should have."""
        layout = plan.layout
        chosen = strategy_options(layout)
        if layout.data == layout.ranks > 1 and not layout.zero_stage:
            chosen = {"data_parallel_size": layout.data, **chosen}  # or the strategy would plan, were memory short
        options = "".join(f"\n        {name}={value!r}," for name, value in chosen.items())
        devices, nodes = self.devices, self.num_nodes
        if layout.ranks < devices * nodes:
            devices, nodes = min(layout.ranks, devices), max(1, layout.ranks // devices)
        replicas = "replica" if layout.data == 1 else "replicas"
        accelerator = '    accelerator="cpu",\n' if self.hardware.is_host else ""
        return (
            (
                f"Trainer(\n{accelerator}    devices={devices},\n    num_nodes={nodes},\n"
                f"    precision={self.precision!r},\n"
                f"    strategy=Hybrid3DStrategy({options}\n    ),\n)\n"
                f"# batch_size={layout.batch // layout.data} of the loader, for each of {layout.data} {replicas}"
            )
            .replace("Hybrid3DStrategy(\n    )", "Hybrid3DStrategy()")
            .replace("'", '"')
        )

    def has_several_batches(self, most: int) -> bool:
        """Return whether the best plans differ in the samples of a step."""
        return len({plan.layout.batch for plan in self.result.plans[:most]}) > 1

    def compared_samples(self, most: int) -> str:
        """Return for which samples the reasons give times, where the best plans differ in those of a step."""
        samples = self.result.best.layout.batch
        return f", times of {samples:,} samples" if self.has_several_batches(most) else ""

    def rate(self, plan: Plan) -> tuple[float, str]:
        """Return the throughput over all devices, in tokens, or samples where these are no sequences."""
        assert plan.time is not None
        positions = self.costs.positions
        return plan.time.samples_per_second * positions, "tokens/s" if positions > 1 else "samples/s"

    def content(self, most: int = 5) -> dict[str, Any]:
        """Return the plans as plain values."""
        return {
            "model": {
                "name": self.costs.name,
                "parameters": self.costs.parameters,
                "units": self.costs.num_layers,
                "positions": self.costs.positions,
                "forward_flops_per_sample": self.costs.flops,
                "is_traced": self.costs.is_traced,
                "notes": list(self.costs.notes),
            },
            "hardware": self.hardware.name,
            "devices": self.devices,
            "num_nodes": self.num_nodes,
            "precision": self.precision,
            "evaluated": self.result.evaluated,
            "plans": [self.plan_content(plan) for plan in self.result.plans[:most]],
            "rejected": [
                {
                    "family": rejection.family,
                    "reason": rejection.reason,
                    "layout": None if rejection.layout is None else spelled(rejection.layout),
                }
                for rejection in self.result.rejected
            ],
            "trainer": self.trainer_arguments(self.result.best),
        }

    def plan_content(self, plan: Plan) -> dict[str, Any]:
        """Return one plan as plain values: seconds, bytes."""
        layout = {
            field.name: _plain(getattr(plan.layout, field.name)) for field in dataclasses.fields(type(plan.layout))
        }
        content: dict[str, Any] = {
            "layout": spelled(plan.layout),
            "options": strategy_options(plan.layout),
            "fields": layout,
            "fits": plan.fits,
            "memory": plan.memory.least,
            "memory_error": plan.memory_error * plan.memory.least,
            "memory_of_ranks": [dict(rank) for rank in plan.memory.ranks],
            "capacity": plan.memory.capacity,
        }
        if plan.time is not None:
            content |= {
                "seconds": plan.time.seconds,
                "seconds_error": plan.time_error * plan.time.seconds,
                "terms": dict(plan.time.terms),
                "samples_per_second": plan.time.samples_per_second,
            }
        return content


def rank_name(rank: int, plan: Plan) -> str:
    """Return how a report calls a pipeline rank of a plan."""
    return f"pipeline rank {rank}" if plan.layout.pipeline > 1 else "each rank"


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else value


def _count(number: float) -> str:
    for size, word in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if number >= size:
            return f"{number / size:,.1f} {word}"
    return f"{number:,.0f}"
