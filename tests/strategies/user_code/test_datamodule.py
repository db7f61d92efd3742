"""Loaders of a LightningDataModule, for every kind of run."""

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from harness.trainer_runs import ignore_warnings, trainer_of
from models.tiny import Samples, Tiny


class Data(LightningDataModule):
    """Makes its samples in `setup`, for the given stage; two loaders for validation."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append(f"setup {stage}")
        self.samples = {"train": Samples(8), "val": Samples(12), "test": Samples(10), "predict": Samples(6)}

    def train_dataloader(self):
        return DataLoader(self.samples["train"], batch_size=4)

    def val_dataloader(self):
        return [DataLoader(self.samples["val"], batch_size=4), DataLoader(self.samples["train"], batch_size=2)]

    def test_dataloader(self):
        return DataLoader(self.samples["test"], batch_size=4)

    def predict_dataloader(self):
        return DataLoader(self.samples["predict"], batch_size=4)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "x": batch["x"] * 0.5}

    def teardown(self, stage):
        self.calls.append(f"teardown {stage}")
        del self.samples


class Steps(Tiny):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val", self.loss(batch), batch_size=len(batch["x"]))

    def test_step(self, batch, batch_idx):
        self.log("test", self.loss(batch), batch_size=len(batch["x"]))

    def predict_step(self, batch, batch_idx):
        return {"y": self(batch["x"]), "index": batch["index"]}


def run(size, pp, kind):
    ignore_warnings()
    trainer, model, data = trainer_of(size, pp), Steps(), Data()
    result = getattr(trainer, kind)(model, datamodule=data)
    if kind == "predict":
        result = [{name: value.tolist() for name, value in batch.items()} for batch in result]
    numbers = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return result, numbers, [call for call in data.calls if call != "prepare_data"]


@pytest.mark.parametrize("kind", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize("pp", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_run_uses_the_loaders_of_the_datamodule(worlds, kind, pp):
    [(expected, numbers, calls)] = worlds.run(1, run, 1, 1, kind)
    assert numbers or kind == "predict"
    for actual, our_numbers, our_calls in worlds.run(pp, run, pp, pp, kind):
        assert our_calls == calls
        assert our_numbers == pytest.approx(numbers, rel=1e-10)
        if kind == "predict":
            assert [batch["index"] for batch in actual] == [batch["index"] for batch in expected]
            for batch, known in zip(actual, expected, strict=True):
                torch.testing.assert_close(torch.tensor(batch["y"]), torch.tensor(known["y"]), rtol=1e-6, atol=0)
        elif kind != "fit":
            assert len(actual) == len(expected)
            for metrics, known in zip(actual, expected, strict=True):
                assert metrics == pytest.approx(known, rel=1e-10)
