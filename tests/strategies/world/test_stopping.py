"""`trainer.should_stop`, set on all ranks or on some: all stop together, where one process does if all set it there."""

import time

import pytest
from lightning.pytorch import Callback

from harness.layouts import each, under_sizes
from harness.trainer_runs import ignore_warnings, lines_of_lightning, trainer_of
from models.tiny import Tiny, loader

BATCHES = 4  # of an epoch


class Stops(Callback):
    """Sets the flag in one hook, on each rank from another step on."""

    def __init__(self, hook, steps, delay=0.0):
        self.hook, self.steps, self.delay = hook, steps, delay

    def count_hook(self, hook, trainer):
        rank = getattr(getattr(trainer.strategy, "mesh", None), "rank", 0)
        if hook == "on_train_batch_end":
            time.sleep(self.delay * rank)
        if hook == self.hook and trainer.global_step >= self.steps.get(rank, self.steps.get("all", 1000)):
            trainer.should_stop = True

    def on_fit_start(self, trainer, *_):
        self.count_hook("on_fit_start", trainer)

    def on_train_start(self, trainer, *_):
        self.count_hook("on_train_start", trainer)

    def on_train_epoch_start(self, trainer, *_):
        self.count_hook("on_train_epoch_start", trainer)

    def on_train_batch_start(self, trainer, *_):
        self.count_hook("on_train_batch_start", trainer)

    def on_train_batch_end(self, trainer, *_):
        self.count_hook("on_train_batch_end", trainer)

    def on_validation_epoch_end(self, trainer, *_):
        self.count_hook("on_validation_epoch_end", trainer)

    def on_validation_end(self, trainer, *_):
        self.count_hook("on_validation_end", trainer)

    def on_train_epoch_end(self, trainer, *_):
        self.count_hook("on_train_epoch_end", trainer)


class Validates(Tiny):
    """Logs in training and validation."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))


def run_stopping(size, pp, hook, steps, options, delay=0.0, model=Validates):
    ignore_warnings()
    options = {"max_epochs": 5, "num_sanity_val_steps": 0, "limit_train_batches": BATCHES, **options}
    trainer = trainer_of(size, pp, callbacks=[Stops(hook, steps, delay)], **options)
    with lines_of_lightning() as lines:
        trainer.fit(model(), loader(2, 64), loader(2, 8))
    where = trainer.global_step, trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx
    return where, trainer.should_stop, [line for line in lines if "should_stop was set on rank" in line]


HOOKS = {
    "on_fit_start": 0,
    "on_train_start": 0,
    "on_train_epoch_start": 4,
    "on_train_batch_start": 5,
    "on_train_batch_end": 6,
    "on_validation_epoch_end": 6,
    "on_validation_end": 6,
    "on_train_epoch_end": 4,
}
SIZES = under_sizes({"dp2": (2, 1), "pp2": (2, 2), "dp2xpp2": (4, 2)})


# Lightning reads the flag at the same place after both.
EQUAL = {"on_train_start": "on_fit_start", "on_validation_epoch_end": "on_validation_end"}


@SIZES
@each("hook", list(HOOKS), covered_by=EQUAL)
def test_should_stop_on_all_ranks_stops_as_one_process(worlds, size, pp, hook):
    options = {"val_check_interval": 2}
    [expected] = worlds.run(1, run_stopping, 1, 1, hook, {"all": HOOKS[hook]}, options, timeout=60)
    results = worlds.run(size, run_stopping, size, pp, hook, {"all": HOOKS[hook]}, options, 0.02, timeout=60)
    assert all(result == expected for result in results), (results, expected)


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_validation_end", "on_train_epoch_end"])
@pytest.mark.parametrize("rank", [0, 1])
def test_should_stop_on_one_rank_at_a_collective_hook(worlds, hook, rank):
    options = {"val_check_interval": 2}
    [expected] = worlds.run(1, run_stopping, 1, 1, hook, {"all": HOOKS[hook]}, options, timeout=60)
    results = worlds.run(2, run_stopping, 2, 2, hook, {rank: HOOKS[hook]}, options, timeout=60)
    assert all(result == expected for result in results), (results, expected)


ALONE = {
    "first rank": {0: 6},
    "last rank": {1: 6},
    "one earlier": {0: 6, 1: 7},
    "one later": {0: 7, 1: 6},
    "two apart": {0: 5, 1: 7},
}


@SIZES
@each("name", list(ALONE), covered_by={"last rank": "first rank", "two apart": "one later"})
def test_should_stop_on_some_ranks_stops_all_soon(worlds, size, pp, name):
    steps = ALONE[name]
    results = worlds.run(size, run_stopping, size, pp, "on_train_batch_end", steps, {}, 0.02, timeout=60)
    assert all(result[:2] == results[0][:2] for result in results), results
    (step, _, _), flag, messages = results[0]
    assert flag and min(steps.values()) <= step <= min(steps.values()) + 2
    assert len(messages) == 1 and "not on all ranks after the same batch" in messages[0]


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_batch_start"])
def test_should_stop_on_one_rank_at_batch_or_epoch_start(worlds, hook):
    first, second = worlds.run(2, run_stopping, 2, 2, hook, {1: HOOKS[hook]}, {}, timeout=60)
    assert first[:2] == second[:2] and first[1]
    assert HOOKS[hook] < first[0][0] <= HOOKS[hook] + 2


@pytest.mark.parametrize("rank", [0, 1])
def test_accumulating_replicas_stop_together(worlds, rank):
    options = {"accumulate_grad_batches": 4, "limit_train_batches": 16}
    arguments = (2, 1, "on_train_batch_end", {rank: 1}, options, 0.02, Tiny)
    first, second = worlds.run(2, run_stopping, *arguments, timeout=60)
    assert first[:2] == second[:2] and first[1]
    assert 4 <= first[0][2] + 1 <= 8


@pytest.mark.parametrize("steps", [{"all": 2}, {1: 2}, {0: 2, 1: 3}], ids=["all", "one", "one later"])
@pytest.mark.parametrize("least", [{"min_steps": 10}, {"min_epochs": 2}], ids=["steps", "epochs"])
def test_should_stop_waits_for_the_minimum_steps(worlds, least, steps):
    [expected] = worlds.run(1, run_stopping, 1, 1, "on_train_batch_end", {"all": 2}, least, timeout=60)
    for where, flag, _ in worlds.run(2, run_stopping, 2, 2, "on_train_batch_end", steps, least, timeout=60):
        assert (where, flag) == expected[:2]


def test_should_stop_on_one_rank_after_the_last_batch_ends_with_the_epoch(worlds):
    steps = {1: BATCHES}
    for where, flag, _ in worlds.run(2, run_stopping, 2, 2, "on_train_batch_end", steps, {}, timeout=60):
        assert (where[0], flag) == (BATCHES, True)


class TakesBack(Validates):
    """Sets the flag in the first epoch on all ranks, resets it as that ends, and sets it again on one."""

    def on_train_batch_end(self, *_):
        if self.trainer.global_step == 2 or (self.trainer.global_step >= 6 and self.trainer.strategy.mesh.rank):
            self.trainer.should_stop = True

    def on_train_epoch_end(self):
        self.trainer.should_stop = False if self.trainer.current_epoch == 0 else self.trainer.should_stop


def test_should_stop_can_be_reset_and_set_again(worlds):
    options = {"min_steps": 5}
    first, second = worlds.run(2, run_stopping, 2, 2, "", {}, options, 0.0, TakesBack, timeout=60)
    assert first[:2] == second[:2] and first[1]
    assert first[0][0] in (6, 7)
