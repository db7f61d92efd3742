"""Optimizer states after a fit: files and pickles have them in full, also once a validation has run."""

import pickle

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from harness.checkpoint_runs import states_of
from harness.trainer_runs import assert_same, ignore_warnings, trainer_of
from lightning_hybrid.errors import RanksDisagree
from models.regression import ManualStep, Regression, regression_data


class ByAdam(Regression):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class ManuallyByAdam(ManualStep, ByAdam): ...


class ManuallyByAdafactor(ManualStep):
    def configure_optimizers(self):
        return torch.optim.Adafactor(self.parameters(), lr=0.01)


def fit_and_save(module, size, options, path, resume=None):
    """Saves after `fit` and after `validate`; the optimizer's states as a pickle has them, and the weights."""
    ignore_warnings()
    torch.manual_seed(0)
    model, data = module().double(), regression_data()["val_dataloaders"].dataset
    trainer = trainer_of(size, strategy_options=options, max_epochs=2 if resume else 1)
    replicas = 1 if "pipeline_parallel_size" in options else size
    sampler = DistributedSampler(data, replicas, trainer.global_rank % replicas, shuffle=False)
    loader = DataLoader(data, 8 // replicas, sampler=sampler)
    trainer.fit(model, loader, ckpt_path=resume)
    if resume is None:
        trainer.save_checkpoint(path / "after fit")
        trainer.validate(model, loader, verbose=False)
        trainer.save_checkpoint(path / "after validation")
    pickled = pickle.loads(pickle.dumps(trainer.optimizers[0])).state_dict()["state"]
    return by_name(pickled), {name: value.clone() for name, value in model.state_dict().items()}


def by_name(states):
    return {f"{number} {name}": value for number, entry in states.items() for name, value in entry.items()}


FOLDERS = {"save_distributed_checkpoint": True}


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (ManuallyByAdam, {"zero_stage": 1}),
        (ByAdam, {"zero_stage": 3, **FOLDERS}),
        (ManuallyByAdam, {"pipeline_parallel_size": 2, **FOLDERS}),
        pytest.param(ManuallyByAdafactor, {"zero_stage": 2}, marks=pytest.mark.slow),
        pytest.param(ManuallyByAdam, {"zero_stage": 2, "offload": {"optimizer_states": "cpu"}}, marks=pytest.mark.slow),
        pytest.param(ByAdam, {"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param(ByAdam, {"zero_stage": 1}, marks=pytest.mark.slow),
    ],
)
def test_full_in_files_and_pickles(worlds, tmp_path, module, options):
    plain, saved = tmp_path / "plain", tmp_path / "saved"
    [(pickled, _)] = worlds.run(1, fit_and_save, module, 1, {}, plain)
    expected = by_name(states_of(plain / "after fit"))
    for mine, _ in worlds.run(2, fit_and_save, module, 2, options, saved):
        assert_same(mine, pickled)
    for when in ("after fit", "after validation"):
        assert_same(by_name(states_of(saved / when)), expected)
    [(_, weights)] = worlds.run(1, fit_and_save, module, 1, {}, plain, plain / "after fit")
    for _, mine in worlds.run(2, fit_and_save, module, 2, options, saved, saved / "after validation"):
        assert_same(mine, weights)


def gathers_of_resume(path):
    """The ranks that optimizers ask for full states while a fit goes on from a file."""
    from lightning_hybrid.run.optimizer_states import OptimizerStates

    fit_and_save(ByAdam, 2, {"zero_stage": 2}, path)
    asked, full_state = [], OptimizerStates.full_state

    def counted(states, optimizer):
        asked.append(type(optimizer).__name__)
        return full_state(states, optimizer)

    OptimizerStates.full_state = counted
    try:
        trainer = trainer_of(2, strategy_options={"zero_stage": 2}, max_epochs=2)
        torch.manual_seed(0)
        trainer.fit(ByAdam().double(), regression_data()["train_dataloaders"], ckpt_path=path / "after fit")
    finally:
        OptimizerStates.full_state = full_state
    return asked


def test_a_resume_gathers_no_states(worlds, tmp_path):
    assert worlds.run(2, gathers_of_resume, tmp_path) == [[], []]


def resume_on_one_rank(path):
    fit_and_save(ByAdam, 2, {}, path)
    trainer = trainer_of(2, max_epochs=2)
    data = regression_data()["train_dataloaders"]
    with pytest.raises(RanksDisagree, match=r"ranks \[1\] find no checkpoint, and others go on from .*after fit"):
        trainer.fit(ByAdam().double(), data, ckpt_path=None if trainer.global_rank else path / "after fit")


def test_a_resume_of_some_ranks_is_refused_on_all(worlds, tmp_path):
    worlds.run(2, resume_on_one_rank, tmp_path)
