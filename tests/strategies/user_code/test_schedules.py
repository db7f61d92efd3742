"""Schedules that end before the run: told of, or refused, before the first batch; torch's own error says what to do."""

import pytest
import torch
from lightning.pytorch import Callback
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from harness.trainer_runs import trainer_of
from models.tiny import Tiny, loader

STEPS = 4  # of an epoch of one replica


class OneCycle(Tiny):
    """Its schedule ends after two epochs, or has the length of the run."""

    def __init__(self, total_steps=None, frequency=1):
        super().__init__()
        self.total_steps, self.frequency, self.trained = total_steps, frequency, 0

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.trained += 1

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = OneCycleLR(optimizer, 0.1, self.total_steps or self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": self.frequency}]


class NewLength(OneCycle):
    """As docs/howto/resume_other_layout.md says."""

    def on_load_checkpoint(self, checkpoint):
        for state in checkpoint["lr_schedulers"]:
            for length in ("total_steps", "_schedule_phases", "T_max"):
                state.pop(length, None)


class Cosine(OneCycle):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = CosineAnnealingLR(optimizer, self.total_steps or self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class CosineOfNewLength(Cosine):
    on_load_checkpoint = NewLength.on_load_checkpoint


class StopsItself(OneCycle):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.trainer.should_stop = self.trainer.global_step >= 8


class Stops(Callback):
    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step >= 8


def fit(module, batch_size=4, path=None, **options):
    trainer = trainer_of(strategy_options={"num_microbatches": 2}, **options)
    trainer.fit(module, loader(batch_size), ckpt_path=path)
    return trainer


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A checkpoint of the first epoch of two."""
    path = str(tmp_path_factory.mktemp("half") / "half.ckpt")
    fit(OneCycle(2 * STEPS)).save_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def half_cosine(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("half") / "cosine.ckpt")
    fit(Cosine(2 * STEPS)).save_checkpoint(path)
    return path


@pytest.mark.parametrize(
    "options, coming, end",
    [
        ({"max_epochs": 5}, 16, "max_steps=8 or max_epochs=2 "),
        ({"max_epochs": 2, "batch_size": 2}, 8, "max_steps=8 to"),
        ({"max_epochs": 5, "accumulate_grad_batches": 2, "batch_size": 1}, 32, "max_steps=8 to"),
        ({"max_epochs": 5, "max_steps": 9}, 5, "max_steps=8 or max_epochs=2 "),
    ],
)
def test_resumed_run_that_outlasts_its_schedule_is_refused_before_it_trains(half, options, coming, end):
    module = OneCycle()
    with pytest.raises(
        ValueError, match=f"OneCycleLR has 4 of its 8 steps left, and this run takes {coming} more"
    ) as e:
        fit(module, path=half, **options)
    assert "raise at its step 9" in str(e.value) and f"set {end}" in str(e.value) and module.trained == 0


def test_run_as_long_as_its_schedule_trains(half):
    for options in ({"max_epochs": 2}, {"max_epochs": 9, "max_steps": 8}):
        assert fit(module := OneCycle(), path=half, **options).global_step == 8 and module.trained == 4


def test_resumed_run_that_ends_before_its_schedule_is_warned(half):
    with pytest.warns(UserWarning, match="4 of its 8 steps left, .* takes 2 more: it ends before its schedule"):
        assert fit(OneCycle(), path=half, batch_size=8, max_epochs=2).global_step == 6


@pytest.mark.parametrize("module, callback", [(StopsItself, None), (OneCycle, Stops())], ids=["module", "callback"])
def test_run_that_may_stop_before_is_warned(half, module, callback):
    with pytest.warns(UserWarning, match="unless the run ends before, it raises at its step 9; set max_steps=8"):
        assert fit(module(), path=half, max_epochs=9, callbacks=callback).global_step == 8


def test_torch_error_says_what_to_do():
    """Also in a run that is not resumed, where the schedule is stepped by the user's own hook."""

    class StepsTwice(OneCycle):
        def lr_scheduler_step(self, scheduler, metric):
            scheduler.step()
            scheduler.step()

    with pytest.raises(ValueError, match="Tried to step 5 times") as error:
        fit(StepsTwice())
    [note] = [each for each in error.value.__notes__ if "explain-error schedule-ended" in each]
    assert "estimated_stepping_batches" in note


def last_rate(trainer):
    return trainer.lr_scheduler_configs[0].scheduler.get_last_lr()[0]


def test_remedy_of_the_docs_gives_one_cycle_the_length_of_the_run(half):
    trainer = fit(NewLength(), path=half, max_epochs=4)
    assert trainer.global_step == 16 and last_rate(trainer) == last_rate(fit(OneCycle(), max_epochs=4))


def test_remedy_of_the_docs_lets_cosine_annealing_end_with_the_run(half_cosine):
    assert last_rate(fit(CosineOfNewLength(), path=half_cosine, max_epochs=3)) == pytest.approx(0, abs=1e-12)
    assert last_rate(fit(Cosine(), path=half_cosine, max_epochs=3)) > 0.01
