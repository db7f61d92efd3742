"""Predicted step times: what follows from the definition of a layout, and published runs of clusters."""

import dataclasses
import sys
from pathlib import Path

import pytest

from lightning_hybrid.planner.costs.transformer_costs import TransformerShape, transformer_costs
from lightning_hybrid.planner.hardware.hardware import BandwidthCurve, load_hardware
from lightning_hybrid.planner.plan_layout import FORMATS, PlanLayout
from lightning_hybrid.planner.time.collective_seconds import (
    RankGroup,
    all_reduce_seconds,
    gather_seconds,
    group_of_axis,
)
from lightning_hybrid.planner.time.predict_time import predict_time

PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "published"
A100 = load_hardware("a100-80")
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
    body = dataclasses.replace(GPT, layers=(GPT.layers[1],))
    layout = PlanLayout(pipeline=4, microbatch=1, batch=12)
    plain = predicted(layout, body).terms["bubble"]
    found = predicted(dataclasses.replace(layout, schedule="zero_bubble"), body).terms["bubble"]
    assert found == pytest.approx(plain / 3)


def test_interleaved_stages_divide_the_bubble():
    body = dataclasses.replace(GPT, layers=(GPT.layers[1],))
    layout = PlanLayout(pipeline=4, microbatch=1, batch=12)
    two = dataclasses.replace(layout, stages_per_rank=2, schedule="interleaved_1f1b")
    assert predicted(two, body).terms["bubble"] == pytest.approx(predicted(layout, body).terms["bubble"] / 2)


def test_full_recomputation_adds_one_forward_of_the_layers():
    plain = predicted(PlanLayout(microbatch=4, batch=4)).terms
    full = predicted(PlanLayout(microbatch=4, batch=4, recompute="full")).terms
    assert full["computation"] == pytest.approx(plain["computation"])
    assert 0.2 * plain["computation"] < full["recomputation"] < 0.34 * plain["computation"]


def test_frozen_parameters_have_no_weight_gradients():
    frozen = dataclasses.replace(GPT, frozen_parameters=GPT.parameters)
    layout = PlanLayout(microbatch=4, batch=4)
    share = predicted(layout, frozen).terms["computation"] / predicted(layout).terms["computation"]
    assert 0.6 < share < 0.75  # forward and gradients of activations: two of three products


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_ring_moves_its_share_of_the_bytes(ranks):
    flat = BandwidthCurve((1.0, 1e12), (100e9, 100e9))
    hardware = dataclasses.replace(A100, within_node=flat, latency_within=0.0)
    group = RankGroup(ranks, ranks, 1)
    assert gather_seconds(1e9, group, hardware) == pytest.approx((ranks - 1) / ranks / 100)
    assert all_reduce_seconds(1e9, group, hardware) == pytest.approx(2 * (ranks - 1) / ranks / 100)


def test_groups_of_one_node_share_its_adapters():
    flat = BandwidthCurve((1.0, 1e15), (100e9, 100e9))
    hardware = dataclasses.replace(A100, between_nodes=flat, latency_between=0.0)
    alone, shared = RankGroup(16, 1, 1), RankGroup(16, 1, 8)
    assert gather_seconds(1e9, shared, hardware) == pytest.approx(8 * gather_seconds(1e9, alone, hardware))


@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [(8, 1, RankGroup(8, 8, 1)), (4, 2, RankGroup(4, 4, 2)), (16, 1, RankGroup(16, 8, 1)), (4, 8, RankGroup(4, 1, 8))],
)
def test_place_of_an_axis_in_nodes(size, stride, expected):
    assert group_of_axis(size, stride, 8) == expected


def test_small_messages_get_less_bandwidth():
    curve = A100.between_nodes
    assert curve.bandwidth(2**24) > 5 * curve.bandwidth(2**18)
    assert curve.bandwidth(10) < 10 * curve.bandwidths[0] / curve.sizes[0] * 1.01
    assert curve.bandwidth(1e15) == curve.bandwidths[-1]


def test_tensor_ranks_across_nodes_wait_for_the_slower_link():
    slow = BandwidthCurve(A100.between_nodes.sizes, tuple(rate / 4 for rate in A100.between_nodes.bandwidths))
    layout = PlanLayout(tensor=16, microbatch=4, batch=4)
    inside = predicted(dataclasses.replace(layout, tensor=8)).terms["tensor ranks"]
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
    assert mean_error(known) < 0.085


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
