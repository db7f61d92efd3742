"""LAMB and LARS against the package `pytorch-optimizer`, and against the formulas of their papers."""

import copy

import pytest
import pytorch_optimizer
import torch
from torch import nn

from lightning_hybrid.optim import LAMB, LARS


def trained(make_optimizer, num_steps=5):
    """The parameters after some steps, in one vector."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    with torch.no_grad():
        module[2].bias.zero_()  # no ratio in the first step
    x = torch.randn(9, 5, dtype=torch.float64)
    optimizer = make_optimizer(
        [{"params": module[0].parameters()}, {"params": module[2].parameters(), "weight_decay": 0.2}]
    )
    for _ in range(num_steps):
        optimizer.zero_grad()
        module(x).square().sum().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def assert_equal(make_ours, make_theirs):
    ours, theirs = trained(make_ours), trained(make_theirs)
    assert not torch.equal(ours, trained(make_ours, num_steps=0))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("max_norm", [10.0, 1.0])
def test_lamb(monkeypatch, max_norm):
    """Theirs has no bias correction, an upper bound of norms, and ``eps`` in the ratio too."""
    monkeypatch.setattr(pytorch_optimizer.Lamb, "clamp", max_norm)
    assert_equal(
        lambda p: LAMB(p, lr=0.01, weight_decay=0.1, bias_correction=False, max_norm=max_norm, eps=1e-14),
        lambda p: pytorch_optimizer.Lamb(
            p, lr=0.01, weight_decay=0.1, weight_decouple=False, adam_debias=True, eps=1e-14
        ),
    )


def test_lamb_of_equal_norms_is_adamw_of_a_single_ratio():
    """The first step by algorithm 2 of the paper, with bias correction."""
    p = nn.Parameter(torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64))
    p.grad = torch.tensor([[1.0, -2.0], [0.5, 4.0]], dtype=torch.float64)
    start = p.detach().clone()
    LAMB([p], lr=0.1, weight_decay=0.5, eps=0.0).step()
    update = p.grad.sign() + 0.5 * start  # both averages, corrected, are the gradient and its square
    torch.testing.assert_close(p.detach(), start - 0.1 * 5 / update.norm() * update, rtol=1e-12, atol=0)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_lars(nesterov, momentum):
    options = {"momentum": momentum, "trust_coefficient": 0.1, "weight_decay": 0.1}
    options |= {"nesterov": nesterov and momentum > 0, "dampening": 0.1 if momentum else 0.0}
    assert_equal(lambda p: LARS(p, lr=0.1, **options), lambda p: pytorch_optimizer.LARS(p, lr=0.1, **options))


@pytest.mark.parametrize("kind", [LAMB, LARS])
def test_states_survive_a_state_dict(kind):
    p, q = (nn.Parameter(torch.full((3, 2), 2.0)) for _ in range(2))
    one, other = kind([p], lr=0.1), kind([q], lr=0.1)
    for number in range(4):
        if number == 2:
            q.data.copy_(p.data)
            other.load_state_dict(copy.deepcopy(one.state_dict()))
        for r, optimizer in ((p, one), (q, other)):
            r.grad = torch.full_like(r, 1.0 + number)
            if optimizer is one or number >= 2:
                optimizer.step()
    assert torch.equal(p, q) and not torch.equal(p, torch.full_like(p, 2.0))


@pytest.mark.parametrize("kind", [LAMB, LARS])
def test_closure_runs_once_and_its_loss_is_returned(kind):
    p = nn.Parameter(torch.ones(2, 2))

    def closure():
        p.grad = None
        loss = p.square().sum()
        loss.backward()
        return loss

    assert kind([p], lr=0.1).step(closure).item() == 4.0
    assert not torch.equal(p, torch.ones(2, 2))


@pytest.mark.parametrize("kind", [LAMB, LARS])
def test_parameters_without_gradients_stay(kind):
    p = nn.Parameter(torch.ones(2, 2))
    optimizer = kind([p])
    optimizer.step()
    assert torch.equal(p, torch.ones(2, 2)) and not optimizer.state


def test_refusals():
    p = nn.Parameter(torch.ones(2, 2))
    for make, message in {
        lambda: LAMB([p], lr=-1.0): r"lr=-1.0 is outside of \[0.0, inf\)",
        lambda: LAMB([p], betas=(0.9, 1.0)): r"betas\[1\]=1.0 is outside of \[0.0, 1.0\)",
        lambda: LARS([p], momentum=1.5): r"momentum=1.5 is outside",
        lambda: LARS([p], trust_coefficient=-1): r"trust_coefficient=-1 is outside",
    }.items():
        with pytest.raises(ValueError, match=message):
            make()
    rows = nn.Embedding(3, 2, sparse=True)
    rows(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"LAMB does not support a parameter with a sparse gradient, shape \(3, 2\)"):
        LAMB(rows.parameters()).step()


@pytest.mark.parametrize(
    ("kind", "shape", "expected"),
    [
        (LAMB, (50, 20), 8 * 50 * 20),
        (LARS, (50, 20), 4 * 50 * 20),
        (torch.optim.Muon, (50, 20), 4 * 50 * 20),
        (torch.optim.Adafactor, (50, 20), 4 * (50 + 20)),
        (torch.optim.Adafactor, (50,), 4 * 50),
    ],
)
def test_state_bytes(kind, shape, expected):
    """Of a float32 parameter, as the table of docs/optimizers.md has them."""
    p = nn.Parameter(torch.ones(shape))
    p.grad = torch.ones_like(p)
    optimizer = kind([p])
    optimizer.step()
    states = [value for value in optimizer.state[p].values() if value.dim()]
    assert sum(state.nbytes for state in states) == expected
