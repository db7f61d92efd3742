"""Metrics that are updated with one number per batch: a sum, mean or extreme over its samples."""

import warnings

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric, MinMetric, SumMetric

from harness.trainer_runs import trainer_of

LAYOUTS = [
    {"num_microbatches": 2},
    {"pipeline_parallel_size": 2, "num_microbatches": 2},
    {"tensor_parallel_size": 2, "num_microbatches": 2},
    {"zero_stage": 3, "num_microbatches": 2},
]
METRICS = {
    "mask": SumMetric,
    "real_mask": SumMetric,
    "mask_number": SumMetric,
    "most": MaxMetric,
    "total": SumMetric,
    "doubled": SumMetric,
    "largest": MaxMetric,
    "least": MinMetric,
    "mean": MeanMetric,
    "hits": SumMetric,
    "constant": MaxMetric,
    "weighted": MeanMetric,
    "total_forward": SumMetric,
}


class Updates(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.metrics = nn.ModuleDict({name: made() for name, made in METRICS.items()})
        self.spread = MeanMetric()

    def training_step(self, batch):
        x, y, mask = batch
        out = self.body(x)
        losses = (out - y).square().flatten(1).mean(1)
        numbers = {
            "mask": mask.sum(),
            "real_mask": mask.float().sum(),
            "mask_number": mask.float().sum().item(),
            "most": mask.sum(1).max(),
            "total": losses.detach().sum(),
            "doubled": 2 * losses.sum(),
            "largest": losses.max(),
            "least": losses.detach().min(),
            "mean": losses.mean(),
            "hits": (out > 0).sum(),
        }
        for name, number in numbers.items():
            self.metrics[name].update(number)
        self.metrics["constant"].update(4)
        self.metrics["weighted"].update(losses.mean(), weight=len(x))
        self.metrics["total_forward"](losses.sum())
        self.spread.update(out.std())
        return losses.mean()

    def on_train_epoch_end(self):
        for name, metric in self.metrics.items():
            self.log(name, metric.compute())
            metric.reset()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def loader():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 4, generator=generator)
    mask = torch.rand(16, 5, generator=generator) < 0.5
    return DataLoader(TensorDataset(x, x[:, :1] * 2, mask), 8)


def fitted(options, world):
    given = dict(options)
    trainer = trainer_of(world, given.pop("pipeline_parallel_size", 1), max_epochs=1, strategy_options=given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Updates(), loader())
    found = {name: float(trainer.callback_metrics[name]) for name in METRICS}
    return found, [str(one.message) for one in caught]


def expected():
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(Updates(), loader())
    return {name: float(trainer.callback_metrics[name]) for name in METRICS}


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_updated_as_in_one_process(worlds, options):
    world = 1 if len(options) == 1 else 2
    results = worlds.run(world, fitted, options, world)
    for found, _ in results:
        assert found == pytest.approx(expected(), rel=1e-5)
    texts = [text for _, caught in results for text in caught if "the mean over parts of it" in text]
    assert texts, "a standard deviation is none of these"
    assert all("the metric 'spread' with a number" in text for text in texts), texts
