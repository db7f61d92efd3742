"""Autograd functions called by a stored bound ``apply``, which since torch 2.14 calls no Python.

Here ``apply`` is the built-in one, and searched for, with every version of torch.
"""

import sys
import types
from functools import partial

import pytest
from torch import nn
from torch.autograd.function import _SingleLevelFunction

from harness.one_process_pipeline import assert_same_gradients, pipeline, record_and_cut, reference
from lightning_hybrid.errors import StepError
from lightning_hybrid.step.tracing import functions as intercept_autograd_functions
from lightning_hybrid.step.tracing import stored as places
from lightning_hybrid.step.tracing.stored import find_bound_applies
from models.autograd_functions import Reverse
from models.cases import batch_of
from models.hand_written import WIDTH, Layers

reverse = super(_SingleLevelFunction, Reverse).apply


@pytest.fixture(autouse=True)
def count_searches(monkeypatch):
    for module in (places, intercept_autograd_functions):
        monkeypatch.setattr(module, "APPLIED_IN_PYTHON", False)


class Holder:
    apply = reverse


class Reversing(Layers):
    """Reverses gradients between its layers, by its stored function."""

    of_class = reverse

    def __init__(self, how):
        super().__init__()
        self.of_object = reverse
        self.stored = Holder()
        self.listed = [reverse]
        self.how = how

    def reversed(self, x):
        if self.how == "variable":
            return reverse(x, 0.7)
        if self.how == "list":
            return self.listed[0](x, 0.7)
        if self.how == "partial":
            return partial(self.listed[0])(x, 0.7)
        if self.how == "other module":
            return self.stored.apply(x, 0.7)
        return {"class": self.of_class, "object": self.of_object, "itself": Reverse.apply}[self.how](x, 0.7)

    def forward(self, x):
        for layer in self.layers:
            x = x + self.reversed(layer(x))
        return self.head(x + self.reversed(x))


def loss_of(how):
    module, batch = Reversing(how).double(), batch_of(Reversing.kind, range(4))
    return module, lambda: module.loss(batch)


@pytest.mark.parametrize("how", ["variable", "class", "object", "itself"])
def test_each_call_is_one_operation(how):
    module, step = loss_of(how)
    kept = reverse, vars(Reversing)["of_class"], vars(module)["of_object"], vars(Reverse).get("apply")
    outcome = pipeline(module, step, 2)
    assert_same_gradients(outcome.grads, reference(module, step).grads)
    calls = [node for node in outcome.graph.nodes if node.name == "apply:Reverse"]
    assert len(calls) == 5
    assert {outcome.assignment.node_stage[node.index] for node in calls} == {0, 1}
    now = reverse, vars(Reversing)["of_class"], vars(module)["of_object"], vars(Reverse).get("apply")
    assert all(a is b for a, b in zip(now, kept, strict=True))


@pytest.mark.parametrize("how", ["list", "partial", "other module"])
def test_untraceable_apply_is_refused(how):
    module, step = loss_of(how)
    own = vars(Reverse)["forward"]
    with pytest.raises(StepError, match=r"test_bound_apply.*: Reverse is called .* call Reverse\.apply\(\.\.\.\)"):
        record_and_cut(module, step, 2)
    assert vars(Reverse)["forward"] is own
    assert step().requires_grad  # outside a recorded step it is unchanged


@pytest.mark.skipif(not places.APPLIED_IN_PYTHON, reason="since torch 2.14 an apply is built in")
def test_python_apply_is_traced_wherever_stored(monkeypatch):
    for module in (places, intercept_autograd_functions):
        monkeypatch.setattr(module, "APPLIED_IN_PYTHON", True)
    module, step = loss_of("list")
    module.listed = [Reverse.apply]
    outcome = pipeline(module, step, 2)
    assert_same_gradients(outcome.grads, reference(module, step).grads)
    assert sum(node.name == "apply:Reverse" for node in outcome.graph.nodes) == 5


def test_apply_inside_a_unit_may_be_stored_anywhere():
    module, step = loss_of("list")
    module.layers = nn.ModuleList(Inside() for _ in range(4)).double()
    module.how = "variable"
    outcome = pipeline(module, step, 2)
    assert_same_gradients(outcome.grads, reference(module, step).grads)


class Inside(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.listed = nn.Linear(WIDTH, WIDTH), [reverse]

    def forward(self, x):
        return self.listed[0](self.linear(x), 0.3)


def test_only_applies_are_found():
    this_module = sys.modules[__name__]
    others = {module for module in sys.modules.values() if module is not this_module}  # other tests may store it too
    found = [p for p in find_bound_applies(Reversing("variable")) if p.function is Reverse and p.owner not in others]
    assert sorted(place.name for place in found) == ["of_class", "of_object", "reverse"]
    assert {place.owner for place in found if place.name == "reverse"} == {this_module}


def test_applies_stored_later_are_found(monkeypatch):
    module, this_module, another, reverse_apply = (
        Reversing("variable"),
        sys.modules[__name__],
        types.ModuleType("another"),
        reverse,
    )

    def found():
        return {(place.owner, place.name) for place in find_bound_applies(module)}

    monkeypatch.setattr(this_module, "reverse", None)
    assert (this_module, "reverse") not in found()
    this_module.reverse = another.kept = reverse_apply
    monkeypatch.setitem(sys.modules, "another", another)
    assert {(this_module, "reverse"), (another, "kept")} <= found()
    another.kept = None
    assert (another, "kept") not in found()
    another.later = reverse_apply
    assert (another, "later") in found()
