"""Layers computed again in the backward: the same numbers to the last bit, and less kept for it."""

import pytest
import torch
from lightning.pytorch import Callback
from trainer.fitting import Run, fit, trainer_of
from worlds_plugin import RankError

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import ActivationCheckpointing


def assert_same_bits(worlds, run, recompute):
    plain = worlds.run(run.world_size, fit, run)
    again = worlds.run(run.world_size, fit, Run(**{**vars(run), "strategy": {**run.strategy, "recompute": recompute}}))
    for one, other in zip(plain, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.losses, other.losses, strict=True))
        assert one.state.keys() == other.state.keys()
        for name, value in one.state.items():
            assert torch.equal(value, other.state[name]), name
        for a, b in zip(one.grads, other.grads, strict=True):
            assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


RUNS = [
    Run("GPT2Dropout", microbatches=1, dtype=torch.float32),
    Run("GPT2Dropout", pp=2, dp=2),
    Run("GPT2Dropout", tp=2, sequence=True),
    Run("BatchNorms", pp=2),
    pytest.param(Run("Llama", pp=2, strategy={"stages_per_rank": 2}), marks=pytest.mark.slow),
    pytest.param(Run("GPT2", cp=2), marks=pytest.mark.slow),
    pytest.param(Run("T5", pp=2, tp=2), marks=pytest.mark.slow),
    pytest.param(Run("ViT", pp=2, strategy={"schedule": "gpipe"}), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.case}-pp{run.pp}-dp{run.dp}-tp{run.tp}-cp{run.cp}")
def test_the_same_numbers_to_the_last_bit(worlds, run, recompute):
    """With dropout, and with statistics that a second run must not write."""
    assert_same_bits(worlds, run, recompute)


LAYERS = [f"model.transformer.h.{k}" for k in range(4)]
SOME = [
    (["model.transformer.h.1"], LAYERS[1:2]),
    ({"*": "full", "model.transformer.h.*": "keep", "model.transformer.h.3": "full"}, LAYERS[3:]),
]


@pytest.mark.parametrize(("recompute", "chosen"), SOME, ids=["names", "policies"])
def test_some_layers(worlds, recompute, chosen):
    [policies] = worlds.run(1, policies_of, recompute)
    assert [name for name in LAYERS if policies[name] == "full"] == chosen


def test_every_second_layer(worlds):
    [policies] = worlds.run(1, policies_of, 2)
    assert list(policies.values()) == ["full" if k % 2 == 0 else "keep" for k in range(len(policies))]
    assert set(LAYERS) <= policies.keys()


class Notes(Callback):
    def on_train_start(self, trainer, pl_module):
        self.noted = dict(trainer.strategy._policies)


def policies_of(recompute):
    return fit(Run("GPT2", num_batches=1, strategy={"recompute": recompute}, callback=Notes)).extra


class Runs(Callback):
    """How often a layer's own code runs in a step; its hook would open the layer for a recording."""

    def __init__(self):
        self.noted = []

    def on_train_batch_start(self, trainer, pl_module, *_):
        norm = pl_module.model.transformer.h[1].ln_1
        self.count, forward = 0, type(norm).forward

        def counted(x):
            self.count += 1
            return forward(norm, x)

        norm.__dict__["forward"] = counted

    def on_train_batch_end(self, *_):
        self.noted.append(self.count)


@pytest.mark.parametrize(("recompute", "times"), [("full", 2), ("keep", 1)])
def test_a_plain_step_recomputes_too(worlds, recompute, times):
    """One process and one microbatch need no replay."""
    run = Run("GPT2", microbatches=1, num_batches=2, strategy={"recompute": recompute}, callback=Runs)
    assert worlds.run(1, fit, run)[0].extra == [times] * 2


def test_from_either_side(worlds):
    """The callback is the option; both at once must ask for the same."""
    [option] = worlds.run(1, policies_of, "full")
    [callback] = worlds.run(1, policies_by_callback, None)
    assert option == callback and set(option.values()) == {"full"}
    with pytest.raises(RankError, match="recompute='full' and recompute=2 are both asked for"):
        worlds.run(1, policies_by_both, None)


def policies_by_callback(_):
    return fit(Run("GPT2", num_batches=1, callback=Asks)).extra


class Asks(ActivationCheckpointing, Notes):
    def __init__(self):
        ActivationCheckpointing.__init__(self, "full")


class AsksForHalf(ActivationCheckpointing, Notes):
    def __init__(self):
        ActivationCheckpointing.__init__(self, 2)


def policies_by_both(_):
    return fit(Run("GPT2", num_batches=1, callback=AsksForHalf, strategy={"recompute": "full"}))


def test_what_cannot_be_asked_for(worlds):
    with pytest.raises(ValueError, match="recompute='half'; use 'full' for all layers"):
        Hybrid3DStrategy(recompute="half")
    with pytest.raises(ValueError, match="recompute=0; use"):
        ActivationCheckpointing(0)
    with pytest.raises(RankError, match=r"'model.transformer.g.*' is the name of no layer; the nearest are model.tran"):
        worlds.run(1, policies_of, ["model.transformer.g.*"])


def test_another_strategy_is_told():
    trainer = trainer_of(1, "auto", [])
    with pytest.raises(TypeError, match="needs a strategy of lightning_hybrid, and this is SingleDeviceStrategy"):
        ActivationCheckpointing().setup(trainer, None, "fit")
