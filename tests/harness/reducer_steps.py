"""Steps of a small model under a gradient reducer, compared with the mean over ranks."""

import copy

import torch
import torch.distributed as dist
from torch import nn

from lightning_hybrid.replicate.reducer import GradientReducer


def group():
    return dist.group.WORLD


def gathered(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def mean_over_ranks(gradient, like):
    """The manual mean over the ranks' gradients; None counts as zeros unless all are None."""
    gradients = gathered(None if gradient is None else gradient.clone())
    if all(other is None for other in gradients):
        return None
    dense = [torch.zeros_like(like) if other is None else other.to_dense() for other in gradients]
    return sum(dense[1:], dense[0]) / len(dense)


def local_gradients(parameters):
    return {name: None if p.grad is None else p.grad.clone() for name, p in parameters}


def assert_mean(parameters, local):
    for name, parameter in parameters:
        expected = mean_over_ranks(local[name], parameter.detach())
        if expected is None:
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None, name
            assert torch.equal(parameter.grad.to_dense(), expected), name


class Layers(nn.Module):
    """Layers of which each forward uses some, in any order."""

    def __init__(self, num_layers=6, width=8, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=dtype) for _ in range(num_layers))

    def forward(self, x, order):
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x


def backward(model, order, seed=None, width=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(dist.get_rank() if seed is None else seed)
    model(torch.randn(4, width, generator=generator, dtype=dtype), order).square().sum().backward()


def checked_step(model, reducer, orders, **kwargs):
    """Backwards over `orders`, of which the last one is armed, against the manual mean."""
    oracle = copy.deepcopy(model)
    for parameter, own in zip(oracle.parameters(), model.parameters(), strict=True):
        parameter.requires_grad_(own.requires_grad)
        parameter.grad = None if own.grad is None else own.grad.clone()
    for index, order in enumerate(orders):
        backward(oracle, order, seed=10 * dist.get_rank() + index, **kwargs)
    for index, order in enumerate(orders):
        if index == len(orders) - 1:
            reducer.arm()
        backward(model, order, seed=10 * dist.get_rank() + index, **kwargs)
    reducer.finish()
    assert_mean(list(model.named_parameters()), local_gradients(oracle.named_parameters()))


def small_buckets(model, **kwargs):
    # 288 bytes per layer of width 8, so that every bucket has one and a half.
    return GradientReducer(list(model.named_parameters()), group(), bucket_bytes=400, first_bucket_bytes=100, **kwargs)
