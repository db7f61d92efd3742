"""Attributes are patched temporarily, in several layers, and restored in any order of undoing."""

import copy
import functools
import inspect
import itertools
import pickle
import warnings
from types import ModuleType

import pytest
import torch
from torch import nn

from lightning_hybrid.patching import (
    Replacement,
    active_patches,
    around,
    around_method,
    ignore_warnings,
    replace,
    replaced,
    replaced_forwards,
    wraps,
)

REASON = "tests"


class Named(nn.Module):
    name, limit = "a", 1

    def step(self, batch, batch_idx):
        return f"{self.name}{batch}{batch_idx}"

    @staticmethod
    def double(value):
        return 2 * value


def on_instance():
    return Named()


def on_class():
    return type("Other", (Named,), {"step": lambda self, batch, batch_idx: Named.step(self, batch, batch_idx)})


def on_module():
    module = ModuleType("other")
    module.step = lambda batch, batch_idx: f"a{batch}{batch_idx}"
    return module


def call(owner):
    return (owner() if isinstance(owner, type) else owner).step(1, batch_idx=2)


def bracket(kind):
    return lambda original, *args, **kwargs: f"{kind[0]}{original(*args, **kwargs)}{kind[1]}"


@pytest.mark.parametrize("order", list(itertools.permutations("([{")), ids="".join)
@pytest.mark.parametrize("make", [on_instance, on_class, on_module])
def test_patches_are_undone_in_any_order(make, order):
    owner = make()
    before = dict(vars(owner))
    kinds = {"(": "()", "[": "[]", "{": "{}"}
    undo = {kind: around(owner, "step", bracket(kinds[kind]), reason=REASON) for kind in kinds}
    left = list(kinds)
    for kind in order:
        expected = "a12"
        for each in left:
            expected = kinds[each][0] + expected + kinds[each][1]
        assert call(owner) == expected
        assert len(active_patches()) == len(left)
        undo[kind]()
        undo[kind]()
        left.remove(kind)
    assert call(owner) == "a12"
    assert dict(vars(owner)) == before and not active_patches()


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_stacked_values_and_functions(order):
    for owner in (Named(), type("Other", (Named,), {})):
        before = dict(vars(owner))
        values = [2, len, 3, max]
        undo = [replace(owner, "limit", value, reason=REASON) for value in values]
        left = dict(enumerate(values))
        for layer in order:
            found = owner.limit
            assert (found.func if isinstance(found, Replacement) else found) == left[max(left)]
            undo[layer]()
            del left[layer]
        assert owner.limit == 1 and dict(vars(owner)) == before and not active_patches()


@pytest.mark.parametrize("is_first_undone", [False, True])
def test_instance_members_are_restored(is_first_undone):
    module = Named()
    own = module.step = lambda batch: f"own{batch}"
    undo = [around(module, "step", bracket(kind), reason=REASON) for kind in ("()", "[]")]
    assert module.step(3) == "[(own3)]"
    assert list(inspect.signature(module.step).parameters) == ["batch"]
    undo[not is_first_undone]()
    undo[is_first_undone]()
    assert module.step is own


def test_class_members_keep_their_kind():
    member = vars(Named)["double"]
    with replaced(Named, "double", staticmethod(lambda value: 3 * value), reason=REASON):
        assert Named.double(2) == Named().double(2) == 6
    assert vars(Named)["double"] is member
    with replaced(Named, "__len__", lambda _: 5, reason=REASON):
        assert len(Named()) == 5
    assert "__len__" not in vars(Named)


def test_changes_by_others_are_kept():
    for owner in (Named(), ModuleType("other")):
        undo = replace(owner, "limit", 2, reason=REASON)
        owner.limit = 7
        undo()
        assert owner.limit == 7 and not active_patches()


def test_error_undoes_all_patches():
    module = Named()
    with pytest.raises(ZeroDivisionError), replaced(module, "step", lambda *_: "", reason=REASON):
        raise ZeroDivisionError
    modules = {"first": module, "second": nn.Linear(1, 1)}
    with pytest.raises(KeyError), replaced_forwards(modules, lambda fqn, _: {"first": len}[fqn], reason=REASON):
        pass
    assert not {"step", "forward"} & set(vars(module)) and not active_patches()


def test_signatures_are_preserved():
    for make in (on_instance, on_class, on_module):
        owner = make()
        expected = inspect.signature(owner.step)
        undo = around(owner, "step", bracket("()"), reason=REASON)
        assert inspect.signature(owner.step) == expected
        undo()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_and_pickles_have_the_originals(duplicate):
    module = Named()
    module.size, module.slot = 4, module.step
    undo = [
        around(module, "step", bracket("()"), reason=REASON),
        replace(module, "size", 5, reason=REASON),
        replace(module, "size", 6, reason=REASON),
        replace(module, "limit", 7, reason=REASON),
    ]
    other = duplicate(module)
    assert other.step(1, 2) == "a12" and other.size == 4 and other.limit == 1
    assert not {"step", "limit"} & set(vars(other))
    assert module.step(1, 2) == "(a12)" and module.size == 6 and len(active_patches()) == 4
    for each in undo:
        each()
    assert module.size == 4


def test_deep_copies_keep_callback_methods():
    module = Named()

    def of(kind):
        return lambda module, run: f"{kind[0]}{module.name}:{run()}{kind[1]}"

    first, second = (around_method(module, "step", of(kind), reason=REASON) for kind in ("()", "[]"))
    with replaced(module, "step", lambda *_: "replaced", reason=REASON):
        other = copy.deepcopy(module)
    other.name = "b"
    assert module.step(1, batch_idx=2) == "[a:(a:a12)]"
    assert other.step(1, 2) == copy.deepcopy(other).step(1, 2).replace("a", "b") == "[b:(b:b12)]"
    assert pickle.loads(pickle.dumps(module)).step(1, 2) == "a12"
    first()
    assert module.step(1, 2) == "[a:a12]" and copy.deepcopy(module).step(1, 2) == "[a:a12]"
    second()
    assert "step" not in vars(module) and not active_patches()


def test_registry_describes_each_patch():
    module = Named()
    undo = [replace(owner, "limit", 2, reason="why") for owner in (module, Named, ModuleType("there"))]
    undo.append(replace(module, "step", functools.partial(max, 1), reason="why not"))
    kind = f"{__name__}.Named"
    assert sorted(active_patches()) == [
        (f"class {kind}", "limit", "why"),
        ("module there", "limit", "why"),
        (f"object of {kind}", "limit", "why"),
        (f"object of {kind}", "step", "why not"),
    ]
    for each in undo:
        each()
    assert not active_patches()


def test_functions_around_a_replaced_step_keep_what_schedulers_set_on_it():
    """Without the mark a scheduler that is stepped in a hook warns of an overridden step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with replaced(optimizer, "step", wraps(optimizer.step)(lambda: None), reason="one"):
        around = wraps(optimizer.step)(lambda: None)
        assert vars(around)["_wrapped_by_lr_sched"]


def test_a_filter_that_is_undone_leaves_an_equal_one_of_the_user():
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.filterwarnings("ignore", "as the user", UserWarning)
        before = list(warnings.filters)
        undo = ignore_warnings("as the user", UserWarning, reason="test")
        assert len(warnings.filters) == len(before) + 1
        undo()
        assert warnings.filters == before
