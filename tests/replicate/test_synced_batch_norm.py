"""SyncedBatchNorm equals BatchNorm on the data of all ranks, for any sizes of it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_hybrid.replicate.batch_norm import SyncedBatchNorm

KINDS = {
    "rows": (lambda: nn.BatchNorm1d(3), (8, 3)),
    "images": (lambda: nn.BatchNorm2d(3, momentum=None), (8, 3, 2, 4)),
    "not affine": (lambda: nn.BatchNorm1d(3, affine=False, track_running_stats=False), (8, 3, 5)),
}
ROWS = {"uneven": (6, 2), "one rank has none": (8, 0)}


def sync(kind, rows):
    """This rank's rows of outputs and gradients, and the same of one BatchNorm on all rows."""
    torch.manual_seed(0)
    make, shape = KINDS[kind]
    reference, local = make().double(), make().double()
    local.load_state_dict(reference.state_dict())
    x = (torch.randn(shape, dtype=torch.float64) * 3 + 1).requires_grad_()
    weights = torch.randn(shape, dtype=torch.float64)
    first = sum(rows[: dist.get_rank()])
    part = slice(first, first + rows[dist.get_rank()])
    own = x.detach()[part].requires_grad_()
    outputs = []
    for _ in range(2):  # twice, for the running averages
        y = reference(x)
        (y * weights).sum().backward()
        with SyncedBatchNorm(dist.group.WORLD).running():
            z = local(own)
            (z * weights[part]).sum().backward()
        outputs.append((z, y[part]))
    for parameter in local.parameters():
        dist.all_reduce(parameter.grad)
    gradients = [(p.grad, q.grad) for p, q in zip(local.parameters(), reference.parameters(), strict=True)]
    states = list(zip(local.buffers(), reference.buffers(), strict=True))
    pairs = [*outputs, (own.grad, x.grad[part]), *gradients, *states]
    return [(a.detach().clone(), b.detach().clone()) for a, b in pairs]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_matches_one_process(worlds, kind, rows):
    for pairs in worlds.run(2, sync, kind, ROWS[rows]):
        assert len(pairs) >= 3
        for actual, expected in pairs:
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def in_half(dtype):
    torch.manual_seed(dist.get_rank())
    norm, x = nn.BatchNorm2d(4).to(dtype), (100 + torch.randn(4, 4, 3, 3)).to(dtype).requires_grad_()
    with SyncedBatchNorm(dist.group.WORLD).running():
        y = norm(x)
        y.sum().backward()
    return y.dtype, x.grad.dtype, norm.weight.grad.dtype, float(y.float().std()), norm.running_mean.dtype


def test_half_precision_has_float32_statistics(worlds):
    for *dtypes, deviation, buffer in worlds.run(2, in_half, torch.bfloat16):
        assert {*dtypes, buffer} == {torch.bfloat16}
        assert abs(deviation - 1) < 0.02


def evaluates():
    norm = nn.BatchNorm1d(3).eval()
    with SyncedBatchNorm(dist.group.WORLD).running():
        if dist.get_rank() == 0:  # the other rank has no batch
            norm(torch.randn(5, 3))
    return torch.batch_norm is norm.__class__ or "SyncedBatchNorm" in repr(torch.batch_norm)


def test_evaluation_does_not_communicate_or_keep_state(worlds):
    assert worlds.run(2, evaluates) == [False, False]
