"""An experiment, and one recorded run of it on this rank: fit, test and predict, under a layout or a reference."""

from __future__ import annotations

import importlib
import inspect
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Protocol

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.collectives.arrivals import wait_until
from lightning_hybrid.verify.record import Failure, RunRecord, RunRecorder, describe_failure

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

    def file_of(self, path: str) -> str:
        """The file of a checkpoint that was saved at a path."""


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
    """Run an experiment once on this rank, and record it; a failure is recorded too.

    The relative size ``perturbation`` of noise is added to the weights before the first step; ``only_first_step`` ends
    after one batch, without validation.

    Raises:
        RuntimeError: This rank failed and others still run.
    """
    # All ranks read and write the folder of rank 0, so it stays until the last one has ended.
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        observed = _run(folder, experiment, connection, perturbation, only_first_step)
        if connection.devices > 1 and not _all_ended(connection.devices) and observed.failure is not None:
            raise RuntimeError(f"{observed.failure.message} ({observed.failure.where}); other ranks still run")
    return observed


def _run(
    folder: str, experiment: Experiment, connection: Connection, perturbation: float, only_first_step: bool
) -> RunRecord:
    """Run as `run_once`, with ``folder`` as the Trainer's root."""
    _seed(experiment.seed)
    recorder: Any = None
    fitted = False
    try:
        module, data = _made(experiment)
        pl = namespace_of(module)
        recorder = recorder_of(pl, perturbation)
        with warnings.catch_warnings():
            if connection.devices == 1:
                warnings.simplefilter("ignore")  # warnings to the user are given once, under the layout
            arguments = _arguments(experiment, folder, only_first_step)
            arguments["callbacks"] = [*arguments.get("callbacks", ()), recorder]
            trainer = _trainer(pl, connection, module, arguments)
            trainer.fit(module, **fit_arguments(pl, data))
            observed: RunRecord = recorder.finish(trainer, module)
            if only_first_step:
                connection.finish(observed)
                return observed
            fitted = True
            saved = _save(folder, connection, trainer, module, observed) if experiment.resume else ""
            _test_and_predict(pl, trainer, module, data, recorder)
            connection.finish(observed)
            if saved:
                arguments["max_epochs"] = trainer.current_epoch + 1
                _resume(experiment, connection, arguments, saved, observed)
        return observed
    except Exception as error:
        observed = RunRecord() if recorder is None else recorder.observed
        # Test and prediction, after the fit, change no parameter.
        observed.failure = describe_failure(error, steps_done=0 if fitted else len(observed.steps))
        return observed


def _made(experiment: Experiment) -> tuple[Any, Any]:
    """The module, and the data; None if the module defines its loaders."""
    return experiment.make_module(), None if experiment.make_data is None else experiment.make_data()


def _trainer(pl: ModuleType, connection: Connection, module: Any, arguments: dict[str, Any]) -> Any:
    trainer = pl.Trainer(devices=connection.devices, strategy=connection.strategy(pl), **arguments)
    connection.connect(trainer, module)
    return trainer


def _all_ended(world_size: int) -> bool:
    if not dist.is_initialized():
        return True  # no other rank can be waiting in a collective with this one
    store = dist.distributed_c10d._get_default_store()
    store.add("verify/ended", 1)
    return wait_until(lambda: store.add("verify/ended", 0) >= world_size, _WAIT_SECONDS)


def recorder_of(pl: ModuleType, perturbation: float = 0.0) -> Any:
    """Make the callback that records a run."""
    return type("RunRecorderCallback", (RunRecorder, pl.Callback), {})(perturbation)


def _save(folder: str, connection: Connection, trainer: Any, module: Any, observed: RunRecord) -> str:
    """Save a checkpoint after a fit, read its values on the first rank, and return its path; empty if that fails."""
    path = str(trainer.strategy.broadcast(os.path.join(folder, "after_fit.ckpt")))
    try:
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            observed.checkpoint = saved_values(connection.file_of(path), module, trainer.optimizers)
    except Exception as error:
        observed.failure = _failure_after_fit(error, "a checkpoint after the fit")
        return ""
    return path


def _resume(
    experiment: Experiment, connection: Connection, arguments: dict[str, Any], path: str, observed: RunRecord
) -> None:
    """Train one optimizer step more from a checkpoint, with a new module and Trainer; record the parameters."""
    _seed(experiment.seed)
    module, data = _made(experiment)
    if experiment.precision == "64-true":
        module.double()  # Lightning loads weights before it makes the module one of float64
    pl = namespace_of(module)
    recorder = recorder_of(pl)
    callbacks = [*arguments["callbacks"][:-1], recorder]
    limits = {"max_steps": -1, "limit_train_batches": arguments.get("accumulate_grad_batches", 1)}
    arguments = {**arguments, **limits, "limit_val_batches": 0, "callbacks": callbacks}
    trainer = _trainer(pl, connection, module, arguments)
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


def saved_values(path: str, module: nn.Module, optimizers: list[Any]) -> dict[str, Tensor]:
    """Tensors and numbers of the file of a checkpoint, of any shapes, by what they are.

    FQNs of the module name the states of its optimizers.
    """
    checkpoint = torch.load(path, map_location="cpu", weights_only=False)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    values = dict(_named(checkpoint["state_dict"], ""))
    for number, state in enumerate(checkpoint.get("optimizer_states", ())):
        prefix = f"optimizer {number}: "
        own = [p for group in getattr(optimizers[number], "param_groups", ()) for p in group["params"]]
        for index, entries in state.get("state", {}).items():
            known = isinstance(index, int) and index < len(own)
            values.update(_named(entries, prefix, of=names.get(id(own[index])) if known else f"parameter {index}"))
        for index, group in enumerate(state.get("param_groups", ())):
            counted = {**group, "number of parameters": len(group["params"])}
            del counted["params"]
            values.update(_named(counted, prefix, of=f"group {index}"))
    for number, state in enumerate(checkpoint.get("lr_schedulers", ())):
        values.update(_named(state, f"scheduler {number}: "))
    return values


def _named(tree: Any, prefix: str, of: str | None = "") -> Iterator[tuple[str, Tensor]]:
    if not isinstance(tree, Mapping):
        return
    for path, leaf in torch.utils._pytree.tree_flatten_with_path(dict(tree))[0]:
        if isinstance(leaf, Tensor | float | int):
            key = ".".join(str(getattr(part, "key", getattr(part, "idx", part))) for part in path)
            yield f"{prefix}{key}{f' of {of}' if of != '' else ''}", torch.as_tensor(leaf).detach()
