"""A run that is resumed with other replicas hears of its epochs and schedules before it trains."""

import math

import pytest

from lightning_hybrid.run.resumed_epochs import SavedEpochs

PROGRESS = {"fit_loop": {"epoch_loop.batch_progress": {"is_last_batch": True, "current": {"ready": 5}}}}
CHECKPOINT = {"loops": PROGRESS, "lr_schedulers": [{"total_steps": 8, "last_epoch": 4}]}


def test_both_numbers_of_batches_and_the_schedule_are_named():
    saved = SavedEpochs.of(CHECKPOINT, 2)
    text = saved.changes_to(1, 10)
    assert "from 2 to 1; an epoch has 10 batches instead of 5; " in text, text
    assert "keeps total_steps=8 of the saved run, of which it has done 4" in text and text.endswith("times 2"), text
    assert "an epoch has 3 batches instead of 5" in saved.changes_to(4, 3)


@pytest.mark.parametrize(("replicas", "batches"), [(2, 5), (2, 9), (4, 5)])
def test_nothing_is_said_of_as_many_replicas_or_batches(replicas, batches):
    assert SavedEpochs.of(CHECKPOINT, 2).changes_to(replicas, batches) == ""


def test_unknown_numbers_of_batches_are_estimated():
    saved = SavedEpochs.of({"loops": PROGRESS}, 2)
    assert "an epoch had 5 batches; with the same batch_size it has about 3 now" in saved.changes_to(4, math.inf)
    progress = {"fit_loop": {"epoch_loop.batch_progress": {"is_last_batch": False, "current": {"ready": 2}}}}
    saved = SavedEpochs.of({"loops": progress}, 2)
    assert "an epoch has 4 batches; with the same batch_size it had about 8" in saved.changes_to(4, 4)
    assert "with the same batch_size an epoch has another number" in saved.changes_to(4, math.inf)


def test_no_resumed_run_says_nothing():
    assert SavedEpochs().changes_to(4, 3) == ""
