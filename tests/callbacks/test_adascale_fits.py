"""AdaScale through the Trainer: the gain over stages and replicas matches one process."""

import functools

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_hybrid
from harness.fits import Run, assert_parity, reference_of
from harness.fits import fit as fit_run
from lightning_hybrid.callbacks import AdaScale
from models.regression import Sequential


class Regression(Sequential):
    def __init__(self):
        super().__init__(features=6, lr=0.05)


class Gains(pl.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, *_):
        if "adascale_gain" in trainer.callback_metrics:
            self.seen.append(float(trainer.callback_metrics["adascale_gain"]))


class Decides(Regression):
    """No pipeline runs it."""

    def training_step(self, batch):
        loss = super().training_step(batch)
        return 2 * loss if loss.item() > 1e6 else loss


def fit(devices, pipeline, accumulated, module_class=Regression, **options):
    torch.manual_seed(0)
    module = module_class().double()
    x = torch.randn(48, 6, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
    gains = Gains()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=lightning_hybrid.Hybrid3DStrategy(pipeline_parallel_size=pipeline, num_microbatches=2, **options),
        max_epochs=1,
        accumulate_grad_batches=accumulated,
        callbacks=[AdaScale(scale=2.0, smoothing=0.5), gains],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    return gains.seen, [p.detach() for p in module.parameters()]


def test_gain_over_stages_matches_one_process(worlds):
    [(gains, parameters)] = worlds.run(1, fit, 1, 1, 3)
    assert len(gains) >= 4
    assert any(gain > 1.001 for gain in gains), "the callback did nothing"
    for other, staged in worlds.run(2, fit, 2, 2, 3):
        torch.testing.assert_close(other, gains, rtol=1e-9, atol=0)
        torch.testing.assert_close(staged, parameters, rtol=1e-9, atol=1e-12)


def test_gain_is_equal_on_all_ranks_of_stages_and_replicas(worlds):
    results = worlds.run(4, fit, 4, 2, 1)
    gains, parameters = results[0]
    assert any(gain > 1.001 for gain in gains), "the callback did nothing"
    for other, others_parameters in results:
        assert other == gains
        torch.testing.assert_close(others_parameters, parameters, rtol=0, atol=0)


ZERO = {
    "stage 1": {"zero_stage": 1},
    "stage 2": {"zero_stage": 2},
    "stage 3": {"zero_stage": 3},
    "stage 3 by layer": {"zero_stage": 3, "reshard_after_forward": True},
}


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("stage", ZERO)
def test_gain_with_sharded_gradients(worlds, stage, pipeline, accumulated):
    devices = 2 * pipeline
    expected = worlds.run_once(devices, fit, devices, pipeline, accumulated)
    found = worlds.run(devices, functools.partial(fit, **ZERO[stage]), devices, pipeline, accumulated)
    for (gains, parameters), (wanted, wanted_parameters) in zip(found, expected, strict=True):
        assert len(gains) >= 4 and any(gain > 1.001 for gain in gains)
        torch.testing.assert_close(gains, wanted, rtol=1e-9, atol=0)
        torch.testing.assert_close(parameters, wanted_parameters, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("devices", "accumulated"), [(2, 3), (4, 1), (4, 2)])
def test_gain_with_sharded_stages(worlds, devices, accumulated):
    expected, *_ = worlds.run(devices // 2, fit, devices // 2, 1, accumulated)
    for found in worlds.run(devices, fit, devices, 2, accumulated, Decides):
        torch.testing.assert_close(found[0], expected[0], rtol=1e-9, atol=0)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-9, atol=1e-12)


class Scaled(AdaScale):
    recorded = None

    def __init__(self):
        super().__init__(scale=2.0, smoothing=0.5)


def test_gain_over_context_ranks_matches_one_process(worlds):
    accumulated = {"accumulate_grad_batches": 2}
    run = Run("GPT2", cp=2, microbatches=1, num_batches=6, callback=Scaled, trainer=accumulated)
    expected = reference_of(worlds, run)
    assert_parity(worlds.run(2, fit_run, run), expected, run)
