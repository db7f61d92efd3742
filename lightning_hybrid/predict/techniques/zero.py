"""ZeRO: states, gradients and parameters are shards over replicas."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

from lightning_hybrid.predict.links import Shares, gather_seconds
from lightning_hybrid.predict.techniques.technique import (
    Candidates,
    Family,
    LayersOfRank,
    PlanLayout,
    PlanTechnique,
    StepModel,
)


class Zero(PlanTechnique):
    """Stages 0 to 3, over all replicas or over some of them.

    ``reshard_after_forward`` tells whether stage 3 gathers parameters again for each backward, and stage 2 reduces
    gradients after each.
    """

    settings: ClassVar = {"zero_stage": 0, "reshard_after_forward": True}
    limits: ClassVar = {"zero_stages": (0, 1, 2, 3)}
    options: ClassVar = {
        "zero_stage": "zero_stage",
        "shard_size": "shard",
        "reshard_after_forward": "reshard_after_forward",
    }
    short: ClassVar = {"zero_stage": "zero"}

    def frugal(self, layout: PlanLayout, candidates: Candidates) -> Mapping[str, Any]:
        """Return the highest stage."""
        data, allowed = layout.data, candidates.allowed.zero_stages
        stage = candidates.fixed.get("zero_stage", max(allowed) if data > 1 else 0)
        shard = min(candidates.fixed.get("shard", data), data) if stage else 1
        return {"zero_stage": stage, "shard": shard, "replicate": data // shard if data % shard == 0 else 0}

    def levels(self, layout: PlanLayout, candidates: Candidates) -> Iterable[Mapping[str, Any]]:
        """Yield the stages."""
        stages = sorted(candidates.allowed.zero_stages) if layout.data > 1 else [0]
        for stage in [candidates.fixed["zero_stage"]] if "zero_stage" in candidates.fixed else stages:
            yield self._fields(layout, stage, candidates)

    def changes(self, layout: PlanLayout, candidates: Candidates) -> Iterator[Mapping[str, Any]]:
        """Yield stages; shards over all replicas, or over the replicas of one or eight nodes; both ways to reshard."""
        if layout.data > 1:
            for stage in candidates.allowed.zero_stages:
                yield self._fields(layout, stage, candidates)
        if layout.zero_stage:
            node = max(1, candidates.hardware.devices_per_node // (layout.tensor * layout.context))
            for largest in (layout.data, node, 8 * node):
                shard = math.gcd(layout.data, largest)
                if shard > 1:
                    yield {"shard": shard, "replicate": layout.data // shard}
        if layout.zero_stage == 3:
            yield {"reshard_after_forward": not layout.reshard_after_forward}

    def _fields(self, layout: PlanLayout, stage: int, candidates: Candidates) -> dict[str, Any]:
        """The fields of another stage."""
        shard = min(candidates.fixed.get("shard", layout.data), layout.data) if stage else 1
        if stage and layout.zero_stage and layout.shard > 1:
            shard = layout.shard
        reshard = layout.reshard_after_forward or stage != 3
        replicate = layout.data // max(shard, 1)
        return {"zero_stage": stage, "shard": shard, "replicate": replicate, "reshard_after_forward": reshard}

    def of_replicas(self, layout: PlanLayout, candidates: Candidates) -> Iterator[Mapping[str, Any]]:
        """Yield stages 0 and 3."""
        for stage in (0, 3) if layout.data > 1 and "zero_stage" not in candidates.fixed else ():
            yield self._fields(layout, stage, candidates)

    def sharded(self, layout: PlanLayout) -> Collection[str]:
        """Return what the stage shards; what stage 3 reduces once in a step is full until then."""
        stage = layout.zero_stage
        accumulates = stage == 3 and not layout.reshard_after_forward and layout.num_microbatches > 1
        kinds = {"states": 1, "gradients": 4 if accumulates else 2, "parameters": 3}
        return [kind for kind, least in kinds.items() if stage >= least]

    def gathers(self, layout: PlanLayout) -> bool:
        """Whether it is stage 3."""
        return layout.zero_stage >= 3 and layout.shard > 1

    def reduces_by_layer(self, layout: PlanLayout) -> bool:
        """Whether it is stage 2 or 3."""
        return layout.zero_stage >= 2 and layout.shard > 1

    def reduces_in_buckets(self, layout: PlanLayout) -> bool:
        """Whether gradients are reduced once in a step."""
        return layout.zero_stage in (1, 2) and layout.shard > 1 and not self._reduces_each_microbatch(layout)

    def _reduces_each_microbatch(self, layout: PlanLayout) -> bool:
        """Whether stage 2 reduces the gradients of each microbatch, to hold no more than shards of them."""
        return layout.zero_stage == 2 and layout.reshard_after_forward and layout.num_microbatches > 1

    def replica_seconds(self, step: StepModel, layers: LayersOfRank, computed: float) -> float | None:
        """Return what computation does not hide of gathers and reductions, layer by layer."""
        layout = step.layout
        if layout.shard == 1 or not (layout.zero_stage == 3 or self._reduces_each_microbatch(layout)):
            return None
        beside = computed if layout.zero_stage == 3 else computed * (2 / 3)
        return max(0.0, self._seconds(step, layers) - step.hardware.overlap * beside)

    def _seconds(self, step: StepModel, layers: LayersOfRank) -> float:
        """Seconds of gathers and reductions over shards, layer by layer, and of reductions over what is no shard.

        Stage 3 gathers for each forward and backward, or once; stage 2 once, after the optimizer's step.
        """
        layout, constants, hardware = step.layout, step.constants, step.hardware
        rest = 1.0 - constants.gather_share
        passes = layout.num_microbatches if layout.reshard_after_forward else 1
        gathers = 2 * passes if layout.reshard_after_forward and layout.zero_stage == 3 else 1
        seconds = 0.0
        for layer, count in layers:
            for size, group in step.sizes_of_shards(layer):
                between = constants.gather_share + rest / (1.0 + group.nodes / constants.gather_nodes)
                shares = Shares(constants.within_share, between)
                gather = gather_seconds(size * step.format.gathered, group, hardware, shares)
                reduce = gather_seconds(size * step.format.reduced * step.backward_share, group, hardware, shares)
                seconds += count * (gathers * gather + passes * reduce)
        shard = step.parameters(layers).over_shards(layout)
        return seconds + step.reduction_seconds(shard, layout.replicate * layout.context, layout.shard)

    def runs_within_layers(self, layout: PlanLayout) -> bool:
        """Whether it is stage 3."""
        return bool(layout.zero_stage == 3)

    def arguments(self, layout: PlanLayout) -> dict[str, Any]:
        """Return the stage, the shards if they are not over all replicas, and whether to reshard if it matters."""
        if not layout.zero_stage:
            return {}
        options: dict[str, Any] = {"zero_stage": layout.zero_stage}
        if layout.shard != layout.data:
            options["shard_size"] = layout.shard
        if layout.zero_stage == 3 or self._reduces_each_microbatch(layout):
            options["reshard_after_forward"] = layout.reshard_after_forward
        return options

    def check(self, name: str, value: Any) -> None:
        """Refuse another stage."""
        if name == "zero_stage" and value not in (0, 1, 2, 3, "auto", None):
            raise ValueError(f"zero={value}; use 0, 1, 2 or 3")

    def families(self, devices_per_node: int) -> Iterable[Family]:
        """Return each stage, and stages 0 and 3 without another kind of parallelism."""

        def has(stage: int, layout: PlanLayout) -> bool:
            return bool(layout.zero_stage == stage)

        def has_alone(stage: int, layout: PlanLayout) -> bool:
            return layout.has_replicas_alone and has(stage, layout)

        for stage in (0, 3):
            yield Family(f"replicas alone, zero {stage}", partial(has_alone, stage))
        for stage in range(4):
            yield Family(f"zero {stage}", partial(has, stage), field="zero_stage", place=5)

    def simplicity(self, layout: PlanLayout) -> Mapping[int, float]:
        """Return the stage, whether replicas have copies besides, and whether all is gathered."""
        copies = layout.replicate > 1 and layout.zero_stage > 0
        return {2: layout.zero_stage, 4: copies, 9: not layout.reshard_after_forward}

    def difference(self, layout: PlanLayout, other: PlanLayout) -> float:
        """Return 1 if both shard, over different numbers of replicas."""
        return float(bool(layout.zero_stage and other.zero_stage and layout.shard != other.shard))
