"""Cuts chosen by measured steps are applied before the first batch of an epoch, where the run allows it."""

from types import SimpleNamespace

import pytest
from torch import nn

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import GradientCompression, LocalSGD, PipelineTimeline
from lightning_hybrid.callbacks.lost_time.cuts import _digest
from lightning_hybrid.run.execution.layout import pending_cuts, with_cuts_of_checkpoint, with_pending_cuts

CUTS = {"pipeline_cuts": ["layers.3"]}


def trainer_with(*callbacks, batch_idx=0, rebalance=True):
    timeline = PipelineTimeline(rebalance=rebalance)
    timeline.cuts._proposed = CUTS
    loops = SimpleNamespace(epoch_loop=SimpleNamespace(batch_idx=batch_idx))
    return SimpleNamespace(callbacks=[timeline, *callbacks], fit_loop=loops)


def test_cuts_are_applied_before_the_first_batch_of_an_epoch():
    assert pending_cuts(trainer_with()) == ["layers.3"]
    assert pending_cuts(trainer_with(batch_idx=1)) is None
    assert pending_cuts(trainer_with(rebalance=False)) is None


def test_error_feedback_stays_until_a_restart():
    assert pending_cuts(trainer_with(GradientCompression("int8"))) is None
    assert pending_cuts(trainer_with(LocalSGD(3))) == ["layers.3"]


def test_keys_of_states():
    """One callback of a Trainer may rebalance; others have no state that could clash."""
    plain, other, rebalances = PipelineTimeline(), PipelineTimeline(), PipelineTimeline(rebalance=True)
    assert len({plain.state_key, other.state_key, rebalances.state_key}) == 3
    assert rebalances.state_key == PipelineTimeline("other.svg", rebalance=True).state_key
    assert plain.state_dict() == {}


@pytest.mark.parametrize(
    ("widths", "chosen", "used"),
    [
        ("auto", [3, 1], [3, 1]),  # those for which the cuts were chosen
        ([3, 1], [3, 1], [3, 1]),
        ([2, 2], None, [2, 2]),
        ("auto", None, "auto"),  # of four stages
        ("auto", [2, 1], "auto"),  # of another number of ranks
        (None, [3, 1], None),
    ],
)
def test_widths_of_a_resumed_run_are_those_of_its_cuts(widths, chosen, used):
    trainer = trainer_with()
    trainer.state, trainer.lightning_module = SimpleNamespace(fn="fit"), nn.Linear(1, 1)
    saved = {**CUTS, "replaces": None, "num_stages": len(chosen or [1, 1]), "stage_widths": chosen}
    trainer.callbacks[0].cuts.load_state_dict({**saved, "parameters": _digest(trainer.lightning_module)})
    options = Hybrid3DStrategy(pipeline_parallel_size=4, stage_widths=widths).options
    found = with_cuts_of_checkpoint(trainer, options, SimpleNamespace(pipeline_parallel_size=4))
    assert found.stage_widths == used
    assert found.pipeline_cuts == (None if used in ("auto", None) else ["layers.3"])


def test_widths_stay_where_cuts_change():
    trainer = trainer_with()
    trainer.callbacks[0].cuts._proposed = {**CUTS, "stage_widths": [3, 1]}
    options = Hybrid3DStrategy(pipeline_parallel_size=4, stage_widths="auto").options
    found = with_pending_cuts(SimpleNamespace(trainer=trainer, options=options))
    assert (found.pipeline_cuts, found.stage_widths) == (["layers.3"], [3, 1])
