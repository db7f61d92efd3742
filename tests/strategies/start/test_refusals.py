"""Unsupported runs are refused at set-up or before any parameter changes, with advice."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import lightning_hybrid
from harness.trainer_runs import trainer_of, weights_of
from harness.verification import call_quietly
from models.tiny import FEATURES, Tiny, loader


class Manual(Tiny):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer, loss = self.optimizers(), self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class ReturnsDetached(Tiny):
    def training_step(self, batch, batch_idx):
        return self.loss(batch).detach()


class Branches(Tiny):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if loss > 3:
            loss = loss * 2
        return loss


class BranchesOnNumber(Tiny):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if loss.item() > 3:
            loss = loss * 2
        return loss


SEEN = []


class ChangesLater(Tiny):
    """A variable outside of the module decides: no guard sees it."""

    def on_train_batch_start(self, batch, batch_idx):
        SEEN.append(batch_idx)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss if len(SEEN) < 2 else loss * 2 + 1


class Recurrent(Tiny):
    """Feeds its output back through all layers: most parameters are needed on every stage."""

    def forward(self, x):
        for _ in range(3):
            for layer in self.layers[:-1]:
                x = layer(x)
        return self.layers[-1](x)


class WithLBFGS(Tiny):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class OneUnit(Tiny):
    def __init__(self):
        super().__init__()
        self.layers = nn.Linear(FEATURES, 1).double()


class Scripted(Tiny):
    """Its second layer cannot be traced."""

    def __init__(self):
        super().__init__()
        self.layers[1] = call_quietly(torch.jit.script, (self.layers[1],))


CASES = {
    "detached": (ReturnsDetached, {}, ["training_step", "loss", "trainable"]),
    "cut": (Tiny, {"pipeline_cuts": ["layers.9"]}, ["layers.9", "pipeline_cuts"]),
    "microbatches": (Tiny, {"num_microbatches": 9}, ["num_microbatches=9", "4 samples"]),
    "sizes": (Tiny, {"data_parallel_size": 3}, ["6", "world has 2", "devices=6"]),
    "strict": (
        Manual,
        {"strict_layout": True},
        ["Manual", "under pipeline_parallel_size=2: ", "manual optimization"],
    ),
}
# No stages run these: each rank has shards, and runs the step on a share of the batch.
IN_SHARES = [Scripted, Manual, Branches, BranchesOnNumber, Recurrent, WithLBFGS, OneUnit]


def run_in_shares(model_class):
    model = model_class()
    before = weights_of(model)
    trainer = trainer_of(2, 2, strategy_options={})
    text = r"(?s)sharded instead of pipelined.*; each of the 2 ranks of pipeline_parallel_size=2 holds a shard"
    with pytest.warns(UserWarning, match=text) if trainer.is_global_zero else nullcontext():
        trainer.fit(model, loader(4), loader(4))
    after = weights_of(model)
    moved = [name for name, value in after.items() if not torch.equal(value, before[name])]
    return trainer.strategy.run.batch_shares, trainer.global_step > 1, {n: after[n].tolist() for n in moved}


@pytest.mark.parametrize("model_class", IN_SHARES)
def test_unpipelinable_steps_are_trained_sharded(worlds, model_class):
    ranks = worlds.run(2, run_in_shares, model_class)
    assert ranks[0] == ranks[1]
    shares, steps, moved = ranks[0]
    assert shares == 2 and steps and moved


def run_refused(case):
    model_class, options, _ = CASES[case]
    model = model_class()
    before = weights_of(model)
    try:
        trainer_of(2, 2, strategy_options=options).fit(model, loader(4), loader(4))
    except Exception as error:
        changed = [
            name
            for name, value in weights_of(model).items()
            if value.device.type == "cpu" and value.shape == before[name].shape and not same(value, before[name])
        ]
        notes = getattr(error, "__notes__", [])
        return type(error).__name__, "\n".join([str(error), *notes]), changed
    return "nothing was raised", "", []


def same(value, before):
    return type(value) is not torch.Tensor or torch.equal(value, before)


@pytest.mark.parametrize("case", CASES)
def test_refused_before_any_parameter_changes(worlds, case):
    words = CASES[case][2]
    for name, message, changed in worlds.run(2, run_refused, case):
        assert all(word in message for word in words), f"{name}: {message}"
        assert name not in ("AssertionError", "KeyError", "AttributeError", "RankError")
        assert not changed


class ChangesBefore(ChangesLater):
    """The changed operation has a result that the next one reads."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return (loss * 3 if len(SEEN) < 2 else loss + 3) / 2


@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"zero_stage": 3, "num_microbatches": 2}])
def test_one_stage_trains_a_changing_step(worlds, options):
    assert all(worlds.run(2, changed_under, options))


def changed_under(options):
    SEEN.clear()
    trainer = trainer_of(2, 1, strategy_options=options)
    trainer.fit(ChangesBefore(), loader(4))
    return trainer.global_step == len(SEEN) >= 2


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"schedule": "zigzag"}, ValueError, ["zigzag", "gpipe", "1f1b"]),
        ({"schedule": "zero_bubble", "stages_per_rank": 2}, ValueError, ["stages_per_rank=2", "interleaved_1f1b"]),
        ({"schedule": "eager_1f1b", "stages_per_rank": 2}, ValueError, ["eager_1f1b", "interleaved_1f1b"]),
        ({"schedule": "zero_bubble_v", "stages_per_rank": 3}, ValueError, ["two stages per rank", "stages_per_rank=3"]),
        (
            {"max_microbatches_in_flight": 4},
            ValueError,
            ["max_microbatches_in_flight=4", "zero_bubble_searched", "1f1b"],
        ),
        (
            {"schedule": "zero_bubble_searched", "max_microbatches_in_flight": 0},
            ValueError,
            ["max_microbatches_in_flight=0", "1 or more"],
        ),
        ({"num_microbatches": 0}, ValueError, ["num_microbatches=0", "1 or more"]),
        ({"num_microbatches": "four"}, ValueError, ["num_microbatches='four'", "'auto'"]),
        ({"num_microbatches": 2.0}, ValueError, ["num_microbatches=2.0"]),
        ({"num_microbatches": True}, ValueError, ["num_microbatches=True"]),
        ({"stages_per_rank": 0}, ValueError, ["stages_per_rank=0"]),
        ({"tensor_parallel_size": 0}, ValueError, ["tensor_parallel_size=0"]),
        ({"pipeline_parallel_size": 0}, ValueError, ["pipeline_parallel_size", "0"]),
        ({"pipeline_parallel_size": "2"}, ValueError, ["pipeline_parallel_size", "'2'"]),
        ({"data_parallel_size": "all"}, ValueError, ["data_parallel_size", "'all'"]),
        ({"pipeline_cuts": "layers.1"}, TypeError, ["pipeline_cuts", "list"]),
        ({"tensor_parallel_plan": ["layers.0"]}, TypeError, ["tensor_parallel_plan", "'colwise'"]),
        ({"tensor_parallel_plan": {"layers.0": "column"}}, ValueError, ["'column'", "'layers.0'", "colwise, rowwise"]),
        ({"batch_splitter": 3}, TypeError, ["batch_splitter", "3"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bad_options_are_refused_by_the_constructor(options, error, words):
    with pytest.raises(error) as caught:
        lightning_hybrid.Hybrid3DStrategy(**options)
    assert all(word in str(caught.value) for word in words), str(caught.value)
