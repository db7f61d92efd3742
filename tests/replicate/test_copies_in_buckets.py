"""Copies of a parameter on several ranks of a replica stay equal to the bit, whatever shares their buckets."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.fits import Run, check
from lightning_hybrid.replicate.reducer import GradientReducer

SIZE = 1000


def averaged(others, copies):
    """The average of the gradient of one parameter, beside others."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    copy = nn.Parameter(torch.zeros(SIZE))
    named = [*((f"other{n}", nn.Parameter(torch.zeros(size))) for n, size in enumerate(others)), ("copy", copy)]
    copy.grad = torch.randn(SIZE, generator=generator)
    for name, p in named:
        if name != "copy":
            p.grad = torch.ones_like(p)
    reducer = GradientReducer(named[::-1], dist.group.WORLD, copies=copies)
    reducer.reduce()
    assert all(torch.equal(p.grad, torch.ones_like(p)) for name, p in named if name != "copy")
    return copy.grad.clone()


@pytest.mark.world(3)
def test_the_sum_of_a_copy_does_not_depend_on_its_neighbours():
    alone, beside = averaged([], {}), averaged([700], {})
    assert not torch.equal(alone, beside), "this backend adds up in one order: the test shows nothing"
    keys = {"copy": (0, 1)}
    assert torch.equal(averaged([], keys), averaged([700], keys))
    assert torch.equal(averaged([], keys), averaged([700, 300], keys))


def tie_layers(module):
    """The weights of two layers are on two stages of one rank, beside an embedding that both ranks have."""
    module.layers[2] = module.layers[0]


@pytest.mark.slow
def test_tied_weights_over_stages_and_three_replicas(worlds):
    run = Run("Tied", pp=2, dp=3, strategy={"stages_per_rank": 2}, dtype=torch.float32, change=tie_layers)
    check(worlds, run, tolerance=1e-4, timeout=300)
