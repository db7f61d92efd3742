"""Fits under the strategy are parity with one process: losses, every gradient, parameters after three steps."""

import dataclasses

import pytest
import torch
from trainer.fitting import Run, assert_parity, fit, fit_reference, fit_whole

GPIPE = {"schedule": "gpipe"}
ONE_F_ONE_B = {"schedule": "1f1b"}
INTERLEAVED = {"schedule": "interleaved_1f1b", "stages_per_rank": 2}


def check(worlds, run, reference=fit_reference, *, tolerance=1e-10):
    """Fit on the ranks, compare with one process, and return what each rank saw."""
    [expected] = worlds.run(1, reference, run)
    ranks = worlds.run(run.world_size, fit, run)
    assert_parity(ranks, expected, run, tolerance=tolerance)
    return ranks, expected


def name_of(run):
    schedule = run.strategy.get("schedule", "1f1b")
    return f"{run.case}-pp{run.pp}-dp{run.dp}-m{run.microbatches}-{schedule}-{str(run.dtype)[6:]}"


GRID = [
    Run("GPT2", pp=2, dp=2, strategy=ONE_F_ONE_B),
    Run("GPT2", pp=4, strategy=GPIPE, microbatches=4),
    Run("GPT2", pp=2, strategy=INTERLEAVED),
    Run("GPT2", pp=2, dtype=torch.float32),
    Run("Llama", pp=4, microbatches=4),
    Run("Llama", pp=2, dp=2, strategy=INTERLEAVED),
    Run("T5", pp=2, dp=2, strategy=GPIPE),
    Run("T5", pp=4, strategy=ONE_F_ONE_B),
    Run("Bert", pp=2, strategy=INTERLEAVED),
    Run("Bert", pp=2, dp=2),
    Run("ViT", pp=4, strategy=GPIPE),
    Run("ViT", pp=2, dp=2),
    Run("UNet", pp=4, microbatches=4),
    Run("UNet", pp=2, dp=2, strategy=INTERLEAVED),
    Run("InPlace", pp=2, dp=2, strategy=INTERLEAVED),
    Run("AuxiliaryLosses", pp=4),
    Run("GlueParameters", pp=2, dp=2),
    Run("Containers", pp=2, dp=2, strategy=GPIPE),
    Run("SeveralForwards", pp=2),
    Run("Recurrent", pp=2),
    Run("Tied", dp=2, microbatches=1),
    Run("Tied", dp=2, microbatches=2),
    Run("Tied", pp=1, strategy={"stages_per_rank": 2}),
]


@pytest.mark.parametrize("run", GRID, ids=name_of)
def test_parity(worlds, run):
    check(worlds, run, tolerance=1e-10 if run.dtype == torch.float64 else 2e-3)
