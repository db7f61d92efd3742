"""What training steps return, how they are called, and what they log: as in Lightning, or refused by name."""

import dataclasses
import re
from collections import namedtuple
from collections.abc import Mapping
from itertools import pairwise

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional as F

from harness.layouts import each_under, under
from harness.trainer_runs import fit_until_error, ignore_warnings, trainer_of
from harness.verification import COMBINED, LAYOUTS, TENSOR, check
from models.regression import EncoderDecoder, regression_data

BY_LAYOUT = [*LAYOUTS[1:], COMBINED]
by_layout = under(BY_LAYOUT, slow=[TENSOR])
DP, DP_PP = LAYOUTS[1], LAYOUTS[2]


# --- forms of the loss -----------------------------------------------------------------------------------------------


class WithExtras(EncoderDecoder):
    """Hooks read the step's outputs."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        return {"loss": F.mse_loss(out, y), "predictions": out.detach(), "targets": y, "step": batch_idx}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert outputs["predictions"].shape == outputs["targets"].shape == batch[1].shape
        error = (outputs["predictions"] - outputs["targets"]).square().mean()
        self.log("returned_loss", outputs["loss"], sync_dist=True)
        self.log("error_again", error, sync_dist=True)


Losses = namedtuple("Losses", ["total", "parts"])
Parts = namedtuple("Parts", ["fit", "penalty"])


class WithNamedTuples(EncoderDecoder):
    def losses(self, x, y):
        out = self(x)
        parts = Parts(F.mse_loss(out, y), out.square().mean())
        return Losses(parts.fit + 0.1 * parts.penalty, parts)

    def training_step(self, batch, batch_idx):
        losses = self.losses(*batch)
        self.log_dict(losses.parts._asdict())
        return {"loss": losses.total, "losses": losses}


class LossDict(dict):
    """Attribute access, as configuration libraries do it."""

    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)  # as copy and pickle look up methods that Python 3.10 does not have
        return self[name]


class WithCustomMapping(EncoderDecoder):
    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        losses = LossDict(fit=F.mse_loss(out, y), penalty=out.abs().mean())
        losses["loss"] = losses.fit + 0.05 * losses.penalty
        return losses


class InForward(EncoderDecoder):
    """The network computes the loss, as those of transformers do."""

    @dataclasses.dataclass
    class Output:
        loss: torch.Tensor | None
        prediction: torch.Tensor

    def forward(self, x, y=None):
        out = super().forward(x)
        return self.Output(None if y is None else F.mse_loss(out, y), out)

    def training_step(self, batch, batch_idx):
        x, y = batch
        output = self(x, y)
        self.log("spread", output.prediction.std())
        return output.loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self(*batch).loss)


class WithoutBatchIdx(EncoderDecoder):
    def training_step(self, batch):
        x, y = batch
        return F.mse_loss(self(x), y)

    def validation_step(self, batch):
        self.log("val_loss", self.training_step(batch))


class WithKeywords(EncoderDecoder):
    def training_step(self, *args, **kwargs):
        (x, y), batch_idx = args
        return F.mse_loss(self(x), y) * (1 + batch_idx)


class OfOneElement(EncoderDecoder):
    """A loss of shape (1,)."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return (self(x) - y).square().mean(0)


class LossOfAModule(EncoderDecoder):
    def __init__(self):
        super().__init__()
        self.criterion = nn.SmoothL1Loss()
        self.balance = nn.Parameter(torch.zeros(2))

    def training_step(self, batch, batch_idx):
        """Weights of several losses that are learnt along."""
        x, y = batch
        out = self(x)
        losses = torch.stack([self.criterion(out, y), out.square().mean()])
        return (losses * torch.exp(-self.balance) + self.balance).sum()


FORMS = [
    WithNamedTuples,
    WithCustomMapping,
    InForward,
    WithoutBatchIdx,
    WithKeywords,
    OfOneElement,
    LossOfAModule,
]


@each_under("module", FORMS, BY_LAYOUT, slow=[TENSOR])
def test_loss_return_types(worlds, module, layout):
    report = check(worlds, module, layout)
    assert report.outcome == "same", str(report)


@under([x for x in LAYOUTS if x.replicas == 1])
def test_extra_outputs_reach_hooks(worlds, layout):
    report = check(worlds, WithExtras, layout)
    assert report.outcome == "same", str(report)


@pytest.mark.parametrize("pp", [1, 2])
def test_extra_outputs_are_those_of_the_replica(worlds, pp):
    # The module itself compares them, on every rank.
    for kind, message, _ in worlds.run(2 * pp, fit_until_error, WithExtras, pp):
        assert (kind, message) == ("", "nothing was refused")


# --- what Lightning itself refuses -----------------------------------------------------------------------------------


class LossObject:
    """Neither a tensor nor a mapping."""

    def __init__(self, loss):
        self.loss = loss


class ReturnsAnObject(EncoderDecoder):
    def training_step(self, batch, batch_idx):
        return LossObject(super().training_step(batch, batch_idx))


class ReturnsATuple(EncoderDecoder):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx), batch_idx


class ReturnsADictWithoutLoss(EncoderDecoder):
    def training_step(self, batch, batch_idx):
        return {"objective": super().training_step(batch, batch_idx)}


class ReturnsANumber(EncoderDecoder):
    def training_step(self, batch, batch_idx):
        return float(super().training_step(batch, batch_idx).detach())


REFUSED = [ReturnsAnObject, ReturnsATuple, ReturnsADictWithoutLoss, ReturnsANumber]


@pytest.mark.parametrize("module", REFUSED, ids=lambda module: module.__name__)
@pytest.mark.parametrize("pp", [1, 2])
def test_outputs_that_lightning_refuses_are_refused_first(worlds, module, pp):
    for outcome in worlds.run(2 * pp, fit_until_error, module, pp):
        kind, message, moved = outcome
        assert kind in ("MisconfigurationException", "StepError", "LossError"), message
        assert not moved
        assert kind != "StepError" or "return the loss tensor, or a dict with the key 'loss'" in message


class MappingWithoutDict(Mapping):
    def __init__(self, **items):
        self._items = items

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class ReturnsAMapping(EncoderDecoder):
    """Lightning takes any Mapping."""

    def training_step(self, batch, batch_idx):
        return MappingWithoutDict(loss=super().training_step(batch, batch_idx), note="fine")


@by_layout
def test_any_mapping(worlds, layout):
    report = check(worlds, ReturnsAMapping, layout)
    assert report.outcome == "same", str(report)


# --- None ------------------------------------------------------------------------------------------------------------


class SkipsEverywhere(EncoderDecoder):
    """Warm-up of a running statistic: nothing is learnt in every third batch."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        if batch_idx % 3 == 1:
            return None
        loss = F.mse_loss(self(x), y)
        self.log("loss", loss)
        return loss


class SkipsBadBatches(EncoderDecoder):
    """One replica may have a bad batch where the others have none."""

    def training_step(self, batch, batch_idx):
        if self.trainer.strategy.data_rank == 1 and batch_idx == 1:
            return None
        return super().training_step(batch, batch_idx)


class RecordsOutputs(Callback):
    def __init__(self):
        self.outputs, self.weights = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.outputs.append(outputs if outputs in (None, {}) else sorted(outputs))
        self.weights.append([p.detach().clone() for p in pl_module.parameters()])


def fit_skipping(module, size, pp, options):
    ignore_warnings()
    torch.manual_seed(0)
    model, recorder = module().double(), RecordsOutputs()
    data = regression_data(batch_size=32 // (4 * size // pp))["train_dataloaders"]
    before = [p.detach().clone() for p in model.parameters()]
    trainer = trainer_of(size, pp, callbacks=[recorder], strategy_options=options, limit_train_batches=4)
    try:
        trainer.fit(model, data)
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", []))
        return f"{type(error).__name__}: {error}\n{notes}"
    moved = [
        any(not torch.equal(a, b) for a, b in zip(x, y, strict=True)) for x, y in pairwise([before, *recorder.weights])
    ]
    return recorder.outputs, moved


def fit_both(size, options):
    """Weights after a run that skips the last batch of an accumulation, or begins with a skip."""
    ignore_warnings()
    torch.manual_seed(0)
    model = SkipsEverywhere().double()
    data = regression_data(batch_size=8 // size)["train_dataloaders"]
    data = torch.utils.data.DataLoader(data.dataset, 8 // size, sampler=InTurns(data.dataset, size))
    options = {"use_distributed_sampler": False, "limit_train_batches": 4, **options}
    trainer_of(size, 1, strategy_options={"num_microbatches": 1}, **options).fit(model, data)
    return [p.detach().clone() for p in model.parameters()]


class InTurns(torch.utils.data.Sampler):
    """Each replica takes its share of every batch of 8."""

    def __init__(self, data, size):
        self.data, self.size = data, size

    def __len__(self):
        return len(self.data) // self.size

    def __iter__(self):
        rank = torch.distributed.get_rank() if self.size > 1 else 0
        return iter(range(rank, len(self.data), self.size))


@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}], ids=lambda options: "".join(options)
)
def test_skipped_steps_match_one_process(worlds, options):
    [expected] = worlds.run(1, fit_both, 1, options)
    for weights in worlds.run(2, fit_both, 2, options):
        for actual, wanted in zip(weights, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2])
def test_step_skipped_by_all_replicas(worlds, size):
    for outputs, moved in worlds.run(size, fit_skipping, SkipsEverywhere, size, 1, {"num_microbatches": 1}):
        assert outputs == [["loss"], {}, ["loss"], ["loss"]]
        # Adam applies its momentum only where there are gradients.
        assert moved == [True, False, True, True]


def test_step_skipped_by_some_replicas_is_refused_on_all(worlds):
    for message in worlds.run(2, fit_skipping, SkipsBadBatches, 2, 1, {}):
        assert re.search(r"training_step \(.*\.py:\d+\) returned None on 1 of 2 replicas", message), message
        assert "return a loss of zero that depends on the model" in message


@under([LAYOUTS[0], *LAYOUTS[2:], COMBINED])
def test_first_step_skipped_then_pipelined(worlds, layout):
    size, pp = layout.devices, layout.strategy.get("pipeline_parallel_size", 1)
    for shares, trained in worlds.run(size, fit_skipping_first, size, pp, dict(layout.strategy)):
        assert shares == 1 and trained == [False, True, True, True]


def fit_skipping_first(size, pp, options):
    ignore_warnings()
    options.pop("pipeline_parallel_size", None)
    trainer = trainer_of(size, pp, strategy_options=options, limit_train_batches=4)
    trained = []
    module = SkipsFirst().double()
    module.on_train_batch_end = lambda outputs, *_: trained.append(bool(outputs))
    trainer.fit(module, regression_data(batch_size=8 * pp // size)["train_dataloaders"])
    return trainer.strategy.run.batch_shares, trained


class SkipsFirst(EncoderDecoder):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 0 else super().training_step(batch, batch_idx)
