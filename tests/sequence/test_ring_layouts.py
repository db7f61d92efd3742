"""Fits with ring attention, where context ranks do not divide the heads, against one process."""

import pytest

from harness.fits import Run, check
from models.wide import GPT2OneHead, LlamaGrouped


def slow(*runs):
    return [pytest.param(run, marks=pytest.mark.slow) for run in runs]


def name_of(run):
    case = run.case if isinstance(run.case, str) else run.case.__name__
    options = "".join(f"-{name}-{value}" for name, value in run.strategy.items())
    return f"{case}-pp{run.pp}-dp{run.dp}-tp{run.tp}-cp{run.cp}" + "-sequence" * run.sequence + options


TWO, CLIPPED = {"cp": 2}, {"trainer": {"gradient_clip_val": 0.05}}
RUNS = [
    Run(LlamaGrouped, cp=4, microbatches=1),
    Run("GPT2", tp=2, cp=2, **CLIPPED),
    *slow(Run(GPT2OneHead, **TWO, microbatches=1, validate=True), Run("GPT2", cp=3), Run("Llama", cp=3, **CLIPPED)),
    *slow(Run(GPT2OneHead, pp=2, **TWO), Run(GPT2OneHead, dp=2, **TWO), Run("Encoder", cp=3, **CLIPPED)),
    *slow(Run(GPT2OneHead, dp=2, **TWO, strategy={"zero_stage": 3}), Run("GPT2", tp=2, cp=2, sequence=True)),
    *slow(Run(GPT2OneHead, **TWO, strategy={"recompute": "full"}), Run("Encoder", tp=2, cp=2)),
    *slow(Run(GPT2OneHead, **TWO, strategy={"recompute": "selective"}), Run("ViT", cp=3), Run("Bert", cp=3)),
    *slow(Run("Llama", pp=2, tp=2, cp=2), Run("GPT2", dp=2, tp=2, cp=2)),
]


@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_parity(worlds, run):
    ranks, _ = check(worlds, run)
    layers = {fqn: plan for fqn, plan in ranks[0].plans.items() if fqn.rpartition(".")[2].isdecimal()}
    assert layers
    for plan in layers.values():
        assert plan.positions is not None and plan.positions.ring_attention, plan.lines()
        assert plan.positions.by == ("both" if run.sequence else "context")
