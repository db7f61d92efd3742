"""Every model of transformers under every schedule, over two and four stages, with one and two replicas."""

import itertools

import pytest
import torch

from harness.fits import Run, check, reference_of
from harness.schedules import EAGER, GPIPE, INTERLEAVED, ONE_F_ONE_B

SCHEDULES = {
    "gpipe": GPIPE,
    "1f1b": ONE_F_ONE_B,
    "eager_1f1b": EAGER,
    "interleaved_1f1b": INTERLEAVED,
    "zero_bubble": {"schedule": "zero_bubble"},
}
MODELS = ("GPT2", "Llama", "T5", "Bert", "ViT")
SIZES = ((2, 1), (2, 2), (4, 1), (4, 2))
# Each model, schedule and size once; `test_parity.py` has more.
BY_DEFAULT = {
    ("GPT2", "eager_1f1b", (2, 2)),
    ("Llama", "zero_bubble", (2, 1)),
    ("T5", "interleaved_1f1b", (4, 1)),
    ("Bert", "gpipe", (2, 1)),
    ("ViT", "1f1b", (4, 2)),
}


def cells():
    for cell in itertools.product(MODELS, SCHEDULES, SIZES):
        model, schedule, (pp, dp) = cell
        if schedule == "interleaved_1f1b" and pp == 4 and model != "T5":
            continue  # eight stages, and four layers
        marks = [] if cell in BY_DEFAULT else [pytest.mark.slow]
        yield pytest.param(*cell, marks=marks, id=f"{model}-{schedule}-pp{pp}-dp{dp}")


@pytest.mark.parametrize(("model", "schedule", "sizes"), [*cells()])
def test_parity(worlds, model, schedule, sizes):
    pp, dp = sizes
    ranks, _ = check(worlds, Run(model, pp=pp, dp=dp, microbatches=pp, strategy=SCHEDULES[schedule]))
    stages = pp * SCHEDULES[schedule].get("stages_per_rank", 1)
    for rank in ranks:
        assert rank.num_microbatches == pp
        assert len(rank.units) == stages and all(rank.units), "no stage is empty"


@pytest.mark.parametrize("model", [pytest.param(name, marks=[pytest.mark.slow] * (name != "Bert")) for name in MODELS])
def test_replicas_only(worlds, model):
    check(worlds, Run(model, dp=2, microbatches=1))


ACCUMULATED = [
    pytest.param(name, marks=[] if name in ("eager_1f1b", "interleaved_1f1b") else [pytest.mark.slow])
    for name in SCHEDULES
]


@pytest.mark.parametrize("schedule", ACCUMULATED)
def test_accumulation_over_batches_stages_and_replicas(worlds, schedule):
    run = Run("Tied", pp=2, dp=2, num_batches=6, strategy=SCHEDULES[schedule], trainer={"accumulate_grad_batches": 3})
    ranks, expected = check(worlds, run)
    assert all(len(rank.grads) == 2 and len(rank.losses) == 6 for rank in ranks)
    each = [loss for rank in ranks[:2] for loss in rank.losses]
    assert len({float(loss) for loss in each}) == 12, "batches and replicas must have gradients of their own"
    # Of one microbatch: if all microbatches were equal, scaling would hide a lost one.
    halves = Run("Tied", pp=2, dp=2, num_batches=6, batch_size=2, microbatches=1)
    other = reference_of(worlds, halves)
    assert not torch.allclose(other.losses[0] / 3, expected.losses[0])
