"""Callbacks run something around a method of a module, several at once, and leave it as it was in any order."""

import copy
import inspect

from torch import nn

from lightning_hybrid.callbacks.wrapped_methods import wrap_method


class Named(nn.Module):
    name = "a"

    def step(self, batch, batch_idx):
        return f"{self.name}{batch}{batch_idx}"


def bracket(kind):
    return lambda module, run: f"{kind[0]}{module.name}:{run()}{kind[1]}"


def test_two_wrap_and_leave_in_any_order():
    module = Named()
    first, second = wrap_method(module, "step", bracket("()")), wrap_method(module, "step", bracket("[]"))
    assert module.step(1, batch_idx=2) == "[a:(a:a12)]"
    assert list(inspect.signature(module.step).parameters) == ["batch", "batch_idx"]
    other = copy.deepcopy(module)
    other.name = "b"
    assert other.step(1, 2) == "[b:(b:b12)]"
    first()
    first()
    assert module.step(1, 2) == "[a:a12]"
    second()
    assert "step" not in vars(module)


def test_a_function_of_the_users_on_the_instance_comes_back():
    module = Named()
    own = module.step = lambda batch: f"own{batch}"
    leave = wrap_method(module, "step", bracket("()"))
    assert module.step(3) == "(a:own3)"
    assert list(inspect.signature(module.step).parameters) == ["batch"]
    leave()
    assert module.step is own
