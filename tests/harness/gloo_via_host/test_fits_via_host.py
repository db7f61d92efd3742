"""Fits over process groups of `gloo_via_host` match one process; a rank that fails ends the others."""

import pytest

from harness.fits import Run, assert_parity, fit, reference_of
from harness.gloo_via_host.late import over_the_host
from harness.trainer_runs import ignore_warnings, trainer_of
from models.mixtures import Mixtral
from models.tiny import Tiny, loader

CLIPPED = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}
BY_DEFAULT = {
    "stages": Run("GPT2", pp=2, validate=True, trainer=CLIPPED),
    "shards of parameters and of layers": Run(
        "Llama", dp=2, tp=2, strategy={"zero_stage": 3, "reshard_after_forward": True}
    ),
}
MORE = {
    "replicas": Run("GPT2", dp=2, trainer=CLIPPED),
    "tensor ranks": Run("T5", tp=2),
    "shards": Run("GPT2", dp=2, strategy={"zero_stage": 3}, trainer=CLIPPED),
    "experts": Run(Mixtral, dp=2, ep=2),
    "interleaved": Run("UNet", pp=2, strategy={"stages_per_rank": 2}),
    "dp2tp2pp2": Run("GPT2", pp=2, dp=2, tp=2),
}


def fit_over_the_host(run):
    with over_the_host():
        return fit(run)


@pytest.mark.parametrize("name", [*BY_DEFAULT, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_fit_via_host(worlds, name):
    run = {**BY_DEFAULT, **MORE}[name]
    expected = reference_of(worlds, run)
    assert_parity(worlds.run(run.world_size, fit_over_the_host, run, timeout=120), expected, run)


class Fails(Tiny):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.trainer.strategy.mesh.rank == 1:
            raise ZeroDivisionError("on purpose")
        return self.loss(batch)


def run_failing():
    ignore_warnings()
    with over_the_host():
        try:
            trainer_of(2, 1).fit(Fails(), loader(4, 32))
        except Exception as error:
            return type(error).__name__, getattr(error, "__notes__", [])
    return None


def test_rank_that_fails_ends_the_others(worlds):
    (peer, notes), (failed, _) = worlds.run(2, run_failing, timeout=30)
    assert failed == "ZeroDivisionError"
    assert peer in ("RuntimeError", "DistNetworkError", "DistBackendError")
    assert any("had to stop" in note and "rank 1" in note and "on purpose" in note for note in notes), notes
