"""Few functions of the package stand between Lightning's call of a training step and the user's code."""

import sys

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from harness.trainer_runs import trainer_of
from lightning_hybrid import Hybrid3DStrategy

MOST = 8  # of the package, from the method of the strategy on
LAYOUTS = {
    "plain": {},
    "stages": {"pipeline_parallel_size": 2, "num_microbatches": 2},
    "zero": {"zero_stage": 3, "num_microbatches": 2},
    "tensor": {"tensor_parallel_size": 2},
}


class Framed(pl.LightningModule):
    """Lists the functions of the package that its step is called through, from the strategy on."""

    def __init__(self):
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)) for _ in range(4))
        self.layers, self.path = nn.Sequential(*blocks), []

    def training_step(self, batch, batch_idx):
        frame, path = sys._getframe(1), []
        while frame is not None:
            code = frame.f_code
            if "/lightning_hybrid/" in code.co_filename:
                path.append(f"{code.co_filename.rpartition('/lightning_hybrid/')[2]}: {code.co_name}")
            if code.co_name == "training_step" and isinstance(frame.f_locals.get("self"), Hybrid3DStrategy):
                self.path = path
                break
            frame = frame.f_back
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_framed(options):
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(32, 16, generator=generator))
    module = Framed()
    trainer_of(2, strategy_options={"strict_layout": True, **options}).fit(module, DataLoader(data, 8))
    return module.path


@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_few_frames_around_the_step_of_the_user(worlds, options):
    for path in worlds.run(2, fit_framed, options):
        assert 1 <= len(path) <= MOST, path
