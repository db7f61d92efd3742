"""Steps of optimizers that are replaced while a run lasts."""

import warnings

import pytest
import torch
from torch import nn

from lightning_hybrid.optimizers.replacement import Place, replace_step, step_after_closure


def test_a_scheduler_accepts_a_step_that_is_replaced_twice():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    undos = []
    for place in (Place.FULL, Place.STATES):
        original = optimizer.step
        undos.append(step_after_closure(optimizer, lambda kwargs, original=original: original(), place, reason="test"))
    optimizer.step()
    scheduler.step()  # warns, which is an error here, where torch's mark of the first step is not found
    for undo in reversed(undos):
        undo()
    assert parameter.tolist() == [0.0, 0.0] and optimizer.param_groups[0]["lr"] == 0.5


def test_a_scheduler_sees_the_replaced_step():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    steps = []
    undo = step_after_closure(optimizer, steps.append, Place.STATES, reason="a test")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()
    undo()
    assert steps == [{}] and scheduler.get_last_lr() == [0.5]


def test_the_undo_restores_the_step():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    undo = replace_step(optimizer, lambda self, closure=None: "replaced", Place.FULL, reason="a test")
    assert optimizer.step() == "replaced"
    undo()
    assert optimizer.step() is None


def test_a_replacement_inside_of_an_outer_one_is_an_error():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    undo = step_after_closure(optimizer, lambda kwargs: None, Place.STATES, reason="a test")
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # wraps the step
    with pytest.raises(AssertionError, match="STATES"):
        step_after_closure(optimizer, lambda kwargs: None, Place.FLOAT32, reason="a test")
    undo()
