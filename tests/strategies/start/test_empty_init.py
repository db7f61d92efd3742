"""Modules built empty: the values of one process on every layout, and never more memory than a rank's own shards."""

import os

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from harness.trainer_runs import assert_same, ignore_warnings, trainer_of, weights_of
from lightning_hybrid.errors import InitialValueError
from lightning_hybrid.step.standins.tensors import is_absent
from models.tiny import FEATURES, Tiny, loader


class Scaled(Tiny):
    """Tied weights, values set by the constructor, buffers, and an optimizer older than the strategy."""

    def __init__(self, width=FEATURES):
        pl.LightningModule.__init__(self)
        self.inlet = nn.Linear(FEATURES, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(4)])
        self.layers[3].weight = self.layers[0].weight
        self.outlet = nn.Linear(width, 1)
        self.gain = nn.Parameter(torch.randn(width))
        self.register_buffer("mask", torch.linspace(0.5, 1.5, width), persistent=False)
        self.register_buffer("scale", torch.rand(width))
        for index, layer in enumerate(self.layers):
            nn.init.normal_(layer.weight, std=0.5 / (index + 1))
        self.double()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.05)

    def forward(self, x):
        x = self.inlet(x) * self.gain
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.mask * self.scale
        return self.outlet(x)

    def configure_optimizers(self):
        return self.optimizer


class MeasuresMemory(pl.Callback):
    """Memory of a rank when training starts, and its peak until then."""

    def __init__(self):
        self.start = {}
        self.absent = []
        self.stored_bytes = 0
        self.peak_bytes = 0
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)

    def measure(self):
        self._profiler.start()

    def on_train_start(self, trainer, pl_module):
        if self._profiler.profiler is not None:
            self._profiler.stop()
            events = self._profiler.profiler.kineto_results.events()
            memory = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
            allocated = 0
            for _, nbytes in memory:
                allocated += nbytes
                self.peak_bytes = max(self.peak_bytes, allocated)
        for name, p in pl_module.named_parameters():
            if is_absent(p):
                self.absent.append(name)
            else:
                with torch._C.DisableTorchFunction():  # a read of one rank alone
                    self.start[name] = p.detach().clone()
                    self.stored_bytes += p.untyped_storage().nbytes()
        self.buffers = {name: b.clone() for name, b in pl_module.named_buffers()}


def fit(size, pp, empty, build=Scaled, batch=8, measure=False, **options):
    ignore_warnings()
    watch = MeasuresMemory()
    trainer = trainer_of(size, pp, callbacks=[watch], **options)
    torch.manual_seed(5 + int(os.environ["RANK"]))  # the first rank's values count
    if measure:
        watch.measure()
    with trainer.init_module(empty_init=empty):
        model = build()
    trainer.fit(model, loader(batch))
    return watch, weights_of(model), model


def on_rank(*args, **kwargs):
    watch, weights, model = fit(*args, **kwargs)
    return watch.start, watch.absent, watch.buffers, weights, model.layers[3].weight is model.layers[0].weight


def reference(replicas):
    """Plain Lightning, an ordinary constructor."""
    ignore_warnings()
    torch.manual_seed(5)
    watch = MeasuresMemory()
    model = Scaled()
    trainer_of(callbacks=[watch]).fit(model, loader(8, replicas=replicas))
    return watch.start, watch.buffers, weights_of(model)


@pytest.mark.parametrize(("size", "pp"), [(1, 1), (2, 2), (2, 1), (4, 2)])
def test_every_layout_matches_one_process_without_empty_init(worlds, size, pp):
    [(start, buffers, expected)] = worlds.run(1, reference, size // pp if size > pp else None)
    options = {"strategy_options": {"num_microbatches": 1}}  # the strategy, also on one rank
    for began, absent, stored, weights, tied in worlds.run(
        size, on_rank, size, pp, True, batch=8 * pp // size, **options
    ):
        assert tied and set(began) | set(absent) == set(start)
        assert bool(absent) == (pp > 1)
        for name, value in began.items():
            assert torch.equal(value, start[name]), name
        for name, value in buffers.items():
            assert torch.equal(stored[name], value), name
        assert_same(weights, expected)


WIDTH = 512  # a layer is 2 MiB in float64, which states of generators and messages of 64 KiB do not hide
LAYER = 8 * WIDTH * WIDTH


def wide():
    return Scaled(WIDTH)


class Late(pl.LightningModule):
    """The same, built in `configure_model`."""

    def configure_model(self):
        with self.trainer.init_module(empty_init=True):
            self.inner = wide()

    def training_step(self, batch, batch_idx):
        return self.inner.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def late(size, pp):
    ignore_warnings()
    torch.manual_seed(5)
    watch, model = MeasuresMemory(), Late()
    trainer = trainer_of(size, pp, callbacks=[watch], precision="64-true")
    watch.measure()
    trainer.fit(model, loader(8))
    return watch.peak_bytes, watch.stored_bytes


def measured(size, pp, empty):
    watch, _, _ = fit(size, pp, empty, wide, measure=True, precision="64-true")
    return watch.peak_bytes, watch.stored_bytes


def test_ranks_allocate_at_most_their_stages_and_one_layer(worlds):
    for peak, stored in [*worlds.run(2, measured, 2, 2, True), *worlds.run(2, late, 2, 2)]:
        assert 0 < stored <= 2.2 * LAYER
        assert stored <= peak <= stored + 1.2 * LAYER, f"{peak} bytes at most, of which {stored} stay"
    for peak, _ in worlds.run(2, measured, 2, 2, False):
        assert peak >= 3 * LAYER, "the measurement misses the full module"


def saved(path):
    ignore_warnings()
    torch.manual_seed(1)
    model = Scaled()
    trainer = trainer_of(max_steps=1)
    trainer.fit(model, loader(8))
    trainer.save_checkpoint(path)
    trainer_of(max_steps=2).fit(model, loader(8), ckpt_path=path)
    return weights_of(model)


def resumed(size, pp, path, build):
    ignore_warnings()
    torch.manual_seed(2)
    trainer = trainer_of(size, pp, max_steps=2)
    with trainer.init_module(empty_init=True):
        model = build()
    trainer.fit(model, loader(8), ckpt_path=path)
    return weights_of(model)


class Configured(Scaled):
    """Built on the meta device by the user's hook."""

    def __init__(self, width=FEATURES):
        pl.LightningModule.__init__(self)
        self.width = width

    def configure_model(self):
        if not hasattr(self, "layers"):
            with torch.device("meta"):
                self.layers = nn.ModuleList([nn.Linear(FEATURES, self.width) for _ in range(4)])
                self.layers[3].weight = self.layers[0].weight
                self.outlet = nn.Linear(self.width, 1)
            self.double()

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.uniform_(module.weight, 0.6, 0.9)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.outlet(x)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def test_checkpoint_replaces_initial_values(worlds, tmp_path):
    path = str(tmp_path / "one.ckpt")
    [expected] = worlds.run(1, saved, path)
    for actual in worlds.run(2, resumed, 2, 2, path, Scaled):
        assert_same(actual, expected)


def configured(size, pp, **options):
    ignore_warnings()
    torch.manual_seed(5)
    watch = MeasuresMemory()
    model = Configured()
    trainer_of(size, pp, callbacks=[watch], **options).fit(model, loader(8))
    return watch.start, weights_of(model), model.layers[3].weight is model.layers[0].weight


def test_meta_model_is_reset_equally_on_every_layout(worlds):
    [(start, expected, _)] = worlds.run(1, configured, 1, 1, strategy_options={"num_microbatches": 1})
    assert float(start["layers.1.weight"].min()) >= 0.6  # reset_parameters draws at most 0.5
    assert 0 < float(start["layers.1.bias"].abs().max()) <= 0.5
    for actual, weights, tied in worlds.run(2, configured, 2, 2):
        assert tied and 0 < len(actual) < len(start)
        for name, value in actual.items():
            assert torch.equal(value, start[name]), name
        assert_same(weights, expected)


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(FEATURES).double())

    def forward(self, x):
        return x * self.weight


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.ones(FEATURES).double(), persistent=False)

    def forward(self, x):
        return x * self.frequencies


def refused(size, part):
    ignore_warnings()

    class Refused(Tiny):
        def configure_model(self):
            with torch.device("meta"):
                self.layers.append(part())

        def on_train_start(self):
            raise AssertionError("it trains")

    with pytest.raises(InitialValueError) as caught:
        trainer_of(size, size, strategy_options={"num_microbatches": 1}).fit(Refused(), loader(8))
    return str(caught.value)


@pytest.mark.parametrize(("part", "name"), [(Bare, "layers.5.weight"), (Rotary, "layers.5.frequencies")])
def test_uninitialized_values_are_refused_by_name(worlds, part, name):
    for message in worlds.run(2, refused, 2, part):
        assert name in message and "reset_parameters()" in message and "init_module(empty_init=True)" in message
