"""`microbatch="auto"`: a step that does not fit runs again in more microbatches, to the numbers of one process."""

import pytest
import torch

from harness.feature_runs import LAYOUTS, SHARED_OUT, compare, on_rank
from lightning_hybrid.errors import RankOutOfMemory
from models.planted_out_of_memory import PLANT, Planted

EVERYWHERE = ("dp2", "pp2", "tp2", "dp2 x zero3")
OPTIONS = {"dp2 x zero3": {"zero_stage": 3}, "tp2": {"tensor_parallel_size": 2}}


def one_process(run):
    module = Planted()
    trainer = run.trainer(max_epochs=2)
    trainer.fit(module, run.data())
    return run.numbers(trainer, module)


def fit_with_room_for(run, rows, where, kind):
    """Fit where memory suffices for so many rows; the numbers, and how often this rank ran out of memory."""
    module = Planted()
    trainer = run.trainer(microbatches="auto", strategy_options={"microbatch": "auto"}, max_epochs=2)
    PLANT.__init__(rows, where, run.size, kind)
    try:
        trainer.fit(module, run.data())
        return run.numbers(trainer, module), PLANT.num_failures
    finally:
        PLANT.__init__()


def rank_with_room_for(size, pp, folder, options, *args):
    return on_rank(lambda run: fit_with_room_for(run, *args), size, pp, folder, options)


@pytest.fixture(scope="module")
def expected(worlds, tmp_path_factory):
    [numbers] = worlds.run(1, on_rank, one_process, 1, 1, str(tmp_path_factory.mktemp("one")))
    return numbers


def survive(worlds, tmp_path, layout, expected, rows, where, kind=torch.OutOfMemoryError):
    """A fit has the numbers of one process on all ranks; returns how often each rank ran out of memory."""
    size, pp = {**LAYOUTS, **SHARED_OUT}[layout]
    options = OPTIONS.get(layout, {})
    found = worlds.run(size, rank_with_room_for, size, pp, str(tmp_path), options, rows, where, kind)
    for numbers, _ in found:
        compare(numbers, expected)
    return [failures for _, failures in found]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("layout", EVERYWHERE)
def test_a_step_that_does_not_fit_runs_again(worlds, tmp_path, expected, layout, where):
    failures = survive(worlds, tmp_path, layout, expected, 1, where)
    assert sum(failures) >= {"dp2": 2, "pp2": 1, "tp2": 3, "dp2 x zero3": 2}[layout], failures


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    "size, pp, options",
    [
        (4, 2, {}),
        (4, 1, {"tensor_parallel_size": 2, "zero_stage": 3}),
        (4, 2, {"tensor_parallel_size": 2}),
        (4, 2, {"zero_stage": 1}),
        (2, 1, {"zero_stage": 2}),
        (2, 2, {"schedule": "zero_bubble"}),
        (2, 2, {"stages_per_rank": 2, "schedule": "interleaved_1f1b"}),
        (2, 1, {"zero_stage": 3, "recompute": "full"}),
        (2, 1, {"context_parallel_size": 2}),
    ],
    ids=str,
)
def test_combined_layouts(worlds, tmp_path, expected, size, pp, options, where):
    found = worlds.run(
        size, rank_with_room_for, size, pp, str(tmp_path), options, 1, where, torch.OutOfMemoryError, timeout=120
    )
    for numbers, _ in found:
        compare(numbers, expected)
    assert sum(failures for _, failures in found)


class Branching(Planted):
    """Its step cannot be partitioned into stages."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return 2 * loss if loss > 0.5 else loss


def fit_shards(run):
    PLANT.__init__(1, "forward", run.size)
    try:
        run.trainer(microbatches="auto", strategy_options={"microbatch": "auto"}).fit(Branching(), run.data())
    except RankOutOfMemory as error:
        return str(error)
    finally:
        PLANT.__init__()


@pytest.mark.filterwarnings("ignore:sharded instead of pipelined")
def test_unsplit_first_batch_of_shards_is_named(worlds, tmp_path):
    """More microbatches cannot help there."""
    for error in worlds.run(2, on_rank, fit_shards, 2, 2, str(tmp_path)):
        assert "run their first batch unsplit" in error and "microbatch is one sample" not in error
