"""Modules built without storage have the parameters of others in all but their values."""

import torch
from torch import nn

from lightning_hybrid.step.deferred_init.parameters import parameters_on_meta


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10)
        self.head.weight = self.embed.weight
        self.head.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.ones(3, 3).tril())
        nn.init.orthogonal_(self.embed.weight)


def test_parameters_are_on_meta_and_buffers_are_real():
    real = Tied()
    with parameters_on_meta():
        module = Tied()
    assert module.head.weight is module.embed.weight
    for (name, parameter), (other, expected) in zip(module.named_parameters(), real.named_parameters(), strict=True):
        assert (name, parameter.shape, parameter.dtype) == (other, expected.shape, expected.dtype)
        assert (
            parameter.is_meta and type(parameter) is nn.Parameter and parameter.requires_grad == expected.requires_grad
        )
    assert torch.equal(module.mask, real.mask) and not module.norm.running_var.is_meta
    assert not nn.Linear(2, 2).weight.is_meta  # outside


def test_parameters_larger_than_the_memory():
    with parameters_on_meta():
        wide = nn.Linear(2**22, 2**22)
    assert wide.weight.is_meta and wide.weight.numel() == 2**44


def test_random_parameters_larger_than_the_memory():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Parameter(torch.randn(64, 2**20, 2**20) / 2**10)
            self.down = nn.Parameter(torch.rand((64, 2**20, 2**20), dtype=torch.bfloat16, generator=torch.Generator()))
            self.register_buffer("noise", torch.randn(4, 4, generator=torch.Generator()))

    with parameters_on_meta():
        module = Experts()
    assert module.up.is_meta and module.up.numel() == 2**46
    assert module.down.is_meta and module.down.dtype is torch.bfloat16
    assert not module.noise.is_meta
    assert torch.equal(module.noise, torch.randn(4, 4, generator=torch.Generator()))
