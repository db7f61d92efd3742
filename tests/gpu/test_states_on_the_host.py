"""Optimizer states on the host of a GPU: steps in a pipeline, also in the backward, against states in place."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader

from harness.fits import trainer_of
from lightning_hybrid import Hybrid3DStrategy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.world(1, timeout=120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Blocks(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(8))

    def training_step(self, batch, batch_idx):
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self):
        weights = [p for p in self.parameters() if p.dim() > 1]
        biases = [p for p in self.parameters() if p.dim() == 1]
        optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Devices(Callback):
    """Whether the pipeline runs, and the devices of states."""

    def on_train_end(self, trainer, pl_module):
        offloaded = trainer.strategy._lifecycle.optimization.moved
        self.pipelines = [each.host_optimizer is not None for each in offloaded]
        entries = trainer.optimizers[0].state.values()
        self.states = {value.device.type for entry in entries for value in entry.values() if value.dim()}


def leave_gloo():
    dist.destroy_process_group()  # the Trainer makes its own


def fitted(callback=None, **options):
    data = torch.randn(80, 512, generator=torch.Generator().manual_seed(1))
    module = Blocks()
    callbacks = [callback] if callback else []
    trainer = trainer_of(1, Hybrid3DStrategy(**options), callbacks, accelerator="gpu", max_epochs=2)
    trainer.fit(module, DataLoader(list(data), batch_size=8))
    return {name: value.cpu() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("in_backward", [False, True], ids=["in the step", "in the backward"])
@pytest.mark.parametrize("where", ["cpu", "disk:{}"], ids=["memory", "file"])
def test_same_values_as_states_in_place(tmp_path, where, in_backward):
    """20 steps; the kernels of the host and of the GPU round differently."""
    leave_gloo()
    devices = Devices()
    offload = {"optimizer_states": where.format(tmp_path)}
    values = fitted(devices, offload=offload, optimizer_in_backward=in_backward)
    assert devices.pipelines == [True] and devices.states == {"cpu"}
    torch.testing.assert_close(values, fitted(), rtol=1e-4, atol=1e-6)


def test_step_in_the_backward_is_bitwise_equal():
    leave_gloo()
    torch.testing.assert_close(fitted(optimizer_in_backward=True), fitted(), rtol=0, atol=0)
