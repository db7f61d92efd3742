"""A classifier that records what each step logs, and the comparison of two of its fits."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import TensorDataset

CLASSES, FEATURES, SAMPLES, BATCH = 4, 6, 24, 8


def samples():
    index = torch.arange(SAMPLES, dtype=torch.float64).unsqueeze(1)
    x = torch.cos(index * torch.arange(1, FEATURES + 1) + index)
    return TensorDataset(x, (index.squeeze(1).square() % 7 % CLASSES).long())


class Classifier(LightningModule):
    """Logs in each step the compared values."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Sequential(nn.Tanh(), nn.Linear(8, CLASSES))
        self.double()
        self.seen = []

    def training_step(self, batch, batch_idx):
        return self.step(self.head(self.body(batch[0])), batch[1])

    def validation_step(self, batch, batch_idx):
        self.step(self.head(self.body(batch[0])), batch[1])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        logged = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        with torch._C.DisableTorchFunction():
            grads = {name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None}
        self.seen.append((float(outputs["loss"]), logged, grads))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def assert_steps_agree(expected, ranks, tolerance=1e-10):
    assert len(expected) == SAMPLES // BATCH
    for steps in zip(expected, *ranks, strict=True):
        loss, logged, grads = steps[0]
        for actual, our_logged, our_grads in steps[1:]:
            assert actual == pytest.approx(loss, rel=tolerance)
            # A torchmetrics object stores float32; its counts of samples are exact in it.
            assert our_logged == pytest.approx(logged, rel=tolerance)
            for name, grad in our_grads.items():
                torch.testing.assert_close(grad, grads[name], rtol=tolerance, atol=tolerance / 100)
        assert set().union(*(our_grads for _, _, our_grads in steps[1:])) == grads.keys()
