"""Steps whose numbers are those of the full batch, where microbatches differ from it in something else too."""

import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from harness.verification import BOTH, STAGES, check
from lightning_hybrid.verify import Layout

CLASSES = 5


def labelled_data(num_train=32, num_val=16, batch_size=16):
    index = torch.arange(num_train + num_val, dtype=torch.float64).unsqueeze(1)
    x = torch.cos(index * torch.arange(1, 7) + index)
    y = x[:, :CLASSES].argmax(1)
    y = torch.where(torch.arange(len(y)) % 16 < 3, -100, y)  # all of them in the first microbatch
    train = DataLoader(TensorDataset(x[:num_train], y[:num_train]), batch_size, shuffle=False)
    return {"train_dataloaders": train, "val_dataloaders": DataLoader(TensorDataset(x[num_train:], y[num_train:]), 8)}


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Normalised(Classifier):
    """BatchNorm, and an accuracy per step whose classes are averaged: no mean over microbatches."""

    def __init__(self):
        super().__init__()
        self.body.append(nn.BatchNorm1d(6))
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES, average="macro")

    def training_step(self, batch, batch_idx):
        x, y = batch
        y = y.clamp(min=0)
        logits = self(x)
        self.log("accuracy", self.accuracy(logits, y))
        return F.cross_entropy(logits, y)


class Float32Loss(Classifier):
    """The loss is computed in float32, whatever the precision of the run, as in models of transformers."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(F.layer_norm(self(x).float(), (CLASSES,)), y)


def test_batch_norm_takes_statistics_of_microbatches_beside_a_metric_of_the_full_batch(worlds):
    report = check(worlds, Normalised, STAGES, make_data=labelled_data, num_microbatches=4)
    assert report.outcome == "same", report.message
    [note] = report.notes
    assert "the objective mixes samples: full batch" in note and "mean of 4 microbatches" in note


class FlatNormalised(Normalised):
    """Its BatchNorm begins with a weight of zero, as the last one of a residual block."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.body[-1].weight)


def test_a_note_has_no_two_equal_numbers(worlds):
    report = check(worlds, FlatNormalised, STAGES, make_data=labelled_data, num_microbatches=4)
    assert report.outcome == "same", report.message
    [note] = report.notes
    assert note.startswith("the objective mixes samples, by BatchNorm, but not in the first loss, 1.5"), note


def test_a_loss_in_float32_is_compared_in_float32(worlds):
    report = check(worlds, Float32Loss, STAGES, make_data=labelled_data, num_microbatches=4)
    assert report.outcome == "same", report.message


class Faulty(Normalised):
    """The metric sees other samples than in one process."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        rows = len(x)
        logits = self(x)
        self.log("accuracy", self.accuracy(logits[: 1 + rows // 3], y.clamp(min=0)[: 1 + rows // 3]))
        return F.cross_entropy(logits, y)


def test_a_metric_of_other_samples_still_differs(worlds):
    report = check(worlds, Faulty, STAGES, make_data=labelled_data, num_microbatches=4)
    assert report.outcome == "different", str(report)


class DroppingMaskedMean(Classifier):
    """Dropout, and a mean over the entries of a mask, clamped; beside it a term that weighs by samples."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        for layer in self.body:
            x = self.dropout(layer(x))
        return self.head(x)

    def loss(self, batch):
        x, y = batch
        mask = (y >= 0).to(x.dtype)
        logits = self(x)
        losses = F.cross_entropy(logits, y.clamp(min=0), reduction="none")
        return (losses * mask).sum() / mask.sum().clamp(min=1) + 0.1 * logits.square().mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


class DroppingCrossEntropy(DroppingMaskedMean):
    def loss(self, batch):
        return F.cross_entropy(self(batch[0]), batch[1])


def test_a_masked_mean_beside_dropout_is_that_of_each_replicas_full_batch(worlds):
    for module in (DroppingMaskedMean, DroppingCrossEntropy):
        report = check(worlds, module, BOTH, make_data=labelled_data, num_microbatches=4)
        assert report.outcome == "same", report.message
        assert "each replica's loss is that of its own batch, as under DDP: full batch" in report.notes[-1]


class CountsOverRanks(DroppingMaskedMean):
    """A mean over the entries of a mask on all ranks, for gradients that are averaged over these."""

    def loss(self, batch):
        x, y = batch
        mask = (y >= 0).to(x.dtype)
        losses = F.cross_entropy(self(x), y.clamp(min=0), reduction="none")
        return (losses * mask).sum() * self.trainer.world_size / self.all_gather(mask.sum()).sum()


def test_a_mean_over_labels_is_that_of_the_full_batch(worlds):
    report = check(worlds, Classifier, STAGES, make_data=labelled_data, num_microbatches=4)
    assert report.outcome == "same" and not report.notes, str(report)


@pytest.mark.parametrize("module", [Classifier, CountsOverRanks])
def test_a_mean_whose_microbatches_have_other_weights_differs(worlds, module):
    unweighted = Layout("unweighted", 2, {**STAGES.strategy, "microbatch_weight": equal_weights})
    report = check(worlds, module, unweighted, make_data=labelled_data, num_microbatches=4)
    assert report.outcome == "different" and str(report.first.key) == "loss", str(report)
    assert "pass microbatch_weight" in report.message and "mean of 4 microbatches" in report.message


def equal_weights(microbatch):
    return 1.0


class DropsOtherRows(DroppingMaskedMean):
    """Dropout whose numbers depend on the number of samples in a microbatch."""

    def forward(self, x):
        x = super().forward(x)
        noise = torch.rand(len(x) + 1, CLASSES, dtype=x.dtype) if self.training else x.new_zeros(len(x) + 1, CLASSES)
        return x + noise[1:]


def test_draws_that_depend_on_how_samples_are_grouped_differ(worlds):
    report = check(worlds, DropsOtherRows, BOTH, make_data=labelled_data, num_microbatches=4)
    assert report.outcome == "different"
