"""State after a run over several ranks: a Trainer, handlers and objects as after any run of Lightning's."""

import copy
import io
import pickle
import pickletools
import signal
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.strategies import Strategy

from harness.trainer_runs import ignore_warnings, trainer_of
from models.tiny import Tiny, loader

LAYOUTS = {
    "dp2": (1, {"data_parallel_size": 2}),
    "pp2": (2, {"num_microbatches": 2}),
    "zero3": (1, {"zero_stage": 3}),
    "tp2": (1, {"tensor_parallel_size": 2}),
    "zero3, folders": (1, {"zero_stage": 3, "save_distributed_checkpoint": True}),
}


class Breaks(Tiny):
    error, where = None, "on_train_batch_end"

    def on_fit_start(self):
        if self.where == "on_fit_start":
            raise self.error("before the first batch")

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1 and self.error and self.where == "on_train_batch_end":
            raise self.error("after the second batch")


def state_of(trainer):
    """State that a run might change on a Trainer and in the process."""
    loops = [trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop]
    loops += [trainer.fit_loop.epoch_loop.automatic_optimization, trainer.validate_loop, trainer.test_loop]
    loops += [trainer.fit_loop._data_source]
    connectors = [trainer._signal_connector, trainer._data_connector, trainer._checkpoint_connector]
    return {
        "callbacks": [type(callback).__name__ for callback in trainer.callbacks],
        "members": [{name for name in vars(part) if callable(vars(part)[name])} for part in (*loops, *connectors)],
        "handlers": {n: signal.getsignal(n) for n in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}},
    }


def changed_state(pp, options, error, where="on_train_batch_end"):
    ignore_warnings()
    module, trainer, reports = Breaks(), trainer_of(2, pp, strategy_options=options, max_epochs=1), []
    module.error, module.where = error, where
    before = state_of(trainer)
    with mock.patch.object(Strategy, "on_exception", lambda _, exception: reports.append(str(exception))):
        try:
            trainer.fit(module, loader(4), loader(4))
        except (SystemExit, RuntimeError) as raised:
            reports.append(type(raised).__name__)
    after = state_of(trainer)
    return reports, {name: (before[name], after[name]) for name in before if before[name] != after[name]}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_trainer_is_restored_after_a_run(worlds, layout, error):
    for reports, changed in worlds.run(2, changed_state, *LAYOUTS[layout], error):
        raised = "SystemExit" if error is KeyboardInterrupt else "RuntimeError"
        assert reports == ([] if error is None else ["after the second batch", raised])
        assert not changed, changed


def test_loaders_of_a_recorded_step_end_with_the_run(worlds):
    """Later runs call the loader's hook again, though the loop of this one has read none."""
    for reports, changed in worlds.run(2, changed_state, *LAYOUTS["pp2"], RuntimeError, "on_fit_start"):
        assert reports == ["before the first batch", "RuntimeError"] and not changed, changed


# -- copies -----------------------------------------------------------------------------------------------------------


def classes_in(data):
    """Names of modules of this package that a pickle needs."""
    texts = {text for _, text, _ in pickletools.genops(data) if isinstance(text, str)}
    return sorted(text for text in texts if text.startswith("lightning_hybrid"))


def copied(pp, options):
    ignore_warnings()
    module = Breaks()
    bar = TQDMProgressBar(refresh_rate=0)
    trainer = trainer_of(2, pp, strategy_options=options, max_epochs=1, callbacks=[bar], enable_progress_bar=True)
    trainer.fit(module, loader(4), loader(4))
    torch.save(module, io.BytesIO())
    needed = classes_in(pickle.dumps([module, trainer.optimizers, trainer.train_dataloader]))
    again = pickle.loads(pickle.dumps(trainer))
    for part in (trainer, trainer.strategy, bar, trainer.fit_loop):
        copy.deepcopy(part)
    losses = []
    for each in (trainer, again):
        own = each.lightning_module
        each.fit_loop.max_epochs = 2
        each.fit(own, loader(4), loader(4))
        losses.append(float(each.callback_metrics["loss"]))
    return needed, losses


@pytest.mark.parametrize("layout", LAYOUTS)
def test_objects_can_be_copied_and_used_after_a_run(worlds, layout):
    for needed, losses in worlds.run(2, copied, *LAYOUTS[layout]):
        assert needed == [] and losses[0] == losses[1]


class CopiesStrategy(Callback):
    def on_train_batch_end(self, trainer, *_):
        for strategy in (copy.deepcopy(trainer.strategy), pickle.loads(pickle.dumps(trainer.strategy))):
            assert strategy.options == trainer.strategy.options and strategy._world is None
        self.copied = True


def copied_in_a_run():
    ignore_warnings()
    copies = CopiesStrategy()
    trainer = trainer_of(2, 1, strategy_options={"data_parallel_size": 2}, callbacks=[copies])
    trainer.fit(Breaks(), loader(4))
    return copies.copied


def test_strategy_can_be_copied_during_a_run(worlds):
    assert worlds.run(2, copied_in_a_run) == [True, True]
