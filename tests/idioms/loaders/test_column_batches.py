"""Batches of columns that iterate over their samples, as those of tensordict do."""

from collections.abc import MutableMapping

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from harness.verification import COMBINED, LAYOUTS, TENSOR, check
from models.regression import FEATURES, Regressor, mlp, regression_data


class Columns(MutableMapping):
    """As a TensorDict: it iterates over its samples, and its columns have one length."""

    def __init__(self, members, batch_size=()):
        self._members, self.batch_size = {}, tuple(batch_size)
        self.update(members.items())

    @property
    def batch_dims(self):
        return len(self.batch_size)

    def auto_batch_size_(self, dims):
        self.batch_size = tuple(next(iter(self._members.values())).shape[:dims])
        return self

    def to(self, device):
        return self

    def keys(self):
        return self._members.keys()

    def items(self):
        return self._members.items()

    def values(self):
        return self._members.values()

    def __iter__(self):
        return (Columns({key: value[row] for key, value in self.items()}, ()) for row in range(self.batch_size[0]))

    def __len__(self):
        return self.batch_size[0]

    def __getitem__(self, key):
        return self._members[key]

    def __setitem__(self, key, value):
        assert value.shape[: self.batch_dims] == self.batch_size, f"{value.shape} in columns of {self.batch_size}"
        self._members[key] = value

    def __delitem__(self, key):
        del self._members[key]


def columns(rows):
    return Columns({"x": torch.stack([x for x, _ in rows]), "y": torch.stack([y for _, y in rows])}, (len(rows),))


def column_data():
    data = regression_data()
    return {name: DataLoader(loader.dataset, 8, collate_fn=columns) for name, loader in data.items()}


class OfColumns(Regressor):
    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(), nn.Linear(FEATURES, 1)

    def forward(self, x):
        return self.head(self.body(x))

    def shared_step(self, batch):
        return super().shared_step((batch["x"], batch["y"]))


@pytest.mark.parametrize("layout", [*LAYOUTS, COMBINED, TENSOR], ids=lambda layout: layout.name)
def test_batches_that_iterate_over_samples(worlds, layout):
    report = check(worlds, OfColumns, layout, make_data=column_data)
    assert report.outcome == "same" and "sharded instead" not in str(report), str(report)
