"""Full backward hooks of modules fire where the module is, with the gradients of one process."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_full_backward_hook

from harness.one_process_pipeline import assert_same_gradients, pipeline, reference
from lightning_hybrid.errors import StepError
from models.cases import batch_of, make
from models.hand_written import Layers


class Activated(Layers):
    """With a module between layers that has no parameters."""

    def __init__(self):
        super().__init__()
        self.activation = nn.Tanh()

    def forward(self, x):
        for layer in self.layers:
            x = self.activation(x + layer(x))
        return self.head(x)


class Inside(Layers):
    """All layers inside one module."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*self.layers)

    def forward(self, x):
        return self.head(self.layers(x))


def recorder(seen, name):
    def hook(module, grad_input, grad_output):
        assert isinstance(module, nn.Module)
        seen.setdefault(name, []).append([None if g is None else g.clone() for g in (*grad_input, *grad_output)])
        return tuple(None if g is None else 2 * g for g in grad_input) if name == "layers.2" else None

    return hook


def warned(is_warned=True):
    """Warned by torch, for hooks of a module whose only input is the batch."""
    return pytest.warns(UserWarning, match="no inputs require gradients") if is_warned else contextlib.nullcontext()


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("names", [("layers.0", "layers.2", "layers.3.0"), ("activation",)], ids=" ".join)
def test_hooks_see_the_gradients_of_one_process(names, num_stages):
    module = make(Activated)
    seen = {}
    for name in names:
        module.get_submodule(name).register_full_backward_hook(recorder(seen, name))
    module.layers[1].register_full_backward_pre_hook(lambda module, grads: tuple(3 * grad for grad in grads))
    batch = batch_of("vectors", range(4))
    step = lambda: module.loss(batch)  # noqa: E731
    with warned("layers.0" in names):
        expected = reference(module, step)
    first = dict(seen)
    seen.clear()
    assert first.keys() == set(names)
    with warned("layers.0" in names):
        got = pipeline(module, step, num_stages)
    assert got.assignment.num_stages == num_stages
    assert_same_gradients(got.grads, expected.grads)
    torch.testing.assert_close(seen, first, rtol=1e-10, atol=1e-12)
    assert len(module.layers[0]._backward_hooks) == ("layers.0" in names)


def test_hook_on_a_cut_module_is_refused():
    module = make(Inside)
    handle = module.layers.register_full_backward_hook(lambda *_: None)
    batch = batch_of("vectors", range(4))
    with pytest.raises(StepError, match=r"layers has a full backward hook.* 3 stages .* there are 2"):
        pipeline(module, lambda: module.loss(batch), 3)
    with warned():
        assert pipeline(module, lambda: module.loss(batch), 2).units == [["layers"], ["head"]]
    handle.remove()
    module.register_full_backward_hook(lambda *_: None)
    with pytest.raises(StepError, match="full backward hook of a module whose inside is cut"):
        pipeline(module, lambda: module(batch["x"]).sum(), 2)


def test_global_hook_is_refused_with_stages():
    module = make(Inside)
    batch = batch_of("vectors", range(4))
    handle = register_module_full_backward_hook(lambda *_: None)
    try:
        with pytest.raises(StepError, match="full backward hook of a module whose inside is cut"):
            pipeline(module, lambda: module.loss(batch), 2)
    finally:
        handle.remove()
