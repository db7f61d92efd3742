"""Running statistics of layers that tensor ranks share: validation, hooks and copies read the full ones."""

import copy
import warnings

import pytest
import torch
from torch import nn

from harness.trainer_runs import trainer_of
from harness.verification import check
from lightning_hybrid.verify import Layout
from models.regression import FEATURES, Regression, regression_data

TP2 = Layout("tp2", devices=2, strategy={"tensor_parallel_size": 2})
SLOW = [
    Layout("tp2 x pp2", devices=4, strategy={"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    Layout("tp2, full", devices=2, strategy={"tensor_parallel_size": 2, "recompute": "full"}),
    Layout("tp2, selective", devices=2, strategy={"tensor_parallel_size": 2, "recompute": "selective"}),
]


class Tracked(nn.Module):
    """An instance norm that keeps statistics of its channels."""

    def __init__(self, features):
        super().__init__()
        self.norm = nn.InstanceNorm1d(features, affine=True, track_running_stats=True)

    def forward(self, x):
        return self.norm(torch.stack([x, x.square(), x.sin()], -1)).sum(-1)


class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(FEATURES, 16), norm(16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x):
        return self.model(x)


class Wrapped(Regression):
    norm = nn.BatchNorm1d

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(), Net(self.norm)


class OneByOne(Wrapped):
    def forward(self, x):
        if self.training:
            return self.head(x)
        for layer in self.head.model:
            x = layer(x)
        return x


class Instances(Wrapped):
    norm = Tracked


class Averaged(Wrapped):
    """Validates an average of the weights; a hook reads, copies and writes the statistics."""

    def __init__(self):
        super().__init__()
        self.average = torch.optim.swa_utils.AveragedModel(self.head, use_buffers=True).requires_grad_(False)

    def forward(self, x):
        return self.head(x) if self.training else self.average(x)

    def on_train_batch_end(self, *_):
        self.average.update_parameters(self.head)
        self.log("mean", copy.deepcopy(self.head).model[1].running_mean.square().sum())
        self.head.model[1].running_var.mul_(torch.linspace(0.5, 1.5, 16))


@pytest.mark.parametrize("layout", [TP2, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)], ids=str)
@pytest.mark.parametrize("module", [Wrapped, OneByOne, Instances, Averaged])
def test_matches_one_process(worlds, module, layout):
    report = check(worlds, module, layout, num_microbatches=1)
    assert report.outcome == "same", str(report)


def warned(module_class):
    trainer = trainer_of(2, 1, strategy_options=TP2.strategy, precision="64-true", num_sanity_val_steps=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module_class(), **regression_data())
    return [text for each in caught if "tensor plan" in (text := str(each.message))]


def test_validation_runs_sharded(worlds):
    assert worlds.run(2, warned, Wrapped) == [[], []]
