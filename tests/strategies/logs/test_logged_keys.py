"""Keys that only some ranks log: refused within a replica, allowed between replicas."""

import pytest

from harness.layouts import under
from harness.trainer_runs import fit_until_error
from harness.verification import LAYOUTS, check
from lightning_hybrid.verify import Layout
from models.regression import EncoderDecoder, regression_data


class LogsOnFirstRank(EncoderDecoder):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.trainer.is_global_zero:
            self.log("first_rank_loss", loss, rank_zero_only=True)
        return loss


class LogsOtherKeysOnOtherRanks(EncoderDecoder):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log(f"loss_of_rank_{self.global_rank}", loss)
        return loss


class ValidatesOnFirstRank(EncoderDecoder):
    def validation_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.trainer.is_global_zero:
            self.log("first_rank_val", loss)


def with_prediction():
    data = regression_data()
    return {**data, "predict_dataloaders": data["val_dataloaders"]}


TENSOR_RANKS = Layout("tp2", devices=2, strategy={"tensor_parallel_size": 2})
ONE_REPLICA = under([x for x in LAYOUTS if x.replicas == 1])


@ONE_REPLICA
def test_one_replica_appears_as_one_rank(worlds, layout):
    report = check(worlds, LogsOtherKeysOnOtherRanks, layout)
    assert report.outcome == "same", str(report)


@ONE_REPLICA
def test_logging_on_rank_0_only_is_refused(worlds, layout):
    report = check(worlds, LogsOnFirstRank, layout)
    assert report.outcome == "refused" and "log the same keys on every rank" in report.message, str(report)


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("module", [LogsOnFirstRank, ValidatesOnFirstRank], ids=lambda module: module.__name__)
def test_logging_on_tensor_rank_0_only_is_refused(worlds, module, num_microbatches):
    report = check(worlds, module, TENSOR_RANKS, num_microbatches=num_microbatches)
    # By the time of the validation the model has trained, which is no refusal any more.
    assert report.outcome == ("refused" if module is LogsOnFirstRank else "failed"), str(report)
    assert "the 2 tensor ranks of one replica log different keys" in report.message, str(report)


def test_tensor_ranks_appear_as_one_rank(worlds):
    report = check(worlds, LogsOtherKeysOnOtherRanks, TENSOR_RANKS, num_microbatches=1)
    assert report.outcome == "same", str(report)


def test_rank_condition_within_a_replica_is_refused(worlds):
    for _, message, moved in worlds.run(4, fit_until_error, LogsOnFirstRank, 2):
        # A rank whose replica agrees may learn of it by the loss of its peers.
        reason = message.lower()
        assert "log the same keys on every rank" in reason or "connection closed" in reason, message
        assert not moved


@pytest.mark.parametrize(
    ("module", "pp"),
    [(LogsOnFirstRank, 1), (LogsOtherKeysOnOtherRanks, 1), (LogsOtherKeysOnOtherRanks, 2)],
)
def test_replicas_may_log_different_keys(worlds, module, pp):
    for kind, message, _ in worlds.run(2 * pp, fit_until_error, module, pp):
        assert (kind, message) == ("", "nothing was refused")


class OverridesLog(EncoderDecoder):
    """Adds a prefix, and ignores in prediction values that Lightning refuses."""

    def log(self, name, value, **options):
        if not self.trainer.predicting:
            super().log(f"mine/{name}", value, **options)

    def predict_step(self, batch, batch_idx):
        self.log("no_number", None)
        self.log("words", "as they are")
        return self(batch[0])


@under([LAYOUTS[0], TENSOR_RANKS])
def test_overridden_log_method_is_called_first(worlds, layout):
    report = check(worlds, OverridesLog, layout, make_data=with_prediction)
    assert report.outcome == "same", str(report)


class LogsNothing(EncoderDecoder):
    def training_step(self, batch, batch_idx):
        self.log("nothing", None)
        return super().training_step(batch, batch_idx)


def test_non_numbers_are_refused_as_by_lightning(worlds):
    report = check(worlds, LogsNothing, LAYOUTS[0])
    assert "`self.log(nothing, None)` was called, but `NoneType` values cannot be logged" in report.message, str(report)
