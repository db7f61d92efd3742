"""A user's module and what users pickle of it; nothing here imports the package under test.

Run as a script, it loads pickles where that package cannot be imported: for each line with a path a line of numbers.
"""

import copy
import json
import sys

import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ProgressBar
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FEATURES, CLASSES = 4, 3


class Weighted(nn.Module):
    """A loss with its own buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64))

    def forward(self, logits, target):
        return (nn.functional.cross_entropy(logits, target, reduction="none") * self.weights[target]).mean()


class Forecaster(LightningModule):
    """Its hyperparameters contain a layer, a loss and a metric, as those of forecasting packages do."""

    def __init__(self, first, loss, metric, width=4, norm=True):
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(first, nn.Tanh(), nn.Linear(width, width), nn.Dropout(0.0), nn.Tanh())
        self.norm = nn.BatchNorm1d(width) if norm else nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)
        self.head.weight.why = "an attribute that users give a parameter"
        self.loss, self.metric = loss, metric
        self.val_metrics = torchmetrics.MetricCollection([torchmetrics.F1Score("multiclass", num_classes=CLASSES)])
        self.double()

    def forward(self, x):
        return self.head(self.norm(self.body(x)))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.metric(logits, y)
        self.log("accuracy", self.metric, on_step=False, on_epoch=True)
        loss = self.loss(logits, y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.val_metrics.update(self(x), y)
        self.log_dict(self.val_metrics)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def on_train_epoch_end(self):
        write(self.trainer, self, "epoch")


class Writes(Callback):
    """Pickles objects in a batch, and stores a copy of the module."""

    def __init__(self, prefix):
        self.prefix, self.copy = prefix, None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            callbacks = [each for each in trainer.callbacks if not isinstance(each, ProgressBar)]
            further = {"loggers": trainer.loggers, "callbacks": callbacks}
            write(trainer, pl_module, "batch", batch=batch, outputs=outputs, **further)
            self.copy = copy.deepcopy(pl_module)
            trainer.save_checkpoint(f"{self.prefix[:-1]}batch.ckpt")


KINDS = ("module", "copy", "body", "metric", "metrics", "loss", "optimizer", "scheduler", "hparams", "loader")
IN_BATCH = ("batch", "outputs", "loggers", "callbacks")


WHEN = ("batch", "epoch", "after")


def write(trainer, module, when, **further):
    """Pickles everything that users pickle, each into its own file."""
    [writes] = [callback for callback in trainer.callbacks if isinstance(callback, Writes)]
    optimizer = trainer.optimizers[0]
    things = {
        "module": module,
        "copy": copy.deepcopy(module),
        "body": module.body,
        "metric": module.metric,
        "metrics": module.val_metrics,
        "loss": module.loss,
        "optimizer": optimizer,
        "scheduler": trainer.lr_scheduler_configs[0].scheduler,
        "hparams": module.hparams,
        "loader": trainer.train_dataloader,
        **further,
    }
    for name, thing in things.items():
        torch.save(thing, f"{writes.prefix}.{when}.{name}")


def made(norm):
    torch.manual_seed(5)
    metric = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
    return Forecaster(nn.Linear(FEATURES, 4), loss=Weighted(), metric=metric, norm=norm)


def data(batch_size, reference_of_replicas=False):
    x = torch.cos(torch.arange(16 * FEATURES, dtype=torch.float64) ** 2).reshape(16, FEATURES)
    samples = TensorDataset(x, torch.arange(16) % CLASSES)
    sampler = DistributedSampler(samples, 1, 0, shuffle=True, seed=0) if reference_of_replicas else None
    return DataLoader(samples, batch_size, sampler=sampler), DataLoader(samples, batch_size)


def numbers(thing):
    """The content of a loaded object, as plain numbers and names."""
    if isinstance(thing, torchmetrics.Metric):
        return {name: numbers(getattr(thing, name)) for name in thing._defaults} | {"value": numbers(thing.compute())}
    if isinstance(thing, nn.Module):
        found = {name: numbers(value) for name, value in thing.state_dict().items()}
        found |= {f"{name} is": str(type(parameter)) for name, parameter in thing.named_parameters()}
        for name, module in thing.named_modules():
            found |= {f"{name} has {key}": "" for key in vars(module)}
            hooks = {key: value for key, value in vars(module).items() if "hooks" in key}
            found |= {f"{name} in {key}": list(map(str, value)) for key, value in hooks.items()}
        if isinstance(thing, LightningModule):
            found["attributes"] = sorted(vars(thing.head.weight))
            x = torch.ones(2, FEATURES, dtype=torch.float64)
            found["answer"] = numbers(copy.copy(thing).eval()(x))
            found["hparams"] = numbers(thing.hparams)
        return found
    if isinstance(thing, torch.optim.Optimizer):
        return {"state": numbers(thing.state_dict()), "is": [str(type(p)) for p in thing.state]}
    if isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
        return {"rates": thing.get_last_lr(), "optimizer": numbers(thing.optimizer)}
    if isinstance(thing, Writes):
        return {"copy": numbers(thing.copy)}
    if isinstance(thing, DataLoader):
        found = {name: str(type(getattr(thing, name))) for name in ("sampler", "batch_sampler")}
        return {"is": str(type(thing)), **found, "first": numbers(thing.dataset[0])}
    if isinstance(thing, torch.Tensor):
        assert type(thing) in (torch.Tensor, nn.Parameter) and not vars(thing).keys() - {"why"}
        return thing.tolist()
    if isinstance(thing, dict):
        return {str(key): numbers(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [numbers(value) for value in thing if type(value) is not Callback]
    return thing if isinstance(thing, (int, float, str, type(None))) else str(type(thing))


def load_without_package():
    from harness.worlds.hidden_packages import hide

    hide(("lightning_hybrid",))
    for line in sys.stdin:
        path = line.strip()
        if path.endswith(".ckpt"):
            thing = Forecaster.load_from_checkpoint(path, weights_only=False)
        else:
            thing = torch.load(path, weights_only=False)
        assert not any(name.partition(".")[0] == "lightning_hybrid" for name in sys.modules)
        print("loaded", json.dumps(numbers(thing)), flush=True)


if __name__ == "__main__":
    # classes are those of this module under its real name

    load_without_package()
