"""Evaluation of numbers that are no means over samples: with stages too they are those of the batch."""

import warnings

import pytest
import torch
from lightning.pytorch import Callback
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from harness.trainer_runs import assert_same, trainer_of
from models.regression import FEATURES, Regression

SAMPLES, BATCH = 22, 8  # the last batch is shorter


class Spread(Regression):
    def measured(self, batch):
        out = self(batch[0])
        return {"spread": out.std()}

    def validation_step(self, batch, batch_idx):
        self.log_dict(self.measured(batch))

    def test_step(self, batch, batch_idx):
        self.log_dict(self.measured(batch), on_step=True, on_epoch=True)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


class Centred(Spread):
    def measured(self, batch):
        out = self(batch[0])
        return {"centred": (out - out.mean(0)).square().mean(), "mean": out.mean()}


class OverAConstant(Spread):
    def measured(self, batch):
        out = self(batch[0])
        return {"half": out.square().sum() / 2, "share": out.sum() / len(out)}


class Contrastive(Spread):
    def measured(self, batch):
        out = F.normalize(self(batch[0]).tanh() + batch[0][:, :1])
        return {"loss": F.cross_entropy(out @ out.T, torch.arange(len(out)))}


class Standardised(Spread):
    def predict_step(self, batch, batch_idx):
        out = self(batch[0])
        return (out - out.mean(0)) / out.std(0)


class Means(Spread):
    """The batches of this one are split."""

    def measured(self, batch):
        x, y = batch
        out = self(x)
        return {
            "loss": F.mse_loss(out, y),
            "largest": out.abs().max(),
            "count": float(len(x)),
            "error": (out > y).sum(),
        }


class Noisy(Spread):
    """Random numbers differ in each run of a step: nothing is known, and its batches are split."""

    def measured(self, batch):
        out = self(batch[0])
        return {"noise": (out + torch.randn_like(out)).mean()}


class Unsplit(Callback):
    """Collects the steps whose batches are not split."""

    def __init__(self):
        self.names = set()

    def collect(self, trainer, module):
        self.names |= getattr(getattr(trainer.strategy, "run", None), "runner", self).unsplit_step_names

    unsplit_step_names = frozenset()
    on_validation_end = on_test_end = on_predict_end = collect


def evaluated(kind, world_size=1, pp=1, options=None):
    """The numbers of each evaluation, the predictions, and the steps whose batches are not split."""
    torch.manual_seed(1)
    module, unsplit = kind(), Unsplit()
    x, y = torch.randn(SAMPLES, FEATURES, dtype=torch.float64), torch.randn(SAMPLES, 1, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH)
    trainer = trainer_of(world_size, pp, strategy_options=options or {}, precision="64-true", callbacks=[unsplit])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        [validated] = trainer.validate(module, loader, verbose=False)
        [tested] = trainer.test(module, loader, verbose=False)
        predicted = trainer.predict(module, loader)
    return {
        **{f"val {name}": number for name, number in validated.items()},
        **tested,
        "out": torch.cat(predicted),
    }, unsplit.names


EVALUATED = {"validation_step", "test_step"}
CASES = {Spread: EVALUATED, Centred: EVALUATED, OverAConstant: EVALUATED, Contrastive: EVALUATED}
CASES |= {Standardised: EVALUATED | {"predict_step"}, Means: set(), Noisy: set()}


@pytest.mark.parametrize("kind", CASES)
def test_stages_evaluate_batches(worlds, kind):
    for found, unsplit in worlds.run(2, evaluated, kind, 2, 2, {"num_microbatches": 4}):
        assert unsplit == CASES[kind]
        if kind is not Noisy:
            assert_same(found, evaluated(kind)[0])
