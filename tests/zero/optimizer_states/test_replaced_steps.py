"""Steps of optimizers that are replaced while a run lasts."""

import torch
from torch import nn

from lightning_hybrid.zero.optimizer_states.temporarily_replace_optimizer_step import step_after_closure


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
