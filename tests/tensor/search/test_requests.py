"""The user's plan comes first, then the one of the model, then the search; the start table says which."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_hybrid.errors import TensorPlanError
from lightning_hybrid.tensor.search.requests import requests_by_unit, requests_of_model, requests_of_user
from lightning_hybrid.tensor.search.unit import plan_unit
from models.tensor_blocks import BLOCKS, HIDDEN, WIDTH, tokens


class Mixes(nn.Module):
    """Features are mixed between the two, so that they are no pair."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).softmax(-1))


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.c(self.b(self.a(x).relu()).relu())


UNITS = {**BLOCKS, "mixes": lambda: (Mixes(), (tokens(),)), "three": lambda: (Three(), (tokens(),))}


def planned(name, plan=None, own=None, size=2):
    """The plan of one unit in a list of layers, under a plan of the user or the model."""
    torch.manual_seed(0)
    unit, args = UNITS[name]()
    root = nn.Module()
    root.layers = nn.ModuleList([unit])
    root._tp_plan = own
    by_unit = requests_by_unit(root, {"layers.0": unit}, requests_of_user(root, plan or {}), requests_of_model(root))
    return plan_unit(unit, args, {}, size, plan_requests=by_unit["layers.0"])


def shown(plan):
    return [f"{str(group).partition(' (')[0]} ({group.origin}" for group in plan.groups]


def test_user_roles_are_fixed_and_the_rest_is_searched():
    plan = planned("grouped queries", {"layers.*.down": "rowwise"})
    assert shown(plan) == ["q_proj, k_proj, v_proj -> o_proj (found", "gate, up -> down (your plan"]
    # Sharded in another pair than the search would choose, full, and with its output gathered.
    assert shown(planned("three", {"c": "rowwise"})) == ["b -> c (your plan", "a (found"]
    plan = planned("grouped queries", {"layers.0.*_proj": "replicated", "up": "none", "gate": "colwise"})
    assert shown(plan) == ["gate -> down (your plan"]
    assert plan.replicated_reasons["up.weight"] == "your plan has 'up': 'none'"
    assert plan.replicated_reasons["k_proj.weight"] == "your plan has 'layers.0.*_proj': 'replicated'"
    plan = planned("mlp", {"layers.*.2": "colwise_rep"})
    assert shown(plan) == ["0 (found", "2 (your plan"] and plan.roles == {"0": "gathered", "2": "gathered"}
    assert plan.lines()[0] == "0 (output gathered: what reads it (2) is in your plan)"


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("layers.0.up", {"layers.0.up"}),
        ("*.up", {"layers.0.up", "layers.1.mlp.up"}),
        ("up", {"layers.0.up", "layers.1.mlp.up"}),  # no full FQN, so the end of one
        ("layers.*.up", {"layers.0.up", "layers.1.mlp.up"}),
        ("layers.[1-9].*.up", {"layers.1.mlp.up"}),
        ("layers.1.*", {"layers.1.mlp.up", "layers.1.mlp.q_proj"}),
        ("q_*", {"layers.1.mlp.q_proj"}),
    ],
)
def test_patterns(pattern, names):
    def module(**children):
        made = nn.Module()
        for name, child in children.items():
            made.add_module(name, child)
        return made

    mlp = module(up=nn.Linear(2, 2), q_proj=nn.Linear(2, 2), norm=nn.LayerNorm(2))
    root = module(layers=nn.ModuleList([module(up=nn.Linear(2, 2)), module(mlp=mlp)]))
    assert requests_of_user(root, {pattern: "colwise"}).keys() == names


def test_last_pattern_counts():
    plan = planned("grouped queries", {"layers": "replicated", "[ug]*": "colwise", "down": "rowwise"})
    assert shown(plan) == ["gate, up -> down (your plan"]


@pytest.mark.parametrize(
    ("unit", "plan", "words"),
    [
        ("mlp", {"layers.*.down": "rowwise"}, ["'layers.*.down'", "no module", "did you mean 'layers.*."]),
        ("mlp", {"layers.0.1": "rowwise"}, ["'layers.0.1': 'rowwise'", "ReLU", "none that multiplies"]),
        ("mlp", {"0": "rowwise"}, ["layers.0.0 is rowwise", "no colwise linear feeds it", "from no linear"]),
        ("mlp", {"2": "colwise"}, ["layers.0.2 is colwise", "read by no linear", "colwise_gather_output"]),
        ("mlp", {"0": "colwise", "2": "none"}, ["layers.0.0 is colwise", "read by 2 ('2': 'none')"]),
        ("mlp", {"2": "rowwise", "layers.0.0": "none"}, ["layers.0.2 is rowwise", "comes from 0 ('layers.0.0'"]),
        (
            "mixes",
            {"up": "colwise"},
            ["up -> down of layers.0", "not proved", "relative difference", "split by output"],
        ),
        ("encoder layer", {"out_proj": "rowwise"}, ["self_attn.out_proj", "MultiheadAttention", "by heads"]),
        ("own bias", {"own": "colwise"}, ["layers.0.own", "did not run, or did not multiply"]),
    ],
)
def test_infeasible_plans_are_refused(unit, plan, words):
    with pytest.raises(TensorPlanError) as caught:
        planned(unit, plan)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_indivisible_sizes_are_named_with_their_modules():
    with pytest.raises(TensorPlanError, match="4 heads of q_proj and 2 heads of k_proj, v_proj are not a"):
        planned("grouped queries", {"o_proj": "rowwise"}, size=3)
    plan = planned("grouped queries", size=3)
    assert shown(plan) == ["gate, up -> down (found"]
    assert plan.uneven == {"q_proj": (4, "heads"), "k_proj": (2, "heads"), "v_proj": (2, "heads")}
    assert any(line.startswith("warning: replicated (4 heads of q_proj") for line in plan.lines())


def test_model_plan_precedes_the_search():
    own = {"layers.*.b": "colwise", "layers.*.c": "rowwise", "layers.*": "moe_tp_experts", "embed": 3}
    assert shown(planned("three", own=own)) == ["b -> c (the model's own plan", "a (found"]
    # What the user names is the user's.
    plan = planned("three", {"a": "colwise"}, own=own)
    assert shown(plan) == ["a -> b (your plan", "c (found"]
    assert plan.notes == (
        "the model's own plan is not followed: c is rowwise, but no colwise linear feeds it: its input comes from"
        " b ('layers.0.b': 'colwise')",
    )


def test_unproved_model_plan_is_dropped_with_a_warning():
    plan = planned("mixes", own={"layers.*.up": "colwise", "layers.*.down": "rowwise"})
    assert shown(plan) == ["up (found", "down (found"] and plan.roles["up"] == "gathered"
    assert "the model's own plan is not followed: up -> down: " in plan.lines()[2]
    assert "relative difference" in plan.lines()[2]


def test_model_plans_are_found():
    inner = nn.Module()
    inner.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.LayerNorm(2)])
    inner.__dict__["base_model"], inner.config = inner, SimpleNamespace(base_model_tp_plan={"layers.*": "colwise"})
    outer = nn.Module()
    outer.__dict__["_tp_plan"] = {"head": "colwise_gather_output", "model.layers.*": "rowwise"}
    outer.model, outer.head = inner, nn.Linear(2, 2)
    root = nn.Module()
    root.net = outer
    wanted = {fqn: request.wanted for fqn, request in requests_of_model(root).items()}
    assert wanted == {"net.head": "gathered", "net.model.layers.0": "row", "net.model.layers.1": "row"}
    del outer.__dict__["_tp_plan"]
    assert {request.wanted for request in requests_of_model(root).values()} == {"column"}
