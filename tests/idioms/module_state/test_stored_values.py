"""Values of the model that a step stores on the module: as in one process, once per batch, on every rank."""

import math
import warnings
from collections import defaultdict, deque

import pytest
import torch
from torch.nn import functional as F

from harness.stored_values import Meter, StoresValues, assert_equal, data, run
from harness.trainer_runs import ignore_warnings, trainer_of
from harness.verification import LAYOUTS
from harness.verification import check_there_and_back as check
from lightning_hybrid.schedule import Kind
from lightning_hybrid.verify import Layout
from models.regression import regression_data

PP2, _, BOTH, INTERLEAVED, *_ = LAYOUTS


def correct(out, y):
    return (out > 0).eq(y > 0)


class Appends(StoresValues):
    """The commonest: a list of losses, a running sum, a moving average, counts."""

    def __init__(self):
        super().__init__()
        self.losses, self.recent, self.pairs = [], deque(maxlen=2), []
        self.history = defaultdict(list)
        self.total, self.running, self.correct, self.seen, self.steps = 0.0, 1.0, 0, 0, 0
        self.last = None
        self.epochs = []

    def store(self, loss, out, batch, batch_idx):
        x, y = batch
        self.losses.append(loss.item())
        self.recent.append(round(float(loss.detach()), 8))
        self.pairs.append((batch_idx, {"loss": loss.item() * len(x)}))
        self.history["error"].append(math.sqrt(loss.item()))
        self.total += float(loss) * x.size(0)
        self.running = 0.9 * self.running + 0.1 * loss.item()
        self.correct += correct(out, y).sum().item()
        self.seen += len(x)
        self.steps += 1
        self.last = float(correct(out, y).double().mean())

    def on_train_epoch_end(self):
        self.epochs.append(self.total / self.seen)
        self.log("mean", sum(self.losses) / len(self.losses))


class Meters(StoresValues):
    def __init__(self):
        super().__init__()
        self.meters = {"loss": Meter(), "accuracy": Meter()}

    def store(self, loss, out, batch, batch_idx):
        x, y = batch
        self.meters["loss"].update(loss.item(), x.size(0))
        self.meters["accuracy"].update(correct(out, y).sum().item() / len(y), x.size(0))


class Contents(StoresValues):
    """Arrays and lists of model values, and numbers over the samples."""

    def __init__(self):
        super().__init__()
        self.outputs, self.flat, self.names, self.tensors = [], [], {}, []
        self.sums, self.most, self.last = 0.0, [], None

    def store(self, loss, out, batch, batch_idx):
        self.outputs.append(out.detach().cpu().numpy())
        self.flat.extend(out.flatten().tolist())
        self.names["loss"] = loss.detach().numpy()
        self.tensors.append((out.detach(), torch.tensor(loss.item())))
        self.sums += correct(out, batch[1]).double().sum().item()
        self.most.append([out.max().item(), out.detach().min().item()])
        self.last = out.detach()


class SteersNext(StoresValues):
    """A number of the last batch weighs the next one's loss, on an early stage and on the last."""

    def __init__(self):
        super().__init__()
        self.difficulty = 1.0

    def forward(self, x):
        return super().forward(x * self.difficulty)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx) * self.difficulty
        self.difficulty = 0.5 * self.difficulty + 0.5 * loss.item()
        return loss


class Centre(StoresValues):
    """A moving mean of outputs, read in the next batch; and a number, so that each microbatch sees the last batch's."""

    def __init__(self):
        super().__init__()
        self.centre, self.norm = torch.zeros(1, dtype=torch.float64), 0.0

    def training_step(self, batch, batch_idx):
        out = self(batch[0])
        loss = F.mse_loss(out - self.centre, batch[1])
        self.centre = 0.9 * self.centre + 0.1 * out.detach().mean(0)
        self.norm += loss.item()
        return loss


class Tensors(StoresValues):
    """No numbers: rebound attributes, lists of dicts, and a count."""

    def __init__(self):
        super().__init__()
        self.rows, self.steps, self.best = [], 0, None

    def store(self, loss, out, batch, batch_idx):
        self.out, self.target, self.columns = out.detach(), batch[1], out.detach().T
        self.loss, self.correct, self.seen = loss.detach(), correct(out, batch[1]).sum(), torch.tensor(len(out))
        self.rows.append({"out": out.detach(), "n": len(out)})
        self.best = (out.max().detach(), {"mean": out.mean(0).detach()})
        self.steps += 1


class Returns(StoresValues):
    """Numbers in step outputs, read by hooks."""

    def __init__(self):
        super().__init__()
        self.returned = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        out = self(batch[0])
        return {"loss": loss, "correct": correct(out, batch[1]).sum().item(), "name": "x", "out": [out.detach()]}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.returned.append({name: value for name, value in outputs.items() if name != "loss"})

    def validation_step(self, batch, batch_idx):
        return F.l1_loss(self(batch[0]), batch[1]).item()

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.returned.append(outputs)


class PicksRows(StoresValues):
    """The first samples of a batch, for a picture, and single ones."""

    def __init__(self):
        super().__init__()
        self.firsts, self.shown, self.last = [], [], None

    def store(self, loss, out, batch, batch_idx):
        self.firsts.append(out[0, 0].item())
        self.shown.append(out[:5].detach().cpu())
        self.last = out[-1].detach()


class AppendsLosses(StoresValues):
    """Lightning's idiom, with numbers, tensors and batch-only values."""

    def __init__(self):
        super().__init__()
        self.losses, self.outputs, self.by_name = [], [], {"target": []}

    def store(self, loss, out, batch, batch_idx):
        self.losses.append((batch_idx, loss.item()))
        self.outputs.append({"out": out.detach(), "loss": loss.detach(), "error": (out - batch[1]).abs().mean().item()})
        self.by_name["target"].append(batch[1])


class WritesItsBatch(StoresValues):
    def training_step(self, batch, batch_idx):
        loss = super().training_step([batch[0].mul_(2), batch[1]], batch_idx)
        self.logged["loss"] = loss.item()
        return loss


_KEEP = [AppendsLosses, WritesItsBatch, Appends, Meters, Contents, SteersNext, Centre, Tensors, Returns, PicksRows]


_CUTS = {"pp2-m1": (PP2, 1), "pp2-m3": (PP2, 3), "pp2 x 2 stages-m2": (INTERLEAVED, 2)}
_one_process = {}  # stored values of one process, by module


def each_cut():
    """Joining the stages of one rank does not depend on the stored values."""
    for make in _KEEP:
        for cut in _CUTS:
            default = cut == "pp2-m3" or (cut == "pp2 x 2 stages-m2" and make is Appends)
            yield pytest.param(make, cut, id=f"{make.__name__}-{cut}", marks=[] if default else [pytest.mark.slow])


@pytest.mark.parametrize(("make", "cut"), list(each_cut()))
def test_every_rank_stores_the_values_of_one_process(worlds, make, cut):
    if make not in _one_process:
        [_one_process[make]] = worlds.run(1, run, make, 1, {})
    layout, num_microbatches = _CUTS[cut]
    for rank in worlds.run(2, run, make, 2, {**layout.strategy, "num_microbatches": num_microbatches}):
        for actual, wanted in zip(rank, _one_process[make], strict=True):
            assert_equal(actual, wanted)


def test_stages_store_the_values_of_their_replica(worlds):
    ranks = worlds.run(4, run, Appends, 4, {**BOTH.strategy, "num_microbatches": 2})
    kept = [rank[0] for rank in ranks]
    for actual in kept:
        same_losses = [wanted for wanted in kept if wanted["losses"] == actual["losses"]]
        assert len(same_losses) == 2
        assert_equal(*same_losses)


class StoresLargest(StoresValues):
    def store(self, loss, out, batch, batch_idx):
        self.logged["likeliest"] = out.argmax().item()


class StoresMemory(StoresValues):
    """A tensor per sample that the next batch reads, and a number."""

    def __init__(self):
        super().__init__()
        self.memory, self.losses = None, []

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x if self.memory is None else x + self.memory)
        self.memory = out.detach()
        loss = F.mse_loss(out, y)
        self.losses.append(loss.item())
        return loss


class BuildsLazily(StoresValues):
    """A mask of the first batch's shape, used ever after, and a number."""

    def __init__(self):
        super().__init__()
        self.mask, self.losses = None, []

    def training_step(self, batch, batch_idx):
        if self.mask is None:
            self.mask = (batch[0] > 0).double()
        loss = F.mse_loss(self(batch[0] * self.mask), batch[1])
        self.losses.append(loss.item())
        return loss


class StoresFromSecondBatch(StoresValues):
    def store(self, loss, out, batch, batch_idx):
        if batch_idx:
            self.logged["loss"] = loss.item()


class PicksScatteredRows(StoresValues):
    def store(self, loss, out, batch, batch_idx):
        self.shown = out[::3].detach()


_AT_ONCE = {
    PicksScatteredRows: "self.shown keeps a tensor of the model",
    StoresLargest: "self.logged['likeliest'] keeps a number read from the model",
    BuildsLazily: "self.mask keeps a row for each sample",
    Appends: "keeps a number read from the model",
}


@pytest.mark.parametrize("make", _AT_ONCE, ids=lambda make: make.__name__)
def test_strict_layout_names_values_that_microbatches_lack(worlds, make):
    strict = Layout("strict", devices=2, strategy={**PP2.strategy, "strict_layout": True})
    report = check(worlds, make, strict, num_microbatches=2)
    assert report.outcome == "refused" and _AT_ONCE[make] in report.message, str(report)


def fit_warned(size, make):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = trainer_of(size, size, strategy_options={"num_microbatches": 2}, limit_train_batches=2)
        trainer.fit(make(), data())
    counts = {span.action.microbatch for span in trainer.strategy.spans if span.action.kind is Kind.F}
    return [str(warning.message) for warning in caught if "one microbatch" in str(warning.message)], len(counts)


@pytest.mark.parametrize(("make", "count"), [(StoresLargest, 1), (AppendsLosses, 2)])
def test_step_that_only_appends_to_lists_has_microbatches(worlds, make, count):
    for rank, (messages, microbatches) in enumerate(worlds.run(2, fit_warned, 2, make)):
        assert microbatches == count
        assert len(messages) == (count == 1 and rank == 0), messages
        assert not messages or "self.logged['likeliest'] keeps a number read from the model" in messages[0]


def fit_remembering(size, make):
    ignore_warnings()
    torch.manual_seed(0)
    module = make().double()
    trainer_of(size, size, strategy_options={}).fit(module, regression_data()["train_dataloaders"])
    return [parameter.tolist() for parameter in module.parameters()]


@pytest.mark.parametrize("make", [StoresMemory, BuildsLazily])
def test_each_microbatch_stores_a_memory_of_its_samples(worlds, make):
    [expected] = worlds.run(1, fit_remembering, 1, make)
    for found in worlds.run(2, fit_remembering, 2, make):
        for actual, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(actual), torch.tensor(wanted), rtol=1e-9, atol=1e-12)


def test_value_stored_later_than_recorded(worlds):
    report = check(worlds, StoresFromSecondBatch, PP2)
    assert report.outcome == "same", str(report)
