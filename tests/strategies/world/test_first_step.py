"""The first step shows equal batches of replicas, and parameters that nothing uses."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from harness.trainer_runs import lines_of_lightning, trainer_of
from models.tiny import FEATURES, Tiny, loader


class Stream(IterableDataset):
    """Yields each replica its own eight samples, or all of them the same."""

    def __init__(self, is_divided):
        self.is_divided = is_divided

    def __iter__(self):
        start = 8 * torch.distributed.get_rank() if self.is_divided else 0
        for index in range(start, start + 8):
            x = torch.full((FEATURES,), float(index), dtype=torch.float64)
            yield {"x": x, "y": x[:1]}


class WithExtra(Tiny):
    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(2, 2).double()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run_on_stream(is_divided):
    trainer = trainer_of(2, 1, max_steps=2)
    data = DataLoader(Stream(is_divided), batch_size=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(WithExtra(), data)
    return [str(one.message) for one in caught if "same first batch" in str(one.message)]


def test_stream_that_no_one_divides_is_warned_of(worlds):
    [warning], others = worlds.run(2, run_on_stream, False)
    assert warning.startswith("2 replicas got the same first batch") and not others
    assert worlds.run(2, run_on_stream, True) == [[], []]


def run_on_samples(pp):
    trainer = trainer_of(2, pp, max_steps=2)
    with lines_of_lightning() as lines:
        trainer.fit(WithExtra(), loader(4))
    return lines


@pytest.mark.parametrize(
    ("pp", "line"),
    [
        (1, "parameters without a gradient in the first step: extra.weight, extra.bias"),
        (2, "; not used by the step: extra.weight, extra.bias"),
    ],
)
def test_unused_parameters_are_named(worlds, pp, line):
    lines, _ = worlds.run(2, run_on_samples, pp)
    assert line in "\n".join(lines), lines
