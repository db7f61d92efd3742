"""Training in the V placement, under searched schedules too, matches one process."""

import dataclasses

import pytest
import torch

from harness.fits import Run, assert_parity, check, fit, fit_joined_batches, reference_of
from harness.split_backwards import LinearsOfAnySize

ZB_V = {"schedule": "zero_bubble_v"}
DUALPIPE_V = {"schedule": "dualpipe_v", "stages_per_rank": 2}
SEARCHED = {"schedule": "zero_bubble_searched"}
SEARCHED_V = {"schedule": "zero_bubble_searched", "stages_per_rank": 2, "max_microbatches_in_flight": 3}


def slow(run):
    return pytest.param(run, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "run",
    [
        Run("Llama", pp=2, microbatches=4, strategy=ZB_V),
        slow(Run("Llama", pp=2, microbatches=4, strategy=DUALPIPE_V)),
        Run("Llama", pp=2, microbatches=4, strategy=SEARCHED_V),
        Run("Layers", pp=2, dp=2, microbatches=4, strategy=SEARCHED),
        slow(Run("Llama", pp=4, microbatches=8, batch_size=8, strategy=ZB_V)),
        slow(Run("Llama", pp=4, microbatches=8, batch_size=8, strategy=DUALPIPE_V)),
        slow(Run("UNet", pp=2, microbatches=4, strategy=ZB_V)),
        slow(Run("T5", pp=2, microbatches=4, strategy=ZB_V)),
        slow(Run("AuxiliaryLosses", pp=2, microbatches=4, strategy=DUALPIPE_V)),
        Run("Tied", pp=2, dp=2, num_batches=4, strategy=ZB_V, trainer={"accumulate_grad_batches": 2}),
        slow(Run("Tied", pp=2, dp=2, strategy=DUALPIPE_V, trainer={"gradient_clip_val": 0.05})),
        slow(Run("Tied", pp=2, dp=2, strategy={**ZB_V, "zero_stage": 1})),
        slow(Run("Tied", pp=2, dp=2, strategy={**ZB_V, "zero_stage": 2})),
        slow(Run("Tied", pp=2, dp=2, strategy={**ZB_V, "zero_stage": 3, "reshard_after_forward": True})),
        slow(Run("Tied", pp=2, dp=2, strategy={**ZB_V, "zero_stage": 3})),
        slow(Run("Layers", pp=2, tp=2, microbatches=4, strategy=ZB_V)),
        slow(Run("Layers", pp=2, dp=2, microbatches=4, strategy={**ZB_V, "zero_stage": 1})),
        slow(Run("Layers", pp=2, dp=2, microbatches=4, strategy={**DUALPIPE_V, "zero_stage": 2})),
        slow(Run("Llama", pp=2, dp=2, microbatches=4, strategy={**ZB_V, "zero_stage": 3})),
        slow(Run("Llama", pp=2, microbatches=4, strategy={**ZB_V, "recompute": "full"})),
        slow(Run("SeveralForwards", pp=2, microbatches=4, strategy=ZB_V)),
        slow(Run("Recurrent", pp=2, microbatches=4, strategy=DUALPIPE_V)),
        slow(Run("InPlace", pp=2, microbatches=4, strategy=ZB_V)),
    ],
    ids=lambda run: "-".join(
        [run.case, f"pp{run.pp}-dp{run.dp}-tp{run.tp}", *(f"{key}={value}" for key, value in run.strategy.items())]
    ),
)
def test_parity(worlds, run):
    run = dataclasses.replace(run, callback=LinearsOfAnySize)
    ranks = worlds.run(run.world_size, fit, run)
    assert_parity(ranks, reference_of(worlds, run), run)
    each = run.strategy.get("stages_per_rank", 1 if run.strategy == SEARCHED else 2)
    assert len(ranks[0].units) == run.pp * each
    actions = [action for rank in ranks for batch in rank.extra for action in batch]
    # In these the gradients of weights have hooks, or layers are recomputed.
    defers = not {"recompute", "reshard_after_forward"}.intersection(run.strategy)
    assert any("I" in action for action in actions) == defers, "no backward was split, or one that cannot be"


@pytest.mark.slow
def test_dropout_and_evaluation(worlds):
    check(worlds, Run("Dropouts", pp=2, dp=2, strategy=ZB_V), fit_joined_batches)
    check(worlds, Run("Layers", pp=2, microbatches=4, strategy=ZB_V, validate=True))


def test_first_and_last_stage_are_on_the_first_rank(worlds):
    [first, second] = worlds.run(2, fit, Run("Tied", pp=2, microbatches=4, strategy=ZB_V))
    [shared] = [stages for stages in first.stages.values() if len(stages) > 1]
    assert shared == (0, 3)
    assert {stage for stages in first.stages.values() for stage in stages} == {0, 1, 2, 3}
    of_ranks = [{stages for name, stages in rank.stages.items() if name in rank.grads[0]} for rank in (first, second)]
    assert of_ranks[0] == {(0,), (3,), (0, 3)} or of_ranks[0] == {(0, 3)}, of_ranks
    assert of_ranks[1] <= {(1,), (2,)}, of_ranks


def test_bitwise_equal_to_each_other(worlds):
    run = Run("Llama", pp=2, microbatches=4, num_batches=3, strategy=ZB_V)
    one = worlds.run(2, fit, dataclasses.replace(run, callback=LinearsOfAnySize))
    for strategy in (DUALPIPE_V, SEARCHED_V):
        other = worlds.run(2, fit, dataclasses.replace(run, strategy=strategy, callback=LinearsOfAnySize))
        for here, there in zip(one, other, strict=True):
            assert here.state.keys() == there.state.keys()
            assert all(torch.equal(here.state[name], there.state[name]) for name in here.state)
