"""A run that is resumed with other replicas hears of its epochs and schedules before it trains."""

from lightning_hybrid.run.resumed_epochs import describe_epochs

PROGRESS = {"fit_loop": {"epoch_loop.batch_progress": {"is_last_batch": True, "current": {"ready": 5}}}}


def test_both_numbers_of_steps_and_the_schedule_are_named():
    text, is_misfit = describe_epochs({"loops": PROGRESS}, 2, 4)
    assert not is_misfit and "from 2 to 4" in text and "5 batches before, about 3 now" in text, text
    assert text.endswith("times 1/2"), text
    schedule = {"total_steps": 8, "last_epoch": 4}
    text, is_misfit = describe_epochs({"loops": PROGRESS, "lr_schedulers": [schedule]}, 2, 1)
    assert is_misfit and "keeps total_steps=8 of the saved run, of which it has done 4" in text and "times 2" in text


def test_checkpoint_in_the_middle_of_an_epoch_has_no_number():
    progress = {"fit_loop": {"epoch_loop.batch_progress": {"is_last_batch": False, "current": {"ready": 2}}}}
    assert "batches" not in describe_epochs({"loops": progress}, 2, 4)[0].partition(";")[0]
