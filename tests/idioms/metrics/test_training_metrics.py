"""torchmetrics objects of training steps equal plain Lightning's in one process, for any batch split."""

import logging
import warnings

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback, Trainer
from torch.nn import functional as F

from lightning_hybrid import Hybrid3DStrategy
from models.regression import FEATURES, Regressor, mlp, regression_data


class Measures(Regressor):
    """Means of losses, as in templates, and metrics over samples; batches are of several sizes."""

    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(), torch.nn.Linear(FEATURES, 1)
        self.mean, self.rows, self.error = (
            torchmetrics.MeanMetric(),
            torchmetrics.MeanMetric(),
            torchmetrics.MeanAbsoluteError(),
        )
        self.by_size = torchmetrics.MeanMetric()
        several = {"squared": torchmetrics.MeanSquaredError(), "explained": torchmetrics.ExplainedVariance()}
        self.several, self.seen = torchmetrics.MetricCollection(several), torchmetrics.SumMetric()
        self.val_mean, self.best = torchmetrics.MeanMetric(), torchmetrics.MinMetric()

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        loss = F.mse_loss(out, y)
        self.mean(loss)
        self.by_size.update(loss, weight=len(x))  # the user's weights are kept
        self.rows.update((out - y).abs().flatten())
        self.error(out, y)
        self.several.update(out, y)
        self.seen.update(float(len(x)))
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.log("by_size", self.by_size, on_step=False, on_epoch=True)
        self.log("error", self.error, on_step=False, on_epoch=True)
        self.log_dict(self.several, on_step=False, on_epoch=True)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        self.log("rows", self.rows.compute())
        self.rows.reset()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.val_mean(F.mse_loss(self(x), y))
        self.log("val_mean", self.val_mean, on_step=False, on_epoch=True)

    def on_validation_epoch_end(self):
        self.best(self.val_mean.compute())
        self.log("best", self.best.compute())


class Decides(Measures):
    """No pipeline runs it."""

    def forward(self, x):
        h = self.body(x)
        return self.head(h) if not self.training or h.abs().mean().item() < 10 else self.head(2 * h)


class BranchesLater(Measures):
    """None does from the third batch on."""

    def forward(self, x):
        h = self.body(x)
        is_later = self.training and self.trainer.fit_loop.epoch_loop.total_batch_idx >= 2
        return self.head(2 * h) if is_later and h.abs().mean().item() > 10 else self.head(h)


class StoresBatch(Decides):
    """Its ranks always run unsplit batches."""

    def training_step(self, batch, batch_idx):
        self.last = batch[0]
        return super().training_step(batch, batch_idx)


class AtEnd(Callback):
    """The value that a user hook reads, as the first reader."""

    def __init__(self):
        self.found = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.found.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def data():
    return regression_data(num_train=27, num_val=13)  # last batches are shorter: one sample in training


def run(module_class, devices, options):
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(1)
    strategy = {"strategy": Hybrid3DStrategy(**options)} if options is not None else {}
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    recorder = AtEnd()
    trainer = Trainer(
        accelerator="cpu", devices=devices, max_epochs=2, precision="64-true", callbacks=[recorder], **quiet, **strategy
    )
    torch.manual_seed(1)
    loaders = data()
    loaders["train_dataloaders"] = torch.utils.data.DataLoader(loaders["train_dataloaders"].dataset, 8)
    trainer.fit(module_class(), **loaders)
    return recorder.found


EXPLAINED = "explained"  # torchmetrics itself stores it in float32
OPTIONS = {
    "pipelined": (Measures, {"pipeline_parallel_size": 2}),
    "pipelined in 4 microbatches": (Measures, {"pipeline_parallel_size": 2, "num_microbatches": 4}),
    "in shares": (Decides, {"pipeline_parallel_size": 2, "num_microbatches": 1}),
    "in shares and microbatches": (Decides, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
    "pipelined, then in shares": (BranchesLater, {"pipeline_parallel_size": 2}),
    "unsplit batches": (StoresBatch, {"pipeline_parallel_size": 2}),
    "microbatches of tensor ranks": (Measures, {"tensor_parallel_size": 2, "num_microbatches": 3}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_matches_plain_lightning(worlds, name):
    module, options = OPTIONS[name]
    ranks = worlds.run(2, run, module, 2, options)
    [expected] = worlds.run(1, run, module, 1, None)
    for found in ranks:
        for epoch, wanted in zip(found, expected, strict=True):
            assert epoch.keys() == wanted.keys()
            for key, value in wanted.items():
                near = 1e-5 if key == EXPLAINED else 1e-6 if key in ("error", "squared", "seen") else 2e-6
                assert epoch[key] == pytest.approx(value, rel=near), (key, epoch, wanted)
