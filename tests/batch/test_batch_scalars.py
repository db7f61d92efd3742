"""Scalars of a step over several microbatches equal those of the full batch: metrics, and functions of means."""

from typing import ClassVar

import pytest
import torch
import torchmetrics
from torch.nn import functional as F
from torch.utils.data import DataLoader

from harness.logged_steps import BATCH, CLASSES, SAMPLES, Classifier, assert_steps_agree, samples
from harness.trainer_runs import ignore_warnings, trainer_of


def accuracy(**options):
    return torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES, **options)


class Called(Classifier):
    def __init__(self):
        super().__init__()
        self.accuracy = accuracy(average="macro")

    def step(self, logits, y):
        self.log("accuracy", self.accuracy(logits, y), on_step=True, on_epoch=True)
        return F.cross_entropy(logits, y)


class LoggedObject(Called):
    def step(self, logits, y):
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return F.cross_entropy(logits, y)


class Collection(Classifier):
    def __init__(self):
        super().__init__()
        metrics = {"accuracy": accuracy(average="macro"), "top2": accuracy(top_k=2)}
        metrics["f1"] = torchmetrics.F1Score(task="multiclass", num_classes=CLASSES, average="macro")
        metrics["auroc"] = torchmetrics.AUROC(task="multiclass", num_classes=CLASSES, thresholds=5)
        self.metrics = torchmetrics.MetricCollection(metrics, prefix="train/")

    def step(self, logits, y):
        self.log_dict(self.metrics(logits.softmax(1), y))
        return F.cross_entropy(logits, y)


class LoggedCollection(Collection):
    def step(self, logits, y):
        self.metrics(logits.softmax(1), y)
        self.log_dict(self.metrics, on_step=True)
        return F.cross_entropy(logits, y)


class Returned(Classifier):
    """A value per class, each logged by the step; a function of it; another call of the same metric."""

    def __init__(self):
        super().__init__()
        self.each = accuracy(average=None)
        self.error = torchmetrics.MeanSquaredError(squared=False)

    def step(self, logits, y):
        each = self.each(logits, y)
        for number, value in enumerate(each):
            self.log(f"accuracy_{number}", value)
        self.log("percent", 100 * each.mean())
        self.log("error", self.error(logits[:, 0], y.double()))
        self.log("other", self.error(logits[:, 1], y.double()).sqrt())
        return F.cross_entropy(logits, y)


class Cumulative(Classifier):
    """Updated and computed in each step: over all samples so far."""

    def __init__(self):
        super().__init__()
        self.accuracy = accuracy(average="macro")

    def step(self, logits, y):
        self.accuracy.update(logits, y)
        self.log("accuracy", self.accuracy.compute())
        return F.cross_entropy(logits, y)


class OfTheLoss(Classifier):
    """Perplexity, and the root of a mean."""

    def step(self, logits, y):
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss, prog_bar=True)
        self.log("perplexity", torch.exp(loss.detach()))
        self.log("root", (logits.square().mean() + 1).sqrt() / 2)
        return loss


class Squared(torch.autograd.Function):
    calls: ClassVar = []

    @staticmethod
    def forward(ctx, x):
        Squared.calls.append(float(x))
        return x.square()

    @staticmethod
    def backward(ctx, gradient):
        return torch.zeros_like(gradient)


class UserFunction(Classifier):
    """Logs a number from a user function, which runs once per microbatch."""

    def step(self, logits, y):
        loss = F.cross_entropy(logits, y)
        self.log("squared", Squared.apply(loss))
        return loss


def fit_user_function(pp):
    fit(UserFunction, pp, 4)
    return len(Squared.calls)


def test_user_functions_are_not_run_again(worlds):
    counts = worlds.run(2, fit_user_function, 2)
    executed = max(counts) - min(counts)  # a recording runs it on both ranks
    assert executed == 4 * SAMPLES // BATCH


def fit(module_class, pp, count, validates=False):
    ignore_warnings()
    options = {"num_microbatches": count} if count > 1 else {}
    trainer = trainer_of(pp, pp, strategy_options=options)
    module = module_class()
    if validates:
        trainer.validate(module, DataLoader(samples(), BATCH), verbose=False)
        return {name: float(value) for name, value in trainer.callback_metrics.items()}
    trainer.fit(module, DataLoader(samples(), BATCH))
    return module.seen


MODULES = [Called, LoggedObject, Collection, LoggedCollection, Returned, Cumulative, OfTheLoss]


@pytest.mark.parametrize("module_class", MODULES)
def test_step_scalars_match_the_full_batch(worlds, module_class):
    [expected] = worlds.run(1, fit, module_class, 1, 1)
    assert_steps_agree(expected, worlds.run(2, fit, module_class, 2, 4))


@pytest.mark.parametrize("module_class", [Called, OfTheLoss])
def test_validation_scalars_match_the_full_batches(worlds, module_class):
    [expected] = worlds.run(1, fit, module_class, 1, 1, True)
    for logged in worlds.run(2, fit, module_class, 2, 4, True):
        assert logged == pytest.approx(expected, rel=1e-10)
