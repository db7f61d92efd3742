"""A step that is recorded before there is a run, and calls backwards and optimizers itself."""

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from harness.trainer_runs import trainer_of


class TogglesByTurns(LightningModule):
    """Two networks of odd widths, which no two tensor ranks can shard; each trains in its turn."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.second(self.first(batch[0])).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.first, self.second)]


def trained(size):
    torch.manual_seed(0)
    module, data = TogglesByTurns().double(), TensorDataset(torch.randn(8, 3).double())
    options = {"tensor_parallel_size": size, "data_parallel_size": 1}
    trainer_of(size, 1, strategy_options=options, max_epochs=1).fit(module, DataLoader(data, 4))
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_recorded_manual_step_leaves_parameters_trainable(worlds):
    expected = trained(1)
    for weights in worlds.run(2, trained, 2):
        assert all(torch.allclose(weights[name], value, rtol=1e-10) for name, value in expected.items())
