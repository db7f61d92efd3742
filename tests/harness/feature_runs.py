"""A module and its runs for tests of Lightning's features: one process, stages, replicas, and both."""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback

from harness.trainer_runs import trainer_of
from models.tiny import loader

LAYOUTS = {"pp2": (2, 2), "dp2": (2, 1), "dp2 x pp2": (4, 2)}
SHARED_OUT = {"dp2 x zero3": (2, 1), "tp2": (2, 1)}  # for what is run by `check`
_OPTIONS = {"dp2 x zero3": {"zero_stage": 3}, "tp2": {"tensor_parallel_size": 2}}
_references: dict[Any, Any] = {}


class RecordsBatches(Callback):
    """Records the learning rates and losses of each batch, and the step at each epoch end."""

    def __init__(self):
        self.rates, self.losses, self.batches = [], [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.rates.append(tuple(group["lr"] for group in trainer.optimizers[0].param_groups))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(trainer.callback_metrics["loss_step"]))

    def on_train_epoch_end(self, trainer, pl_module):
        self.batches.append(trainer.fit_loop.epoch_loop.total_batch_idx)


@dataclass
class Run:
    """One rank's part of a run.

    Attributes:
        size: Of the world; 1 is plain Lightning.
        pp: Stages.
        folder: Shared by the ranks, fresh.
        strategy: Further options of the strategy.
    """

    size: int
    pp: int
    folder: str
    strategy: dict[str, Any] = field(default_factory=dict)

    @property
    def plain(self):
        return self.size == 1

    def data(self, batch_size=8, num=32, **options):
        """Batches of which the union over the replicas is the one process's."""
        inner = ("tensor_parallel_size", "context_parallel_size")
        replicas = self.size // math.prod([self.pp, *(self.strategy.get(size, 1) for size in inner)])
        return loader(batch_size // replicas, num, replicas=1 if replicas == 1 else None, **options)

    def val_data(self, num=16):
        return loader(8 * self.pp // self.size, num)

    def trainer(self, *, callbacks=(), microbatches=2, strategy_options=None, **options):
        self.recorder = RecordsBatches()
        strategy_arguments = (
            {} if self.plain else {"num_microbatches": microbatches, **self.strategy, **(strategy_options or {})}
        )
        options = {"log_every_n_steps": 1, "num_sanity_val_steps": 0, "default_root_dir": self.folder, **options}
        return trainer_of(
            self.size, self.pp, strategy_options=strategy_arguments, callbacks=[*callbacks, self.recorder], **options
        )

    def numbers(self, trainer, module, **more):
        """Values that must match one process on every rank."""
        seen = self.recorder
        lists = {"rates": [r for row in seen.rates for r in row], "losses": seen.losses, "batches": seen.batches}
        return {
            **{f"parameter {name}": p.detach().clone() for name, p in module.named_parameters()},
            **{f"buffer {name}": b.detach().clone() for name, b in module.named_buffers()},
            **{f"metric {name}": value for name, value in trainer.callback_metrics.items()},
            **{name: torch.tensor(values, dtype=torch.float64) for name, values in lists.items()},
            "steps": trainer.global_step,
            "epoch": trainer.current_epoch,
            **more,
        }


def on_rank(feature, size, pp, folder, options=None):
    """Run one feature on this rank."""
    warnings.simplefilter("ignore")
    os.makedirs(folder, exist_ok=True)
    return feature(Run(size, pp, folder, options or {}))


def check(worlds, tmp_path, feature, layout, *, rtol=1e-9):
    """Under a layout, a feature comes to the numbers of one process, on every rank."""
    if feature not in _references:
        [_references[feature]] = worlds.run(1, on_rank, feature, 1, 1, str(tmp_path / "one"))
    size, pp = {**LAYOUTS, **SHARED_OUT}[layout]
    options = _OPTIONS.get(layout, {})
    for result in worlds.run(size, on_rank, feature, size, pp, str(tmp_path / "many"), options):
        compare(result, _references[feature], rtol=rtol)


def refusal(worlds, tmp_path, feature, layout):
    """The error text of each rank that refuses."""
    size, pp = LAYOUTS[layout]
    return worlds.run(size, refused_on_rank, feature, size, pp, str(tmp_path / "many"))


def refused_on_rank(feature, size, pp, folder):
    try:
        on_rank(feature, size, pp, folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def compare(result, expected, *, rtol=1e-9, atol=1e-12):
    """Asserts the same numbers under the same names, and names those that differ."""
    assert set(result) == set(expected), sorted(set(result) ^ set(expected))
    for name, value in expected.items():
        got = torch.as_tensor(result[name], dtype=torch.float64)
        wanted = torch.as_tensor(value, dtype=torch.float64)
        same = got.shape == wanted.shape and torch.allclose(got, wanted, rtol=rtol, atol=atol, equal_nan=True)
        assert same, f"{name} is {got}, and {wanted} in one process"
