"""The one-process reference is correct for hard modules: recomputation, gradients edited by hooks."""

import copy
from functools import partial

import pytest
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

from harness.verification import check
from lightning_hybrid.verify import Experiment, Layout
from lightning_hybrid.verify.data import DataSplit
from lightning_hybrid.verify.references import run_plain
from models.regression import Dropping, Plain, regression_data


class Recomputes(Dropping):
    """Dropout is drawn again in the backward."""

    def forward(self, x):
        for layer in self.net:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


class Squares(Plain):
    """Its edit of the mean over replicas is not the mean of their edits."""

    def on_after_backward(self):
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.square_()


def test_recomputed_dropout(worlds):
    report = check(worlds, Recomputes, Layout("pp2", 2, {"pipeline_parallel_size": 2}))
    assert report.outcome == "same", str(report)


class CountsSteps(Dropping):
    num_steps = 0

    def training_step(self, batch, batch_idx):
        CountsSteps.num_steps += 1
        return super().training_step(batch, batch_idx)


def test_a_run_ends_at_its_first_draw_and_is_repeated_with_keyed_numbers():
    experiment = Experiment(make_module=CountsSteps, make_data=regression_data, steps=3, resume=False)
    reference = run_plain(experiment, DataSplit(1, 2, 2))
    assert reference.failure is None and reference.draws and reference.irreproducible is None
    assert CountsSteps.num_steps == 1 + 3 * 3  # observed, with noise, once more


def test_gradients_edited_after_the_backward(worlds):
    report = check(worlds, Squares, Layout("dp2", 2), num_microbatches=1)
    assert report.outcome == "same", str(report)


class Phases(Plain):
    """Its hooks set values that its step reads, in place and rebound; each replica also counts locally."""

    def __init__(self):
        super().__init__()
        self.phase, self.weights, self.seen = 0, {"loss": 1.0}, []
        self.register_buffer("shift", torch.zeros(()))

    def on_train_batch_start(self, batch, batch_idx):
        self.phase = batch_idx + 1
        self.weights["loss"] /= 2
        self.shift += 0.5
        self.seen.clear()

    def training_step(self, batch, batch_idx):
        self.seen.append(batch_idx)
        return super().training_step(batch, batch_idx) * self.phase * self.weights["loss"] * len(self.seen) + (
            self.shift * self.head.weight.sum()
        )


class StoresLosses(Dropping):
    """Its loss depends on stored values of earlier steps: once per batch, over all its samples."""

    def __init__(self):
        super().__init__()
        self.total, self.seen, self.losses = 0.0, 0, []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        loss = loss * (1 + self.total + self.seen / 10 + len(self.losses))
        self.total += loss.item()
        self.seen += len(batch[0])
        self.losses.append(loss.detach())
        return loss


class Counts(Plain):
    """Stores nothing of the model, so it counts its microbatches."""

    calls = 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        return super().training_step(batch, batch_idx) * self.calls


def test_values_set_by_hooks_are_set_on_all_replicas(worlds):
    report = check(worlds, Phases, Layout("dp2", 2), num_microbatches=1)
    assert report.outcome == "same", str(report)


@pytest.mark.parametrize("module", [StoresLosses, Counts], ids=lambda module: module.__name__)
def test_values_stored_by_steps_are_stored_once_per_batch(worlds, module):
    report = check(worlds, module, Layout("dp2 x pp2", 4, {"pipeline_parallel_size": 2}))
    assert report.outcome == "same", str(report)


class Evaluated(Plain):
    """Has every kind of step."""

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_loss", nn.functional.mse_loss(self(x), y) * (1 + self.fault()))

    def predict_step(self, batch, batch_idx):
        return {"y": self(batch[0]), "first": batch[0][:, 0]}

    def fault(self):
        return 0


class WrongTest(Evaluated):
    def fault(self):
        return self.trainer.world_size - 1


class WrongPrediction(Evaluated):
    def predict_step(self, batch, batch_idx):
        return {"y": self(batch[0]) * self.trainer.world_size, "first": batch[0][:, 0]}


def all_loaders():
    loaders = regression_data(num_val=13)  # replicas have batches of different sizes
    return {
        **loaders,
        "test_dataloaders": loaders["val_dataloaders"],
        "predict_dataloaders": loaders["val_dataloaders"],
    }


@pytest.mark.parametrize(
    ("module", "first"),
    [(Evaluated, None), (WrongTest, "metric after test: test_loss"), (WrongPrediction, "prediction [0][0]['y']")],
    ids=["right", "test", "prediction"],
)
def test_test_and_prediction_are_compared(worlds, module, first):
    layout = Layout("dp2 x pp2", 4, {"pipeline_parallel_size": 2}) if first is None else Layout("dp2", 2)
    report = check(worlds, module, layout, make_data=all_loaders, steps=2)
    assert report.outcome == ("same" if first is None else "different"), str(report)
    assert first is None or str(report.first.key) == first, str(report)


class OnlyFloat32(Plain):
    """Its kernel has no float64, as those of experts on CPUs."""

    def forward(self, x):
        offsets = torch.tensor([x.shape[0]], dtype=torch.int32)
        return F.grouped_mm(super().forward(x), torch.eye(1, dtype=x.dtype)[None], offs=offsets)


def test_kernel_without_float64_is_distinguished(worlds):
    report = check(worlds, OnlyFloat32, Layout("dp2", 2))
    assert report.outcome == "failed" and "try --precision 32-true" in " ".join(report.notes), str(report)


class DrawsToValidate(Plain):
    """Branches on its draws, so that it runs unsplit."""

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x + torch.randn_like(x)), y)
        self.log("val_loss", loss if loss > 0 else -loss)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_random_validation_numbers_are_recognised(worlds, num_microbatches):
    layout = Layout("pp2", 2, {"pipeline_parallel_size": 2})
    report = check(worlds, DrawsToValidate, layout, num_microbatches=num_microbatches)
    assert report.outcome == "same", str(report)


class Swaps(Plain):
    """Validates with a teacher, under the name that the student has for training."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.used = self.net

    def forward(self, x):
        return self.head(self.used(x))

    def on_validation_epoch_start(self):
        self.used = self.teacher

    def on_validation_epoch_end(self):
        self.used = self.net


def test_module_with_the_name_of_another(worlds):
    report = check(worlds, Swaps, Layout("dp2", 2))
    assert report.outcome == "same", str(report)


class ManualStep(Plain):
    """Steps its optimizer itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss, optimizer = super().training_step(batch, batch_idx), self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def test_batches_of_as_many_tensors_as_each_has_samples(worlds):
    data = partial(regression_data, batch_size=2)
    report = check(worlds, ManualStep, Layout("dp2", 2), num_microbatches=1, make_data=data)
    assert report.outcome == "same", str(report)
