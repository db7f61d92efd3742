"""Objects that hooks put into a checkpoint, with metrics and modules inside: full under any layout."""

import copy
import io

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from harness.trainer_runs import trainer_of

FEATURES = 4
LAYOUTS = {
    "pp2": {"pipeline_parallel_size": 2},
    "zero3": {"zero_stage": 3},
    "tp2": {"tensor_parallel_size": 2},
}


class Holder:
    """An object of the user's."""

    def __init__(self, module):
        self.module, self.weight = module, module.weight


class SavesObjects(Callback):
    def state_dict(self):
        return {"metric": self.module.mae, "modules": [self.module.body[0]]}

    def setup(self, trainer, pl_module, stage):
        self.module = pl_module


class Saves(LightningModule):
    """Saves its metrics, layers and objects around them where a custom loader expects them."""

    def __init__(self, criterion=None):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.body = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(4)))
        self.head = nn.Linear(FEATURES, 1)
        self.mae = criterion or torchmetrics.MeanAbsoluteError()

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self.head(self.body(x))
        self.mae(out, y)
        self.log("mae", self.mae)
        return F.mse_loss(out, y)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["special"] = {"metric": self.mae, "module": self.head, "holder": Holder(self.body[1])}
        checkpoint["special"]["copies"] = [copy.deepcopy(layer) for layer in self.body]

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class SavesNow(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


def saved(options, path):
    torch.manual_seed(1)
    given = dict(options)
    size = 2 if options else 1
    now = SavesNow()
    now.path = path
    stages = given.pop("pipeline_parallel_size", 1)
    trainer = trainer_of(size, stages, strategy_options=given, max_epochs=1, callbacks=[SavesObjects(), now])
    data = TensorDataset(torch.randn(16, FEATURES), torch.randn(16, 1))
    batch = 4 if trainer.strategy.__class__.__name__ != "SingleDeviceStrategy" and "zero_stage" in options else 8
    trainer.fit(Saves(torchmetrics.MeanAbsoluteError()), DataLoader(data, batch))


def numbers(path):
    """Their full content in the file, as numbers."""
    checkpoint = torch.load(path, weights_only=False)
    special, hyper = checkpoint["special"], checkpoint["hyper_parameters"]
    kept = next(state for key, state in checkpoint["callbacks"].items() if "SavesObjects" in key)
    metrics = [special["metric"], hyper["criterion"], kept["metric"]]
    modules = [special["module"], special["holder"].module, kept["modules"][0], *special["copies"]]
    assert torch.equal(special["holder"].weight, special["holder"].module.weight)
    assert all(type(p) is nn.Parameter for module in modules for p in module.parameters())
    state = checkpoint["state_dict"]
    names = ("head", "body.1", "body.0", *(f"body.{place}" for place in range(4)))
    for name, module in zip(names, modules, strict=True):
        torch.testing.assert_close(module.state_dict(), {key: state[f"{name}.{key}"] for key in module.state_dict()})
    torch.save(checkpoint, io.BytesIO())
    return [float(metric.sum_abs_error) for metric in metrics], [int(metric.total) for metric in metrics]


@pytest.mark.parametrize("name", LAYOUTS)
def test_checkpointed_objects_are_full(worlds, tmp_path, name):
    worlds.run(1, saved, {}, str(tmp_path / "one.ckpt"))
    worlds.run(2, saved, LAYOUTS[name], str(tmp_path / "two.ckpt"))
    errors, counts = numbers(tmp_path / "two.ckpt")
    expected, total = numbers(tmp_path / "one.ckpt")
    replicas = 2 if name == "zero3" else 1  # each replica's metric counts local batches
    assert [count * replicas for count in counts] == total
    if replicas == 1:
        assert errors == pytest.approx(expected)
