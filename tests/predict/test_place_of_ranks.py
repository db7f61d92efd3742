"""The place of an axis's ranks in nodes, against an enumeration of all ranks of small clusters."""

import itertools

import pytest

from lightning_hybrid.predict.costs.transformer import TransformerShape, transformer_costs
from lightning_hybrid.predict.hardware import load_hardware
from lightning_hybrid.predict.layout import FORMATS, PlanLayout
from lightning_hybrid.predict.links import RankGroup, group_of_axis, group_of_two_axes, message_seconds
from lightning_hybrid.predict.time import predict_time


def enumerated(size, stride, node, ranks):
    groups = [
        [outer * size * stride + k * stride + inner for k in range(size)]
        for outer in range(ranks // (size * stride))
        for inner in range(stride)
    ]
    nodes = [{rank // node for rank in group} for group in groups]
    sharing = [sum(number in each and len(each) > 1 for each in nodes) for number in range(-(-ranks // node))]
    return RankGroup(size, max(map(len, nodes)), max(1, *sharing, 1))


@pytest.mark.parametrize("node", [2, 4, 6, 8])
def test_an_axis_lies_where_its_ranks_do(node):
    for size, stride, outer in itertools.product(range(2, 9), (1, 2, 3, 4, 6, 8, 12), (1, 2, 3, 8)):
        ranks = size * stride * outer
        assert group_of_axis(size, stride, node, ranks) == enumerated(size, stride, node, ranks), (size, stride, outer)


@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [
        (8, 1, (8, 1, 1)),
        (4, 2, (4, 1, 1)),
        (16, 1, (16, 2, 1)),
        (8, 4, (8, 4, 4)),
        (4, 8, (4, 4, 8)),
        (3, 2, (3, 2, 4)),
    ],
)
def test_place_of_an_axis_in_nodes_of_eight(size, stride, expected):
    assert group_of_axis(size, stride, 8) == RankGroup(*expected)


def test_one_node_of_any_number_of_devices_is_not_left():
    assert group_of_axis(3, 2, 8, ranks=6) == RankGroup(3, 1, 1)


@pytest.mark.parametrize(("context", "shard", "replicate"), [(2, 4, 4), (4, 2, 8), (2, 8, 2), (8, 2, 1), (1, 4, 4)])
def test_copies_of_shards_lie_where_their_ranks_do(context, shard, replicate):
    """Context ranks are innermost, then shards, then replicas; the copies are all but the shards."""
    node, ranks = 8, context * shard * replicate
    inner, outer = group_of_axis(context, 1, node, ranks), group_of_axis(replicate, context * shard, node, ranks)
    groups = [{(r * shard + s) * context + c for r in range(replicate) for c in range(context)} for s in range(shard)]
    found = group_of_two_axes(inner, outer, node)
    assert found.nodes == max(len({rank // node for rank in group}) for group in groups)
    assert found.size == context * replicate


def test_messages_of_a_pipeline_that_begins_in_a_node():
    """Two stages of four ranks are in a node: of three messages from stage to stage, one leaves it."""
    costs, form = transformer_costs(TransformerShape(24, 2048, 8192, 16, 50304, 2048)), FORMATS["bf16-mixed"]
    hardware, layout = load_hardware("a100-80"), PlanLayout(pipeline=4, tensor=4, microbatch=1, batch=8)
    found = predict_time(costs, layout, form, hardware).terms["pipeline messages"]
    size = 2048 * 2048 * 2 / 4
    inside, outside = message_seconds(size, False, 8, hardware), message_seconds(size, True, 4, hardware)
    assert found == pytest.approx(2 * (2 * inside + outside))
