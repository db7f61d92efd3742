"""Layers that take a branch for which their tensor plan was not proved: they run in full, as in one process."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness.trainer_runs import trainer_of
from harness.verification import TENSOR, check
from lightning_hybrid.verify import Layout
from models.regression import FEATURES, Regressor, regression_data

TP2 = Layout("tp2", devices=2, strategy={"tensor_parallel_size": 2})
REPLICAS = Layout("dp2 x tp2", devices=4, strategy={"tensor_parallel_size": 2})
ZERO = Layout("dp2 x tp2, ZeRO-3", devices=4, strategy={"tensor_parallel_size": 2, "zero_stage": 3})
SEQUENCE = Layout("tp2, sequence", devices=2, strategy={"tensor_parallel_size": 2, "sequence_parallel": True})
CONTEXT = Layout("cp2", devices=2, strategy={"context_parallel_size": 2})
BOTH = Layout("cp2 x tp2", devices=4, strategy={"context_parallel_size": 2, "tensor_parallel_size": 2})

FULL, SELECTIVE = (
    Layout(f"tp2, {how}", devices=2, strategy={"tensor_parallel_size": 2, "recompute": how})
    for how in ("full", "selective")
)


class Block(nn.Module):
    late = False

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(FEATURES, 32), nn.Linear(32, FEATURES)

    def forward(self, x):
        return x + self.fc2(self.between(torch.relu(self.fc1(x)), x))


class ByAttribute(Block):
    def between(self, h, x):
        return h.softmax(-1) if self.late else h


class ByConfig(Block):
    """Branches on an object that layers share."""

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
    """Counts calls in a buffer, which must not count twice."""

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


class ByArgument(Block):
    """The same lines, with other numbers."""

    width = 32

    def between(self, h, x):
        return h * (torch.arange(h.shape[-1], device=h.device) < (self.width if self.late else 64))


class ByFunction(Block):
    """Another function at the same line."""

    def between(self, h, x):
        return (torch.softmax if self.late else _as_it_is)(h, -1)


def _as_it_is(h, dim):
    return h


class ReturnsIntermediate(Block):
    """Returns its intermediate value too."""

    def forward(self, x):
        h = torch.relu(self.fc1(x))
        out = x + self.fc2(h)
        return (out, h) if self.late else (out, None)


class WritesInput(Block):
    def forward(self, x):
        if self.late:
            x = x.clone()
            x.mul_(0.5)
        return super().forward(x)

    def between(self, h, x):
        return h


class ReadGuards(Block):
    """Reads values for validation, as many modules do."""

    def between(self, h, x):
        return torch.nan_to_num(h) if torch.isnan(h).any() else h


class Drops(Block):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return self.drop(super().forward(x))

    def between(self, h, x):
        return h.softmax(-1) if self.late else h


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


class Argument(Two):
    make_block = ByArgument


class Function(Two):
    make_block = ByFunction


class More(Two):
    make_block = ReturnsIntermediate

    def forward(self, x):
        x, first = self.a(x)
        x, second = self.b(x)
        kept = 0 if first is None else first.amax(1, keepdim=True) + second.amax(1, keepdim=True)
        return self.head(x) + kept


class Written(Two):
    make_block = WritesInput


class Guarded(Two):
    make_block = ReadGuards


class Dropped(Two):
    make_block = Drops


class Checkpointed(Attribute):
    def forward(self, x):
        return self.head(checkpoint(self.b, checkpoint(self.a, x, use_reentrant=False), use_reentrant=False))


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
    *((module, TP2) for module in (Attribute, Config, Input, Shape, State, Argument, Function, More, Written)),
    *((module, layout) for module in (Attribute, Dropped) for layout in (FULL, SELECTIVE)),
    *((module, TP2) for module in (Guarded, Dropped, Checkpointed)),
    *((Attribute, layout) for layout in (TENSOR, REPLICAS, ZERO)),
    *((Sequence, layout) for layout in (TP2, SEQUENCE, CONTEXT, BOTH)),
    (State, REPLICAS),
]


@pytest.mark.parametrize(("module", "layout"), CASES, ids=named)
def test_matches_one_process(worlds, module, layout):
    report = check(worlds, module, layout, make_data=data, steps=6, num_microbatches=1)
    assert report.outcome == "same", str(report)


def warned(module_class, devices, options):
    torch.manual_seed(0)
    trainer = trainer_of(devices, 1, strategy_options=options, precision="64-true", max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module_class(), data()["train_dataloaders"])
    return [str(warning.message) for warning in caught if "batches run unsharded" in str(warning.message)]


class Never(Attribute):
    def on_train_batch_start(self, batch, batch_idx):
        pass


@pytest.mark.parametrize(("module", "reports"), [(Attribute, ["a .. b (2)"]), (Never, [])])
def test_layers_are_reported_once_in_one_warning(worlds, module, reports):
    first, second = worlds.run(2, warned, module, 2, {"tensor_parallel_size": 2})
    assert second == [] and [text.partition(":")[0] for text in first] == reports, first
    assert all("test_unproved_branches.py" in text for text in first)
