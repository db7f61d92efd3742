"""Adam and AdamW on the host use torch's fused steps by default, with the same results."""

import contextlib
import copy

import numpy
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_hybrid.techniques.fused_adam import fuse_steps

OPTIMIZERS = {
    "Adam": (torch.optim.Adam, {"lr": 1}),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True, "betas": (0.5, 0.9)}),
    "maximize": (torch.optim.AdamW, {"maximize": True}),
}
LEFT_ALONE = {
    "fused": (torch.optim.Adam, {"fused": False}),
    "foreach": (torch.optim.AdamW, {"foreach": True}),
    "lr": (torch.optim.AdamW, {"lr": torch.tensor(0.1, dtype=torch.float64)}),
    "rounded": (torch.optim.AdamW, {"lr": numpy.float32(0.1)}),
    "another": (torch.optim.SGD, {"momentum": 0.9}),
    "derived": (type("MyAdam", (torch.optim.Adam,), {}), {}),
}


@pytest.fixture
def fused_steps(monkeypatch):
    """The numbers of parameters that were stepped at once by a fused kernel."""
    counts = []
    for name in ("_fused_adam_", "_fused_adamw_"):
        kernel = getattr(torch, name)

        def counted(parameters, *args, kernel=kernel, **kwargs):
            counts.append(len(parameters))
            return kernel(parameters, *args, **kwargs)

        monkeypatch.setattr(torch, name, counted)
    return counts


def parameters_of(dtype=torch.float64):
    torch.manual_seed(1)
    shapes = [(37, 53), (7,), (3, 0), ()]
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]


def give_gradients(parameters, step):
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.cos(parameter.detach() * (number + 2) + step)


def stepped(kind, options, *, fuse, steps=4, gradients=give_gradients, dtype=torch.float64):
    parameters = parameters_of(dtype)
    optimizer = kind(parameters, **copy.deepcopy(options))
    with contextlib.ExitStack() as until:
        fuse_steps([optimizer] if fuse else [], until)
        for step in range(steps):
            gradients(parameters, step)
            optimizer.step()
    return parameters, optimizer


def assert_same_layout(parameters, expected):
    for one, other in zip(parameters, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_fused_steps_match_parameters_and_states(kind, options, fused_steps):
    expected, plain = stepped(kind, options, fuse=False)
    assert not fused_steps
    parameters, optimizer = stepped(kind, options, fuse=True)
    assert fused_steps == [4, 4, 4]  # the first step makes the states
    assert_same_layout(parameters, expected)
    assert optimizer.state_dict()["param_groups"] == plain.state_dict()["param_groups"]
    for one, other in zip(parameters, expected, strict=True):
        assert_same_layout(optimizer.state[one].values(), plain.state[other].values())


@pytest.mark.parametrize(("kind", "options"), LEFT_ALONE.values(), ids=LEFT_ALONE.keys())
def test_user_choice_is_kept(kind, options, fused_steps):
    parameters, _ = stepped(kind, options, fuse=True)
    assert not fused_steps
    for one, other in zip(parameters, stepped(kind, options, fuse=False)[0], strict=True):
        assert torch.equal(one, other)


def test_other_memory_formats_are_not_fused(fused_steps):
    def transposed(parameters, step):
        give_gradients(parameters, step)
        parameters[0].grad = parameters[0].grad.t().contiguous().t()

    parameters, _ = stepped(*OPTIMIZERS["AdamW"], fuse=True, gradients=transposed)
    assert not fused_steps
    assert_same_layout(parameters, stepped(*OPTIMIZERS["AdamW"], fuse=False, gradients=transposed)[0])


def test_half_precision_is_not_fused(fused_steps):
    stepped(*OPTIMIZERS["AdamW"], fuse=True, dtype=torch.bfloat16)
    assert not fused_steps


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_torch_function_mode_sees_the_original_step(fused_steps):
    """It may pass other tensors to the step, whose shape the kernel would not check."""
    parameters = parameters_of()
    optimizer = torch.optim.AdamW(parameters)
    with contextlib.ExitStack() as until:
        fuse_steps([optimizer], until)
        for step in range(3):
            give_gradients(parameters, step)
            with FunctionMode():
                optimizer.step()
    assert not fused_steps


def test_hooks_see_the_user_choice(fused_steps):
    parameters = parameters_of()
    optimizer, choices = torch.optim.AdamW(parameters), []
    note = [lambda one, args, kwargs, when=when: choices.append((when, one.param_groups[0]["fused"])) for when in "ab"]
    with contextlib.ExitStack() as until:
        fuse_steps([optimizer], until)
        hooks = [optimizer.register_step_pre_hook(note[0]), optimizer.register_step_post_hook(note[1])]
        for step in range(3):
            give_gradients(parameters, step)
            optimizer.step()
    assert fused_steps == [4, 4]
    assert choices == [("a", None), ("b", None)] * 3
    assert list(optimizer._optimizer_step_post_hooks) == [hooks[1].id]


def test_replaced_step_is_kept(fused_steps):
    parameters = parameters_of()
    optimizer, calls = torch.optim.AdamW(parameters), []
    optimizer.step = lambda: calls.append("mine")
    with contextlib.ExitStack() as until:
        fuse_steps([optimizer], until)
        optimizer.step()
    assert calls == ["mine"]


def test_states_of_another_shape_are_not_fused(fused_steps):
    """The kernel would write past their end."""
    parameters, optimizer = stepped(*OPTIMIZERS["AdamW"], fuse=True, steps=1)
    optimizer.state[parameters[0]]["exp_avg"] = torch.zeros(5, dtype=torch.float64)
    give_gradients(parameters, 1)
    with contextlib.ExitStack() as until:
        fuse_steps([optimizer], until)
        with pytest.raises(RuntimeError):
            optimizer.step()
    assert not fused_steps


def test_version_counters_increase(fused_steps):
    parameters = parameters_of()
    optimizer = torch.optim.AdamW(parameters)
    give_gradients(parameters, 0)
    optimizer.step()
    product = (parameters[0] * parameters[1].exp().sum()).sum()
    with contextlib.ExitStack() as until:
        fuse_steps([optimizer], until)
        optimizer.step()
    assert fused_steps == [4]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_parameters_without_gradients_are_unchanged(fused_steps):
    def only_first(parameters, step):
        give_gradients(parameters[:1], step)

    parameters, _ = stepped(*OPTIMIZERS["AdamW"], fuse=True, gradients=only_first)
    assert fused_steps == [1, 1, 1]
    assert_same_layout(parameters[1:], parameters_of()[1:])


def test_closure_sees_the_user_choice(fused_steps):
    parameters = parameters_of()
    optimizer = torch.optim.AdamW(parameters)
    seen = []

    def closure():
        seen.append(optimizer.param_groups[0]["fused"])
        give_gradients(parameters, len(seen))
        return torch.tensor(float(len(seen)))

    with contextlib.ExitStack() as until:
        fuse_steps([optimizer], until)
        assert [float(optimizer.step(closure)) for _ in range(3)] == [1.0, 2.0, 3.0]
    assert seen == [None] * 3
    assert fused_steps == [4, 4]


def test_closure_error_restores_the_optimizer():
    parameters = parameters_of()
    optimizer = torch.optim.AdamW(parameters)

    def closure():
        raise ValueError("no loss today")

    with contextlib.ExitStack() as until:
        fuse_steps([optimizer], until)
        with pytest.raises(ValueError, match="no loss today"):
            optimizer.step(closure)
        assert optimizer.param_groups[0]["fused"] is None
    assert "step" not in vars(optimizer)
