"""A small module, run with the plain Trainer and with hybrid3d on the same single device."""

import tempfile
import traceback

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from harness.trainer_runs import ignore_warnings
from models.small import Small

HOOKS = [*(name for name in dir(Callback) if name.startswith("on_")), "setup", "teardown", "state_dict"]
OWN_HOOKS = sorted(
    {name for name in dir(LightningModule) if name.startswith("on_")}
    | {
        "setup",
        "teardown",
        "configure_model",
        "configure_optimizers",
        "configure_callbacks",
        "prepare_data",
        "backward",
    }
    | {"configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "forward"}
    | {"transfer_batch_to_device", "training_step", "validation_step", "test_step", "predict_step", "train_dataloader"}
)
OWN_HOOKS.remove("on_gpu")  # a property


def _recording_class(kind, names, prefix, seen):
    """A subclass whose methods record their calls."""

    def recording(name):
        def method(self, *args, **kwargs):
            seen.append(f"{prefix}.{name}")
            return getattr(super(kind_that_notes, self), name)(*args, **kwargs)

        return method

    kind_that_notes = type(kind.__name__, (kind,), {name: recording(name) for name in names})
    return kind_that_notes


def recording_callback(seen):
    return _recording_class(Callback, HOOKS, "callback", seen)()


def recording_module(seen, kind=Small):
    return _recording_class(kind, [name for name in OWN_HOOKS if hasattr(kind, name)], "module", seen)()


def plain(value):
    """A comparable value: tensors become lists."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def result_of(trainer, module):
    """The full result of a fit."""
    return {
        "losses": module.seen,
        "weights": plain(module.state_dict()),
        "metrics": plain({**trainer.callback_metrics, **trainer.logged_metrics}),
        "progress": (trainer.global_step, trainer.current_epoch, trainer.state.status.value),
        "callbacks": [type(callback).__name__ for callback in trainer.callbacks],
    }


def with_both_strategies(case, *args):
    """On the one rank of a world: the result of a case with the plain Trainer, and with hybrid3d.

    Args:
        case: Called with a function that makes a Trainer with further options.
        args: Of the case.
    """
    ignore_warnings()
    found = []
    for strategy in ("auto", "hybrid3d"):
        seed_everything(7, verbose=False)
        with tempfile.TemporaryDirectory() as folder:

            def trainer(strategy=strategy, folder=folder, **options):
                quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
                sizes = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "default_root_dir": folder}
                return Trainer(strategy=strategy, logger=False, **{**sizes, **quiet, **options})

            try:
                found.append(case(trainer, *args))
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}\n{''.join(traceback.format_tb(error.__traceback__))}")
    return found


def compared(worlds, case, *args):
    """The equal result of both."""
    [[expected, actual]] = worlds.run(1, with_both_strategies, case, *args)
    assert not isinstance(expected, str), expected
    assert not isinstance(actual, str), actual
    assert actual == expected
    return expected
