"""What one case of the conformance suite is, and the numbers that its data are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

BATCH = 8
SAMPLES = 48  # three batches of two replicas


@dataclass(frozen=True)
class Case:
    """One LightningModule as a package of its field writes it, with its data.

    Attributes:
        make_module: Makes the module; at the top of a file, since it is sent to other processes.
        make_data: Makes loaders or a datamodule, likewise.
        draws: Whether training or validation draws random numbers.
        steps: Batches of an epoch.
        epochs: How many.
        splits: Whether a batch can be split into microbatches; otherwise the strategy chooses their number.
        trainer: Arguments of the Trainer that belong to the module.
        of_each_replica: Metrics that hooks make of what each replica has kept, so that replicas know different ones.
        layouts: Names of further layouts that mean something for it: "cp2", "ep2", "sp2".
        precision: As Lightning spells it.
    """

    make_module: Callable[[], Any]
    make_data: Callable[[], Any] | None
    draws: bool = False
    steps: int = 3
    epochs: int = 1
    splits: bool = True
    trainer: Mapping[str, Any] = field(default_factory=dict)
    of_each_replica: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    precision: str = "64-true"

    @property
    def name(self) -> str:
        return self.make_module.__name__


def waves(*shape: int, count: int = SAMPLES, phase: float = 0.0) -> torch.Tensor:
    """Numbers between -1 and 1 that are a function of the sample's index, as float32."""
    index = torch.arange(count, dtype=torch.float64).view(-1, *[1] * len(shape))
    place = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(1, *shape)
    return torch.sin(0.7 * index * (1 + place % 5) + 0.31 * place + phase).float()


def loaders(train: Dataset, val: Dataset | None = None, **options: Any) -> dict[str, DataLoader]:
    """Loaders for ``Trainer.fit``; training data are shuffled."""
    given = {"train_dataloaders": DataLoader(train, BATCH, shuffle=True, **options)}
    return given if val is None else {**given, "val_dataloaders": DataLoader(val, BATCH, **options)}


def tensor_loaders(*columns: torch.Tensor, num_val: int = 16, **options: Any) -> dict[str, DataLoader]:
    """Loaders of tuples; the validation set is the beginning of the training set."""
    return loaders(TensorDataset(*columns), TensorDataset(*(column[:num_val] for column in columns)), **options)


class Rows(Dataset):
    """Samples that a function makes of their index."""

    def __init__(self, make_row: Callable[[int], Any], count: int = SAMPLES) -> None:
        self._make_row, self._count = make_row, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._make_row(index)
