"""What would end every rank is found before any is started: a wrong checkpoint path, cut, or number of parts."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import default_collate

from lightning_hybrid.batch.split import check_number
from lightning_hybrid.checkpoint.archive import check_archive, is_readable
from lightning_hybrid.checkpoint.folder import check_complete, is_folder
from lightning_hybrid.errors import UnfitError
from lightning_hybrid.graph.partition import wrong_number_of_cuts
from lightning_hybrid.optimizers.state_file import check_mount
from lightning_hybrid.strategies.options.options import Options
from lightning_hybrid.text import meant_of

_PACKAGE = __name__.partition(".strategies.")[0]
_NAMED_CHECKPOINTS = ("best", "last", "hpc")
_LISTED = 5  # checkpoints in a message
_BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def check_call(options: Options, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> None:
    """Check what a method of the Trainer is called with, as far as one process can know.

    Raises:
        FileNotFoundError: There is no such checkpoint; names those that are there.
        CheckpointError: It is not whole.
        OffloadError: The disk of ``offload`` is not mounted.
        UnfitError: ``pipeline_cuts`` names no module, or is of another number or order, or the training step has fewer
            layers than there are stages.
        BatchError: The loader's batches have fewer samples than ``num_microbatches``.
    """
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    if trainer is not None and not isinstance(accumulated := trainer.accumulate_grad_batches, int):
        raise TypeError(
            f"accumulate_grad_batches={accumulated!r}; use a whole number, or"
            f" Trainer(callbacks=[GradientAccumulationScheduler({{0: 2, 4: 8}})]) for numbers by epoch"
        )
    _check_checkpoint(given.get("ckpt_path"), trainer)
    if trainer is not None and trainer.state.fn == "fit":
        for where in options.offloaded.values():
            if where != "cpu":
                check_mount(f"offload={options.offload!r}", where.removeprefix("disk:"))
    if isinstance(module := given.get("model"), LightningModule):
        _check_cuts(options, module)
        _check_batch(options, module, given)
        if "train_dataloaders" in given:
            _check_stages(options, module, given)


def _check_checkpoint(path: Any, trainer: Any) -> None:
    if not isinstance(path, str | os.PathLike) or path in _NAMED_CHECKPOINTS or "://" in str(path):
        return
    if is_folder(path):
        check_complete(Path(path))
    elif Path(path).exists():
        if trainer is not None and type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            check_archive(path)
    elif ":" not in str(path):
        raise _not_there(path)


def _not_there(path: str | os.PathLike[str]) -> FileNotFoundError:
    """The error for a path where nothing is, which names the latest checkpoints near it."""
    folder = next(parent for parent in Path(path).absolute().parents if parent.is_dir())
    found = (each for depth in range(4) for each in folder.glob("*/" * depth + "*.ckpt"))
    latest = sorted(found, key=lambda each: each.stat().st_mtime)[-_LISTED:]
    near = [os.path.relpath(each) for each in latest if is_folder(each) or is_readable(each)]
    asked = Path(path).absolute().parent
    there = f"; the folder {asked} does not exist" if asked != folder else "" if near else f"; {folder} has no other"
    if near:
        there += f"; set it to one that is there: {', '.join(near)}"
    return FileNotFoundError(f"ckpt_path={str(path)!r}: there is no such checkpoint{there}")


def _check_cuts(options: Options, module: LightningModule) -> None:
    """Look for the modules, or parameters, that stages begin with; some modules are built on the ranks alone."""
    if is_overridden("configure_model", module):
        return
    layers = [name for name, each in module.named_modules() if name and next(each.parameters(), None) is not None]
    known = {name for name, _ in (*module.named_modules(), *module.named_parameters())}
    cuts, num_stages = options.pipeline_cuts or (), _num_stages(options)
    is_chosen = options.asks_for_plan or options.sizes["pipeline_parallel_size"] == 1  # as in a trial on one device
    if cuts and len(cuts) != num_stages - 1 and not is_chosen:
        raise wrong_number_of_cuts(cuts, num_stages)
    for cut in cuts:
        if cut not in known:
            first = next(name for name, _ in module.named_parameters())  # of the first stage, in all likelihood
            later = [name for name in layers if not first.startswith(f"{name}.")]
            raise UnfitError(
                f"pipeline_cuts names {cut!r}, but {type(module).__name__} has no module of that name; name the first"
                f" module of each stage but the first{meant_of(cut, later)}",
                entry="cuts-name",
            )


def _check_batch(options: Options, module: LightningModule, given: Mapping[str, Any]) -> None:
    """Compare the number of microbatches with the batch size, where nothing else than the loader makes batches."""
    loader = given.get("train_dataloaders")
    is_changed = options.batch_splitter is not None or any(is_overridden(hook, module) for hook in _BATCH_HOOKS)
    if isinstance(loader, DataLoader) and loader.collate_fn is default_collate and not is_changed:
        check_number(loader.batch_size, options.microbatches)


def _check_stages(options: Options, module: LightningModule, given: Mapping[str, Any]) -> None:
    """Plan stages in this process where there may be too few layers, or where cuts may be out of order."""
    if is_overridden("configure_model", module):
        return
    holders = [each for each in module.modules() if next(each.parameters(recurse=False), None) is not None]
    if _may_be_out_of_order(options.pipeline_cuts or (), module) or len(holders) < _num_stages(options):
        # It derives a strategy from the user's, and is above this folder.
        importlib.import_module(f"{_PACKAGE}.planning.stages").check_stages(options, module, given)


def _num_stages(options: Options) -> int:
    if not isinstance(options.stage_widths, str | None):
        return len(options.stage_widths)
    return int(options.mesh_sizes["pipeline_parallel_size"]) * options.stages_of_each_rank


def _may_be_out_of_order(cuts: Sequence[str], module: LightningModule) -> bool:
    """Whether the module has another order than cuts: modules are mostly used in the order in which they are made."""
    names = [name for name, _ in module.named_parameters()]
    starts = [next((i for i, n in enumerate(names) if f"{n}.".startswith(f"{cut}.")), 0) for cut in cuts]
    return any(start <= before for before, start in pairwise([0, *starts]))
