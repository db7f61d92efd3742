"""Lightning's checkpoint features with checkpoint folders that are written asynchronously during training."""

import os
import threading
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import nn

from harness.feature_runs import Run, compare, on_rank
from lightning_hybrid.checkpoint import write as folder_writer
from lightning_hybrid.checkpoint.read import SavedFolder
from lightning_hybrid.errors import CheckpointError
from models.transfer_learning import Net

BESIDE = {"save_distributed_checkpoint": True, "async_checkpoint": True}


def options(run, tp=1, **more):
    return {} if run.plain else {"strategy_options": {**BESIDE, "tensor_parallel_size": tp, **more}}


def fit(run, module, *callbacks, max_epochs=4, resume=None, tp=1, **more):
    trainer = run.trainer(callbacks=callbacks, max_epochs=max_epochs, **options(run, tp), **more)
    trainer.fit(module, run.data(), run.val_data(), ckpt_path=resume)
    return trainer


def fit_with_checkpoints(run, **more):
    return ModelCheckpoint(f"{run.folder}/kept", filename="{step}", every_n_epochs=1, **more)


def best_and_last(run):
    """The best one and the last one of two epochs, and on from the last one; as in a run without a break."""
    module = Net()
    uninterrupted = run.numbers(fit(run, module), module)
    callback = fit_with_checkpoints(run, monitor="step", mode="max", save_top_k=1, save_last=True)
    fit(run, Net(), callback, max_epochs=2, enable_checkpointing=True)
    kept = sorted(os.listdir(callback.dirpath))
    module = Net()
    resumed = fit_with_checkpoints(run, monitor="step", mode="max", save_top_k=1, save_last=True)
    trainer = fit(run, module, resumed, resume="last", enable_checkpointing=True)
    return uninterrupted, kept, run.numbers(trainer, module), Path(resumed.best_model_path).name


@pytest.mark.extended  # by default in test_distributed_checkpoints.py, of other files
@pytest.mark.parametrize("size", [pytest.param(2, id="pp2"), pytest.param(4, id="dp2 x pp2", marks=pytest.mark.slow)])
def test_best_and_last_resume_bitwise(worlds, tmp_path, size):
    for uninterrupted, kept, resumed, best in worlds.run(size, on_rank, best_and_last, size, 2, str(tmp_path)):
        assert (kept, best) == (["last.ckpt", "step=8.ckpt"], "step=16.ckpt")
        names = [name for name in uninterrupted if name.startswith(("parameter", "metric"))]
        compare({n: resumed[n] for n in names}, {n: uninterrupted[n] for n in names}, rtol=0, atol=0)
    assert sorted(os.listdir(tmp_path / "kept")) == ["last.ckpt", "step=16.ckpt"]
    manifest = SavedFolder(tmp_path / "kept" / "last.ckpt").manifest
    assert manifest["step"] == 16 and manifest["layout"]["pp"] == 2


class Saves(Callback):
    def __init__(self, path, step):
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def averaged(run, save, tp=1):
    """With an average of the weights, saved or resumed in the middle of an epoch."""
    path, average = f"{run.folder}/half.ckpt", EMAWeightAveraging(decay=0.7, device=None)
    module = Net()
    if save:
        fit(run, module, average, Saves(path, 6), max_epochs=2, tp=tp)
        return None
    trainer = fit(run, module, average, max_epochs=3, resume=path, tp=tp)
    found = trainer.validate(module, run.val_data(), verbose=False)[0]
    return {**run.numbers(trainer, module), **found}


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        pytest.param((4, 2, 2, 0), (2, 1, 1, 0), id="pp2 x tp2 by dp2"),
        pytest.param((4, 2, 1, 0), (2, 1, 1, 3), id="dp2 x pp2 by zero", marks=pytest.mark.slow),
        pytest.param((4, 1, 2, 3), (4, 2, 2, 0), id="zero x tp2 by pp2 x tp2", marks=pytest.mark.slow),
    ],
)
def test_averages_resume_under_another_layout(worlds, tmp_path, saving, loading):
    folder, file, plain = str(tmp_path), str(tmp_path / "one"), (1, 1, 1, 0)
    worlds.run(saving[0], on_rank_in, averaged, *saving, folder, True)
    worlds.run(1, on_rank_in, averaged, *plain, file, True)
    [expected] = worlds.run(1, on_rank_in, averaged, *plain, file, False)
    for result in worlds.run(loading[0], on_rank_in, averaged, *loading, folder, False):
        compare(result, expected, rtol=1e-9)


def averaged_and_saved_after(run, resume, tp=1):
    """Trained with an average of the weights, and saved once training has ended."""
    module, average = Net(), EMAWeightAveraging(decay=0.7, device=None)
    trainer = fit(run, module, average, max_epochs=3 if resume else 2, resume=resume, tp=tp)
    trainer.save_checkpoint(f"{run.folder}/{'second' if resume else 'first'}.ckpt")
    return run.numbers(trainer, module)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_averages_saved_after_a_run(worlds, tmp_path, is_resumed):
    def runs(name, *layout):
        folder = f"{tmp_path}/{name}"
        results = worlds.run(layout[0], on_rank_in, averaged_and_saved_after, *layout, folder, None)
        if is_resumed:
            resume = f"{folder}/first.ckpt"
            results = worlds.run(layout[0], on_rank_in, averaged_and_saved_after, *layout, folder, resume)
        return results

    [expected] = runs("one", 1, 1, 1, 0)
    for result in runs("two", 2, 2, 1, 0):
        compare(result, expected, rtol=1e-9)


class InTp(Run):
    """Replicas are the ranks that neither stages nor tensor ranks share."""

    def __init__(self, size, pp, tp, zero, folder):
        super().__init__(size, pp, folder, {"zero_stage": zero})
        self.tp = tp

    def data(self, batch_size=8, num=32, **options):
        return Run(self.size // self.tp, self.pp, self.folder).data(batch_size, num, **options)

    def val_data(self, num=16):
        return Run(self.size // self.tp, self.pp, self.folder).val_data(num)


def on_rank_in(feature, size, pp, tp, zero, folder, save):
    os.makedirs(folder, exist_ok=True)
    return feature(InTp(size, pp, tp, zero, folder), save, tp)


# -- during training --------------------------------------------------------------------------------------------------


class SavesTwiceDuringTraining(Callback):
    """Saves twice; the first save is not written before three more batches are trained."""

    def __init__(self, folder):
        self.folder, self.open, self.begun, self.seen = folder, threading.Event(), [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        step = trainer.global_step
        if step in (2, 6):
            trainer.save_checkpoint(f"{self.folder}/{step}.ckpt")
        if step == 3:
            trainer.strategy.remove_checkpoint(f"{self.folder}/none.ckpt")
        self.seen.append((step, len(self.begun), sorted(os.listdir(f"{self.folder}/2.ckpt")) if step > 2 else []))
        if step == 5:
            self.open.set()


def trains_on(run):
    callback, write = SavesTwiceDuringTraining(run.folder), folder_writer.write

    def delayed_write(save, *others):
        assert callback.open.wait(30)
        callback.begun.append(save.path.name)
        write(save, *others)

    folder_writer.write = delayed_write
    try:
        fit(run, Net(), callback, max_epochs=2)
    finally:
        folder_writer.write = write
    return callback.seen, callback.begun


def test_training_continues_during_an_async_save(worlds, tmp_path):
    for seen, begun in worlds.run(2, on_rank, trains_on, 2, 2, str(tmp_path)):
        assert [(count, entries) for step, count, entries in seen if step <= 5] == [(0, [])] * 5
        assert seen[5][1] >= 1 and "manifest.json" in seen[5][2]  # the second one waited for the first
        assert begun == ["2.ckpt", "6.ckpt"]
    for step in (2, 6):
        assert SavedFolder(tmp_path / f"{step}.ckpt").manifest["step"] == step


def fit_saving_last(run):
    """Files written during training when two epochs save a last checkpoint each."""
    begun, write = [], folder_writer.write

    def recorded(save, *others):
        begun.append((save.path.name, save.path.is_dir() and any(save.path.iterdir())))
        write(save, *others)

    folder_writer.write = recorded
    try:
        fit(
            run,
            Net(),
            fit_with_checkpoints(run, monitor="step", mode="max", save_last=True),
            max_epochs=3,
            enable_checkpointing=True,
        )
    finally:
        folder_writer.write = write
    return begun


def test_ckpt_path_last_skips_incomplete_folders(worlds, tmp_path):
    """The first save, which blocks, finds no folder; later ones are written while it still exists."""
    for begun in worlds.run(2, on_rank, fit_saving_last, 2, 2, str(tmp_path)):
        assert [is_there for name, is_there in begun if name == "last.ckpt"] == [False, True, True]


def links(run):
    with pytest.raises(ValueError) as error:
        fit(run, Net(), fit_with_checkpoints(run, save_last="link"), enable_checkpointing=True)
    return str(error.value)


def test_link_to_an_unfinished_save_is_refused(worlds, tmp_path):
    assert all("set save_last=True" in message for message in worlds.run(2, on_rank, links, 2, 2, str(tmp_path)))


def one_rank_cannot_write(run):
    write = folder_writer.write
    full = f"{run.folder}/full"

    def write_or_fail(save, *others):
        if torch.distributed.get_rank() == 1:
            save.items[0] = (*save.items[0][:3], "no tensor")
        write(save, *others)

    folder_writer.write = write_or_fail
    try:
        with pytest.raises(CheckpointError) as error:
            fit(run, Net(), Saves(f"{full}.ckpt", 6), max_epochs=2)
    finally:
        folder_writer.write = write
    return str(error.value)


class Unpicklable(Saves):
    def state_dict(self):
        return {"function": lambda: None}


def first_rank_cannot_pickle(run):
    with pytest.raises(Exception) as error:
        fit(run, Net(), Unpicklable(f"{run.folder}/full.ckpt", 6), max_epochs=2)
    return "".join([str(error.value), *getattr(error.value, "__notes__", [])])


def test_write_error_of_one_rank_reaches_all(worlds, tmp_path):
    for message in worlds.run(2, on_rank, one_rank_cannot_write, 2, 2, str(tmp_path)):
        assert "full.ckpt could not be written: rank 1: AttributeError" in message
    for message in worlds.run(2, on_rank, first_rank_cannot_pickle, 2, 2, str(tmp_path)):
        assert "full.ckpt could not be written: rank 0" in message and "lambda" in message
    assert os.listdir(tmp_path) == []


# -- other models and loaders -----------------------------------------------------------------------------------------


class Wider(Net):
    def __init__(self):
        super().__init__()
        self.head[0] = nn.Linear(4, 6).double()
        self.head[2] = nn.Linear(6, 1).double()
        self.more = nn.Linear(4, 4).double()


class Edits(Net):
    """Typical edits in this hook: omit, rename, add."""

    def on_save_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        del state["head.2.bias"]
        state["first.weight"] = state.pop("backbone.0.0.weight")
        checkpoint["mine"] = torch.arange(3000.0) + torch.distributed.get_rank()


class WritesFiles(TorchCheckpointIO):
    pass


def saved_and_misused(run):
    path = f"{run.folder}/half.ckpt"
    fit(run, Net(), Saves(path, 6), max_epochs=2)
    module = Net.load_from_checkpoint(path)
    fit(run, Edits(), Saves(f"{run.folder}/edited.ckpt", 3), max_epochs=1)
    with pytest.raises(ValueError, match="WritesFiles was given to write files"):
        fit(run, Net(), plugins=[WritesFiles()])
    with pytest.raises(CheckpointError) as another:
        fit(run, Wider(), resume=path)
    trainer = run.trainer(strategy_options={"save_distributed_checkpoint": False}, max_epochs=2)
    with pytest.raises(CheckpointError, match="no checkpoint of lightning_hybrid"):
        trainer.fit(Net(), run.data(), run.val_data(), ckpt_path=run.folder)
    return dict(module.state_dict()), str(another.value)


def test_load_without_trainer_and_into_another_model(worlds, tmp_path):
    for state, message in worlds.run(2, on_rank, saved_and_misused, 2, 2, str(tmp_path)):
        saved = SavedFolder(tmp_path / "half.ckpt").checkpoint()["state_dict"]
        compare({n: v for n, v in state.items()}, saved, rtol=0, atol=0)
        edited = SavedFolder(tmp_path / "edited.ckpt").checkpoint()
        assert set(edited["state_dict"]) == {*saved, "first.weight"} - {"head.2.bias", "backbone.0.0.weight"}
        assert edited["mine"][0] == 0
        assert "does not match Wider" in message and "more.weight is in the model only" in message
        assert "head.0.weight has shape (4, 4) in the checkpoint and (6, 4) in the model" in message


def built_empty(run):
    path = f"{run.folder}/half.ckpt"
    fit(run, Net(), Saves(path, 6), max_epochs=2)
    module, read, keys = Net(), SavedFolder.read, []
    fit(run, module, resume=path, max_epochs=3)
    trainer = run.trainer(max_epochs=3, **options(run))
    with trainer.init_module(empty_init=True):
        empty = Net()

    def recorded(self, wanted):
        keys.extend(each.key for each in wanted)
        read(self, wanted)

    SavedFolder.read = recorded
    try:
        trainer.fit(empty, run.data(), run.val_data(), ckpt_path=path)
    finally:
        SavedFolder.read = read
    return dict(module.state_dict()), dict(empty.state_dict()), keys


def test_empty_model_is_read_by_rank_0(worlds, tmp_path):
    for rank, (expected, got, keys) in enumerate(worlds.run(2, on_rank, built_empty, 2, 2, str(tmp_path))):
        compare(got, expected, rtol=0, atol=0)
        kinds = [key.partition("/")[0] for key in keys]
        assert kinds.count("model") == (0 if rank else len(expected))
        assert 0 < kinds.count("optimizer") < len(expected)  # each stage reads its shard


def searched(run):
    """The search saves, trains, and reads the folder again, all in the middle of a run."""
    module = Net()
    finder = LearningRateFinder(num_training_steps=6, min_lr=1e-3, max_lr=0.5)
    trainer = fit(run, module, finder, max_epochs=2)
    return run.numbers(trainer, module, chosen=module.lr)


@pytest.mark.slow
def test_lr_finder_during_training(worlds, tmp_path):
    [expected] = worlds.run(1, on_rank, searched, 1, 1, str(tmp_path / "one"))
    for result in worlds.run(2, on_rank, searched, 2, 2, str(tmp_path / "two")):
        compare(result, expected)
    assert os.listdir(tmp_path / "two") == []
