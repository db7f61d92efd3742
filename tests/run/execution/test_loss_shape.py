"""A loss of several numbers, or none, is refused at the first step as itself, with the line that returns it."""

import pytest
from lightning.pytorch import Trainer

from harness.trainer_runs import ignore_warnings, trainer_of
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.errors import StepError
from models.tiny import Tiny, loader

LAYOUTS = {"stages": (2, 2, {}), "replicas": (2, 1, {}), "shares": (2, 1, {"num_microbatches": 2})}


class ManyLosses(Tiny):
    def training_step(self, batch, batch_idx):
        return (self(batch["x"]) - batch["y"]).square().mean(1)


class NoLoss(Tiny):
    def training_step(self, batch, batch_idx):
        return {"los": self.loss(batch)}


class OwnBackward(ManyLosses):
    def backward(self, loss):
        loss.mean().backward()


def run_step(kind, size, pp, options):
    ignore_warnings()
    trainer = trainer_of(size, pp, strategy_options=options)
    try:
        trainer.fit(kind(), loader(4))
    except StepError as error:
        return str(error)
    except RuntimeError as error:
        return " ".join(error.__notes__)
    return ""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_of_several_numbers_is_refused(worlds, layout):
    size, pp, options = LAYOUTS[layout]
    number, given = (4, "the batch") if layout == "replicas" else (2, "a microbatch")
    line = ManyLosses.training_step.__code__.co_firstlineno + 1
    for text in worlds.run(size, run_step, ManyLosses, size, pp, options):
        assert f"returned a loss of shape [{number}] for {given} ({__file__}:{line}); return one number" in text


@pytest.mark.parametrize("layout", ["stages", "shares"])  # Lightning refuses it under replicas
def test_dict_without_a_loss_is_refused(worlds, layout):
    size, pp, options = LAYOUTS[layout]
    line = NoLoss.training_step.__code__.co_firstlineno + 1
    for text in worlds.run(size, run_step, NoLoss, size, pp, options):
        assert f"returned a dict with keys ['los'] ({__file__}:{line}) and no loss that" in text, text


@pytest.mark.parametrize("kind", [ManyLosses, NoLoss])
@pytest.mark.filterwarnings("error:sharded instead of")
def test_refusal_takes_the_place_of_a_fallback(worlds, kind):
    for options in {}, {"strict_layout": True}:
        assert set(worlds.run(2, error_of_step, kind, options)) == {"LossError"}


def error_of_step(kind, options):
    try:
        trainer_of(2, 2, strategy_options=options).fit(kind(), loader(4))
    except Exception as error:
        return type(error).__name__


def test_loss_of_several_numbers_is_refused_in_one_process():
    options = {"logger": False, "enable_checkpointing": False, "max_epochs": 1}
    trainer = Trainer(accelerator="cpu", devices=1, strategy=Hybrid3DStrategy(), **options)
    with pytest.raises(StepError, match=r"returned a loss of shape .4. for the batch "):
        trainer.fit(ManyLosses(), loader(4))


def test_own_backward_may_reduce_the_loss(worlds):
    assert worlds.run(2, run_step, OwnBackward, 2, 1, {}) == ["", ""]
