"""Validation and test see each sample once, also with fewer batches on some replicas, and never hang."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric, MeanSquaredError

from harness.trainer_runs import ignore_warnings, trainer_of
from harness.verification import LAYOUTS, check
from models.regression import EncoderDecoder, regression_data

DP_PP = LAYOUTS[2]
REPLICAS = [layout for layout in LAYOUTS if layout.replicas > 1]
by_replicas = pytest.mark.parametrize("layout", REPLICAS, ids=lambda layout: layout.name)


class Regression(EncoderDecoder):
    """Logs in every way."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        error = self(x) - y
        self.log("val_loss", error.square().mean(), prog_bar=True)
        self.log("worst", error.abs().max(), reduce_fx="max")
        self.log("best", error.abs().min(), reduce_fx="min")
        self.log("num", float(len(x)), reduce_fx="sum", sync_dist=True)
        self.log("both", error.mean(), on_step=True, on_epoch=True)


class WithMetrics(Regression):
    def __init__(self):
        super().__init__()
        self.error = MeanSquaredError()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        self.error.update(out, y)
        self.log("val_error", self.error)
        self.log("val_loss", F.mse_loss(out, y))


def each_number():
    """Metrics of a count that leaves some ranks without a batch; over stages both counts, and the logs too."""
    for module in (Regression, WithMetrics):
        for num_val in (13, 9, 5):
            for layout in REPLICAS:
                default = (module, num_val) == (WithMetrics, 5) or (layout is DP_PP and num_val == 13)
                marks = [] if default else [pytest.mark.slow]
                yield pytest.param(
                    module, num_val, layout, id=f"{module.__name__}-{num_val}-{layout.name}", marks=marks
                )


@pytest.mark.parametrize(("module", "num_val", "layout"), list(each_number()))
def test_every_sample_counts_once(worlds, module, num_val, layout):
    report = check(worlds, module, layout, make_data=DATA[num_val], steps=2 if num_val == 5 else 4)
    assert report.outcome == "same", str(report)


@pytest.mark.parametrize("num_val", [(13, 5), (4, 9)])
def test_several_loaders(worlds, num_val):
    report = check(worlds, SeveralLoaders, DP_PP, make_data=SEVERAL[num_val])
    assert report.outcome == "same", str(report)


class SeveralLoaders(Regression):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        self.log("val_loss", F.mse_loss(self(x), y))
        self.log(f"{('clean', 'noisy')[dataloader_idx]}_loss", F.l1_loss(self(x), y), add_dataloader_idx=False)


def two_val_loaders(*num_val):
    data = regression_data()
    samples = regression_data(num_val=sum(num_val))["val_dataloaders"].dataset
    parts = torch.utils.data.random_split(samples, num_val, torch.Generator().manual_seed(0))
    return {**data, "val_dataloaders": [DataLoader(part, batch_size=2) for part in parts]}


def of_13_and_5():
    return two_val_loaders(13, 5)


def of_4_and_9():
    return two_val_loaders(4, 9)


SEVERAL = {(13, 5): of_13_and_5, (4, 9): of_4_and_9}


# --- what replicas do not have in common -----------------------------------------------------------------------------


class Stream(IterableDataset):
    """Shards itself, since samplers cannot shard iterables; the shards are uneven."""

    def __init__(self, samples, each):
        self.samples, self.each = samples, each

    def __iter__(self):
        replica, start = torch.distributed.get_rank() % 2, 0
        start = sum(self.each[:replica])
        yield from (self.samples[i] for i in range(start, start + self.each[replica]))


class SizedStream(Stream):
    """Has a `__len__`."""

    def __len__(self):
        return self.each[torch.distributed.get_rank() % 2]


class LogsRareKeys(Regression):
    """A key that only some batches have."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        error = (self(x) - y).abs()
        self.log("val_loss", error.mean())
        if (y > 0.5).any():
            self.log("high", error.max(), batch_size=int((y > 0.5).sum()))


def evaluate(make_module, each, pp, verb="validate", loaders=1, num_devices=4, known=False):
    """The Trainer's metrics, and the same computed manually over all samples."""
    ignore_warnings()
    torch.manual_seed(0)
    module = make_module().double()
    samples = regression_data(num_val=sum(each))["val_dataloaders"].dataset
    stream = DataLoader((SizedStream if known else Stream)(samples, each), batch_size=2)
    trainer = trainer_of(num_devices, pp, strategy_options={"num_microbatches": 1})
    try:
        found = getattr(trainer, verb)(module, [stream] * loaders if loaders > 1 else stream, verbose=False)
    except Exception as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return found, dict(trainer.callback_metrics), expected_of(module, samples, each)


def expected_of(module, samples, each):
    """The result of one process that draws the batches of both replicas."""
    values, high = [], []
    for start, end in ((0, each[0]), (each[0], sum(each))):
        for first in range(start, end, 2):
            x, y = samples[first : min(first + 2, end)]
            error = (module(x) - y).abs()
            values.append((error.mean().item(), len(x)))
            if (y > 0.5).any():
                high.append((error.max().item(), int((y > 0.5).sum())))
    return [sum(v * n for v, n in rows) / max(1, sum(n for _, n in rows)) for rows in (values, high)]


@pytest.mark.parametrize(("module", "pp"), [("LogsRareKeys", 1), ("LogsLoss", 2)])
@pytest.mark.parametrize("each", [(7, 3), (2, 9), (6, 0)])
def test_streams_of_any_length(worlds, each, module, pp):
    if each == (6, 0) and pp > 1:
        return  # see below
    for result in worlds.run(2 * pp, evaluate, globals()[module], each, pp, num_devices=2 * pp):
        assert not isinstance(result, str), result
        [found], callback_metrics, [loss, high] = result
        assert module == "LogsLoss" or bool(high) == (each != (6, 0))
        high = high if module == "LogsRareKeys" else 0
        assert found["val_loss"] == pytest.approx(loss, rel=1e-10)
        assert float(callback_metrics["val_loss"]) == pytest.approx(loss, rel=1e-10)
        if high:
            assert found["high"] == pytest.approx(high, rel=1e-10)


class LogsLoss(Regression):
    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", (self(x) - y).abs().mean())


def test_empty_stream_with_stages_fails_on_all_ranks(worlds):
    messages = worlds.run(4, evaluate, LogsLoss, (6, 0), 2)
    assert all("yields no batch" in message and "example_batch" in message for message in messages), messages


def test_replica_without_batches_in_one_of_several_loaders(worlds):
    for result in worlds.run(2, evaluate, LogsRareKeys, (5, 0), 1, "validate", 3, num_devices=2):
        assert not isinstance(result, str), result
        assert [found[f"val_loss/dataloader_idx_{i}"] for i, found in enumerate(result[0])] == pytest.approx(
            [result[2][0]] * 3, rel=1e-10
        )


def test_test_run_matches_validation(worlds):
    for result in worlds.run(2, evaluate, AlsoTests, (7, 4), 1, "test", num_devices=2):
        assert result[0][0]["val_loss"] == pytest.approx(result[2][0], rel=1e-10)


class AlsoTests(LogsRareKeys):
    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)


class MetricsOfSome(Regression):
    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()

    def validation_step(self, batch, batch_idx):
        self.mean.update(self(batch[0]))
        self.log("mean", self.mean)


def test_metric_object_logged_by_some_replicas_is_refused(worlds):
    for message in worlds.run(2, evaluate, MetricsOfSome, (4, 0), 1, num_devices=2):
        assert message.startswith("RanksDisagree: replicas log different metric objects"), message


def too_few(pp):
    ignore_warnings()
    data = regression_data(num_val=1)
    try:
        trainer_of(2 * pp, pp).fit(Regression().double(), **data)
    except ValueError as error:
        return str(error)


def test_fewer_samples_than_replicas_are_refused_before_training(worlds):
    for message in worlds.run(2, too_few, 1):
        assert "a val loader has 1 samples" in message and "2 replicas" in message


class GathersOutputs(Regression):
    def validation_step(self, batch, batch_idx):
        self.all_gather(self(batch[0]))


def test_gathering_uneven_batches_is_refused(worlds):
    for message in worlds.run(2, evaluate, GathersOutputs, (4, 3), 1, num_devices=2):
        assert "all_gather needs tensors of one shape" in message and "(2, 1), (1, 1)" in message, message


class ManualSums(Regression):
    """A collective in every step; replicas have as many batches or they have not."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        error = (self(x) - y).abs().sum().detach()
        torch.distributed.all_reduce(error)
        assert self.all_gather(error).unique().numel() == 1
        self.log("val_loss", error)


@pytest.mark.parametrize("pp", [1, 2])
def test_collectives_in_unmatched_batches_are_refused(worlds, pp):
    messages = worlds.run(2 * pp, evaluate, ManualSums, (5, 3), pp, num_devices=2 * pp, known=True)
    assert any("validation_step communicates with other replicas (allreduce)" in message for message in messages)
    assert any("batch 2 of loader 0 is evaluated, but the replicas have [3, 2] batches" in m for m in messages)


@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_unmatched_collectives_of_unsized_loaders_are_refused(worlds, pp):
    messages = worlds.run(2 * pp, evaluate, ManualSums, (5, 3), pp, "validate", 2, num_devices=2 * pp)
    assert any("validation_step communicates with other replicas (allreduce)" in message for message in messages)
    assert any("batch 2 of loader 0 is evaluated, but the replicas have ['more', 2] batches" in m for m in messages)


def fit_with_zero():
    ignore_warnings()
    data = regression_data(num_val=8)
    stream = DataLoader(SizedStream(data["val_dataloaders"].dataset, (5, 3)), batch_size=2)
    trainer = trainer_of(2, 1, strategy_options={"zero_stage": 1}, num_sanity_val_steps=0)
    try:
        trainer.fit(ManualSums().double(), data["train_dataloaders"], stream)
    except Exception as error:
        return str(error)
    return ""


def test_unmatched_collectives_with_zero_are_refused(worlds):
    assert any("the replicas have [3, 2] batches" in message for message in worlds.run(2, fit_with_zero, timeout=40))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("pp", "loaders"), [(1, 2), (2, 1)])
def test_collectives_in_matched_batches(worlds, pp, loaders, known):
    settings = {"num_devices": 2 * pp, "known": known}
    for found, *_ in worlds.run(2 * pp, evaluate, ManualSums, (4, 3), pp, "validate", loaders, **settings):
        assert len(found) == loaders
        assert all(value > 0 for each in found for value in each.values())


def of_13():
    return regression_data(num_val=13, batch_size=4)


def of_9():
    return regression_data(num_val=9, batch_size=4)


def of_5():
    return regression_data(num_val=5, batch_size=2)


DATA = {13: of_13, 9: of_9, 5: of_5}
