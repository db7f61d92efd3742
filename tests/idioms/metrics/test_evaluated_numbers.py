"""Numbers of evaluation steps under pipeline stages: one per batch, wherever a step puts them, as in one process."""

import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric, SumMetric

from harness.trainer_runs import trainer_of

LAYOUTS = [
    {"pipeline_parallel_size": 2, "num_microbatches": 2},
    {"pipeline_parallel_size": 2, "num_microbatches": 4},
    {"tensor_parallel_size": 2, "num_microbatches": 2},
]

NUMBERS = {
    "count": lambda y, out: (y >= 0).float().sum(),
    "count_number": lambda y, out: (y >= 0).float().sum().item(),
    "count_integer": lambda y, out: int((y >= 0).sum()),
    "count_numpy": lambda y, out: np.float32((y >= 0).float().sum().item()),
    "late_count": lambda y, out: (y > 1.0).float().sum(),  # 0 in the first batch
    "samples": lambda y, out: len(y),
    "constant": lambda y, out: 4,
    "any": lambda y, out: (y > 1.5).any(),
    "hits": lambda y, out: (out > 0.3).float().sum(),
    "hits_number": lambda y, out: (out > 0.3).float().sum().item(),
    "loss": lambda y, out: F.mse_loss(out, y),
    "loss_number": lambda y, out: F.mse_loss(out, y).item(),
    "loss_sum": lambda y, out: F.mse_loss(out, y, reduction="sum"),
    "largest_number": lambda y, out: out.max().item(),
    "deviation": lambda y, out: out.std(),
    "late_deviation": lambda y, out: F.relu(y - 1.0).std(),
    "late_mean": lambda y, out: y[y > 1.0].mean(),  # NaN in the first batch
    "first": lambda y, out: y[0, 0],
    "last": lambda y, out: out[-1, 0],
    "above_mean": lambda y, out: (out > out.mean()).sum(),  # the same for the first batch and its halves
    "near_pairs": lambda y, out: ((out @ out.T) > 0.1).double().sum(),
    "one_more": lambda y, out: (out > 0.9).float().sum() + 1,
}
SPLIT = {"count", "hits", "loss", "loss_number"}  # as arguments of metrics: batches stay split for these


class Uses(LightningModule):
    """A step that uses one number of its batch."""

    def __init__(self, name):
        super().__init__()
        torch.manual_seed(1)
        self.name, self.found = name, []
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.body[4].bias.data.fill_(0.4)
        self.make()

    def make(self):
        pass

    def validation_step(self, batch):
        self.use(NUMBERS[self.name](batch[1], self.body(batch[0])))

    def on_validation_epoch_end(self):
        self.found += self.end()

    def end(self):
        return []


class Argument(Uses):
    def make(self):
        self.metrics = nn.ModuleList([SumMetric(), MaxMetric(), MeanMetric()])

    def use(self, number):
        self.metrics[0].update(number)
        self.metrics[1].update(value=number)
        self.metrics[2](number)

    def end(self):
        return [float(metric.compute()) for metric in self.metrics]


class Logged(Uses):
    def use(self, number):
        for how in ("mean", "sum", "max"):
            self.log(how, number, reduce_fx=how)

    def end(self):
        return []


class Appended(Uses):
    def make(self):
        self.kept = []

    def use(self, number):
        self.kept.append({"number": number})

    def end(self):
        return [float(each["number"]) for each in self.kept]


class Added(Uses):
    def make(self):
        self.total = 0.0

    def use(self, number):
        self.total += float(number)

    def end(self):
        return [self.total]


class Returned(Uses):
    def validation_step(self, batch):
        return {"number": NUMBERS[self.name](batch[1], self.body(batch[0]))}

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.found.append(float(outputs["number"]))


class Predicted(Uses):
    def predict_step(self, batch):
        return {"number": NUMBERS[self.name](batch[1], self.body(batch[0]))}


def loader():
    x = torch.randn(29, 4, generator=torch.Generator().manual_seed(0))
    y = x[:, :1] * 2
    y[:8] = y[:8].clamp(max=0.9)
    return DataLoader(TensorDataset(x, y), batch_size=8)


def evaluated(use, world=1, options=None):
    """By name of a number, what a Trainer shows of it, and whether its batches were split."""
    warnings.simplefilter("ignore")
    numbers, unsplit = {}, set()
    for name in NUMBERS:
        given = dict(options or {})
        trainer = trainer_of(world, given.pop("pipeline_parallel_size", 1), strategy_options=given)
        module = use(name)
        if use is Predicted:
            module.found = [float(output["number"]) for output in trainer.predict(module, loader())]
        else:
            trainer.validate(module, loader(), verbose=False)
        numbers[name] = module.found + [float(value) for value in trainer.callback_metrics.values()]
        if options and trainer.strategy.run.runner.unsplit_step_names:
            unsplit.add(name)
    return numbers, unsplit


@pytest.mark.parametrize("use", [Argument, Logged, Appended, Added, Returned, Predicted])
@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_numbers_of_one_process(worlds, options, use):
    expected, _ = evaluated(use)
    for numbers, unsplit in worlds.run(2, evaluated, use, 2, options):
        for name, found in numbers.items():
            assert found == pytest.approx(expected[name], rel=1e-4, nan_ok=True), name
        assert use is not Argument or unsplit.isdisjoint(SPLIT)


class Counted(LightningModule):
    """Names what it logs by its mode, and logs bools and constants."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch):
        loss = F.mse_loss(self.body(batch[0]), batch[1])
        name = "train" if self.training else "val"
        self.log(f"{name}_samples", float(len(batch[0])), on_step=True)
        self.log(f"{name}_loss", loss, on_step=True, reduce_fx="sum")
        self.log(f"{name}_constant", torch.tensor(7), on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def trained(world=1, options=None):
    warnings.simplefilter("ignore")
    given = dict(options or {})
    trainer = trainer_of(world, given.pop("pipeline_parallel_size", 1), strategy_options=given)
    trainer.fit(Counted(), loader())
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("options", [{"num_microbatches": 2}, LAYOUTS[0]], ids=str)
def test_logs_named_by_the_mode(worlds, options):
    expected = trained()
    for found in worlds.run(len(options), trained, len(options), options):
        assert found == pytest.approx(expected, rel=1e-4)
