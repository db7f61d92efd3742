"""ZeRO: what replicas share out, to the numbers of one process."""

import pytest
from trainer.fitting import Run, assert_parity, fit, fit_reference


def check(worlds, run, *, tolerance=1e-10):
    [expected] = worlds.run(1, fit_reference, run)
    ranks = worlds.run(run.world_size, fit, run, timeout=120)
    assert_parity(ranks, expected, run, tolerance=tolerance)
    return ranks


def zero(stage, case="GPT2", *, per_layer=False, **options):
    strategy = {"zero_stage": stage, "reshard_after_forward": per_layer, **options.pop("strategy", {})}
    return Run(case, dp=2, strategy=strategy, **options)


def name_of(run):
    policy = "layer" if run.strategy["reshard_after_forward"] else "step"
    stage = run.strategy["zero_stage"]
    return f"zero{stage}-{policy}-{run.case}-pp{run.pp}-dp{run.dp}-tp{run.tp}-m{run.microbatches}"


RUNS = [
    zero(1, microbatches=1),
    zero(2),
    zero(3),
    zero(3, per_layer=True),
    zero(3, per_layer=True, pp=2),
    zero(3, tp=2, pp=2),
]


@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_parity(worlds, run):
    check(worlds, run)
