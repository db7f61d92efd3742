"""Means over the labels that masks select, in microbatches and batch shares of steps that run as plain Python."""

import warnings

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from harness.trainer_runs import trainer_of
from lightning_hybrid.batch.denominators import Count, Mean, counts_in, find_counts

WORDS, LENGTH, BATCH = 13, 6, 8


class Language(LightningModule):
    """Predicts the labels that are not ignored, logs as users do, and stores its losses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh())
        self.mean, self.losses = MeanMetric(), []

    def forward(self, text):
        return self.head(self.body(self.embed(text)))

    def loss(self, logits, labels, mask):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def hits(self, found, labels, mask):
        return (found == labels)[labels != -100]

    def training_step(self, batch, batch_idx):
        text, labels, mask = batch
        logits = self(text)
        loss = self.loss(logits, labels, mask)
        self.mean.update(loss.detach())
        self.losses.append(loss.detach())
        hits = self.hits(logits.argmax(-1), labels, mask).double().mean()
        self.log_dict({"loss": loss, "hits": hits}, on_step=False, on_epoch=True)
        self.log("size", logits.detach().abs().mean(), on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        self.log("mean", self.mean.compute())
        self.mean.reset()
        self.log("kept", torch.stack(self.losses).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Shifted(Language):
    """As in causal models: the label of a token is the next one."""

    def loss(self, logits, labels, mask):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def hits(self, found, labels, mask):
        return super().hits(found[:, :-1], labels[:, 1:], mask)


class Masked(Language):
    """A sum over a mask by its count; labels leave the same entries in the first batches."""

    def loss(self, logits, labels, mask):
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten().clamp(min=0), reduction="none")
        return (each * mask.flatten()).sum() / mask.sum()

    def hits(self, found, labels, mask):
        return (found == labels)[mask]


class Criterion(nn.Module):
    """A loss with a parameter is one unit, whose mean is not visible outside."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, logits, labels):
        return F.cross_entropy(self.scale * logits.flatten(0, 1), labels.flatten())


class Inside(Language):
    def __init__(self):
        super().__init__()
        self.criterion = Criterion()

    def loss(self, logits, labels, mask):
        return self.criterion(logits, labels)


class Branching(Language):
    """No pipeline can run it."""

    def forward(self, text):
        h = self.body(self.embed(text))
        return self.head(h if h.abs().mean().item() < 10 else 2 * h)


def words(*lengths):
    """Batches of samples with so many words that count."""
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(1, WORDS, (len(lengths), LENGTH), generator=generator)
    mask = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    return text, (text + 1).remainder(WORDS).where(mask, -100), mask


UNEVEN = [1, 2, 3, 6, 6, 5, 6, 4], [6, 6, 6, 6, 1, 1, 2, 1], [2, 4, 1, 5, 3, 6, 2, 2]
FULL = [LENGTH] * BATCH
DATA = {
    "uneven": UNEVEN,
    "first full": (FULL, UNEVEN[0], UNEVEN[1]),
    "one replica full": [[length, FULL[0]] for length in UNEVEN[0] + UNEVEN[1]],
    "a microbatch of nothing": (UNEVEN[0], [0, 0, 4, 3, 6, 2, 2, 1], UNEVEN[2]),
}


def data(name, masks_differ=False):
    text, labels, mask = words(*(length for batch in DATA[name] for length in batch))
    if masks_differ:  # in the last batch
        mask = mask.clone()
        mask[2 * BATCH :, 1] = False
        mask[2 * BATCH + 1, :2] = True
    return DataLoader(TensorDataset(text, labels, mask), BATCH)


@pytest.mark.parametrize("options", [{}, {"zero_stage": 3}], ids=str)
def test_replicas_with_different_masks(worlds, options):
    full = worlds.run(2, trained, Language, "one replica full", {"data_parallel_size": 2})
    parts = worlds.run(2, trained, Language, "one replica full", {**options, "num_microbatches": 2})
    for (expected, metrics, _), (found, logged, _) in zip(full, parts, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        assert logged == pytest.approx(metrics, rel=1e-9)


def trained(module_class, name, options, masks_differ=False):
    """Trained on six batches: all but the last one are compared with their shares, where ranks could share them."""
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    if options is None:
        trainer = Trainer(accelerator="cpu", max_epochs=2, precision="64-true", logger=False, **quiet)
    else:
        given = dict(options)
        stages = given.pop("pipeline_parallel_size", 1)
        trainer = trainer_of(2, stages, max_epochs=2, precision="64-true", strategy_options=given)
    module = module_class()
    trainer.fit(module, data(name, masks_differ))
    logged = {key: float(value) for key, value in trainer.callback_metrics.items() if key != "mean"}
    logged["mean"] = round(float(trainer.callback_metrics["mean"]), 5)  # torchmetrics adds in single precision
    is_shared = options is not None and trainer.strategy.run.shared_last_batch
    return [parameter.detach() for parameter in module.parameters()], logged, is_shared


TP = {"tensor_parallel_size": 2, "num_microbatches": 4}
PP = {"pipeline_parallel_size": 2, "num_microbatches": 2}
CASES = [
    *((module, name, TP, False) for module in (Language, Shifted, Masked) for name in ("uneven", "first full")),
    (Masked, "uneven", TP, True),
    (Language, "a microbatch of nothing", TP, False),
    (Inside, "uneven", PP, False),
    *((Branching, name, PP, False) for name in DATA),
]


@pytest.mark.parametrize(
    ("module", "name", "options", "differ"),
    CASES,
    ids=lambda value: getattr(value, "__name__", value if isinstance(value, str) else None),
)
def test_unsplit_batches_match_plain_lightning(worlds, module, name, options, differ):
    [(expected, metrics, _)] = worlds.run(1, trained, module, name, None, differ)
    for found, logged, is_shared in worlds.run(2, trained, module, name, options, differ):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        assert logged == pytest.approx(metrics, rel=1e-9)
        assert is_shared == (module is Branching)


def test_count_must_reproduce_the_batch_loss():
    batch = words(*UNEVEN[0])
    parts = [tuple(column[begin:end] for column in batch) for begin, end in ((0, 3), (3, 8))]
    shares, counts = [3 / 8, 5 / 8], [float((part[1] != -100).sum()) for part in parts]
    losses = [2.0, 1.0]
    full = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    found = find_counts(Mean(full, [losses]), batch, [(parts, shares)], torch.float64)
    assert set(found) == {Count(1, -100), Count(2, 0)} and set(found) < set(counts_in(batch))
    for value in (full + 1e-3, 2.0 * shares[0] + shares[1]):
        assert find_counts(Mean(value, [losses]), batch, [(parts, shares)], torch.float64) == ()
    assert found[0].describe(batch) == "number of entries other than -100 of batch[1]"
