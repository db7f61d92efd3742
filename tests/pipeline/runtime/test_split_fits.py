"""Training with split backwards matches one process, and is bitwise equal to 1F1B."""

import dataclasses

import pytest
import torch

from harness.fits import Run, assert_parity, fit, reference_of
from harness.split_backwards import LinearsOfAnySize

ZERO_BUBBLE = {"schedule": "zero_bubble"}


def slow(run):
    return pytest.param(run, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "run",
    [
        Run("Llama", pp=2, microbatches=4),
        Run("T5", pp=4, microbatches=4),
        slow(Run("T5", pp=4, microbatches=2)),
        slow(Run("Bert", pp=2)),
        slow(Run("UNet", pp=4, microbatches=4)),
        Run("Tied", pp=2, dp=2, num_batches=6, trainer={"accumulate_grad_batches": 3}),
        slow(Run("Llama", pp=2, trainer={"gradient_clip_val": 0.05})),
        Run("Layers", pp=2, dp=2, microbatches=4),
        Run("Layers", pp=2, dp=2, strategy={"zero_stage": 2}),
        slow(Run("Layers", pp=2, tp=2)),
        slow(Run("Llama", pp=2, dp=2, strategy={"zero_stage": 3})),
        slow(Run("Llama", pp=2, strategy={"recompute": "full"})),
        slow(Run("SeveralForwards", pp=2, microbatches=4)),
        slow(Run("Recurrent", pp=2, microbatches=4)),
    ],
    ids=lambda run: "-".join(
        [run.case, f"pp{run.pp}-dp{run.dp}-tp{run.tp}-m{run.microbatches}", *run.strategy, *run.trainer]
    ),
)
def test_parity(worlds, run):
    run = dataclasses.replace(run, callback=LinearsOfAnySize, strategy={**run.strategy, **ZERO_BUBBLE})
    expected = reference_of(worlds, run)
    ranks = worlds.run(run.world_size, fit, run)
    assert_parity(ranks, expected, run)
    # Replicas average during the last backward, unless stages share the weight: then it defers nothing.
    leaves_last = run.dp == 1 or run.case == "Tied"
    stages = set()
    for rank in ranks:
        for batch in rank.extra:
            [stage] = {action[0] for action in batch}
            kinds = "".join(action[1] for action in batch)
            m = run.microbatches
            nothing = stage == "0" or "recompute" in run.strategy
            split = 0 if nothing else m if leaves_last else m - 1
            assert sorted(kinds) == sorted("B" * (m - split) + "IW" * split + "R"), (stage, kinds)
            assert kinds.endswith("R")
            stages.add(stage)
    assert len(stages) == run.pp


def test_bitwise_equal_to_1f1b(worlds):
    run = Run("Llama", pp=2, microbatches=4, num_batches=3)
    unsplit = worlds.run(2, fit, run)
    split = worlds.run(2, fit, dataclasses.replace(run, strategy=ZERO_BUBBLE, callback=LinearsOfAnySize))
    assert any("1W" in batch for batch in split[1].extra)
    for one, other in zip(unsplit, split, strict=True):
        assert one.state.keys() == other.state.keys()
        assert all(torch.equal(one.state[name], other.state[name]) for name in one.state)
