"""Hooks of the module and of callbacks that change or observe a run."""

import os
import time

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, LambdaCallback, ModelCheckpoint
from lightning.pytorch.utilities import grad_norm
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from harness.layouts import each_under, under
from harness.verification import BOTH, LAYOUTS, STAGES
from harness.verification import check_there_and_back as check
from models.regression import ManualStep, Regression

# --- optimization ----------------------------------------------------------------------------------------------------


class WarmsUpInStep(Regression):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 4:
            scale = min(1.0, float(self.trainer.global_step + 1) / 4.0)
            for group in optimizer.param_groups:
                group["lr"] = scale * 0.1


class StepsEveryOther(Regression):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        if batch_idx % 2 == 1:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 2 == 0:
            optimizer.zero_grad(set_to_none=False)


class ManualSchedulerStep(Regression):
    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step(epoch=self.trainer.global_step)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": StepLR(optimizer, 2, 0.5), "interval": "step"}]


class ClipsLate(Regression):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        if self.current_epoch > 0:
            self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")


class ClipsValues(Regression):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.clip_gradients(optimizer, gradient_clip_val=1e-3, gradient_clip_algorithm="value")


class LogsGradientNorm(Regression):
    def on_before_optimizer_step(self, optimizer):
        norms = grad_norm(self, norm_type=2)
        self.log("grad_2.0_norm_total", norms["grad_2.0_norm_total"])


class ZeroesToZero(Regression):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)


class ScalesLoss(Regression):
    def backward(self, loss):
        (loss * 0.5).backward()


class DampsInBackwardHooks(Regression):
    """Full backward hooks of layers on each stage change the gradients that are passed on."""

    def __init__(self):
        super().__init__()
        for layer in self.layers[1:]:
            layer.register_full_backward_hook(lambda module, given, taken: tuple(0.5 * grad for grad in given))
        self.head.register_full_backward_pre_hook(lambda module, taken: tuple(2 * grad for grad in taken))


OPTIMIZATION = [
    WarmsUpInStep,
    StepsEveryOther,
    ManualSchedulerStep,
    ClipsLate,
    ClipsValues,
    LogsGradientNorm,
    ZeroesToZero,
    ScalesLoss,
    DampsInBackwardHooks,
]


# Reads of gradients, and clipping by value, are those of `params/reads/test_gradient_reads.py`.
@each_under("module", OPTIMIZATION, [STAGES, BOTH], covered_by={ClipsValues: ClipsLate, LogsGradientNorm: ClipsLate})
def test_hooks_of_optimization(worlds, module, layout):
    report = check(worlds, module, layout, epochs=2, steps=4)
    assert report.outcome == "same", str(report)


# --- batches ---------------------------------------------------------------------------------------------------------


class ManualTransfer(Regression):
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        x, y = batch
        return {"x": x.to(device), "y": y.to(device)}

    def on_after_batch_transfer(self, batch, dataloader_idx):
        batch["x"] = (batch["x"] - 0.1) / 0.9
        return batch["x"], batch["y"]


class AugmentsBefore(Regression):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        if self.trainer.training:
            x = x.flip(1)
        return x, y


class ScalesInHook(Regression):
    def on_train_batch_start(self, batch, batch_idx):
        batch[0].mul_(1.1)


class SkipsTheRest(Regression):
    """-1 ends the epoch."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            return -1


@pytest.mark.parametrize(
    ("module", "layout"),
    [(ManualTransfer, BOTH), (AugmentsBefore, BOTH), (ScalesInHook, STAGES), (SkipsTheRest, BOTH)],
)
def test_hooks_of_batches(worlds, module, layout):
    report = check(worlds, module, layout, epochs=2)
    assert report.outcome == "same", str(report)


# --- validation ------------------------------------------------------------------------------------------------------


class ValidatesInTraining(Regression):
    """Part of the model remains in train mode while validating."""

    def __init__(self):
        super().__init__()
        self.layers[1].append(torch.nn.BatchNorm1d(6))

    def on_validation_model_eval(self):
        self.eval()
        self.layers[1].train()

    def on_validation_model_train(self):
        self.train()


class NeverEval(Regression):
    def on_validation_model_eval(self):
        pass

    def on_validation_model_train(self):
        pass


class NormsFrozen(ValidatesInTraining):
    """Frozen running statistics: a hook puts part of the model into eval mode."""

    def on_validation_model_eval(self):
        self.eval()

    def on_train_epoch_start(self):
        self.layers[1].eval()


@each_under("module", [NormsFrozen, ValidatesInTraining, NeverEval], [STAGES, BOTH])
def test_hooks_of_modes(worlds, module, layout):
    report = check(worlds, module, layout, epochs=2, steps=2)
    assert report.outcome == "same", str(report)


# --- outputs of steps and callbacks ----------------------------------------------------------------------------------


class ReadsOutputs(Regression):
    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        self.log("loss", loss := F.mse_loss(out, y))
        return {"loss": loss, "out": out.detach(), "name": "train"}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("error", (outputs["out"] - batch[1]).abs().max())
        assert outputs["name"] == "train" or isinstance(outputs["name"], list)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        return {"out": self(x), "y": y}

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", F.mse_loss(outputs["out"], outputs["y"]))


class StacksOutputs(Regression):
    """Lightning's own idiom since 2.0."""

    def __init__(self):
        super().__init__()
        self.training_step_outputs, self.validation_step_outputs = [], []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.training_step_outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.log("epoch_mean", torch.stack(self.training_step_outputs).mean())
        self.training_step_outputs.clear()

    def validation_step(self, batch, batch_idx):
        self.validation_step_outputs.append(self(batch[0]))

    def on_validation_epoch_end(self):
        self.log("spread", torch.cat(self.validation_step_outputs).mean(), sync_dist=True)
        self.validation_step_outputs.clear()


class Follows(Callback):
    """Halves the learning rate while the logged loss is high."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.callback_metrics["loss"] > 0.01:
            for group in trainer.optimizers[0].param_groups:
                group["lr"] *= 0.9

    def on_validation_end(self, trainer, pl_module):
        pl_module.last_val = trainer.callback_metrics["val_loss"].item()

    def on_train_epoch_start(self, trainer, pl_module):
        for group in trainer.optimizers[0].param_groups:
            group["lr"] *= 1 + getattr(pl_module, "last_val", 0.0)


class Followed(Regression):
    def configure_callbacks(self):
        return [Follows(), EarlyStopping("val_loss", patience=1, min_delta=10.0)]


class ReadsInLambda(Regression):
    """The hook that reads the outputs is a function on an instance."""

    training_step = ReadsOutputs.training_step

    def configure_callbacks(self):
        return [LambdaCallback(on_train_batch_end=log_error)]


def log_error(trainer, module, outputs, batch, batch_idx):
    module.log("error", (outputs["out"] - batch[1]).abs().max())


# Hooks compute from the samples of their replica, as under DDP.
@pytest.mark.parametrize(
    ("module", "layout"), [(ReadsOutputs, STAGES), (ReadsInLambda, STAGES), (StacksOutputs, STAGES), (Followed, BOTH)]
)
def test_step_outputs_reach_hooks(worlds, module, layout):
    report = check(worlds, module, layout, epochs=3, steps=2)
    assert report.outcome == "same", str(report)


# --- checkpoints -----------------------------------------------------------------------------------------------------


class SavesMidEpoch(Regression):
    """Saves manually, adds to the file, and loads it into the weights half a run later."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen += 1
        path = os.path.join(self.trainer.strategy.broadcast(self.trainer.default_root_dir), "mid.ckpt")
        if batch_idx == 0:
            self.trainer.save_checkpoint(path)
        if batch_idx == 2:
            self.trainer.strategy.barrier()
            saved = torch.load(path, weights_only=True)
            assert saved["seen"] == 1 and saved["callbacks_saw"] == "it"
            assert len(saved["optimizer_states"][0]["state"]) == len(list(self.parameters()))
            self.log("saved", sum(float(value.norm()) for value in saved["state_dict"].values()))

    def on_save_checkpoint(self, checkpoint):
        checkpoint["seen"] = self.seen
        assert {name.split(".")[0] for name in checkpoint["state_dict"]} in (set(), {"layers", "head"})

    def configure_callbacks(self):
        return [AddsToFile()]


class AddsToFile(Callback):
    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["callbacks_saw"] = "it"


class SavesBest(Regression):
    def configure_callbacks(self):
        return [LoadsBest(monitor="val_loss", save_top_k=1, mode="min")]


class LoadsBest(ModelCheckpoint):
    def on_train_end(self, trainer, pl_module):
        super().on_train_end(trainer, pl_module)
        time.sleep(0.3 * trainer.global_rank)  # later than the others
        if self.best_model_path:
            best = torch.load(self.best_model_path, weights_only=True)
            pl_module.load_state_dict(best["state_dict"])
            assert trainer.callback_metrics["val_loss"] >= self.best_model_score


@pytest.mark.parametrize("module", [SavesMidEpoch, SavesBest], ids=lambda module: module.__name__)
def test_files_written_in_hooks(worlds, module):
    report = check(worlds, module, BOTH, epochs=2)
    assert report.outcome == "same", str(report)


# --- with stages, a step that is not Lightning's own -----------------------------------------------------------------


@under(LAYOUTS, also=[LAYOUTS[1]])
def test_manual_optimization(worlds, layout):
    report = check(worlds, ManualStep, layout, num_microbatches=1)
    assert report.outcome == "same", str(report)
