"""What recomputed layers save for their backward."""

import pytest
import torch
from torch import nn

from harness.live_storages import LiveStorages
from lightning_hybrid.errors import RecomputeError
from lightning_hybrid.memory.recompute.layers import Recomputation
from lightning_hybrid.memory.recompute.policies import layer_policies
from lightning_hybrid.step.objects.modules import find_layers


def block(width):
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def test_layer_saves_only_its_input():
    """Twelve layers: of the eleven values that each saves, one is its input."""
    model = nn.Sequential(*(block(16) for _ in range(12)))
    x = torch.randn(64, 16, requires_grad=True)
    layers = find_layers({"": model})
    assert len(layers) == 12
    kept, grads = {}, {}
    for recompute in ("keep", "full", 3):
        policies = layer_policies(recompute, layers)
        with LiveStorages() as live, Recomputation(layers, policies).running():
            out = model(x)
        kept[recompute] = live.bytes()
        grads[recompute] = torch.autograd.grad(out.sin().sum(), list(model.parameters()))
    assert kept["full"] < 0.25 * kept["keep"] and kept["full"] < kept[3] < kept["keep"]
    for recompute in ("full", 3):
        assert all(torch.equal(a, b) for a, b in zip(grads["keep"], grads[recompute], strict=True))


def test_layers_by_class():
    layers = {"a": nn.Linear(2, 2), "b": nn.LayerNorm(2), "c": nn.Linear(2, 2)}
    assert layer_policies([nn.Linear], layers) == {"a": "full", "b": "keep", "c": "full"}
    choices = {nn.Module: "full", nn.Linear: "selective", "c": "keep"}
    assert layer_policies(choices, layers) == {"a": "selective", "b": "full", "c": "keep"}
    with pytest.raises(RecomputeError, match=r"no layer is a GELU; the layers, .* are a, b, c, of LayerNorm, Linear"):
        layer_policies([nn.Linear, nn.GELU], layers)


def test_statistics_are_updated_once():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)))
    again = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)))
    again.load_state_dict(model.state_dict())
    x = torch.randn(8, 4)
    model(x).sum().backward()
    with Recomputation({"0": again[0]}, {"0": "full"}).running():
        out = again(x)
        out.sum().backward()
    for (name, one), (_, other) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(one, other), name
    assert "forward" not in again[0].__dict__


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_transforms_of_functions_save_all(policy):
    model, x = nn.Sequential(block(4)), torch.randn(3, 4)

    def slopes():
        return torch.func.vmap(torch.func.jacrev(model))(x).square().sum()

    expected = torch.autograd.grad(slopes(), list(model.parameters()), allow_unused=True)
    with Recomputation({"0": model[0]}, {"0": policy}).running():
        found = torch.autograd.grad(slopes(), list(model.parameters()), allow_unused=True)
    assert all(a is b or torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Filling(nn.Module):
    """Caches its results in an object that is passed to it, and uses cached ones."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4)

    def forward(self, x, cache):
        if "keys" not in cache:
            cache["keys"] = self.net(x)
        cache["calls"].append(self)
        return x * cache["keys"].exp() * len(cache["calls"])


def test_cache_is_restored():
    layer, x, grads = Filling(), torch.randn(3, 4), {}
    for policy in ("keep", "full", "selective"):
        cache = {"calls": []}
        with Recomputation({"0": layer}, {"0": policy}).running():
            out = layer(layer(x, cache), cache)
            grads[policy] = torch.autograd.grad(out.sum(), list(layer.parameters()))
        assert len(cache["calls"]) == 2 and cache["calls"][0] is layer
    for policy in ("full", "selective"):
        assert all(torch.equal(a, b) for a, b in zip(grads["keep"], grads[policy], strict=True))


def test_weights_passed_for_one_call():
    layer, x, grads = block(4), torch.randn(3, 4), {}
    scale = torch.tensor(0.5, requires_grad=True)
    for policy in ("keep", "full", "selective"):
        with Recomputation({"0": layer}, {"0": policy}).running():
            weights = {name: p * scale for name, p in layer.named_parameters()}
            out = torch.func.functional_call(layer, weights, (x,))
            grads[policy] = torch.autograd.grad(out.square().sum(), [scale, *layer.parameters()])
    for policy in ("full", "selective"):
        assert all(torch.equal(a, b) for a, b in zip(grads["keep"], grads[policy], strict=True)), policy
