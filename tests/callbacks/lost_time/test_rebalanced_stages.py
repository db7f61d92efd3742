"""Stages that change at an epoch or a restart, by measured steps: the numbers are those of one process."""

import dataclasses
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from harness.fits import FitRecorder, Run, fit, reference_of, trainer_of
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import LocalSGD, PipelineTimeline
from lightning_hybrid.callbacks.lost_time.steps import MeasuredSteps
from lightning_hybrid.schedule.measured.lost_time import LOSSES
from lightning_hybrid.schedule.measured.seconds import StageSeconds, load_measured_costs
from models.cases import Samples, make
from models.hand_written import Layers


class SlowLastStage(MeasuredSteps):
    """The last stage takes ten times as long as the others."""

    @property
    def stages(self):
        if self.assignment is None:
            return []
        last = self.assignment.num_stages - 1
        return [StageSeconds(stage, *((1.0, 2.0) if stage == last else (0.1, 0.2))) for stage in range(last + 1)]


class Rebalances(PipelineTimeline):
    """Measures the first step; records the first unit of the last stage in each epoch."""

    def __init__(self, **options):
        super().__init__(step=1, rebalance=True, **options)
        self.recorded = []

    def on_train_start(self, trainer, pl_module):
        super().on_train_start(trainer, pl_module)
        self._steps = SlowLastStage()

    def on_train_batch_end(self, trainer, pl_module, *args):
        super().on_train_batch_end(trainer, pl_module, *args)
        if hasattr(trainer.strategy, "run") and trainer.fit_loop.epoch_loop.batch_idx == 1:
            self.recorded.append(first_unit(trainer))


def first_unit(trainer):
    stages = trainer.strategy.run.plan.first.unit_stages
    return next(unit for unit, stage in stages.items() if stage == max(stages.values()))


LAYOUTS = {
    "pp2": {"pp": 2},
    "pp2, two stages per rank": {"pp": 2, "strategy": {"stages_per_rank": 2}},
    "pp2 x dp2, zero 1": {"pp": 2, "dp": 2, "strategy": {"zero_stage": 1}},
    "pp2 x dp2, zero 3": {"pp": 2, "dp": 2, "strategy": {"zero_stage": 3}},
    "pp2 x tp2": {"pp": 2, "tp": 2},
}


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("Layers", "pp2"),
        *(
            pytest.param(case, layout, marks=pytest.mark.slow)
            for case, layout in (
                *(("Tied", "pp2"), ("BatchNorms", "pp2"), ("GPT2", "pp2 x tp2")),
                ("GPT2", "pp2, two stages per rank"),
                *(("Layers", "pp2 x dp2, zero 1"), ("Tied", "pp2 x dp2, zero 3")),
            )
        ),
    ],
)
def test_stages_change_at_the_next_epoch(worlds, case, layout):
    """The losses and the state are those of the same run without a change, to the bit, and of one process.

    The reference of one process has the batches of the first epoch alone for replicas, and statistics of full batches.
    """
    unchanged = Run(case, num_batches=2, trainer={"max_epochs": 3}, **LAYOUTS[layout])
    run = dataclasses.replace(unchanged, callback=Rebalances)
    ranks = worlds.run(run.world_size, fit_without_step_hooks, run, timeout=300)
    for rank, other in zip(ranks, worlds.run(run.world_size, fit_without_step_hooks, unchanged), strict=True):
        first, second, third = rank.extra
        assert first != second == third
        assert_same_bits(rank.state, other.state)
        assert all(torch.equal(a, b) for a, b in zip(rank.losses, other.losses, strict=True))
    if run.dp == 1 and case != "BatchNorms":
        torch.testing.assert_close(ranks[0].state, reference_of(worlds, unchanged).state, rtol=1e-9, atol=1e-10)


def fit_without_step_hooks(run):
    """An optimizer's hooks that are there when the stages change would read the gradients of all stages."""
    with mock.patch.object(FitRecorder, "on_train_start"):
        return fit(run)


def assert_same_bits(state, expected):
    assert state.keys() == expected.keys()
    different = [name for name, value in state.items() if not torch.equal(value, expected[name])]
    assert not different


class LayersWithAdam(Layers):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fit_of_local_steps(timelines):
    """On a rank: the state after a fit of three epochs of two steps, whose rounds have three."""
    module = make(LayersWithAdam)
    timeline = [make_timeline() for make_timeline in timelines]
    strategy = Hybrid3DStrategy(pipeline_parallel_size=2, num_microbatches=2)
    trainer = trainer_of(4, strategy, [*timeline, LocalSGD(3, "nesterov")], max_epochs=3)
    trainer.fit(module, DataLoader(Samples(module.kind, 16), batch_size=4))
    assert trainer.global_step == 6
    return module.state_dict(), [unit for each in timeline for unit in each.recorded]


def test_stages_change_in_a_round_of_local_steps(worlds):
    """The replicas differ by then; the state is that of the same run without a change, to the bit."""
    changed = worlds.run(4, fit_of_local_steps, [Rebalances], timeout=300)
    unchanged = worlds.run(4, fit_of_local_steps, [], timeout=300)
    for (state, (first, second, third)), (expected, _) in zip(changed, unchanged, strict=True):
        assert first != second == third
        assert_same_bits(state, expected)


def train(callback, max_epochs, resume=None, case="Dropouts", folder=None, samples=Samples, **options):
    module = make(case)
    options = {"pipeline_parallel_size": 2, "num_microbatches": 2, **options}
    checkpoints = {"enable_checkpointing": True, "default_root_dir": folder} if folder is not None else {}
    callbacks = [] if callback is None else [callback]
    trainer = trainer_of(2, Hybrid3DStrategy(**options), callbacks, max_epochs=max_epochs, **checkpoints)
    trainer.fit(module, DataLoader(samples(module.kind, 8), batch_size=4), ckpt_path=resume)
    return module, trainer


@pytest.mark.world(2)
@pytest.mark.parametrize("saves_folder", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["file", "folder"])
def test_stages_change_at_the_restart(saves_folder):
    """The run ends before its next epoch; the one that resumes it begins with the cuts."""
    expected, _ = train(None, 2)
    options = {"save_distributed_checkpoint": saves_folder}
    first = Rebalances()
    _, trainer = train(first, 1, folder="first", **options)
    assert len(first.recorded) == 1 and first.cuts.pending is not None
    trainer.save_checkpoint("epoch.ckpt")
    dist.barrier()
    assert load_measured_costs("first/checkpoints").steps == (1,)
    unused = Rebalances()
    unchanged, _ = train(unused, 2, "epoch.ckpt", pipeline_cuts=["layers.1"], **options)  # the user's own
    assert_same_bits(unchanged.state_dict(), expected.state_dict())
    assert unused.recorded[0] == "layers.1"
    second = Rebalances()
    module, _ = train(second, 2, "epoch.ckpt", **options)
    assert second.recorded[0] == first.cuts.state_dict()["pipeline_cuts"][0] != first.recorded[0]
    assert_same_bits(module.state_dict(), expected.state_dict())


class Late(Samples):
    """The loader waits for a sample of the second batch."""

    def __getitem__(self, index):
        if index == 4:
            threading.Event().wait(1.0)
        return super().__getitem__(index)


@pytest.mark.world(2)
def test_waits_for_batches_are_recorded():
    """A loader that takes longer than its step is the largest loss, on both ranks."""
    with mock.patch.object(MeasuredSteps, "add", autospec=True, side_effect=MeasuredSteps.add) as added:
        train(PipelineTimeline(step=2), 1, samples=Late)
    if dist.get_rank() == 0:
        [[collected, *_]] = [call.args for call in added.call_args_list]
        lost = collected.typical.lost
        assert lost.total.input >= 1.0  # of the rank that had the batch last
        for row in (lost.total, *lost.ranks):
            assert max(LOSSES, key=lambda cause: getattr(row, cause)) == "input"
