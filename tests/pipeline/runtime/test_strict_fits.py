"""Fits over process groups as strict as NCCL's (`tests/harness/strict_group.py`) match one process."""

import pytest

from harness.fits import Run, assert_parity, fit, reference_of
from harness.strict_group import as_on_gpus
from models.mixtures import GptOss, Looped, Mixtral

CLIPPED = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}
ZERO = {"zero_stage": 3}
BY_LAYER = {"zero_stage": 3, "reshard_after_forward": True}
BY_DEFAULT = {
    "stages, tied and validated": Run("GPT2", pp=2, validate=True, trainer=CLIPPED),
    "shards of parameters and of layers": Run("Llama", dp=2, tp=2, strategy=BY_LAYER),
    "experts": Run(Mixtral, dp=2, ep=2),
}
MORE = {
    "replicas": Run("GPT2", dp=2, trainer=CLIPPED),
    "shards": Run("GPT2", dp=2, strategy=ZERO, trainer=CLIPPED),
    "tensor ranks": Run("T5", tp=2),
    "positions": Run("GPT2", tp=2, sequence=True),
    "context": Run("GPT2", cp=2),
    "interleaved": Run("UNet", pp=2, strategy={"stages_per_rank": 2}),
    "interleaved over three": Run("UNet", pp=3, microbatches=3, batch_size=3, strategy={"stages_per_rank": 2}),
    "experts in a list": Run(Looped, dp=2, ep=2, strategy={"expert_chunks": 2}),
    "experts over context ranks": Run(Looped, cp=2, ep=2),
    "experts cut over tensor ranks": Run(GptOss, dp=2, tp=2, ep=2),
    "dp2tp2pp2": Run("GPT2", pp=2, dp=2, tp=2),
    "shards over stages": Run("T5", pp=2, dp=2, strategy=ZERO, validate=True),
    "checked": Run("GPT2", pp=2, dp=2, strategy={"verify_first_step": True}),
    "sums of samples": Run("GlueParameters", pp=2, dp=2, last=6),
}


def fit_as_on_gpus(run):
    with as_on_gpus():
        return fit(run)


@pytest.mark.parametrize("name", [*BY_DEFAULT, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_fit_on_strict_groups(worlds, name):
    run = {**BY_DEFAULT, **MORE}[name]
    expected = reference_of(worlds, run)
    assert_parity(worlds.run(run.world_size, fit_as_on_gpus, run, timeout=120), expected, run)


def refusal_of_bound_groups():
    with as_on_gpus(bound=True), pytest.raises(ValueError, match="leave device_id out"):
        fit(Run("Layers", pp=2))


def test_device_bound_groups_are_refused(worlds):
    worlds.run(2, refusal_of_bound_groups)
