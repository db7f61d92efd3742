"""Candidates of the search: meshes that fit the model and the cluster, and layouts that differ in one option."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from lightning_hybrid.errors import LayoutError
from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.predict.costs.cut import best_widths
from lightning_hybrid.predict.costs.layers import ModelCosts
from lightning_hybrid.predict.hardware import Hardware
from lightning_hybrid.predict.layout import Allowed, PlanLayout, offloaded_beside

Value = TypeVar("Value")
_MICROBATCH_SIZES, _MOST_MICROBATCHES = 6, 512  # sizes that are all tried, and then each of twice the last
_SHARE_DIVIDED = 0.8  # of the FLOPs of products with weights, which tensor ranks must divide; of activations, rows
_SPATIAL_SIZES = (2, 4, 8)


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, ascending."""
    small = tuple(divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0)
    return small + tuple(number // divisor for divisor in reversed(small) if divisor * divisor != number)


@dataclass(frozen=True)
class Candidates:
    """The layouts of one model on a number of ranks."""

    costs: ModelCosts  # of the model
    hardware: Hardware  # of the cluster
    ranks: int  # number of ranks
    batch: int  # samples of a step over all replicas, or over each of them
    is_replica_batch: bool  # whether ``batch`` is that of each replica
    # fields of `PlanLayout` that are not chosen; "data" is the number of replicas, and "num_microbatches" that of
    # microbatches
    fixed: Mapping[str, Any]
    allowed: Allowed  # what the model permits

    @cached_property
    def most_stages(self) -> int:
        """Largest number of stages: one layer each."""
        return max(1, self.costs.num_layers)

    def tensor_sizes(self) -> list[int]:
        """Numbers of tensor ranks, up to two nodes of them."""
        largest = 2 * self.hardware.devices_per_node if self.allowed.tensor else 1
        return self._unless_fixed(
            "tensor", [size for size in divisors(self.ranks) if size <= largest and self.divides(size)]
        )

    def divides(self, tensor: int) -> bool:
        """Whether tensor ranks divide the heads, if there are some, and most of the products of layers like these."""
        heads = [count for count in (self.costs.heads, self.costs.key_value_heads) if count]
        if tensor == 1 or any(count % tensor for count in heads):
            return tensor == 1
        return self.divided_share(tensor) > _SHARE_DIVIDED

    @property
    def is_sharded_by_tensor_ranks(self) -> bool:
        """Whether they shard most of the products, if they divide their sizes."""
        return self.divided_share(1) > _SHARE_DIVIDED

    def divided_share(self, tensor: int) -> float:
        """Return the share of FLOPs of products with weights that tensor ranks divide; in layers with heads, if any."""
        layers = self.costs.layers
        if self.costs.heads:
            layers = tuple(layer for layer in layers if any(product.is_attention for product in layer.products))
        products = [(p, p.flops * layer.count) for layer in layers for p in layer.products if p.has_weight]
        divided = sum(
            flops
            for product, flops in products
            if (product.sharded == "columns" and product.columns % tensor == 0)
            or (product.sharded == "inner" and product.inner % tensor == 0)
        )
        total = sum(flops for _, flops in products)
        return divided / total if total else float(bool(self.costs.heads))

    def _unless_fixed(self, field: str, values: list[Value]) -> list[Value]:
        return [self.fixed[field]] if field in self.fixed else values

    def meshes(self) -> Iterator[PlanLayout]:
        """Yield one layout of each mesh, the most frugal one, with the smallest microbatch."""
        for tensor in self.tensor_sizes():
            for context in self._context_sizes():
                for pipeline in self._pipeline_sizes():
                    same = tensor * context * pipeline
                    if self.ranks % same or self.fixed.get("data", self.ranks // same) * same != self.ranks:
                        continue
                    data = self.ranks // same
                    if not self.is_replica_batch and self.batch % data:
                        continue
                    for expert in self._expert_sizes(data * context):
                        layout = self._frugal(pipeline, data, tensor, context, expert)
                        if self.is_valid(layout):
                            yield layout

    def _context_sizes(self) -> list[int]:
        if self.costs.most_rows:
            sizes = [size for size in _SPATIAL_SIZES if self.ranks % size == 0 and self.shares_maps(size)]
            return self._unless_fixed("context", [1, *(sizes if self.fixed.get("spatial", True) else [])])
        largest = self.costs.positions // self.allowed.positions_per_context_rank if self.allowed.context else 1
        sizes = [size for size in divisors(self.costs.positions) if size == 1 or size <= min(largest, 64)]
        return self._unless_fixed("context", [size for size in sizes if self.ranks % size == 0])

    def shares_maps(self, ranks: int) -> bool:
        """Whether ranks would share the rows of most feature maps, where none is read by attention."""
        costs = self.costs
        if not self.allowed.spatial or costs.heads or costs.is_sequence:
            return False
        return 1 - costs.map_share(ranks) >= _SHARE_DIVIDED * (1 - 1 / ranks)

    def _pipeline_sizes(self) -> list[int]:
        largest = self.most_stages if self.allowed.pipeline else 1
        return self._unless_fixed("pipeline", [size for size in divisors(self.ranks) if size <= largest])

    def _expert_sizes(self, room: int) -> list[int]:
        """Numbers of ranks that divide the experts, and the ``room`` replicas and context ranks."""
        routes = self.costs.routes if self.allowed.expert else 0
        sizes = [size for size in range(1, routes + 1) if routes % size == room % size == 0]
        return self._unless_fixed("expert", sizes or [1])

    @property
    def why_no_routed_ranks(self) -> str:
        """Why no ranks share experts."""
        if self.costs.routes:
            return f"{self.costs.routes} experts and the replicas have no common divisor"
        unknown = "the step was not recorded, so that its experts are not known; fix their ranks"
        return "the model has no experts" if self.costs.is_traced else unknown

    def _frugal(self, pipeline: int, data: int, tensor: int, context: int, expert: int) -> PlanLayout:
        """Return the layout of a mesh that is expected to take the least memory, without offload."""
        stage = self.fixed.get("zero_stage", max(self.allowed.zero_stages) if data > 1 else 0)
        shard = min(self.fixed.get("shard", data), data) if stage else 1
        layout = PlanLayout(
            pipeline=pipeline,
            replicate=data // shard if data % shard == 0 else 0,
            shard=shard,
            tensor=tensor,
            context=context,
            spatial=context > 1 and "context" not in self.fixed and self.costs.most_rows > 0,
            batch=self.batch * (data if self.is_replica_batch else 1),
            expert=expert,
            zero_stage=stage,
            sequence_parallel=tensor > 1 and self.costs.is_sequence,
            recompute=self.allowed.recompute[-1],
        )
        layout = layout.replaced(**{name: value for name, value in self.fixed.items() if name in _NAMED})
        return layout.replaced(microbatch=self.microbatches(layout)[0])

    def microbatches(self, layout: PlanLayout) -> list[int]:
        """Return sizes of microbatches, ascending, that divide the batch of a replica; the last is the batch."""
        batch = layout.batch // max(layout.data, 1)
        if "num_microbatches" in self.fixed:
            return [-(-max(1, batch) // self.fixed["num_microbatches"])]
        if "microbatch" in self.fixed:
            return [self.fixed["microbatch"]]
        sizes = [size for size in divisors(max(batch, 1)) if batch // size <= _MOST_MICROBATCHES]
        few = sizes[:_MICROBATCH_SIZES]
        for size in sizes[_MICROBATCH_SIZES:]:
            if size >= 2 * few[-1] or size == batch:
                few.append(size)
        return few

    def is_valid(self, layout: PlanLayout) -> bool:
        """Whether the sizes fit each other and the model."""
        if layout.replicate < 1 or layout.num_stages > self.most_stages:
            return False
        if layout.spatial and (layout.tensor > 1 or layout.expert > 1):
            return False
        try:
            ParallelLayout(
                pipeline_parallel_size=layout.pipeline,
                data_replicate_size=layout.replicate,
                data_shard_size=layout.shard,
                context_parallel_size=layout.context,
                tensor_parallel_size=layout.tensor,
                expert_parallel_size=layout.expert,
            )
        except LayoutError:
            return False
        return True

    def neighbours(self, layout: PlanLayout) -> Iterator[PlanLayout]:
        """Yield the valid layouts of the same mesh that differ in one option."""
        for changes in self._changes(layout):
            if not any(name in self.fixed and self.fixed[name] != value for name, value in changes.items()):
                neighbour = self.changed(layout, changes)
                if neighbour != layout and self.is_valid(neighbour):
                    yield neighbour

    def changed(self, layout: PlanLayout, changes: Mapping[str, Any]) -> PlanLayout:
        """Return the layout with changes; what is on the host follows the stage of ZeRO."""
        layout = layout.replaced(**changes)
        if layout.offload and "offload" not in self.fixed:
            return layout.replaced(offload=offloaded_beside(layout.zero_stage))
        return layout

    def levels(self, layout: PlanLayout) -> Iterator[PlanLayout]:
        """Yield the layouts of a mesh among which its first fit is searched, the simplest first."""
        stages = sorted(self.allowed.zero_stages) if layout.data > 1 else [0]
        for kind in self._unless_fixed("recompute", self._kinds_of_recomputation()):
            for stage in self._unless_fixed("zero_stage", stages):
                yield self.changed(layout, {**self._with_stage(layout, stage), "recompute": kind})

    def rescued(self, layout: PlanLayout) -> PlanLayout | None:
        """Return a layout with what its stage of ZeRO allows on the host, if anything may be there."""
        is_free = self.allowed.offload and "offload" not in self.fixed
        return self.changed(layout, self._other_offload(layout)) if is_free else None

    def of_replicas(self, best: PlanLayout) -> Iterator[PlanLayout]:
        """Yield layouts of replicas alone, with the recomputation of the chosen one, that reports compare."""
        for mesh in self.meshes():
            if mesh.has_replicas_alone and mesh.data > 1 and "zero_stage" not in self.fixed:
                for stage in (0, 3):
                    yield self.changed(mesh, {**self._with_stage(mesh, stage), "recompute": best.recompute})

    def _changes(self, layout: PlanLayout) -> Iterator[Mapping[str, Any]]:
        """Yield the fields of each layout that differs in one option; ZeRO shards over all, one or eight nodes."""
        allowed = self.allowed
        for size in self.microbatches(layout):
            yield {"microbatch": size}
        if layout.pipeline > 1:
            for schedule in allowed.schedules:
                yield {"schedule": schedule, "stages_per_rank": 1, "widths": ()}
            for stages in range(2, allowed.largest_stages_per_rank + 1):
                yield {"schedule": "1f1b", "stages_per_rank": stages, "widths": ()}
            if allowed.widths and (widths := self.widths(layout.pipeline)):
                yield {"schedule": "1f1b", "stages_per_rank": 1, "widths": widths}
        for stage in allowed.zero_stages if layout.data > 1 else ():
            yield self._with_stage(layout, stage)
        if layout.zero_stage:
            node = max(1, self.hardware.devices_per_node // (layout.tensor * layout.context))
            for largest in (layout.data, node, 8 * node):
                shard = math.gcd(layout.data, largest)
                if shard > 1:
                    yield {"shard": shard, "replicate": layout.data // shard}
        if layout.zero_stage == 3:
            yield {"reshard_after_forward": not layout.reshard_after_forward}
        if layout.tensor > 1 and self.costs.is_sequence:
            yield {"sequence_parallel": not layout.sequence_parallel}
        for kind in self._kinds_of_recomputation():
            yield {"recompute": kind}
        if allowed.chunked_loss and any(layer.float32_saved or layer.loss_saved for layer in self.costs.layers):
            yield {"chunked_loss": not layout.chunked_loss}
        if allowed.offload:
            yield self._other_offload(layout)

    @cached_property
    def _known_widths(self) -> dict[int, tuple[int, ...]]:
        return {}

    def widths(self, pipeline: int) -> tuple[int, ...]:
        """Return the widths of stages that are best for a number of pipeline ranks; empty where each has one."""
        known = self._known_widths
        if pipeline not in known:
            known[pipeline] = best_widths(self.costs, pipeline)
        return known[pipeline]

    def _with_stage(self, layout: PlanLayout, stage: int) -> dict[str, Any]:
        """The fields of another stage of ZeRO."""
        shard = min(self.fixed.get("shard", layout.data), layout.data) if stage else 1
        if stage and layout.zero_stage and layout.shard > 1:
            shard = layout.shard
        reshard = layout.reshard_after_forward or stage != 3
        replicate = layout.data // max(shard, 1)
        return {"zero_stage": stage, "shard": shard, "replicate": replicate, "reshard_after_forward": reshard}

    def _kinds_of_recomputation(self) -> list[str]:
        """The kinds that differ for this model."""
        repeated = [layer for layer in self.costs.layers if layer.repeats]
        differ = any(layer.saved_scores or layer.selective_saved != layer.saved for layer in repeated)
        return [kind for kind in self.allowed.recompute if differ or kind != "selective"]

    def _other_offload(self, layout: PlanLayout) -> dict[str, Any]:
        """Nothing on the host, or what the stage of ZeRO allows."""
        return {"offload": frozenset() if layout.offload else offloaded_beside(layout.zero_stage)}


_NAMED = {each.name for each in fields(PlanLayout)} - {"shard", "replicate", "batch", "microbatch"}
