"""Hooks that users register on an optimizer see full parameters and gradients, also after the layout has changed."""

import pytest
import torch
from lightning.pytorch import Callback
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from harness.fits import trainer_of
from lightning_hybrid import Hybrid3DStrategy
from models.regression import Sequential

FEATURES, BATCH, STEPS = 8, 4, 5


class Hooked(Sequential):
    """Torch's optimizer, with hooks that read all gradients and change all parameters."""

    def __init__(self, registers, changes):
        super().__init__(features=FEATURES, lr=0.05)
        self.registers, self.changes, self.seen, self.handles = registers, changes, [], []

    def register(self, optimizer):
        optimizer.register_step_pre_hook(lambda *_: self.see("before", optimizer))
        optimizer.register_step_post_hook(self.limit)

    def see(self, when, optimizer):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad.norm() for p in parameters if p.grad is not None]
        norm = float(torch.stack(gradients).norm()) if gradients else 0.0
        self.seen.append((when, len(gradients), norm, float(sum(p.sum() for p in parameters))))

    @torch.no_grad()
    def limit(self, optimizer, args, kwargs):
        self.see("after", optimizer)
        total = sum(p.square().sum() for p in self.parameters()).sqrt()
        for p in self.parameters():
            p.mul_(2.0 / total)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        if self.registers == "when it is built":
            self.register(optimizer)
        return optimizer

    def on_train_start(self):
        if self.registers == "on_train_start":
            self.register(self.trainer.optimizers[0])
        if self.registers == "on all optimizers":
            optimizer = self.trainer.optimizers[0]
            before = register_optimizer_step_pre_hook(lambda *_: self.see("before", optimizer))
            self.handles = [before, register_optimizer_step_post_hook(self.limit)]

    def on_train_end(self):
        for handle in self.handles:
            handle.remove()

    def training_step(self, batch, batch_idx=None):
        x, y = batch
        h = self.layers[0](x)
        is_late = self.trainer.fit_loop.epoch_loop.total_batch_idx >= 2
        if self.changes and is_late and h.mean().item() > 1e6:  # no pipeline runs it
            h = 2 * h
        return F.mse_loss(self.layers[1:](h), y)


class Register(Callback):
    def on_train_start(self, trainer, pl_module):
        if pl_module.registers == "callback":
            pl_module.register(trainer.optimizers[0])


class OnFirstRank(Callback):
    """A hook that one rank has, and that reads nothing."""

    def on_train_start(self, trainer, pl_module):
        self.calls = []
        if trainer.is_global_zero:
            trainer.optimizers[0].register_step_post_hook(lambda *_: self.calls.append(1))


def fit(world_size, options, registers, changes=False, replicas=1):
    torch.manual_seed(0)
    module = Hooked(registers, changes).double()
    x = torch.randn(BATCH * STEPS, FEATURES, dtype=torch.float64)
    first = OnFirstRank()
    strategy = Hybrid3DStrategy(**options) if world_size > 1 else None
    trainer = trainer_of(world_size, strategy, [Register(), first])
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    sampler = DistributedSampler(data, replicas, trainer.global_rank % replicas, shuffle=False)
    trainer.fit(module, DataLoader(data, batch_size=BATCH // replicas, sampler=sampler))
    assert len(first.calls) == STEPS * (trainer.global_rank == 0)
    return module.seen, [p.detach().clone() for p in module.parameters()]


LAYOUTS = {
    "stages": (2, {"pipeline_parallel_size": 2}, False, 1),
    "a layout that changes": (2, {"pipeline_parallel_size": 2}, True, 1),
    "ZeRO-3": (2, {"zero_stage": 3}, False, 2),
    "tensor ranks": (2, {"tensor_parallel_size": 2}, False, 1),
}


@pytest.mark.parametrize("registers", ["callback", "on_train_start", "when it is built", "on all optimizers"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_hooks_read_the_full_model(worlds, layout, registers):
    world_size, options, changes, replicas = LAYOUTS[layout]
    [(seen, parameters)] = worlds.run(1, fit, 1, {}, registers)
    assert {count for _, count, *_ in seen} == {0, len(parameters)}
    for found, state in worlds.run(world_size, fit, world_size, options, registers, changes, replicas, timeout=200):
        assert [each[:2] for each in found] == [each[:2] for each in seen]
        for one, other in zip(found, seen, strict=True):
            assert one[2:] == pytest.approx(other[2:], rel=1e-9)
        for one, other in zip(state, parameters, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
