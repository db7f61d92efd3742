"""Layers that do what their tensor plan was not proved for: they run full then, to the numbers of one process."""

import warnings

import pytest
import torch
from lightning_runs import trainer_of
from torch import nn
from wild.suite import FEATURES, TENSOR, check, regression_data
from wild.test_inside_forward import Regressor

from lightning_hybrid.verify import Layout

TP2 = Layout("tp2", devices=2, strategy={"tensor_parallel_size": 2})
REPLICAS = Layout("dp2 x tp2", devices=4, strategy={"tensor_parallel_size": 2})
ZERO = Layout("dp2 x tp2, ZeRO-3", devices=4, strategy={"tensor_parallel_size": 2, "zero_stage": 3})
SEQUENCE = Layout("tp2, sequence", devices=2, strategy={"tensor_parallel_size": 2, "sequence_parallel": True})
CONTEXT = Layout("cp2", devices=2, strategy={"context_parallel_size": 2})
BOTH = Layout("cp2 x tp2", devices=4, strategy={"context_parallel_size": 2, "tensor_parallel_size": 2})


class Block(nn.Module):
    late, drop = False, 0.0

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(FEATURES, 32), nn.Linear(32, FEATURES)

    def forward(self, x):
        return x + self.fc2(self.between(torch.relu(self.fc1(x)), x))


class ByAttribute(Block):
    def between(self, h, x):
        return h.softmax(-1) if self.late else h


class ByConfig(Block):
    """Holds what it goes by in an object that layers share."""

    def __init__(self, config):
        super().__init__()
        self.config = config

    def between(self, h, x):
        return h * h.sum(-1, keepdim=True) if self.config.late else h


class ByInput(Block):
    def between(self, h, x):
        if x.flatten()[0] > 0.5:
            h = h.flip(-1)
        return h


class ByShape(Block):
    def between(self, h, x):
        if x.shape[0] % 3 == 0:
            h = h.cumsum(-1)
        return h


class WithState(Block):
    """Counts in a buffer what must not count twice."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls.add_(1)
        return super().forward(self.norm(x)) * (1 + 0.01 * self.calls)

    def between(self, h, x):
        return h.roll(3, -1) if self.late else h


class Switches:
    late = False


class Two(Regressor):
    def __init__(self):
        super().__init__()
        self.switches = Switches()
        self.a, self.b = self.make_block(), self.make_block()
        self.head = nn.Linear(FEATURES, 1)

    def on_train_batch_start(self, batch, batch_idx):
        late = self.trainer.fit_loop.epoch_loop.total_batch_idx in (2, 3)
        self.a.late = self.b.late = self.switches.late = late

    def forward(self, x):
        return self.head(self.b(self.a(x)))


class Attribute(Two):
    make_block = ByAttribute


class Config(Two):
    def make_block(self):
        return ByConfig(self.switches)


class Input(Two):
    make_block = ByInput


class Shape(Two):
    make_block = ByShape


class State(Two):
    make_block = WithState


class Sequence(Attribute):
    """Of several positions."""

    def forward(self, x):
        x = x.unsqueeze(1) * torch.arange(1, 5, dtype=x.dtype, device=x.device).view(1, -1, 1) / 4
        return self.head(self.b(self.a(x))).mean(1)


def data():
    return regression_data(num_train=90, batch_size=9)


def named(value):
    return getattr(value, "__name__", None) or value.name


CASES = [
    *((module, TP2) for module in (Attribute, Config, Input, Shape, State)),
    *((Attribute, layout) for layout in (TENSOR, REPLICAS, ZERO)),
    *((Sequence, layout) for layout in (TP2, SEQUENCE, CONTEXT, BOTH)),
    (State, REPLICAS),
]


@pytest.mark.parametrize(("module", "layout"), CASES, ids=named)
def test_same_numbers(worlds, module, layout):
    report = check(worlds, module, layout, make_data=data, steps=6, num_microbatches=1)
    assert report.outcome == "same", str(report)


def warned(module_class, devices, options):
    torch.manual_seed(0)
    trainer = trainer_of(devices, 1, strategy_options=options, precision="64-true", max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module_class(), data()["train_dataloaders"])
    return [str(warning.message) for warning in caught if "was proved" in str(warning.message)]


class Never(Attribute):
    def on_train_batch_start(self, batch, batch_idx):
        pass


@pytest.mark.parametrize(("module", "told"), [(Attribute, ["a", "b"]), (Never, [])])
def test_each_layer_is_told_of_once(worlds, module, told):
    first, second = worlds.run(2, warned, module, 2, {"tensor_parallel_size": 2})
    assert second == [] and [text.partition(" ")[0] for text in first] == told, first
    assert all("test_unproved_branches.py" in text for text in first)
