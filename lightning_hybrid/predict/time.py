"""`predict_time`: seconds of one optimizer step of a model under a layout on a cluster."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from lightning_hybrid.predict.bubble import StageSeconds, bubble_seconds, seconds_of_widths
from lightning_hybrid.predict.costs.cut import stages_by_rank
from lightning_hybrid.predict.costs.layers import (
    LayerCosts,
    ModelCosts,
    Parameters,
    layout_of_layer,
    parameters_of_rank,
)
from lightning_hybrid.predict.hardware import Hardware
from lightning_hybrid.predict.layer_time import CONSTANTS, EfficiencyConstants, layer_seconds
from lightning_hybrid.predict.layout import NumberFormat, PlanLayout
from lightning_hybrid.predict.links import (
    RankGroup,
    Shares,
    all_reduce_seconds,
    all_to_all_seconds,
    gather_seconds,
    group_of_axis,
    group_of_two_axes,
    message_seconds,
)
from lightning_hybrid.predict.plans import PredictedTime

LayersOfRank = Sequence[tuple[LayerCosts, int]]


def predict_time(
    costs: ModelCosts,
    layout: PlanLayout,
    number_format: NumberFormat,
    hardware: Hardware,
    constants: EfficiencyConstants = CONSTANTS,
) -> PredictedTime:
    """Predict the seconds of one optimizer step, and what they are made of."""
    return StepModel(costs, layout, number_format, hardware, constants).predict()


class StepModel:
    """One prediction; the fields are its arguments."""

    def __init__(
        self,
        costs: ModelCosts,
        layout: PlanLayout,
        number_format: NumberFormat,
        hardware: Hardware,
        constants: EfficiencyConstants,
    ) -> None:
        self.terms_of_layers: dict[int, dict[str, float]] = {}
        self.costs, self.layout, self.format = costs, layout, number_format
        self.hardware, self.constants = hardware, constants
        tensor, context = layout.tensor, layout.context
        self.tensor_group = self.group(tensor, 1)
        self.context_group = self.group(context, tensor)
        self.shard_group = self.group(layout.shard, tensor * context)
        self.parts_of_layers: dict[int, tuple[float, float]] = {}  # forwards, and gradients of weights
        self.shares = Shares(constants.within_share, 1.0)
        self.waited = Shares(constants.within_share, constants.within_share)
        self.stage_stride = tensor * context * layout.data
        self.backward_share = (costs.parameters - costs.frozen_parameters) / max(costs.parameters, 1)

    def predict(self) -> PredictedTime:
        """Predict all terms."""
        layout = self.layout
        each = layout.stages_of_each_rank
        stages_of_ranks = stages_by_rank(self.costs, layout)
        ranks = [list(itertools.chain(*stages.values())) for stages in stages_of_ranks]
        of_ranks = [self.microbatch_terms(layers) for layers in ranks]
        widths = [width for width in layout.widths for _ in range(width)] or [1] * layout.pipeline
        busy = [sum(terms.values()) for terms in of_ranks]
        slowest = max(range(layout.pipeline), key=lambda rank: busy[rank] / widths[rank])
        count = -(-layout.num_microbatches // widths[slowest])
        terms = {name: count * seconds for name, seconds in of_ranks[slowest].items()}
        message, all_messages = self.messages()
        stages = [{number: self.stage_seconds(stage) for number, stage in held.items()} for held in stages_of_ranks]
        if layout.widths:
            of_stages = list(dict(pair for held in stages for pair in held.items()).values())
            step = seconds_of_widths(layout.schedule, layout.num_microbatches, of_stages, layout.widths)
            terms["bubble"] = max(0.0, step - count * busy[slowest])
        else:
            terms["bubble"] = bubble_seconds(layout.schedule, count, stages)
        late = max(0.0, message - busy[slowest] / (2 * each))
        terms["pipeline messages"] = 2 * (all_messages + count * each * late)
        computed = count * busy[slowest]
        last = max(ranks, key=lambda layers: parameters_of_rank(layers, self.layout).total)
        terms.update(self.replica_terms(last, computed))
        terms["replicas"] += max(map(self.copies_seconds, ranks, widths))
        terms.update(self.optimizer_terms(last))
        samples = layout.batch
        flops = (2.0 + self.backward_share) * self.costs.flops * samples / layout.ranks
        return PredictedTime(sum(terms.values()), terms, samples, flops)

    def microbatch_terms(self, layers: LayersOfRank) -> dict[str, float]:
        """Seconds of one microbatch's forward and backward through the layers of one rank, by term."""
        total: dict[str, float] = {}
        for layer, count in layers:
            for name, seconds in self.layer_terms(layer).items():
                total[name] = total.get(name, 0.0) + count * seconds
        return total

    def layer_terms(self, layer: LayerCosts) -> dict[str, float]:
        """The same of one layer; computed once for equal layers."""
        known = self.terms_of_layers.get(id(layer))
        if known is not None:
            return known
        layout = self.layout
        seconds = layer_seconds(layer, layout, self.format, self.hardware, self.constants)
        backward = seconds.backward * (1.0 + self.backward_share) / 2.0
        terms = {
            "computation": seconds.forward + backward - seconds.kernel_starts,
            "recomputation": seconds.again,
            "kernel starts": seconds.kernel_starts,
        }
        passes = 2 + (layout.forwards if layer.repeats else 0) + layer.again
        size = layer.outputs * layout.microbatch * self.format.activation / layout_of_layer(layer, layout).context
        if layer.reductions and layout.tensor > 1:
            one = all_reduce_seconds(size, self.tensor_group, self.hardware, self.waited)
            # Overlapped, a collective goes in as many chunks as ranks, and the products hide all but one of these.
            seen = 1.0 / layout.tensor if layout.overlapped_tensor_ranks else 1.0
            skipped = sum(each.sharded == "inner" and not each.repeats for each in layer.products)
            terms["tensor ranks"] = (passes * layer.reductions - (passes - 2) * skipped) * one * seen
        if layout.spatial:
            terms["spatial ranks"] = self.spatial_seconds(layer, passes)
        elif layout.context > 1 and any(product.is_attention for product in layer.products):
            terms["context ranks"] = self.context_seconds(layer, seconds.forward + backward)
        if layout.routed_ranks > 1 and layer.routed_tokens:
            routed = size * layer.routed_tokens / max(self.costs.positions, 1)
            routed /= layout.tensor if layout.sequence_parallel else 1
            group = self.group(layout.routed_ranks, layout.tensor)
            exchanged = 2 * passes * all_to_all_seconds(routed, group, self.hardware, self.waited)
            beside = seconds.forward + backward if layout.overlapped_expert_ranks else 0.0
            terms["expert ranks"] = self.beside(exchanged, beside)
        names = "tensor ranks", "context ranks", "spatial ranks", "expert ranks"
        exchanged = sum(terms.get(name, 0.0) for name in names)
        self.parts_of_layers[id(layer)] = seconds.forward + exchanged / passes, seconds.weights * self.backward_share
        self.terms_of_layers[id(layer)] = terms
        return terms

    def context_seconds(self, layer: LayerCosts, computed: float) -> float:
        """Seconds by which keys and values, and their gradients, exceed the computation that hides them."""
        heads = self.costs.key_value_heads or 1
        share = heads / (self.costs.heads or heads)
        size = 2 * share * layer.outputs * self.layout.microbatch * self.format.activation / self.layout.tensor
        one = gather_seconds(size, self.context_group, self.hardware, self.waited)
        return self.beside(3.0 * one, computed)

    def spatial_seconds(self, layer: LayerCosts, passes: float) -> float:
        """Seconds of the rows at borders, and of the sums of statistics and of gradients, which the layer waits for.

        The backward of a convolution fetches the rows again, and sends back their gradients.
        """
        layout, hardware, group = self.layout, self.hardware, self.context_group
        samples, seconds = layout.microbatch, 0.0
        for each in layer.maps:
            if each.rows < layout.context:
                continue
            if each.border:
                size = each.border * each.row_elements * samples * self.format.activation
                one = message_seconds(size, group.nodes > 1, group.groups_per_node, hardware)
                seconds += (passes + 1) * one
            statistics = all_reduce_seconds(4.0 * each.statistics, group, hardware, self.waited)
            gradients = all_reduce_seconds(each.summed * self.format.activation, group, hardware, self.waited)
            seconds += passes * statistics + self.backward_share * gradients
        return seconds

    def group(self, size: int, stride: int) -> RankGroup:
        """The groups of an axis, by its size and the ranks between neighbours."""
        return group_of_axis(size, stride, self.hardware.devices_per_node, self.layout.ranks)

    def messages(self) -> tuple[float, float]:
        """Seconds of the slowest message from a stage to the next one, and of all of them, one after the other."""
        layout = self.layout
        if layout.pipeline == 1:
            return 0.0, 0.0
        size = max(layer.outputs for layer in self.costs.layers) * layout.microbatch * self.format.activation
        size /= layout.tensor * (1 if layout.spatial else layout.context)
        hops = (len(layout.widths) or layout.pipeline) - 1
        between = min(hops, self.group(layout.pipeline, self.stage_stride).nodes - 1)
        senders = min(self.stage_stride, self.hardware.devices_per_node)
        inside, outside = (message_seconds(size, crosses, senders, self.hardware) for crosses in (False, True))
        return outside if between else inside, between * outside + (hops - between) * inside

    def stage_seconds(self, layers: LayersOfRank) -> StageSeconds:
        """Seconds of one microbatch on a stage of these layers, by the parts that a schedule orders."""
        total = sum(self.microbatch_terms(layers).values())
        forward, weights = (
            sum(count * self.parts_of_layers[id(layer)][part] for layer, count in layers) for part in (0, 1)
        )
        return StageSeconds(forward, max(0.0, total - forward - weights), weights)

    def copies_seconds(self, layers: LayersOfRank, width: int) -> float:
        """Seconds in which the ranks of a stage sum its gradients, at the end of a step."""
        if width == 1:
            return 0.0
        own = parameters_of_rank(layers, self.layout)
        parameters = own.over_shards(self.layout) if self.layout.shards("gradients") else own
        size = parameters.total * self.format.reduced * self.backward_share
        return all_reduce_seconds(size, self.group(width, self.stage_stride), self.hardware, self.shares)

    def beside(self, collectives: float, computed: float) -> float:
        """Seconds that collectives add to computation beside them: what is longer, and a share of what is hidden."""
        hidden = min(collectives, computed)
        return collectives - self.hardware.overlap * hidden

    def replica_terms(self, layers: LayersOfRank, computed: float) -> dict[str, float]:
        """Seconds that gathers and reductions over replicas and context ranks add to the computation beside them."""
        layout = self.layout
        if layout.copies == 1:
            return {"replicas": 0.0}
        backward = computed * (2 + layout.forwards) / (3 + layout.forwards)
        if layout.shard > 1 and (layout.shards("parameters") or layout.reduces_each_microbatch):
            return {"replicas": self.sharded_seconds(layers, computed - backward, backward)}
        one = self.reduction_seconds(parameters_of_rank(layers, layout), layout.copies, 1)
        return {"replicas": self.beside(one, backward / layout.num_microbatches) if layout.pipeline == 1 else one}

    def sharded_seconds(self, layers: LayersOfRank, forward: float, backward: float) -> float:
        """Seconds of gathers and reductions over shards, and of reductions over what is no shard.

        The collectives of one layer run beside the computation of another. Parameters that are shards are gathered for
        each forward and backward, or for the first forward; others after the optimizer's step.
        """
        layout = self.layout
        gather = reduce = 0.0
        for layer, count in layers:
            for size, group in self.sizes_of_shards(layer):
                gather += count * gather_seconds(size * self.format.gathered, group, self.hardware, self.shares)
                reduced = size * self.format.reduced * self.backward_share
                reduce += count * gather_seconds(reduced, group, self.hardware, self.shares)
        shard = parameters_of_rank(layers, layout).over_shards(layout)
        last = self.reduction_seconds(shard, layout.copies // layout.shard, layout.shard)
        passes = layout.num_microbatches
        if not layout.reshard_after_forward:
            return self.beside(gather, forward / passes) + self.beside(reduce, backward / passes) + last
        if not layout.shards("parameters"):
            return gather + self.beside(passes * reduce, backward) + last
        return self.beside(passes * gather, forward) + self.beside(passes * (gather + reduce), backward) + last

    def sizes_of_shards(self, layer: LayerCosts) -> Iterator[tuple[float, RankGroup]]:
        """Yield numbers of a layer's parameters, with the ranks that shard them."""
        layout, own = self.layout, parameters_of_rank([(layer, 1)], self.layout)
        if layout.routed_ranks == 1:
            yield own.total, self.shard_group
            return
        yield own.dense, self.shard_group
        yield own.routed, self.group(layout.routed_shards, layout.tensor * max(layout.routed_ranks, layout.context))

    def reduction_seconds(self, own: Parameters, copies: int, shard: int) -> float:
        """Seconds of the all-reduces of gradients over ``copies`` ranks, each ``shard`` replicas from the next one."""
        layout, per_node = self.layout, self.hardware.devices_per_node
        group = self.group(copies, layout.tensor * (layout.context * shard if layout.spatial else 1))
        if shard > 1 and not layout.spatial:  # the shards lie between context ranks and replicas of them
            inner, stride = self.group(layout.context, layout.tensor), layout.tensor * layout.context * shard
            group = group_of_two_axes(inner, self.group(layout.replicate, stride), per_node)
        sizes = [(own.total, group)]
        if layout.routed_ranks > 1:
            holders = max(
                1, copies * shard // (layout.routed_ranks * layout.routed_shards if shard > 1 else layout.routed_ranks)
            )
            routed = self.group(holders, layout.tensor * max(layout.routed_ranks, shard))
            sizes = [(own.dense, group), (own.routed, routed)]
        element = self.format.reduced * self.backward_share
        return sum(all_reduce_seconds(size * element, each, self.hardware, self.shares) for size, each in sizes)

    def optimizer_terms(self, layers: LayersOfRank) -> dict[str, float]:
        """Seconds of the optimizer's step on all states; on the host, of copies if these take longer."""
        layout, form, hardware = self.layout, self.format, self.hardware
        own = parameters_of_rank(layers, layout)
        parameters = own.over_shards(layout).total if layout.shards("states") else own.total
        parameters *= self.backward_share
        if "optimizer step" not in layout.elsewhere:
            moved = parameters * (2 * form.state + 2 * form.parameter + form.gradient)
            return {"optimizer": moved / (hardware.memory_bandwidth * self.constants.memory_share)}
        copied = parameters * (form.gradient + form.parameter) / hardware.host_bandwidth
        copies = 0.0  # of shards of parameters to the device, for each forward and backward
        if "parameters" in layout.elsewhere:
            passes = 2 * layout.num_microbatches if layout.reshard_after_forward else 1
            copies = passes * own.over_shards(layout).total * form.gathered / hardware.host_bandwidth
        return {"host": max(copied, parameters / hardware.host_update_rate) + copies}
