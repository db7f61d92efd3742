"""Sampled architectures as the modules and data of a Trainer."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from models.sampled.architectures import Drawn, make


@functools.lru_cache(maxsize=1)
def _made(class_name: str) -> tuple[Drawn, dict[str, Tensor]]:
    return make(class_name)


def module_of(class_name: str) -> Drawn:
    """The module of a drawn architecture."""
    return copy.deepcopy(_made(class_name)[0])


def data_of(class_name: str, count: int = 16) -> dict[str, Any]:
    """A loader of its samples, repeated; batches of two."""
    _, batch = _made(class_name)
    size = len(next(iter(batch.values())))
    samples = [{name: values[index % size] for name, values in batch.items()} for index in range(count)]
    return {"train_dataloaders": DataLoader(samples, batch_size=2)}


def precision_of(class_name: str) -> str:
    """The precision in which it runs, as Lightning spells it: no finer than that of its loss."""
    module, batch = copy.deepcopy(_made(class_name))
    loss = module.training_step(batch)
    return "64-true" if {loss.dtype, *(p.dtype for p in module.parameters())} == {torch.float64} else "32-true"
