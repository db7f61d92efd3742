"""Lightning's search of the batch size over ranks: they stop a trial together, and go on with one size."""

import pytest
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.tuner import Tuner

from harness.feature_runs import LAYOUTS, SHARED_OUT, compare, on_rank
from models.planted_out_of_memory import PLANT, Planted

EVERYWHERE = ("dp2", "pp2", "tp2", "dp2 x zero3")
OPTIONS = {"dp2 x zero3": {"zero_stage": 3}, "tp2": {"tensor_parallel_size": 2}}
SEARCH = {"init_val": 4, "steps_per_trial": 2, "max_val": 128}
MICROBATCHES = {"pp2": 4}


def fit(run, module, microbatches, search=lambda trainer: None, **options):
    """Three steps, after a search; the numbers, and the batch size."""
    trainer = run.trainer(microbatches=microbatches, max_steps=3, **options)
    search(trainer)
    trainer.fit(module)
    return run.numbers(trainer, module)


def search(run, where, rows, microbatches, with_tuner, options):
    """Search where memory suffices for so many rows, and fit; returns the size, and failures of this rank."""
    module, arguments = Planted(num_samples=256), {**SEARCH, **options}
    PLANT.__init__(rows, where, run.size)
    try:
        if with_tuner:
            after = fit(run, module, microbatches, lambda t: Tuner(t).scale_batch_size(module, **arguments))
        else:
            after = fit(run, module, microbatches, callbacks=[BatchSizeFinder(**arguments)])
        failures = PLANT.num_failures
    finally:
        PLANT.__init__()
    fresh = Planted(num_samples=256)
    fresh.batch_size = module.batch_size
    compare(after, fit(run, fresh, microbatches))  # the search has left nothing
    return module.batch_size, failures


def search_on_rank(size, pp, folder, strategy, *args):
    return on_rank(lambda run: search(run, *args), size, pp, folder, strategy)


def searched(worlds, tmp_path, layout, where, rows, *, with_tuner=False, **options):
    """The size that all ranks have found."""
    size, pp = {**LAYOUTS, **SHARED_OUT}[layout]
    arguments = OPTIONS.get(layout, {}), where, rows, MICROBATCHES.get(layout, 1), with_tuner, options
    sizes, failures = zip(*worlds.run(size, search_on_rank, size, pp, str(tmp_path), *arguments), strict=True)
    assert len(set(sizes)) == 1, sizes
    assert sum(failures), "memory has sufficed"
    return sizes[0]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("layout", EVERYWHERE)
def test_all_ranks_find_the_size_that_fits_on_each(worlds, tmp_path, layout, where):
    assert searched(worlds, tmp_path, layout, where, 9) == 8 * MICROBATCHES.get(layout, 1)


@pytest.mark.parametrize("layout", EVERYWHERE)
def test_binary_search_with_the_tuner(worlds, tmp_path, layout):
    size = searched(worlds, tmp_path, layout, "forward", 11, with_tuner=True, mode="binsearch", margin=0.0)
    assert size == 11 * MICROBATCHES.get(layout, 1)
