"""A small module, and one run of it with the plain Trainer and one with hybrid3d on the same single device."""

import tempfile
import traceback

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning_runs import ignore_warnings
from torch import nn
from torch.utils.data import DataLoader

HOOKS = [*(name for name in dir(Callback) if name.startswith("on_")), "setup", "teardown", "state_dict"]
OWN_HOOKS = sorted(
    {name for name in dir(LightningModule) if name.startswith("on_")}
    | {
        "setup",
        "teardown",
        "configure_model",
        "configure_optimizers",
        "configure_callbacks",
        "prepare_data",
        "backward",
    }
    | {"configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "forward"}
    | {"transfer_batch_to_device", "training_step", "validation_step", "test_step", "predict_step", "train_dataloader"}
)
OWN_HOOKS.remove("on_gpu")  # a property


class Small(LightningModule):
    """With BatchNorm, dropout and a scheduler; logs in steps and over epochs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.batch_size, self.lr = 2, 0.1
        self.seen = []

    def forward(self, x):
        return self.net(x)

    def loss(self, batch):
        return self(batch).square().mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train", loss, prog_bar=True)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self(batch)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def _loader(self, seed, num):
        samples = torch.randn(num, 4, generator=torch.Generator().manual_seed(seed))
        return DataLoader(samples, batch_size=self.batch_size)

    def train_dataloader(self):
        return self._loader(3, 16)

    def val_dataloader(self):
        return self._loader(4, 8)

    test_dataloader = predict_dataloader = val_dataloader


def _noting(kind, names, prefix, seen):
    """A class of a kind whose methods note that they are called."""

    def noting(name):
        def method(self, *args, **kwargs):
            seen.append(f"{prefix}.{name}")
            return getattr(super(kind_that_notes, self), name)(*args, **kwargs)

        return method

    kind_that_notes = type(kind.__name__, (kind,), {name: noting(name) for name in names})
    return kind_that_notes


def noting_callback(seen):
    return _noting(Callback, HOOKS, "callback", seen)()


def noting_module(seen, kind=Small):
    return _noting(kind, [name for name in OWN_HOOKS if hasattr(kind, name)], "module", seen)()


def plain(value):
    """What can be compared: tensors become lists."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def result_of(trainer, module):
    """All that a fit leaves."""
    return {
        "losses": module.seen,
        "weights": plain(module.state_dict()),
        "metrics": plain({**trainer.callback_metrics, **trainer.logged_metrics}),
        "progress": (trainer.global_step, trainer.current_epoch, trainer.state.status.value),
        "callbacks": [type(callback).__name__ for callback in trainer.callbacks],
    }


def in_both_ways(case, *args):
    """On the one rank of a world: what a case gives with the plain Trainer, and with hybrid3d.

    Args:
        case: Called with a function that makes a Trainer with further options.
        args: Of the case.
    """
    ignore_warnings()
    found = []
    for strategy in ("auto", "hybrid3d"):
        seed_everything(7, verbose=False)
        with tempfile.TemporaryDirectory() as folder:

            def trainer(strategy=strategy, folder=folder, **options):
                quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
                sizes = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "default_root_dir": folder}
                return Trainer(strategy=strategy, logger=False, **{**sizes, **quiet, **options})

            try:
                found.append(case(trainer, *args))
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}\n{''.join(traceback.format_tb(error.__traceback__))}")
    return found
