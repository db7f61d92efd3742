"""Searches of the batch size whose trials validate: memory does not suffice for a batch of validation."""

import pytest
from lightning.pytorch.callbacks import BatchSizeFinder

from harness.feature_runs import LAYOUTS, SHARED_OUT, compare, on_rank, refusal
from models.planted_out_of_memory import PLANT, Validates

OPTIONS = {"dp2 x zero3": {"zero_stage": 3}, "tp2": {"tensor_parallel_size": 2}}


def fit(run, **options):
    module = Validates(num_samples=128)
    module.batch_size = options.pop("batch_size", 4)
    trainer = run.trainer(microbatches=1, max_steps=2, val_check_interval=1, **options)
    trainer.fit(module)
    assert module.training
    return module.batch_size, run.numbers(trainer, module)


def search(run):
    PLANT.__init__(9, "evaluation", run.size)
    try:
        size, numbers = fit(run, callbacks=[BatchSizeFinder(init_val=4, max_val=64, steps_per_trial=2)])
        failures = PLANT.num_failures
    finally:
        PLANT.__init__()
    compare(numbers, fit(run, batch_size=size)[1])
    return size, failures


@pytest.mark.parametrize("layout", ["dp2", "pp2", "tp2", "dp2 x zero3"])
def test_trials_that_validate(worlds, tmp_path, layout):
    size, pp = {**LAYOUTS, **SHARED_OUT}[layout]
    found = worlds.run(size, on_rank, search, size, pp, str(tmp_path), OPTIONS.get(layout, {}))
    assert [size for size, _ in found] == [8, 8]
    assert sum(failures for _, failures in found)


def evaluate(run):
    run.trainer(callbacks=[BatchSizeFinder()]).validate(Validates())


def test_evaluation_alone_is_refused(worlds, tmp_path):
    for message in refusal(worlds, tmp_path, evaluate, "pp2"):
        assert message.startswith("ValueError: BatchSizeFinder in trainer.validate"), message
