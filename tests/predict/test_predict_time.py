"""Predicted step times: what follows from the definition of a layout, and published runs of clusters."""

import dataclasses
import sys
from pathlib import Path

import pytest

from lightning_hybrid.predict.costs.cut import stages_by_rank
from lightning_hybrid.predict.costs.layers import Product
from lightning_hybrid.predict.costs.transformer import TransformerShape, transformer_costs
from lightning_hybrid.predict.hardware import BandwidthCurve, load_hardware
from lightning_hybrid.predict.layer_time import CONSTANTS, product_seconds
from lightning_hybrid.predict.layout import FORMATS, PlanLayout
from lightning_hybrid.predict.links import (
    RankGroup,
    Shares,
    all_reduce_seconds,
    all_to_all_seconds,
    gather_seconds,
    group_of_axis,
)
from lightning_hybrid.predict.time import predict_time

PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "published"
A100, H100 = load_hardware("a100-80"), load_hardware("h100")
BF16 = FORMATS["bf16-mixed"]
GPT = transformer_costs(TransformerShape(24, 2048, 8192, 16, 50304, 2048))


def predicted(layout, costs=GPT, hardware=A100, number_format=BF16):
    return predict_time(costs, layout, number_format, hardware)


def test_terms_add_up_to_the_step():
    found = predicted(PlanLayout(pipeline=4, replicate=2, tensor=2, microbatch=1, batch=32))
    assert found.seconds == pytest.approx(sum(found.terms.values()))
    assert {"computation", "tensor ranks", "bubble", "replicas", "optimizer"} <= set(found.terms)


def test_equal_stages_wait_for_the_share_of_1f1b():
    body = dataclasses.replace(GPT, layers=(GPT.layers[1],))  # 24 equal layers, no head
    found = predicted(PlanLayout(pipeline=4, microbatch=1, batch=12), body)
    busy = found.terms["computation"] + found.terms["kernel starts"]
    assert found.terms["bubble"] / (busy + found.terms["bubble"]) == pytest.approx(3 / (12 + 3))  # (p-1)/(m+p-1)


def test_zero_bubble_waits_for_a_third():
    """Where linears are all there is, forwards and both parts of backwards take the same time."""
    linears = tuple(product for product in GPT.layers[1].products if product.has_weight)
    layer = dataclasses.replace(GPT.layers[1], products=linears, moved=0.0, replicated_moved=0.0, kernels=0)
    body = dataclasses.replace(GPT, layers=(layer,))
    layout = PlanLayout(pipeline=4, microbatch=1, batch=12)
    plain = predicted(layout, body).terms["bubble"]
    found = predicted(layout.replaced(schedule="zero_bubble"), body).terms["bubble"]
    assert found == pytest.approx(plain / 3)


def test_interleaved_stages_divide_the_bubble():
    body = dataclasses.replace(GPT, layers=(GPT.layers[1],))
    layout = PlanLayout(pipeline=4, microbatch=1, batch=12)
    two = layout.replaced(stages_per_rank=2, schedule="interleaved_1f1b")
    assert predicted(two, body).terms["bubble"] == pytest.approx(predicted(layout, body).terms["bubble"] / 2)


def test_full_recomputation_adds_one_forward_of_the_layers():
    plain = predicted(PlanLayout(microbatch=4, batch=4)).terms
    full = predicted(PlanLayout(microbatch=4, batch=4, recompute="full")).terms
    assert full["computation"] == pytest.approx(plain["computation"])
    assert 0.2 * plain["computation"] < full["recomputation"] < 0.34 * plain["computation"]


def test_selective_recomputation_takes_time_for_what_it_does_not_save():
    layout = PlanLayout(microbatch=4, batch=4, recompute="selective")
    assert predicted(layout).terms["recomputation"] == 0  # fused attention alone is recomputed, by its kernel
    layers = [dataclasses.replace(layer, selective_saved=0.4 * layer.saved) for layer in GPT.layers]
    found = predicted(layout, dataclasses.replace(GPT, layers=tuple(layers))).terms["recomputation"]
    full = predicted(layout.replaced(recompute="full")).terms["recomputation"]
    assert 0 < found < full


def test_frozen_parameters_have_no_weight_gradients():
    frozen = dataclasses.replace(GPT, frozen_parameters=GPT.parameters)
    layout = PlanLayout(microbatch=4, batch=4)
    share = predicted(layout, frozen).terms["computation"] / predicted(layout).terms["computation"]
    assert 0.6 < share < 0.75  # forward and gradients of activations: two of three products


def test_frozen_parameters_are_not_reduced():
    slow = dataclasses.replace(A100, overlap=0.0)
    for layout in (PlanLayout(replicate=4, batch=4), PlanLayout(replicate=2, context=2, batch=2)):
        frozen = dataclasses.replace(GPT, frozen_parameters=GPT.parameters)
        assert predicted(layout, hardware=slow).terms["replicas"] > 0
        assert predicted(layout, frozen, slow).terms["replicas"] == 0


def test_recomputation_stops_before_a_product_whose_result_nothing_saves():
    """The MLP's second product, a third of a layer's weights, unless a dropout after it saves its result."""
    shape = TransformerShape(24, 8192, 32768, 64, 50304, 2048)
    with_dropout = transformer_costs(dataclasses.replace(shape, has_dropout=True))
    layout = PlanLayout(tensor=8, microbatch=4, batch=4, recompute="full")
    recomputed, dropout = (predicted(layout, costs).terms for costs in (transformer_costs(shape), with_dropout))
    assert 0.6 < recomputed["recomputation"] / dropout["recomputation"] < 0.75
    assert recomputed["tensor ranks"] / dropout["tensor ranks"] == pytest.approx((5 * 24 + 2) / (6 * 24 + 2))


def test_two_of_four_devices_with_direct_links_use_a_third_of_them():
    direct = load_hardware("v100-32")
    switched = dataclasses.replace(direct, direct_links=False)
    size = 64 * 2**20
    for ranks, share in ((2, 3.0), (4, 1.0)):
        group = group_of_axis(ranks, 1, 4)
        one, two = (all_reduce_seconds(size, group, hardware) - 2e-5 for hardware in (switched, direct))
        assert two / one == pytest.approx(share)


def test_heads_whose_width_is_no_multiple_of_8_run_outside_tensor_cores():
    """BLOOM's heads of 108 elements; those of 104 and 112 stay within."""

    def rate(width):
        product = Product(2048, width, 2048, 64, "count", has_weight=False, is_attention=True)
        layout = PlanLayout(fused_attention=False)
        return product.flops / product_seconds(product, layout, FORMATS["bf16-true"], A100, CONSTANTS)

    assert rate(108) < 2 * A100.product_flops["float32"] < 0.6 * rate(104)
    assert rate(104) < rate(112) < rate(128)


def test_an_8_bit_precision_leaves_excluded_products_in_16_bits():
    product = Product(4096, 8192, 65536)
    times = [
        product_seconds(dataclasses.replace(product, in_float8=in_float8), PlanLayout(), number_format, H100, CONSTANTS)
        for in_float8, number_format in ((True, FORMATS["float8"]), (False, FORMATS["float8"]), (True, BF16))
    ]
    assert times[0] < times[1] == times[2]


def test_parameters_on_the_host_are_copied_for_each_forward_and_backward():
    kinds = frozenset({"optimizer_states", "gradients"})
    layout = PlanLayout(shard=8, batch=8, zero_stage=3, offload=kinds)
    offloaded = layout.replaced(offload=kinds | {"parameters"})
    one, two = (
        predicted(offloaded.replaced(batch=8 * count)).terms["host"]
        - predicted(layout.replaced(batch=8 * count)).terms["host"]
        for count in (1, 2)
    )
    assert one == pytest.approx(2 * GPT.parameters / 8 * BF16.gathered / A100.host_bandwidth)
    assert two == pytest.approx(2 * one)


def test_copies_of_shards_are_reduced_over_the_other_replicas():
    slow = dataclasses.replace(A100, overlap=0.0)
    layout = PlanLayout(shard=8, batch=8, zero_stage=3)
    one = predicted(layout, hardware=slow).terms["replicas"]
    found = predicted(layout.replaced(replicate=16, batch=128), hardware=slow).terms["replicas"]
    size = GPT.parameters / 8 * BF16.reduced
    group = group_of_axis(16, 8, 8)
    assert found - one == pytest.approx(all_reduce_seconds(size, group, slow, Shares(CONSTANTS.within_share, 1.0)))


def test_zero_2_reduces_the_gradients_of_each_microbatch():
    slow = dataclasses.replace(A100, overlap=0.0)
    times = [
        predicted(PlanLayout(shard=8, batch=8 * m, zero_stage=2, microbatch=1), hardware=slow).terms["replicas"]
        for m in (2, 3, 4)
    ]
    reduced = sum(
        layer.count
        * gather_seconds(layer.parameters * BF16.reduced, RankGroup(8, 1, 1), slow, Shares(CONSTANTS.within_share, 1.0))
        for layer in GPT.layers
    )
    assert [times[1] - times[0], times[2] - times[1]] == pytest.approx([reduced, reduced])
    once = PlanLayout(shard=8, batch=32, zero_stage=2, reshard_after_forward=False)
    assert predicted(once, hardware=slow).terms["replicas"] < times[0]


def test_context_ranks_reduce_the_gradients():
    slow = dataclasses.replace(A100, overlap=0.0)
    replicas = predicted(PlanLayout(replicate=4, batch=4), hardware=slow).terms["replicas"]
    assert predicted(PlanLayout(context=4, batch=1), hardware=slow).terms["replicas"] == pytest.approx(replicas)
    assert predicted(PlanLayout(context=2, replicate=2, batch=1), hardware=slow).terms["replicas"] == replicas


def test_context_ranks_do_not_divide_the_head():
    head = dataclasses.replace(GPT, layers=(GPT.layers[2],))
    one, two = (predicted(PlanLayout(context=context, batch=1), head).terms["computation"] for context in (1, 2))
    assert one == two
    layers = dataclasses.replace(GPT, layers=(GPT.layers[1],))
    one, two = (predicted(PlanLayout(context=context, batch=1), layers).terms["computation"] for context in (1, 2))
    assert two < 0.7 * one


def test_rows_of_experts_stay_among_expert_ranks():
    shape = TransformerShape(4, 2048, 8192, 16, 50304, 2048, experts=8, experts_per_token=2)
    layout = PlanLayout(replicate=8, expert=8, batch=8)
    inside = predicted(layout, transformer_costs(shape)).terms["expert ranks"]
    many = layout.replaced(replicate=64, batch=64)
    assert predicted(many, transformer_costs(shape)).terms["expert ranks"] == inside > 0


def test_sharded_experts_are_not_gathered_or_reduced():
    """With as many expert ranks as replicas each expert is on one rank."""
    slow = dataclasses.replace(A100, overlap=0.0)
    few, many = (transformer_costs(TransformerShape(4, 2048, ffn, 16, 50304, 2048, experts=8)) for ffn in (4096, 8192))
    for layout in (
        PlanLayout(replicate=8, expert=8, batch=8),
        PlanLayout(shard=8, expert=8, batch=8, zero_stage=3),
    ):
        assert predicted(layout, many, slow).terms["replicas"] == predicted(layout, few, slow).terms["replicas"] > 0
        whole = layout.replaced(expert=1)
        assert predicted(whole, many, slow).terms["replicas"] > 1.5 * predicted(whole, few, slow).terms["replicas"]


def test_stages_in_v_placement_share_the_head_with_the_first_rank():
    """The head is on the first rank, as is the embedding: the other rank has layers alone."""
    layout = PlanLayout(pipeline=2, schedule="zero_bubble_v", batch=8)
    first, last = stages_by_rank(GPT, layout)
    assert (list(first), list(last)) == ([0, 3], [1, 2])
    names = [{layer.name for stage in rank.values() for layer, _ in stage} for rank in (first, last)]
    assert names == [{"embedding", "layer", "head"}, {"layer"}]
    few = dataclasses.replace(GPT, layers=(*GPT.layers[:1], dataclasses.replace(GPT.layers[1], count=1)))
    with pytest.raises(ValueError, match="2 layers, too few for 4 stages"):
        predicted(layout, few)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_ring_moves_its_share_of_the_bytes(ranks):
    flat = BandwidthCurve((1.0, 1e12), (100e9, 100e9))
    hardware = dataclasses.replace(A100, within_node=flat, latency_within=0.0)
    group = RankGroup(ranks, 1, 1)
    assert gather_seconds(1e9, group, hardware) == pytest.approx((ranks - 1) / ranks / 100)
    assert all_reduce_seconds(1e9, group, hardware) == pytest.approx(2 * (ranks - 1) / ranks / 100)


def test_groups_of_one_node_share_its_adapters():
    flat = BandwidthCurve((1.0, 1e15), (100e9, 100e9))
    hardware = dataclasses.replace(A100, between_nodes=flat, latency_between=0.0)
    alone, shared = RankGroup(16, 16, 1), RankGroup(16, 16, 8)
    assert gather_seconds(1e9, shared, hardware) == pytest.approx(8 * gather_seconds(1e9, alone, hardware))


def test_small_messages_get_less_bandwidth():
    curve = A100.between_nodes
    assert curve.bandwidth(2**24) > 5 * curve.bandwidth(2**18)
    assert curve.bandwidth(10) < 10 * curve.bandwidths[0] / curve.sizes[0] * 1.01
    assert curve.bandwidth(1e15) == curve.bandwidths[-1]


def test_tensor_ranks_across_nodes_wait_for_the_slower_link():
    slow = BandwidthCurve(A100.between_nodes.sizes, tuple(rate / 4 for rate in A100.between_nodes.bandwidths))
    layout = PlanLayout(tensor=16, microbatch=4, batch=4)
    inside = predicted(layout.replaced(tensor=8)).terms["tensor ranks"]
    across = predicted(layout).terms["tensor ranks"]
    by_slow_link = predicted(layout, hardware=dataclasses.replace(A100, between_nodes=slow)).terms["tensor ranks"]
    assert inside < across < by_slow_link / 2


@pytest.fixture(scope="module")
def published():
    sys.path.insert(0, str(PUBLISHED))
    try:
        from published_runs import published_layouts
        from published_sc21 import published_sc21
    finally:
        sys.path.remove(str(PUBLISHED))
    runs = [*published_layouts(), *published_sc21()]
    return [
        (run, predict_time(run.costs, run.layout, run.number_format, run.hardware).seconds)
        for run in runs
        if run.seconds is not None and not run.contradictory and run.layout.num_stages <= run.costs.num_layers
    ]


def mean_error(pairs):
    return sum(abs(seconds / run.seconds - 1) for run, seconds in pairs) / len(pairs)


def test_published_runs_of_known_shape(published):
    known = [(run, seconds) for run, seconds in published if run.known_shape]
    assert len(known) > 300
    assert mean_error(known) < 0.08


@pytest.mark.parametrize("table", ["SC'21 table 1", "SC'21 table 2"])
def test_megatron_on_up_to_3072_devices(published, table):
    assert mean_error([(run, seconds) for run, seconds in published if run.group == table]) < 0.08


def test_zero3_collapses_at_small_microbatches(published):
    """From 384 to 1536 devices the paper's ZeRO-3 falls from 144 to 44 TFLOP/s, and stages with tensor ranks do not."""
    rates = {
        (run.model, run.layout.ranks): run.costs.flops * run.layout.batch / run.layout.ranks / seconds
        for run, seconds in published
        if run.group == "SC'21 table 2"
    }
    zero, stages = "GPT 96x12288 ZeRO-3", "GPT 96x12288"
    assert rates[zero, 1536] < 0.5 * rates[zero, 384]
    assert rates[stages, 1536] > 0.85 * rates[stages, 384]


def test_an_efficiency_for_each_number_format():
    faster = dataclasses.replace(H100, efficiency={**H100.efficiency, "float8": 2 * H100.efficiency["float8"]})
    product = Product(4096, 8192, 65536)
    for name, factor in (("float8", 2.0), ("bf16-mixed", 1.0)):
        one, two = (product_seconds(product, PlanLayout(), FORMATS[name], each, CONSTANTS) for each in (H100, faster))
        assert one / two == pytest.approx(factor, rel=0.1)


def test_attention_takes_the_rate_of_its_kernel():
    slow, fast = (dataclasses.replace(H100, attention={name: H100.attention[name]}) for name in ("flash2", "cudnn"))
    product = Product(8192, 128, 8192, 32, "count", has_weight=False, is_attention=True)
    one, two = (product_seconds(product, PlanLayout(), BF16, each, CONSTANTS) for each in (slow, fast))
    assert one / two == pytest.approx(H100.attention["cudnn"] / H100.attention["flash2"])


def test_computation_hides_collectives_but_for_a_share():
    """Where gathers take less time than the layers, a fifth of them is seen; where they take longer, what is longer."""
    layout = PlanLayout(shard=8, batch=64, zero_stage=3, microbatch=8)
    seen = predicted(layout).terms["replicas"]
    whole = predicted(layout, hardware=dataclasses.replace(A100, overlap=0.0)).terms["replicas"]
    assert seen == pytest.approx((1 - A100.overlap) * whole)


def test_rows_of_many_experts_make_small_products():
    """As many rows in all, of 8, 64 and 512 experts; a rank that holds some of them gets rows of other ranks."""
    product, layout = Product(4096, 2048, 768), PlanLayout()
    seconds = [
        product_seconds(dataclasses.replace(product, groups=groups), layout, BF16, H100, CONSTANTS)
        for groups in (1, 8, 64, 512)
    ]
    assert seconds == sorted(seconds) and seconds[-1] > 2 * seconds[1]
    spread = product_seconds(
        dataclasses.replace(product, groups=512), layout.replaced(expert=64, shard=64), BF16, H100, CONSTANTS
    )
    assert spread < 0.7 * seconds[-1]


@pytest.mark.parametrize(("ranks", "groups"), [(8, 1), (4, 2), (1, 8)])
def test_one_expert_of_a_rank_is_a_plain_product(ranks, groups):
    product, layout = Product(4096, 2048, 768, groups=8), PlanLayout(shard=8, expert=ranks)
    plain = dataclasses.replace(product, groups=1, rows=4096 // groups)  # as many rows as one expert gets
    seconds, of_one = (product_seconds(each, layout, BF16, H100, CONSTANTS) for each in (product, plain))
    assert seconds == pytest.approx(groups * of_one / (CONSTANTS.grouped if groups > 1 else 1.0))


def test_ranks_of_a_node_share_its_adapters_in_an_all_to_all():
    flat = BandwidthCurve((1.0, 1e15), (100e9, 100e9))
    hardware = dataclasses.replace(A100, between_nodes=flat, latency_between=0.0)
    seconds = all_to_all_seconds(1e9, RankGroup(16, 2, 1), hardware)
    assert seconds == pytest.approx(8 * 0.5 * 1e9 / 100e9)
