"""Steps of optimizers that are replaced while a run lasts."""

import warnings

import torch
from torch import nn

from lightning_hybrid.optimizers.replacement import replace_step, step_after_closure


def test_a_scheduler_accepts_a_step_that_is_replaced_twice():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    undos = []
    for _ in range(2):
        original = optimizer.step
        undos.append(step_after_closure(optimizer, lambda kwargs, original=original: original(), reason="a test"))
    optimizer.step()
    scheduler.step()  # warns, which is an error here, where torch's mark of the first step is not found
    for undo in reversed(undos):
        undo()
    assert parameter.tolist() == [0.0, 0.0] and optimizer.param_groups[0]["lr"] == 0.5


def test_a_scheduler_sees_the_replaced_step():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    steps = []
    undo = step_after_closure(optimizer, steps.append, reason="a test")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()
    undo()
    assert steps == [{}] and scheduler.get_last_lr() == [0.5]


def test_the_undo_restores_the_step():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    undo = replace_step(optimizer, lambda self, closure=None: "replaced", reason="a test")
    assert optimizer.step() == "replaced"
    undo()
    assert optimizer.step() is None
