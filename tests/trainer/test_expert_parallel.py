"""Expert parallelism: replicas share the experts of unmodified models, to the numbers of one process."""

from typing import ClassVar

import pytest
from trainer.fitting import Run, assert_parity, fit, fit_reference
from trainer.test_experts import Experts
from wider_models import DeepseekV3, GptOss, Looped, Mixtral, Qwen3Moe


def check(worlds, run, *, tolerance=1e-10):
    [expected] = worlds.run(1, fit_reference, run)
    ranks = worlds.run(run.world_size, fit, run, timeout=120)
    assert_parity(ranks, expected, run, tolerance=tolerance)
    return ranks, expected


def shared(case=Mixtral, *, slow=False, **options):
    run = Run(case, **{"dp": 2, "ep": 2, **options})
    return pytest.param(run, marks=pytest.mark.slow) if slow else run


class Balanced(Experts):
    """Losses of its routers are means over each batch, so they are left out: replicas have others than one process."""

    options: ClassVar = {"balance_loss": 0.0, "shared_experts": 1}


CLIPPED = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}

RUNS = {
    "Mixtral": shared(trainer=CLIPPED),
    "a list of experts": shared(Looped, trainer=CLIPPED),
    "Qwen3": shared(Qwen3Moe),
    "DeepSeek": shared(DeepseekV3),
    "gpt-oss": shared(GptOss),
    "our layer": shared(Balanced),
    "two copies": shared(dp=4, trainer=CLIPPED),
    "over stages": shared(pp=2),
    "over tensor ranks": shared(tp=2),
    "dp2tp2pp2": shared(tp=2, pp=2),
    "zero3": shared(dp=4, strategy={"zero_stage": 3}, trainer=CLIPPED),
    "in chunks": shared(strategy={"expert_chunks": 2}),
    "recomputed": shared(strategy={"recompute": "full"}),
    "validated": shared(validate=True),
}


# Their routers work in float32 whatever the parameters are.
IN_FLOAT32 = {DeepseekV3: 1e-5}


@pytest.mark.parametrize("run", list(RUNS.values()), ids=list(RUNS))
def test_parity(worlds, run):
    check(worlds, run, tolerance=IN_FLOAT32.get(run.case, 1e-10))
