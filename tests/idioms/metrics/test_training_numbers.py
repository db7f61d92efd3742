"""Numbers that training steps log: sums over samples, what only looks like one, and what is 0 at first."""

import warnings

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from harness.trainer_runs import trainer_of

CLASSES = 4


class Logs(LightningModule):
    """Logs functions of the output of a classifier, and of its two losses."""

    ignored = -100

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(
            nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)
        ).double()
        self.weights = nn.Parameter(torch.tensor([0.3, -0.2]).double())
        self.found = []

    def training_step(self, batch):
        x, y = batch
        out = self.body(x)
        error, entropy = out.square().mean(), F.cross_entropy(out, y, ignore_index=self.ignored)
        both = torch.stack([error, entropy])
        loss = (both * self.weights.exp()).sum() + self.weights.sum()
        numbers = {
            "weighted losses": loss,
            "scaled losses": (both * 2).abs().sum(),
            "one loss, several factors": (error * torch.ones(2)).sum(),
            "means of classes": out.mean(0).sum(),
            "squares": out.square().sum(),
            "rows": out.abs().mean(1).sum(),
            "hits": (out.argmax(1) == y).double().sum(),
            "loop": torch.stack([row.square().sum() for row in out]).sum(),
            "scaled loop": (torch.stack([row.square().sum() for row in out]) * 2).sum(),
            "joined": torch.cat([out, out.exp()], 1).abs().sum(),
        }
        numbers |= {
            "largest loss": (both * self.weights.exp()).max(),
            "larger loss": torch.maximum(error, entropy),
            "norm of losses": both.norm(),
            "sum of functions": both.exp().sum(),
        }
        self.log_dict(numbers, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, *_):
        self.found.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Ignores(Logs):
    """Its entropy is a mean over labels, of which microbatches have different numbers."""

    ignored = 1


class Late(Logs):
    """Logs counts that are 0 in the first batch, flags that differ later, and losses with batch sizes."""

    def training_step(self, batch):
        x, y = batch
        out = self.body(x)
        large = x.abs().sum(1) > 3
        loss = F.cross_entropy(out, y)
        numbers = {"any": large.any(), "all": (~large).all(), "count": large.double().sum(), "whole": large.sum()}
        self.log_dict(numbers, on_step=True, on_epoch=True)
        self.log("one", loss, on_step=False, on_epoch=True, batch_size=1)
        self.log("samples", loss, on_step=False, on_epoch=True, batch_size=len(x))
        self.log("hits", loss, on_step=False, on_epoch=True, batch_size=int((y > 0).sum()))
        return loss


class OfOnePart(Logs):
    """Counts rows of the model, of which the first batch has one, in its first part: a sum or a maximum."""

    def training_step(self, batch):
        x, y = batch
        hidden = self.body[:2](x)
        self.log("rows", float(len(hidden[x[:, 0] + 0 * hidden.detach()[:, 0] > 0])))
        out = self.body[2:](hidden)
        return F.cross_entropy(out, y)


class AboveMean(Logs):
    """Halves of a batch have as many outputs above their means as the batch has above its own."""

    def training_step(self, batch):
        out = self.body(batch[0])
        self.log("above", (out[:, 0] > out[:, 0].mean()).sum())
        self.log("positive", (out > 0).sum())
        return F.cross_entropy(out, batch[1])


class OfFewParts(Logs):
    """Halves of its first batch have as many classes as the batch; single samples have one, and no mean of others."""

    def training_step(self, batch):
        x, y = batch
        out = self.body(x)
        self.log("classes", float(y.unique().numel()))
        self.log("of a class", out[y == 3].mean())
        self.log("largest", out.max())
        self.log("smallest", out.min())
        self.log("labels", float((y >= 0).sum()))
        return F.cross_entropy(out, y)


class Meets(Logs):
    """Replicas meet in the step; only the first one's sums are whole numbers."""

    def training_step(self, batch):
        x = batch[0] + 0.3 * self.global_rank
        self.log("sums", self.all_gather(x.sum()).sum())
        self.log("sum", x.sum())
        return F.cross_entropy(self.body(x), batch[1])


class MeetsWithoutLoss(Meets):
    """Half of the first replica's batch has no loss."""

    def training_step(self, batch):
        loss = super().training_step(batch)
        return None if not self.global_rank and len(batch[0]) == 4 and batch[0][0, 0] == 0 else loss


def met(module_class):
    warnings.simplefilter("ignore")
    data = TensorDataset(torch.arange(32).double().reshape(8, 4), torch.arange(8) % CLASSES)
    module = module_class()
    trainer = trainer_of(2, use_distributed_sampler=False, strategy_options={"num_microbatches": 2})
    trainer.fit(module, DataLoader(data, 8))
    return module.found


def trained(module_class, world=1, options=None, samples=12):
    warnings.simplefilter("ignore")
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(14, 4, generator=generator).double(), torch.randint(0, CLASSES, (14,), generator=generator)
    if samples > 12:
        x[:4] /= 10
    if samples < 12:
        x[:4, 0] = torch.tensor([9.0, -9.0, -9.0, -9.0])
    data = TensorDataset(x[:samples], y[:samples])
    given = dict(options or {})
    trainer = trainer_of(world, given.pop("pipeline_parallel_size", 1), max_epochs=1, strategy_options=given)
    module = module_class()
    trainer.fit(module, DataLoader(data, 4))
    return module.found


@pytest.mark.parametrize("module", [Logs, Ignores])
def test_logged_as_in_one_process(worlds, module):
    expected = trained(module)
    for found in worlds.run(2, trained, module, 2, {"pipeline_parallel_size": 2, "num_microbatches": 2}):
        for step, wanted in zip(found, expected, strict=True):
            assert step == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("options", [{"num_microbatches": 2}, {"pipeline_parallel_size": 2, "num_microbatches": 2}])
def test_rows_of_one_part_are_a_sum(worlds, options):
    expected = trained(OfOnePart, samples=8)
    assert expected[0] == {"rows": 1.0}
    size = options.get("pipeline_parallel_size", 1)
    for found in worlds.run(size, trained, OfOnePart, size, options, 8):
        assert found == expected


def warned(world, options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        given = dict(options)
        trainer = trainer_of(world, given.pop("pipeline_parallel_size", 1), strategy_options=given)
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(8, 4, generator=generator).double(), torch.randint(0, CLASSES, (8,), generator=generator)
        trainer.fit(AboveMean(), DataLoader(TensorDataset(x, y), 8))
    return [str(each.message) for each in caught if " over parts of it" in str(each.message)]


@pytest.mark.parametrize("options", [{"num_microbatches": 2}, {"pipeline_parallel_size": 2, "num_microbatches": 2}])
def test_a_count_that_mixes_samples_is_named(worlds, options):
    [text] = worlds.run(len(options), warned, len(options), options)[0]
    assert text.startswith("training_step logs 'above'")


def named_of_few_parts(world, options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        generator = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.randn(16, 4, generator=generator).double(), torch.arange(16) % CLASSES)
        module = OfFewParts()
        trainer_of(world, strategy_options=options).fit(module, DataLoader(data, 8))
    texts = [str(each.message) for each in caught if " over parts of it" in str(each.message)]
    return sorted(text.split("'")[1] for text in texts), [found["largest"] for found in module.found]


def test_numbers_that_few_parts_give_by_chance_are_named(worlds):
    [(_, expected)] = worlds.run(1, named_of_few_parts, 1, {})
    [(named, largest)] = worlds.run(1, named_of_few_parts, 1, {"num_microbatches": 2})
    assert named == ["classes", "of a class"] and largest == pytest.approx(expected)


@pytest.mark.parametrize(
    "options",
    [
        {"num_microbatches": 2},
        {"tensor_parallel_size": 2, "num_microbatches": 2},
        {"pipeline_parallel_size": 2, "num_microbatches": 2},
        {"pipeline_parallel_size": 2, "num_microbatches": 4},
    ],
    ids=str,
)
def test_numbers_that_are_zero_at_first(worlds, options):
    expected = trained(Late, samples=14)
    world = len(options)
    for found in worlds.run(world, trained, Late, world, options, 14):
        for step, wanted in zip(found, expected, strict=True):
            assert step == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("module", [Meets, MeetsWithoutLoss])
def test_replicas_that_meet_in_a_step_are_compared_equally_often(worlds, module):
    for found in worlds.run(2, met, module):
        assert found == [pytest.approx({"sums": 2 * 496 + 9.6, "sum": 496 + 4.8})]
