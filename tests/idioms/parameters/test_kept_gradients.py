"""Gradients that the user's ``optimizer_zero_grad`` keeps over optimizer steps, with accumulated batches."""

from dataclasses import replace

import pytest

from harness.fits import Run, check

ACCUMULATES = {"accumulate_grad_batches": 2}
RUNS = {
    "pp2": Run("Tied", pp=2),
    "pp2 accumulates": Run("Tied", pp=2, trainer=ACCUMULATES),
    "pp2 x zero1 accumulates": Run("Tied", pp=2, dp=2, strategy={"zero_stage": 1}, trainer=ACCUMULATES),
    "zero3 accumulates": Run("Tied", dp=2, strategy={"zero_stage": 3}, trainer=ACCUMULATES),
    "tp2 accumulates": Run("Tied", tp=2, trainer=ACCUMULATES),
}


def keep_gradients(module):
    module.optimizer_zero_grad = lambda *args: None


@pytest.mark.parametrize("run", [pytest.param(run, id=name) for name, run in RUNS.items()])
def test_kept_gradients_are_summed_once(worlds, run):
    check(worlds, replace(run, num_batches=6, change=keep_gradients))
