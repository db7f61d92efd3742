"""An experiment, and one recorded run of it on this rank: fit, test and predict, under a layout or a reference."""

from __future__ import annotations

import importlib
import inspect
import os
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Protocol

import numpy
import torch
import torch.distributed as dist

from lightning_hybrid.verify.layouts import Layout
from lightning_hybrid.verify.records.record import Failure, RunRecord, RunRecorder, describe_failure
from lightning_hybrid.verify.saved_values import saved_values

# How long a rank that failed waits for the other ranks to fail in the same way.
_WAIT_SECONDS = 5.0
_AFTER_FIT = {"test_dataloaders", "predict_dataloaders"}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A training run that can be repeated under any layout; picklable if the two functions are.

    Attributes:
        make_module: Makes the LightningModule.
        make_data: Makes a LightningDataModule, a loader, or a dict of arguments of ``Trainer.fit``; None if the module
            defines its loaders. In a dict, ``test_dataloaders`` and ``predict_dataloaders`` are used after the fit.
        steps: Maximum number of batches of an epoch, and of a validation.
        epochs: Number of epochs.
        num_microbatches: Microbatches of each replica's batch, where the layout names none.
        precision: Lightning's name of the precision, such as "64-true".
        seed: Seed of all random generators.
        trainer: Further arguments of the Trainer.
        resume: Whether to save a checkpoint after the fit, and train one step more from it.
    """

    make_module: Callable[[], Any]
    make_data: Callable[[], Any] | None = None
    steps: int = 4
    epochs: int = 1
    num_microbatches: int | None = 2
    precision: str = "64-true"
    seed: int = 1
    trainer: Mapping[str, Any] = field(default_factory=dict)
    resume: bool = True


class Connection(Protocol):
    """Protocol: makes the strategy of one run, and connects it with the Trainer."""

    devices: int

    def strategy(self, pl: ModuleType) -> Any:
        """Make a strategy for the namespace ``pl``."""

    def connect(self, trainer: Any, module: Any) -> None:
        """Connect the run with the Trainer, after that is made and before it fits."""

    def finish(self, observed: RunRecord) -> None:
        """Complete the record after the run."""


class LayoutConnection:
    """Makes the strategy of a layout."""

    def __init__(self, layout: Layout, num_microbatches: int | None) -> None:
        """Take ``layout`` (the layout to run under), ``num_microbatches`` (the number where the layout names none)."""
        self.devices = layout.devices
        self._layout, self._num_microbatches = layout, num_microbatches

    def strategy(self, pl: ModuleType) -> Any:
        """Make the strategy as ``Trainer(strategy=name)`` does, with the options of the layout."""
        registry = importlib.import_module(f"{pl.__name__}.strategies").StrategyRegistry
        entry = registry[self._layout.strategy_name]
        return entry["strategy"](**{**entry["init_params"], **self._layout.options(self._num_microbatches)})

    def connect(self, trainer: Any, module: Any) -> None:
        """Do nothing: the strategy is all that a layout sets."""

    def finish(self, observed: RunRecord) -> None:
        """Do nothing: the record is complete."""


def namespace_of(module: Any) -> ModuleType:
    """The Lightning of this process, for a module or its class.

    Raises:
        TypeError: It is no LightningModule of it.
    """
    kind = module if isinstance(module, type) else type(module)
    pl = importlib.import_module("lightning.pytorch")
    if issubclass(kind, pl.LightningModule):
        return pl
    other = next((base.__module__ for base in kind.__mro__ if base.__name__ == "LightningModule"), None)
    also = f", but of {other.partition('.')[0]}; import only one of the two in a process" if other else ""
    raise TypeError(f"{kind.__name__} is no LightningModule of {pl.__name__}{also}")


def run_once(
    experiment: Experiment, connection: Connection, *, perturbation: float = 0.0, only_first_step: bool = False
) -> RunRecord:
    """Run an experiment once on this rank.

    Args:
        experiment: The run.
        connection: Makes the strategy.
        perturbation: Relative size of the noise that is added to the weights before the first step.
        only_first_step: End after one batch, without validation.

    Returns:
        The record of this rank; a failure is recorded there, and not raised.
    """
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        return run_in_folder(folder, experiment, connection, perturbation, only_first_step)


def run_in_folder(
    folder: str,
    experiment: Experiment,
    connection: Connection,
    perturbation: float = 0.0,
    only_first_step: bool = False,
) -> RunRecord:
    """Run as `run_once`, with ``folder`` as the Trainer's root."""
    _seed(experiment.seed)
    recorder: Any = None
    fitted = False
    try:
        module = experiment.make_module()
        data = None if experiment.make_data is None else experiment.make_data()
        pl = namespace_of(module)
        recorder = recorder_of(pl, perturbation)
        with warnings.catch_warnings():
            if connection.devices == 1:
                warnings.simplefilter("ignore")  # warnings to the user are given once, under the layout
            arguments = _arguments(experiment, folder, only_first_step)
            arguments["callbacks"] = [*arguments.get("callbacks", ()), recorder]
            trainer = pl.Trainer(devices=connection.devices, strategy=connection.strategy(pl), **arguments)
            connection.connect(trainer, module)
            trainer.fit(module, **fit_arguments(pl, data))
            observed: RunRecord = recorder.finish(trainer, module)
            if not only_first_step:
                fitted = True
                saved = _save(folder, trainer, module, observed) if experiment.resume else ""
                _test_and_predict(pl, trainer, module, data, recorder)
            connection.finish(observed)
            if not only_first_step and saved:
                arguments["max_epochs"] = trainer.current_epoch + 1
                _resume(experiment, connection, arguments, saved, observed)
        return observed
    except Exception as error:
        observed = RunRecord() if recorder is None else recorder.observed
        # Test and prediction, after the fit, change no parameter.
        observed.failure = describe_failure(error, steps_done=0 if fitted else len(observed.steps))
        return observed


def run_layout(experiment: Experiment, layout: Layout, connection: LayoutConnection | None = None) -> RunRecord:
    """Run an experiment on one rank of a layout; a rank that fails while others still run raises its error.

    Args:
        experiment: The run.
        layout: The layout to run under.
        connection: Makes the strategy; a `LayoutConnection` by default.

    Raises:
        RuntimeError: This rank failed and others still run.
    """
    connection = connection or LayoutConnection(layout, experiment.num_microbatches)
    # All ranks read and write the folder of rank 0, so it stays until the last one has ended.
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        observed = run_in_folder(folder, experiment, connection)
        if layout.devices > 1 and not _all_ended(layout.devices) and observed.failure is not None:
            raise RuntimeError(f"{observed.failure.message} ({observed.failure.where}); other ranks still run")
    return observed


def _all_ended(world_size: int) -> bool:
    if not dist.is_initialized():
        return True  # no other rank can be waiting in a collective with this one
    store = dist.distributed_c10d._get_default_store()
    end = time.monotonic() + _WAIT_SECONDS
    count = store.add("verify/ended", 1)
    while count < world_size:
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
        count = store.add("verify/ended", 0)
    return True


def recorder_of(pl: ModuleType, perturbation: float = 0.0) -> Any:
    """Make the callback that records a run."""
    return type("RunRecorderCallback", (RunRecorder, pl.Callback), {})(perturbation)


def _save(folder: str, trainer: Any, module: Any, observed: RunRecord) -> str:
    """Save a checkpoint after a fit, read its values on the first rank, and return its path; empty if that fails."""
    path = str(trainer.strategy.broadcast(os.path.join(folder, "after_fit.ckpt")))
    try:
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            observed.checkpoint = saved_values(path, module, trainer.optimizers)
    except Exception as error:
        observed.failure = _failure_after_fit(error, "a checkpoint after the fit")
        return ""
    return path


def _resume(
    experiment: Experiment, connection: Connection, arguments: dict[str, Any], path: str, observed: RunRecord
) -> None:
    """Train one optimizer step more from a checkpoint, with a new module and Trainer; record the parameters."""
    _seed(experiment.seed)
    module = experiment.make_module()
    data = None if experiment.make_data is None else experiment.make_data()
    if experiment.precision == "64-true":
        module.double()  # Lightning loads weights before it makes the module one of float64
    pl = namespace_of(module)
    recorder = recorder_of(pl)
    callbacks = [*arguments["callbacks"][:-1], recorder]
    limits = {"max_steps": -1, "limit_train_batches": arguments.get("accumulate_grad_batches", 1)}
    arguments = {**arguments, **limits, "limit_val_batches": 0, "callbacks": callbacks}
    trainer = pl.Trainer(devices=connection.devices, strategy=connection.strategy(pl), **arguments)
    connection.connect(trainer, module)
    trusted = {"weights_only": False} if "weights_only" in inspect.signature(trainer.fit).parameters else {}
    try:
        trainer.fit(module, **fit_arguments(pl, data), ckpt_path=path, **trusted)
    except Exception as error:
        observed.failure = _failure_after_fit(error, "a run that goes on from the checkpoint")
    if recorder.observed.steps:
        observed.resumed = recorder.observed.steps[-1].weights


def _failure_after_fit(error: Exception, what: str) -> Failure:
    failure = describe_failure(error, steps_done=1)
    return replace(failure, message=f"{what}: {failure.message}", resuming=True)


def _test_and_predict(pl: ModuleType, trainer: Any, module: Any, data: Any, recorder: RunRecorder) -> None:
    """Test and predict with the trained module, where it has such a step and there are loaders for it."""
    if (
        _overrides(module, pl.LightningModule, "test_step")
        and (arguments_for := _loader_arguments(pl, module, data, "test")) is not None
    ):
        trainer.test(module, **arguments_for, verbose=False)
        recorder.record_test(trainer)
    arguments_for = _loader_arguments(pl, module, data, "predict")
    if arguments_for is not None:
        predictions = trainer.predict(module, **arguments_for)
        recorder.record_predictions(predictions, trainer)


def _loader_arguments(pl: ModuleType, module: Any, data: Any, kind: str) -> dict[str, Any] | None:
    """Arguments of ``Trainer.test`` or ``Trainer.predict``; None if there are no loaders."""
    hook = f"{kind}_dataloader"
    if isinstance(data, dict) and f"{hook}s" in data:
        return {"dataloaders": data[f"{hook}s"]}
    datamodule = data.get("datamodule") if isinstance(data, dict) else data
    if isinstance(datamodule, pl.LightningDataModule) and _overrides(datamodule, pl.LightningDataModule, hook):
        return {"datamodule": datamodule}
    return {} if _overrides(module, pl.LightningModule, hook) else None


def _overrides(thing: Any, base: type, name: str) -> bool:
    return getattr(type(thing), name) is not getattr(base, name)


def _seed(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    # An earlier module of this process may have called seed_everything.
    os.environ.pop("PL_GLOBAL_SEED", None)


def _arguments(experiment: Experiment, folder: str, only_first_step: bool) -> dict[str, Any]:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    arguments = {
        "accelerator": "cpu",
        "num_nodes": 1,
        "precision": experiment.precision,
        "max_epochs": experiment.epochs,
        "limit_train_batches": experiment.steps,
        "limit_val_batches": experiment.steps,
        "limit_test_batches": experiment.steps,
        "limit_predict_batches": experiment.steps,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "default_root_dir": folder,
        **quiet,
        **experiment.trainer,
    }
    if only_first_step:
        arguments |= {"max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 0}
    return arguments


def fit_arguments(pl: ModuleType, data: Any) -> dict[str, Any]:
    """Arguments of ``Trainer.fit`` for what ``Experiment.make_data`` has made."""
    if data is None:
        return {}
    if isinstance(data, pl.LightningDataModule):
        return {"datamodule": data}
    loading = {"train_dataloaders", "val_dataloaders", "datamodule"}
    if not isinstance(data, dict) or not data.keys() <= loading | _AFTER_FIT:
        return {"train_dataloaders": data}
    return {name: value for name, value in data.items() if name in loading}
