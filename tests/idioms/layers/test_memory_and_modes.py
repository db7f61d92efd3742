"""Idioms that save memory or time, and torch modes around them."""

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint as checkpointing
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from harness.layouts import each_under
from harness.verification import BOTH, LAYOUTS, STAGES, check
from lightning_hybrid.verify import Layout
from models.autograd_functions import ManualCheckpoint
from models.regression import FEATURES, Regression

# --- activation checkpointing ----------------------------------------------------------------------------------------


class ChecksPairs(Regression):
    """Two layers at a time, with dropout inside: the second run must repeat the draws."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.append(nn.Dropout(0.2))

    def pair(self, first, x):
        return self.layers[first + 1](self.layers[first](x))

    def forward(self, x):
        for first in (0, 2):
            # The keyed draws of the reference have no second run, so the reference does not recompute.
            again = dist.is_initialized() and dist.get_world_size() > 1
            x = checkpoint(self.pair, first, x, use_reentrant=False) if again else self.pair(first, x)
        return self.head(x)


class ChecksReentrantly(Regression):
    def forward(self, x):
        x = self.layers[0](x)
        x = checkpoint(lambda h: self.layers[3](self.layers[2](self.layers[1](h))), x, use_reentrant=True)
        return self.head(x)


class ChecksAll(Regression):
    def forward(self, x):
        x.requires_grad_()
        for layer in self.layers:
            x = checkpointing.checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


class ChecksSegments(Regression):
    def forward(self, x):
        x = checkpoint_sequential(nn.Sequential(*self.layers), 2, x, use_reentrant=False)
        return self.head(x)


class ChecksWhenTraining(Regression):
    """The full forward, only while training."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(checkpoint(self.forward, x, use_reentrant=False, preserve_rng_state=False), y)
        self.log("loss", loss)
        return loss


class Recomputes(nn.Module):
    """A recomputed layer, with dropout inside."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.drop = layer, nn.Dropout(0.2)

    def forward(self, x):
        return ManualCheckpoint.apply(self.run, x, *self.parameters())

    def run(self, x):
        return self.drop(F.dropout(self.layer(x), 0.1, self.training))


class ChecksByFunction(Regression):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Recomputes(layer) for layer in self.layers)


CHECKPOINTING = [ChecksPairs, ChecksReentrantly, ChecksAll, ChecksSegments, ChecksWhenTraining, ChecksByFunction]


@each_under("module", CHECKPOINTING, [STAGES, BOTH])
def test_manual_checkpointing(worlds, module, layout):
    report = check(worlds, module, layout)
    assert report.outcome == "same", str(report)


def test_a_function_that_runs_its_layer_again_draws_what_it_drew(worlds):
    report = check(worlds, ChecksByFunction, Layout("one device", devices=1, strategy={}), num_microbatches=2)
    assert report.outcome == "same", str(report)


@pytest.mark.parametrize("module", [ChecksPairs, ChecksReentrantly], ids=lambda module: module.__name__)
def test_manual_checkpointing_with_several_stages_per_rank(worlds, module):
    report = check(worlds, module, LAYOUTS[3])
    assert report.outcome == "same", str(report)


class Transformer(Regression):
    """A tiny model of transformers that checkpoints itself."""

    def __init__(self, reentrant=False):
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=16,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            use_cache=False,
        )
        self.layers = self.head = None
        self.model = LlamaForCausalLM(config)
        self.model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    def loss(self, batch):
        x, _ = batch
        tokens = (x.abs() * 7).long().clamp(0, 15)
        return self.model(input_ids=tokens, labels=tokens).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class ReentrantTransformer(Transformer):
    def __init__(self):
        super().__init__(reentrant=True)
        self.model.enable_input_require_grads()


@each_under(
    "module",
    [Transformer, ReentrantTransformer],
    [STAGES, BOTH],
    replicated=[],
    covered_by={ReentrantTransformer: Transformer},
)
def test_gradient_checkpointing_enable(worlds, module, layout):
    report = check(worlds, module, layout, steps=2, precision="32-true")
    assert report.outcome == "same", str(report)


# --- torch.compile, with a backend that needs no compiler ------------------------------------------------------------


class CompilesLayers(Regression):
    def __init__(self):
        super().__init__()
        for index in range(4):
            self.layers[index] = torch.compile(self.layers[index], backend="eager")


class CompilesInPlace(Regression):
    def configure_model(self):
        for layer in self.layers:
            layer.compile(backend="eager")


class CompilesFunction(Regression):
    def __init__(self):
        super().__init__()
        self.scale = torch.compile(lambda h, s: torch.tanh(h * s) + h, backend="eager")

    def forward(self, x):
        for layer in self.layers:
            x = self.scale(layer(x), 0.5)
        return self.head(x)


class CompilesNetwork(Regression):
    """The network is one compiled module."""

    def __init__(self):
        super().__init__()
        self.net = torch.compile(nn.Sequential(*self.layers, self.head), backend="eager")
        del self.layers, self.head

    def forward(self, x):
        return self.net(x)


@each_under(
    "module", [CompilesLayers, CompilesInPlace, CompilesFunction, CompilesNetwork], [STAGES, BOTH], replicated=[]
)
def test_compiled_modules(worlds, module, layout):
    report = check(worlds, module, layout, steps=2)
    assert report.outcome == "same", str(report)


# --- devices and modes -----------------------------------------------------------------------------------------------


class NamesDevice(Regression):
    def training_step(self, batch, batch_idx):
        with torch.device(self.device):
            noise = torch.arange(FEATURES) * 0.01
        x, y = batch
        with self.device:
            h = self.layers[0](x + noise)
            h = h * torch.ones(FEATURES, dtype=h.dtype)
            for layer in self.layers[1:]:
                h = layer(h) + torch.full((), 0.1)
        loss = F.mse_loss(self.head(h), y)
        self.log("loss", loss)
        return loss


class Counts(TorchFunctionMode):
    """A user mode: counts calls and replaces one function."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        if func is torch.sin:
            func = torch.cos
        return func(*args, **(kwargs or {}))


class UnderMode(Regression):
    def forward(self, x):
        x = self.layers[0](x)
        with Counts() as mode:
            x = torch.sin(x)
            for layer in self.layers[1:3]:
                x = layer(x)
            x = torch.sin(self.layers[3](x)) + torch.sin(torch.ones(FEATURES))
        assert mode.calls > 0
        return self.head(x)


class Autocasts(Regression):
    def forward(self, x):
        x = self.layers[1](self.layers[0](x))
        with torch.autocast("cpu", enabled=False):
            return self.head(self.layers[3](self.layers[2](x.double())))


class SavesOnDisk(Regression):
    """Saved activations are packed by hooks, half of the model under them."""

    def forward(self, x):
        x = self.layers[0](x)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            x = self.layers[2](self.layers[1](x))
        with torch.autograd.graph.save_on_cpu():
            x = torch.tanh(self.layers[3](x))
        return self.head(x)


@each_under("module", [NamesDevice, UnderMode, Autocasts, SavesOnDisk], [STAGES, BOTH])
def test_modes_inside_a_step(worlds, module, layout):
    report = check(worlds, module, layout)
    assert report.outcome == "same", str(report)
