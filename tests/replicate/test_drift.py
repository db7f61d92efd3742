"""Copies of parameters on tensor and context ranks that drift apart are brought together, with one warning."""

import warnings

import pytest
import torch
from lightning.pytorch import Callback

from harness.fits import Run, fit
from lightning_hybrid.replicate import drift

UP_AND_DOWN = torch.tensor([torch.inf, -torch.inf], dtype=torch.float64)


class Drifts(Callback):
    """Moves a copy on one rank by units of its last place, up and down, and its state, after two batches."""

    def __init__(self):
        self.recorded = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        sharded = trainer.strategy.run.parts.over("tp").names | trainer.strategy.run.parts.over("cp").names
        optimizer = trainer.optimizers[0]
        with torch._C.DisableTorchFunction(), torch.no_grad():  # local shards
            names = {name: p for name, p in pl_module.named_parameters() if p in optimizer.state and p.numel() > 2}
            [copy] = [p for name, p in names.items() if name not in sharded][:1]
            [state] = [value for value in optimizer.state[copy].values() if value.dim()][:1]
            if batch_idx < 2 and trainer.strategy.mesh.rank == 1:
                for tensor in (copy.data, state):
                    first = tensor.view(-1)[:2]
                    first.copy_(torch.nextafter(first, UP_AND_DOWN))
            self.recorded = [copy.tolist(), state.tolist()]


def fit_with_drift(run, batches):
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(drift, "_BATCHES", batches)
        fitted = fit(run)
    return fitted, [str(warning.message) for warning in caught if "drifted apart" in str(warning.message)]


LAYOUTS = {
    "tp2": {"tp": 2},
    "cp2": {"cp": 2},
    "tp2 x zero3": {"tp": 2, "dp": 2, "strategy": {"zero_stage": 3}},
    "pp2 x tp2": {"tp": 2, "pp": 2},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_copies_are_brought_together(worlds, name):
    run = Run("GPT2", num_batches=4, callback=Drifts, **LAYOUTS[name])
    found = worlds.run(run.world_size, fit_with_drift, run, 1)
    (one, first), (other, second) = found[:2]
    assert one.extra == other.extra
    assert [len(texts) for texts in (first, second)] == [1, 0]
    assert "1 parameters have drifted apart between 2 ranks" in first[0]


def test_copies_are_compared_seldom(worlds):
    run = Run("GPT2", tp=2, num_batches=4, callback=Drifts)
    (one, first), (other, _) = worlds.run(2, fit_with_drift, run, 5)
    assert one.extra != other.extra
    assert first == []
