"""On one device hybrid3d equals the plain Trainer: the same hooks, numbers, files and exceptions."""

import copy
import io
import os
import pickle
import signal
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.tuner import Tuner

from harness.one_device import compared, plain, recording_callback, recording_module, result_of
from models.small import Small

# -- hooks and numbers ------------------------------------------------------------------------------------------------


def hooks(trainer, checkpoints):
    seen = []
    module = recording_module(seen)
    run = trainer(callbacks=[recording_callback(seen)], gradient_clip_val=0.1, enable_checkpointing=checkpoints)
    run.fit(module)
    run.validate(module, verbose=False)
    run.test(module, verbose=False, ckpt_path="best" if checkpoints else None)
    run.predict(module)
    return seen


@pytest.mark.parametrize("checkpoints", [False, True])
def test_hook_order(worlds, checkpoints):
    seen = compared(worlds, hooks, checkpoints)
    assert {"module.on_before_optimizer_step", "callback.on_predict_batch_end"} <= set(seen)


def fitted(trainer, options, callbacks=()):
    module, run = Small(), trainer(**options, callbacks=[make() for make in callbacks])
    run.fit(module)
    return result_of(run, module)


OPTIONS = {
    "nothing more": {},
    "fast_dev_run": {"fast_dev_run": 2},
    "overfit_batches": {"overfit_batches": 2},
    "limits": {"limit_train_batches": 3, "limit_val_batches": 0.5},
    "clipping by norm": {"gradient_clip_val": 0.05},
    "clipping by value": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
    "accumulation": {"accumulate_grad_batches": 3},
    "anomalies": {"detect_anomaly": True},
    "deterministic": {"deterministic": True},
    "loaders reloaded": {"reload_dataloaders_every_n_epochs": 1},
    "validation within epochs": {"val_check_interval": 3},
    "validation by steps": {"check_val_every_n_epoch": None, "val_check_interval": 5},
    "max_steps": {"max_steps": 5, "max_epochs": None},
    "max_time": {"max_time": "00:00:00:00", "max_epochs": 5},
    "sync_batchnorm": {"sync_batchnorm": True},
    "64-true": {"precision": "64-true"},
    "bf16-mixed": {"precision": "bf16-mixed"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_the_trainer(worlds, name):
    compared(worlds, fitted, OPTIONS[name])


def _of(name, *args, **options):
    return {name: (getattr(lightning_callbacks, name), args, options)}


CALLBACKS = {
    **_of("GradientAccumulationScheduler", {0: 2, 1: 4}),
    **_of("StochasticWeightAveraging", 0.05, swa_epoch_start=1),
    **_of("WeightAveraging"),
    **_of("EarlyStopping", "val", patience=0, mode="max"),
    **_of("LearningRateFinder", num_training_steps=12),
    **_of("BatchSizeFinder", max_trials=2, steps_per_trial=1),
    **_of("ModelPruning", "l1_unstructured", amount=0.5, parameters_to_prune=None),
    **_of("Timer", "00:00:00:00"),
}


def with_callback(trainer, name):
    kind, args, options = CALLBACKS[name]
    callback, module = kind(*args, **options), Small()
    run = trainer(max_epochs=4, callbacks=[callback])
    run.fit(module)
    found = {**result_of(run, module), "batch_size": module.batch_size, "lr": module.lr}
    return {**found, "optimal": getattr(callback, "optimal_batch_size", None)}


@pytest.mark.parametrize("name", CALLBACKS)
def test_lightning_callbacks(worlds, name):
    compared(worlds, with_callback, name)


def several_runs(trainer):
    module, run = Small(), trainer(max_epochs=1)
    run.fit(module)
    run.fit_loop.max_epochs = 3
    run.fit(module)
    found = result_of(run, module)
    tested = run.validate(module, verbose=False), run.test(module, verbose=False)
    return found, tested, plain(run.predict(module)), run.predict(module, return_predictions=False)


def test_several_runs_of_one_trainer(worlds):
    compared(worlds, several_runs)


class RecordsTrainer(Callback):
    def on_train_batch_end(self, trainer, pl_module, *_):
        self.seen = {
            "callbacks": [type(callback).__name__ for callback in trainer.callbacks],
            "loops": [sorted(vars(loop)) for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop)],
            "validation": sorted(vars(trainer.fit_loop.epoch_loop.val_loop)),
            "connector": sorted(vars(trainer._signal_connector)),
            "gathered": pl_module.all_gather(torch.ones(2)).shape,
            "sampler": type(trainer.train_dataloader.sampler).__name__,
            "ranks": (trainer.world_size, trainer.global_rank, trainer.is_global_zero),
            "handlers": [h.__qualname__ for h in signal.getsignal(signal.SIGTERM).signal_handlers if callable(h)],
        }


def inspect_trainer(trainer):
    recorder = RecordsTrainer()
    trainer(callbacks=[recorder]).fit(Small())
    return recorder.seen


def test_nothing_is_added_to_the_trainer(worlds):
    seen = compared(worlds, inspect_trainer)
    assert seen["callbacks"] == ["RecordsTrainer"] and seen["gathered"] == (2,)


# -- searches ---------------------------------------------------------------------------------------------------------


class OutOfMemory(Small):
    def training_step(self, batch, batch_idx):
        if len(batch) > 4:
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        return super().training_step(batch, batch_idx)


def searched(trainer, what, kind, options):
    module, run = kind(), trainer()
    found = getattr(Tuner(run), what)(module, **options)
    if what == "lr_find":
        found = plain(found.results)
    run.fit(module)
    return found, module.batch_size, module.lr, result_of(run, module)


@pytest.mark.parametrize(
    ("what", "kind", "options"),
    [
        ("scale_batch_size", Small, {"max_trials": 2, "steps_per_trial": 1}),
        ("scale_batch_size", OutOfMemory, {"max_trials": 4, "steps_per_trial": 1}),
        ("scale_batch_size", Small, {"method": "validate", "max_trials": 2, "mode": "binsearch"}),
        ("lr_find", Small, {"num_training": 15}),
    ],
)
def test_tuner_searches(worlds, what, kind, options):
    found, batch_size, *_ = compared(worlds, searched, what, kind, options)
    assert batch_size == (2 if what == "lr_find" else found)


# -- files and copies -------------------------------------------------------------------------------------------------


def checkpointed(trainer):
    best = lightning_callbacks.ModelCheckpoint(
        monitor="val", save_top_k=2, save_last=True, filename="{epoch}-{val:.3f}"
    )
    steps = lightning_callbacks.ModelCheckpoint(every_n_train_steps=5, save_top_k=-1, filename="s{step}")
    weights = lightning_callbacks.ModelCheckpoint(save_weights_only=True, save_top_k=-1, filename="w{epoch}")
    run, module = trainer(callbacks=[best, steps, weights], max_epochs=3, enable_checkpointing=True), Small()
    run.fit(module)
    saved = torch.load(best.last_model_path, weights_only=True)
    found = {"files": [sorted(os.listdir(best.dirpath))], "keys": sorted(saved), "loops": plain(saved["loops"])}
    found["weights"] = plain([saved["state_dict"], saved["optimizer_states"], saved["lr_schedulers"]])
    found["best"] = run.test(ckpt_path="best", verbose=False)
    for path in (best.last_model_path, "last"):
        last = lightning_callbacks.ModelCheckpoint(dirpath=best.dirpath, save_last=True)
        again, resumed = trainer(max_epochs=4, callbacks=[last], enable_checkpointing=True), Small()
        again.fit(resumed, ckpt_path=path)
        found[path == "last"] = resumed.seen
    return found


def test_checkpoints_have_the_same_names_keys_and_numbers(worlds):
    assert "hybrid3d" not in compared(worlds, checkpointed)["keys"]


def copied(trainer, during):
    found = {}
    factories = {
        "pickle": lambda value: pickle.loads(pickle.dumps(value)),
        "save": lambda value: torch.save(value, io.BytesIO()),
        "copy": copy.deepcopy,
    }

    def copy_all(run, module, *_):
        parts = {"module": module, "trainer": run, "strategy": run.strategy, "bar": run.progress_bar_callback}
        parts |= {"loop": run.fit_loop, "optimizers": run.optimizers, "loader": run.train_dataloader}
        for name, part in parts.items():
            for label, make in factories.items():
                make(part)
                found[name, label] = True

    class Copies(lightning_callbacks.TQDMProgressBar):
        def on_train_batch_end(self, *args):
            copy_all(*args)

        def __reduce__(self):
            return (lightning_callbacks.TQDMProgressBar, ())

    module, run = Small(), trainer(enable_progress_bar=True, callbacks=[Copies()] if during else [])
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        run.fit(module)
    copy_all(run, module)
    again = pickle.loads(pickle.dumps(run))  # a run may be resumed in another process
    again.fit_loop.max_epochs = 3
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        again.fit(module)
    return module.seen


@pytest.mark.parametrize("during", [False, True])
def test_objects_can_be_copied_during_and_after_a_run(worlds, during):
    compared(worlds, copied, during)


# -- exceptions and signals -------------------------------------------------------------------------------------------


class Breaks(Small):
    error = RuntimeError

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.error:
            raise self.error("in the third batch")
        return super().training_step(batch, batch_idx)


class RecordedFiles(TorchCheckpointIO):
    ended = False

    def teardown(self):
        self.ended = True


def _handlers():
    return {number: signal.getsignal(number) for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}}


def failed(trainer, error):
    seen, reports, before = [], [], _handlers()
    module, files = recording_module(seen, Breaks), RecordedFiles()
    module.error = error
    run = trainer(callbacks=[recording_callback(seen)], plugins=[files])
    with mock.patch.object(Strategy, "on_exception", lambda _, exception: reports.append(str(exception))):
        try:
            run.fit(module)
        except (SystemExit, error) as raised:
            seen.append(f"{type(raised).__name__}: {raised}")
    after = _handlers()
    interrupted = after.pop(signal.SIGINT)  # Lightning ignores it from a KeyboardInterrupt on
    changed = [number for number, handler in after.items() if handler != before[number]]
    signal.signal(signal.SIGINT, before[signal.SIGINT])
    loops = [sorted(vars(loop)) for loop in (run.fit_loop, run.fit_loop.epoch_loop, run._signal_connector)]
    found = [seen, reports, files.ended, changed, str(interrupted), loops, run.state.status.value, len(run.callbacks)]
    module.error = None
    run.fit(module)
    return found, module.seen


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_trainer_is_restored_and_reusable_after_an_exception(worlds, error):
    [seen, reports, ended, changed, *_], _ = compared(worlds, failed, error)
    assert reports == ["in the third batch"] and ended and not changed and "callback.on_exception" in seen


class Terminated(Small):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def terminated(trainer):
    received_signals, seen = [], []

    def listen(number, frame):
        received_signals.append(number)

    before = signal.signal(signal.SIGTERM, listen)
    module, run = Terminated(), trainer(callbacks=[recording_callback(seen)])
    try:
        run.fit(module)
    except BaseException as error:
        seen.append(f"{type(error).__name__}: {error}")
    is_back = signal.signal(signal.SIGTERM, before) is listen
    return seen, received_signals, is_back, len(module.seen), run.received_sigterm


def test_signal_ends_the_run_and_its_handler_is_restored(worlds):
    _, received_signals, is_back, batches, received = compared(worlds, terminated)
    assert received_signals == [signal.SIGTERM] and is_back and batches == 3 and received
