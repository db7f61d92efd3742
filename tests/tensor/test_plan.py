"""A tensor plan is written as JSON and read again, and invalid plans are refused."""

import json

import pytest
from torch import nn

from lightning_hybrid.params.placement import Replicated, Shard
from lightning_hybrid.tensor.plan import Group, LinearLike, PositionsPlan, UnitPlan
from lightning_hybrid.tensor.search.cache import from_json, to_json

PLAN = UnitPlan(
    size=2,
    groups=(Group("column", ("up",), ("down",), how="heads"),),
    roles={"up": "column", "down": "row"},
    linears={"up": LinearLike("up", 0, 1, -1, False, 8, 4, True)},
    placements={"up.weight": Shard.evenly(0, 8, 2), "norm.weight": Replicated()},
    attributes={"attention": {"num_heads": 2}},
    rules={("view", "model.py", 3): ("size", 2)},
    offsets=frozenset({"up"}),
    outputs={0: 1},
    positions=PositionsPlan("tensor", 0, 1, 3, outputs=(0,)),
    uneven={"odd": (7, "heads")},
    full_sequence_plan=UnitPlan(size=2),
    seconds=0.5,
)


@pytest.mark.parametrize("plan", [PLAN, UnitPlan.unsharded(nn.Linear(2, 2), 2, "too small")], ids=["sharded", "full"])
def test_round_trip(plan):
    assert from_json(json.loads(json.dumps(to_json(plan)))) == plan


def test_plan_without_shards_says_why():
    plan = UnitPlan.unsharded(nn.Linear(2, 2), 2, "too small")
    assert plan.num_sharded == 0 and plan.lines() == ["replicated (too small): weight, bias"]
    assert PLAN.num_sharded == 1 and PLAN.lines()[0] == "up -> down (heads)"


@pytest.mark.parametrize(
    "change", [{"size": "2"}, {"size": None}, {"groups": 3}, {"is": "Plan"}, {"more": 1}, {"roles": {"up": "nothing"}}]
)
def test_invalid_plans_are_refused(change):
    with pytest.raises(ValueError):
        from_json({**to_json(PLAN), **change})


def test_plan_with_a_missing_field_is_refused():
    written = to_json(PLAN)
    del written["groups"]
    with pytest.raises(ValueError, match="no UnitPlan"):
        from_json(written)
