"""Ranks that hold something else after a change of the layout say so, before they send anything."""

import pytest
import torch

from harness.fits import refusal, trainer_of
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.params.shards import LocalShards
from lightning_hybrid.techniques import zero as layers
from models.regression import Regression, regression_data


class Branches(Regression):
    """On a value of the model, from the third batch on."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return 2 * loss if batch_idx >= 2 and loss.item() < 1e9 else loss


def other_order(monkeypatch):
    original = layers.members_of_groups
    monkeypatch.setattr(layers, "members_of_groups", lambda *args: dict(reversed(original(*args).items())))


def other_shape(monkeypatch):
    original = LocalShards.shard_parameters

    def shard(self, root):
        original(self, root)
        if self:  # after the change: stages have no shards
            root.head.weight.data = torch.zeros(1, 1, dtype=torch.float64)

    monkeypatch.setattr(LocalShards, "shard_parameters", shard)


FAULTS = {other_order: "gathers number 0 are", other_shape: "head.weight has shape (1, 1) there"}


def fit_with_fault(fault):
    with pytest.MonkeyPatch.context() as monkeypatch:
        torch.manual_seed(0)
        trainer = trainer_of(2, Hybrid3DStrategy(pipeline_parallel_size=2), [])
        if fault is not None and trainer.global_rank == 1:
            fault(monkeypatch)
        trainer.fit(Branches().double(), **regression_data())


@pytest.mark.parametrize("fault", FAULTS)
def test_ranks_name_what_differs(worlds, fault):
    for text in worlds.run(2, refusal, fit_with_fault, fault):
        assert text.startswith("RanksDisagree: after a change of the layout rank") and FAULTS[fault] in text, text


def test_right_layout_is_accepted(worlds):
    assert worlds.run(2, refusal, fit_with_fault, None) == ["not refused: None"] * 2
