"""All-to-all of token rows to the ranks of their experts and back, for any number of rows."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_hybrid.experts.parallel.adapters import BatchedPairs
from lightning_hybrid.experts.parallel.all_to_all import ExpertAllToAll

EXPERTS, TOP, WIDTH = 4, 2, 6


class Experts(nn.Module):
    """Experts in the style of transformers."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, 8, WIDTH, generator=draw, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 8, generator=draw, dtype=torch.float64))

    def forward(self, hidden, which, weights):
        out = torch.zeros_like(hidden)
        for number in range(self.num_experts):
            token, place = torch.where(which == number)
            if token.numel():
                rows = torch.tanh(hidden[token] @ self.up[number].T) @ self.down[number].T
                out = out.index_add(0, token, rows * weights[token, place, None])
        return out


def all_tokens(rank, tokens):
    draw = torch.Generator().manual_seed(rank)
    return torch.rand(tokens, EXPERTS, generator=draw).argsort(1)[:, :TOP]


CHOICES = {
    "any": lambda rank: all_tokens(rank, 7),
    "one token": lambda rank: all_tokens(rank, 1),
    "none on the second rank": lambda rank: all_tokens(rank, 5 if rank == 0 else 0),
    "all to one expert": lambda rank: torch.full((5, TOP), 2),
    "all to the first rank": lambda rank: torch.tensor([[0, 1]] * 4),
    "some to none": lambda rank: torch.tensor([[0, EXPERTS], [EXPERTS, EXPERTS], [3, 1]]),
}


def inputs(which, rank):
    draw = torch.Generator().manual_seed(10 + rank)
    hidden = torch.randn(which.shape[0], WIDTH, generator=draw, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(which.shape, generator=draw, dtype=torch.float64, requires_grad=True)
    return hidden, weights


def loss_of(out, hidden, penalized):
    """A sum, with the norm of its own gradient."""
    loss = out.square().sum()
    if penalized:
        [gradient] = torch.autograd.grad(loss, hidden, create_graph=True)
        loss = loss + gradient.square().sum()
    return loss


def run_shared(name, chunks, penalized):
    rank, size = dist.get_rank(), dist.get_world_size()
    module, which = Experts(), CHOICES[name](rank)
    call = torch.zeros(3, WIDTH), torch.zeros(3, TOP).long(), torch.zeros(3, TOP)
    adapter = BatchedPairs.recognise(module, (call, {}))[0]
    each = EXPERTS // size
    for parameter in module.parameters():
        parameter.data = parameter.data[rank * each : (rank + 1) * each].clone()
    ranks = ExpertAllToAll(dist.group.WORLD, chunks=chunks)
    hidden, weights = inputs(which, rank)
    out = adapter.run(
        module,
        module.forward,
        (hidden * 1, which, weights),
        {},
        lambda rows, counts: ranks.run(
            rows, counts, lambda *given: adapter.compute(module, module.forward, *given), trains=True
        ),
    )
    loss_of(out, hidden, penalized).backward()
    assert penalized or ranks.num_exchanges == 4 * chunks
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
    return out.detach(), hidden.grad, weights.grad, gradients


@pytest.mark.parametrize(("chunks", "penalized"), [(1, False), (2, False), (1, True), (2, True)])
@pytest.mark.parametrize("name", list(CHOICES))
def test_matches_one_process(worlds, name, chunks, penalized):
    ranks = worlds.run(2, run_shared, name, chunks, penalized)
    module = Experts()
    for rank, (out, of_hidden, of_weights, _) in enumerate(ranks):
        which = CHOICES[name](rank)
        hidden, weights = inputs(which, rank)
        expected = module(hidden, which, weights)
        torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)
        if which.numel():
            loss_of(expected, hidden, penalized).backward()
            torch.testing.assert_close(of_hidden, hidden.grad, rtol=1e-11, atol=1e-12)
            torch.testing.assert_close(of_weights, weights.grad, rtol=1e-11, atol=1e-12)
    for number, parameter in enumerate(module.parameters()):
        shared = torch.cat([gradients[number] for *_, gradients in ranks])
        full_grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(shared, full_grad, rtol=1e-11, atol=1e-12)
