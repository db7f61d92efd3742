"""Cuts chosen by measured steps are applied before the first batch of an epoch, where the run allows it."""

from types import SimpleNamespace

from lightning_hybrid.callbacks import GradientCompression, LocalSGD, PipelineTimeline
from lightning_hybrid.run.execution.layout import pending_cuts

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
