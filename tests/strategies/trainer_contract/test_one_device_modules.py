"""On one device modules of every kind run as with the plain Trainer: steps, loaders, loggers, errors."""

import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from harness.one_device import compared, plain, recording_callback, result_of
from models.small import Small


class Manual(Small):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        for optimizer, clip in ((first, True), (second, False)):
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            if clip:
                self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.log("train", loss)
        self.seen.append(loss.item())
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()

    def configure_optimizers(self):
        first = torch.optim.SGD(self.net[0].parameters(), 0.1)
        second = torch.optim.SGD(self.net[4].parameters(), 0.1, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.StepLR(first, 1)]


class ManualLoader(Small):
    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        self.seen.append(batch_idx)
        return self.loss(batch)


class SeveralLoaders(Small):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch["a"] + batch["b"].mean(), batch_idx)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val", self.loss(batch))
        self.seen.append((batch_idx, dataloader_idx))

    def train_dataloader(self):
        return {"a": super().train_dataloader(), "b": super().val_dataloader()}

    def val_dataloader(self):
        return [super().val_dataloader(), super().train_dataloader()]


class Skips(Small):
    def training_step(self, batch, batch_idx):
        return None if batch_idx % 3 == 1 else super().training_step(batch, batch_idx)


class Outputs(Small):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "output": self(batch)}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(plain(outputs))


class TakesNoIndex(Small):
    def training_step(self, batch):
        return super().training_step(batch, 0)


class StopsAnEpoch(Small):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 else None


class Closure(Small):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3)


class CustomStep(Small):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx % 2:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


class NoOptimizer(Small):
    def configure_optimizers(self):
        return None


class Plateau(Small):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        rates = {"scheduler": scheduler, "monitor": "val", "interval": "step", "frequency": 3, "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": rates}


class OneCycle(Small):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Metrics(Small):
    def __init__(self):
        super().__init__()
        self.train_mean, self.val_mean = MeanMetric(), MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.train_mean(loss)
        self.log("train_mean", self.train_mean, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.val_mean.update(self.loss(batch))
        self.log("val_mean", self.val_mean)


class Modes(Small):
    """Has a submodule in evaluation mode, which is kept."""

    def __init__(self):
        super().__init__()
        self.net[1].eval()

    def on_train_start(self):
        self.seen.append([part.training for part in self.modules()])

    on_validation_start = on_train_epoch_end = on_train_start


KINDS = [Manual, ManualLoader, SeveralLoaders, Skips, Outputs, TakesNoIndex, StopsAnEpoch, Closure, CustomStep]
KINDS += [NoOptimizer, Plateau, OneCycle, Metrics, Modes]


def fitted(trainer, kind):
    module, run = kind(), trainer()
    run.fit(module)
    found = result_of(run, module)
    module.seen = []
    return found, run.validate(module, verbose=False), module.seen, [part.training for part in module.modules()]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_modules(worlds, kind):
    compared(worlds, fitted, kind)


# -- errors -----------------------------------------------------------------------------------------------------------


class FailsInEvaluation(Small):
    def validation_step(self, batch, batch_idx):
        raise ValueError("in evaluation")

    test_step = predict_step = validation_step


class FailsInSetUp(Small):
    def configure_optimizers(self):
        raise ValueError("in set-up")


class ReturnsText(Small):
    def training_step(self, batch, batch_idx):
        return "loss"


class ReturnsNoLoss(Small):
    def training_step(self, batch, batch_idx):
        return {"output": self.loss(batch)}


class TwoOptimizers(Small):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), 0.1) for _ in range(2)]


class NoGradient(Small):
    def training_step(self, batch, batch_idx):
        return self.loss(batch).detach()


class LogsText(Small):
    def training_step(self, batch, batch_idx):
        self.log("text", "loss")
        return self.loss(batch)


def refused(trainer, kind):
    seen = []
    module, run = kind(), trainer(callbacks=[recording_callback(seen)])
    for name in ("fit", "validate", "test", "predict"):
        try:
            getattr(run, name)(module)
        except Exception as error:
            seen.append((name, type(error).__name__, str(error)))
        seen.append((run.state.status.value, str(run.state.stage)))
    return seen


FAILING = [FailsInEvaluation, FailsInSetUp, ReturnsText, ReturnsNoLoss, TwoOptimizers, NoGradient, LogsText]


@pytest.mark.parametrize("kind", FAILING, ids=lambda kind: kind.__name__)
def test_errors(worlds, kind):
    seen = compared(worlds, refused, kind)
    assert any(isinstance(one, tuple) and len(one) == 3 for one in seen)


# -- what surrounds a module ------------------------------------------------------------------------------------------


class Data(LightningDataModule):
    def __init__(self, seen):
        super().__init__()
        self.seen_hooks = seen

    def prepare_data(self):
        self.seen_hooks.append("prepare_data")

    def setup(self, stage):
        self.seen_hooks.append(("setup", str(stage)))

    def teardown(self, stage):
        self.seen_hooks.append(("teardown", str(stage)))

    def train_dataloader(self):
        samples = torch.randn(16, 4, generator=torch.Generator().manual_seed(5))
        return DataLoader(samples, batch_size=2, shuffle=True, num_workers=1)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    def state_dict(self):
        return {"one": 1}

    def load_state_dict(self, state):
        self.seen_hooks.append(state)


def with_data(trainer):
    seen, module, run = [], Small(), trainer(max_epochs=1)
    run.fit(module, datamodule=Data(seen))
    path = os.path.join(run.default_root_dir, "data.ckpt")
    run.save_checkpoint(path)
    again, resumed = trainer(max_epochs=2), Small()
    again.fit(resumed, datamodule=Data(seen), ckpt_path=path)
    return seen, sorted(torch.load(path, weights_only=True)), module.seen, resumed.seen


def test_data_modules_with_workers_and_state(worlds):
    compared(worlds, with_data)


class Writes(BasePredictionWriter):
    def __init__(self):
        super().__init__("batch_and_epoch")
        self.seen = []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.seen.append((plain(prediction), batch_indices, batch_idx))

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.seen.append((plain(predictions), batch_indices))


def predicted(trainer):
    writes = Writes()
    predictions = trainer(callbacks=[writes]).predict(Small())
    return plain(predictions), plain(writes.seen)


def test_predictions_and_their_writer(worlds):
    compared(worlds, predicted)


def logged(trainer):
    module, run = Small(), trainer(log_every_n_steps=2, profiler="simple")
    run.loggers = [CSVLogger(run.default_root_dir, name="logs")]
    module.save_hyperparameters({"width": 8})
    run.fit(module)
    run.test(module, verbose=False)
    folder = run.logger.log_dir
    files = {path.name: path.read_text() for path in Path(folder).iterdir()}
    names = {name for name in run.profiler.recorded_durations if not name.startswith("[Strategy]")}
    return files, sorted(names)


def test_logger_files_and_profiler_names(worlds):
    files, names = compared(worlds, logged)
    assert set(files) == {"metrics.csv", "hparams.yaml"} and names


def nested(trainer):
    inner = []

    class FitsAnother(Callback):
        def on_train_epoch_end(self, *_):
            other = Small()
            trainer(max_epochs=1).fit(other)
            inner.append(other.seen)

    module = Small()
    trainer(callbacks=[FitsAnother()]).fit(module)
    return module.seen, inner


def test_run_inside_a_run(worlds):
    compared(worlds, nested)
