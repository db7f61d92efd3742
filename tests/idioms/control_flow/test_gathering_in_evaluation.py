"""What ranks gather, send and refuse in an evaluation that cannot be partitioned."""

import warnings

import pytest
import torch

from harness.trainer_runs import assert_same, trainer_of
from lightning_hybrid.errors import UnfitError
from lightning_hybrid.params.reads.steps import StepReads
from lightning_hybrid.run import runner as stage_runner
from lightning_hybrid.step.standins.tensors import is_absent
from models.tiny import Tiny, loader


class BranchesInEvaluation(Tiny):
    """Branches in every step of evaluation."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("v", loss * 2 if loss > 0.1 else loss)

    def predict_step(self, batch, batch_idx):
        out = self(batch["x"])
        while out.abs().max() > 0.01:
            out = out / 2
        self.seen.append(out)
        self.absent = [name for name, parameter in self.named_parameters() if is_absent(parameter)]
        return out


def evaluated(size):
    model, again = BranchesInEvaluation(), BranchesInEvaluation()
    trainer = trainer_of(size, size, limit_val_batches=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        [metrics] = trainer.validate(model, loader(4), verbose=False)
        predictions = trainer.predict(model, loader(4))
    warned = [str(w.message) for w in caught if "unpartitioned on every rank" in str(w.message)]
    again.load_state_dict(model.state_dict())  # full after the run
    return metrics, predictions, model.seen, warned, model.absent


def test_evaluation_without_training(worlds):
    expected, predicted, _, _, absent = evaluated(1)
    assert not absent
    ranks = worlds.run(2, evaluated, 2)
    for metrics, predictions, seen, *_ in ranks:
        assert_same(metrics, expected)
        for tensors in (predictions, seen):
            assert all(torch.equal(one, other) for one, other in zip(tensors, predicted, strict=True))
    (*_, warned, first), (*_, silent, second) = ranks
    assert [text.split()[0] for text in warned] == ["validation_step", "predict_step"] and not silent
    assert all("test_gathering_in_evaluation.py" in text and "branches on a value" in text for text in warned)
    link = "(lightning-hybrid explain-error unpartitioned)"
    assert all(text.endswith(link) and "pipeline_parallel_size" not in text for text in warned)
    names = {name for name, _ in BranchesInEvaluation().named_parameters()}
    assert first and second and set(first) | set(second) == names and not set(first) & set(second)


class CountsSends(BranchesInEvaluation):
    """Counts how often each parameter is sent, and whether it is absent."""

    def on_validation_batch_end(self, *args):
        self.absent = sum(is_absent(p) for p in self.parameters())

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        super().validation_step(batch, batch_idx)


def sent(share):
    stage_runner._FREE_MEMORY_SHARE, before = share, stage_runner._FREE_MEMORY_SHARE
    names = []
    agree = StepReads._agree
    StepReads._agree = lambda self, what, tensors: (
        names.extend(name for name, _ in tensors) or agree(self, what, tensors)
    )
    try:
        model = CountsSends()
        trainer = trainer_of(2, 2, limit_val_batches=1, limit_train_batches=1, num_sanity_val_steps=0)
        trainer.fit(model, loader(4), loader(4))
    finally:
        stage_runner._FREE_MEMORY_SHARE, StepReads._agree = before, agree
    return names, model.absent, float(trainer.callback_metrics["v"]), sum(1 for _ in model.parameters())


@pytest.mark.parametrize(("share", "times"), [(0.25, 1), (0.0, 2)])
def test_parameters_stay_gathered_if_memory_allows(worlds, share, times):
    ranks = worlds.run(2, sent, share)
    assert ranks[0][0] == ranks[1][0] and ranks[0][2] == ranks[1][2]
    for names, absent, _, count in ranks:
        assert len(names) == times * count and 0 < absent < count
    assert sum(absent for _, absent, *_ in ranks) == ranks[0][3], "each parameter is on one rank again"


class ByRank(BranchesInEvaluation):
    """One rank does more than the others."""

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        if self.trainer.strategy.mesh.rank == 1:  # the environment shows user code its replica
            self.log("more", self.loss(batch))


class LoopsByRank(BranchesInEvaluation):
    """One rank reads a parameter once more than the other ranks."""

    def validation_step(self, batch, batch_idx):
        loss = self.layers[0](batch["x"]).sum()
        if loss > 1e6 or self.trainer.strategy.mesh.rank == 1:
            self.layers[1](batch["x"])


class Straight(Tiny):
    """Can be cut, but not as requested."""

    def predict_step(self, batch, batch_idx):
        return self(batch["x"])


def refused(module, options):
    module, evaluates = module(), bool(options)
    try:
        trainer = trainer_of(2, 2, num_sanity_val_steps=1, strategy_options=options)
        if evaluates:
            trainer.predict(module, loader(4))
        else:
            trainer.fit(module, loader(4), loader(4))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("module", "words", "options"),
    [
        (ByRank, ["RanksDisagree", "logged", "on every rank"], {}),
        (LoopsByRank, ["RanksDisagree", "ends the step", "reads 'layers.1.0.weight'", "test_gathering"], {}),
        (Straight, ["UnfitError", "pipeline_cuts names 'nothing'", "nearest"], {"pipeline_cuts": ["nothing"]}),
    ],
)
def test_refused(worlds, module, words, options):
    for message in worlds.run(2, refused, module, options):
        assert all(word in message for word in words), message


def trained_in_too_many_stages():
    with pytest.raises(UnfitError, match=r"makes 16 stages, but the step has only 5 layers.* to 5 or less"):
        trainer_of(2, 2, strategy_options={"stages_per_rank": 8}).fit(Straight(), loader(4))


def test_more_stages_than_layers(worlds):
    worlds.run(2, trained_in_too_many_stages)


def predicted(size, options):
    warnings.simplefilter("ignore")
    trainer = trainer_of(size, size, strategy_options=options)
    return torch.cat(trainer.predict(Straight(), loader(4)))


def test_fewer_layers_than_stages(worlds):
    [expected] = worlds.run(1, predicted, 1, {})
    for found in worlds.run(2, predicted, 2, {"stages_per_rank": 8}):
        torch.testing.assert_close(found, expected)
