"""Candidates of the search: meshes that fit the model and the cluster, and layouts that differ in one option."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightning_hybrid.errors import LayoutError
from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.predict.costs.layers import ModelCosts
from lightning_hybrid.predict.hardware import Hardware
from lightning_hybrid.predict.layout import PlanLayout
from lightning_hybrid.predict.plans import Allowed
from lightning_hybrid.predict.techniques.order import PLANNED

_MICROBATCH_SIZES, _MOST_MICROBATCHES = 6, 512  # sizes that are all tried, and then each of twice the last
_SHARE_DIVIDED = 0.8  # of the FLOPs of products with weights, which tensor ranks must divide


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return small + [number // divisor for divisor in reversed(small) if divisor * divisor != number]


def merged(mappings: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entries of all mappings."""
    return {name: value for each in mappings for name, value in each.items()}


@dataclass(frozen=True)
class Candidates:
    """The layouts of one model on a number of ranks.

    Attributes:
        costs: Of the model.
        hardware: Of the cluster.
        ranks: Number of ranks.
        batch: Samples of a step over all replicas, or over each of them.
        is_replica_batch: Whether ``batch`` is that of each replica.
        fixed: Fields of `PlanLayout` that are not chosen; "data" is the number of replicas, and "num_microbatches"
            that of microbatches.
        allowed: What the model permits.
    """

    costs: ModelCosts
    hardware: Hardware
    ranks: int
    batch: int
    is_replica_batch: bool
    fixed: Mapping[str, Any]
    allowed: Allowed

    @cached_property
    def most_stages(self) -> int:
        """Largest number of stages: one layer each."""
        return max(1, self.costs.num_layers)

    def tensor_sizes(self) -> list[int]:
        """Numbers of tensor ranks, up to two nodes of them."""
        largest = 2 * self.hardware.devices_per_node if self.allowed.tensor else 1
        return self._sizes("tensor", [size for size in divisors(self.ranks) if size <= largest and self.divides(size)])

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

    def _sizes(self, field: str, sizes: list[int]) -> list[int]:
        return [self.fixed[field]] if field in self.fixed else sizes

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
                    for sizes in itertools.product(*(each.sizes(data * context, self) for each in PLANNED)):
                        layout = self._frugal(pipeline, data, tensor, context, merged(sizes))
                        if self.is_valid(layout):
                            yield layout

    def _context_sizes(self) -> list[int]:
        largest = self.costs.positions // self.allowed.positions_per_context_rank if self.allowed.context else 1
        sizes = [size for size in divisors(self.costs.positions) if size == 1 or size <= min(largest, 64)]
        return self._sizes("context", [size for size in sizes if self.ranks % size == 0])

    def _pipeline_sizes(self) -> list[int]:
        largest = self.most_stages if self.allowed.pipeline else 1
        return self._sizes("pipeline", [size for size in divisors(self.ranks) if size <= largest])

    def _frugal(self, pipeline: int, data: int, tensor: int, context: int, others: Mapping[str, Any]) -> PlanLayout:
        """Return the layout of a mesh that is expected to take the least memory, without offload."""
        layout = PlanLayout(
            pipeline=pipeline,
            replicate=data,
            tensor=tensor,
            context=context,
            batch=self.batch * (data if self.is_replica_batch else 1),
            **others,
        )
        for technique in PLANNED:
            layout = layout.replaced(**technique.frugal(layout, self))
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
        try:
            ParallelLayout(
                pipeline_parallel_size=layout.pipeline,
                data_replicate_size=layout.replicate,
                data_shard_size=layout.shard,
                context_parallel_size=layout.context,
                tensor_parallel_size=layout.tensor,
                **{
                    option: layout.fields[field]
                    for each in PLANNED
                    if each.size
                    for option, field in each.options.items()
                },
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
        """Return the layout with changes, and with what follows from them."""
        layout = layout.replaced(**changes)
        followed = merged(each.followed(layout, self) for each in PLANNED)
        return layout.replaced(**followed) if followed else layout

    def _changes(self, layout: PlanLayout) -> Iterator[Mapping[str, Any]]:
        for size in self.microbatches(layout):
            yield {"microbatch": size}
        for technique in PLANNED:
            yield from technique.changes(layout, self)


_NAMED = PlanLayout.defaults.keys() - {"shard", "replicate", "batch", "microbatch"}
