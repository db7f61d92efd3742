"""Weights that are computed before each use: weight and spectral norm, old and new, and user parametrizations."""

import warnings

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from harness.layouts import each_under, under
from harness.verification import BOTH, COMBINED, LAYOUTS, STAGES, check
from lightning_hybrid import Hybrid3DStrategy
from models.regression import FEATURES, Regressor, mlp, regression_data

INTERLEAVED = LAYOUTS[3]


def old_weight_norm(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(layer)


class ResBlock(nn.Module):
    def __init__(self, width, norm):
        super().__init__()
        self.convs = nn.ModuleList(norm(nn.Conv1d(width, width, 3, dilation=d, padding=d)) for d in (1, 2))

    def forward(self, x):
        for conv in self.convs:
            x = x + conv(F.leaky_relu(x, 0.1))
        return x


class Vocoder(Regressor):
    """Upsamples by transposed convolutions and residual blocks, all with normalised weights."""

    norm = staticmethod(old_weight_norm)

    def __init__(self):
        super().__init__()
        self.pre = self.norm(nn.Conv1d(1, 8, 3, padding=1))
        self.ups = nn.ModuleList(self.norm(nn.ConvTranspose1d(8, 8, 4, 2, padding=1)) for _ in range(2))
        self.blocks = nn.ModuleList(ResBlock(8, self.norm) for _ in range(2))
        self.post = self.norm(nn.Conv1d(8, 1, 3, padding=1))

    def forward(self, x):
        x = self.pre(x.unsqueeze(1))
        for up, block in zip(self.ups, self.blocks, strict=True):
            x = block(up(F.leaky_relu(x, 0.1)))
        return torch.tanh(self.post(x)).mean(-1)

    def remove_weight_norm(self):
        for module in self.modules():
            if hasattr(module, "weight_g"):
                nn.utils.remove_weight_norm(module)


class NewVocoder(Vocoder):
    norm = staticmethod(parametrizations.weight_norm)

    def remove_weight_norm(self):
        for module in self.modules():
            if parametrize.is_parametrized(module, "weight"):
                parametrize.remove_parametrizations(module, "weight")


class Critic(Regressor):
    """Judges two batches in each step, so that the power iteration runs twice."""

    norm = staticmethod(nn.utils.spectral_norm)

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(self.norm(nn.Conv1d(1 if n == 0 else 6, 6, 3, padding=1)) for n in range(4))
        self.head = self.norm(nn.Linear(6 * FEATURES, 1))

    def forward(self, x):
        x = x.unsqueeze(1)
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.2)
        return self.head(x.flatten(1))

    def shared_step(self, batch):
        real, y = batch
        fake = real.flip(1) * 0.5
        return F.relu(1 - self(real)).mean() + F.relu(1 + self(fake)).mean() + 0.1 * y.mean()


class NewCritic(Critic):
    norm = staticmethod(parametrizations.spectral_norm)


class StoresValues(Critic):
    """Stores numbers, so that its step is re-run for its side effects."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss

    def on_train_epoch_end(self):
        self.log("mean_loss", sum(self.losses) / len(self.losses))


@each_under("module", [Vocoder, Critic], [*LAYOUTS, COMBINED])
def test_weight_and_spectral_norm_hooks(worlds, module, layout):
    report = check(worlds, module, layout, steps=2)
    assert report.outcome == "same", str(report)


@each_under("module", [NewVocoder, NewCritic], [BOTH, INTERLEAVED, COMBINED], replicated=[])
def test_parametrizations(worlds, module, layout):
    report = check(worlds, module, layout, steps=2)
    assert report.outcome == "same", str(report)


class Generates(Regressor):
    """A first layer's output becomes the weight of later ones, set on them as an attribute."""

    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(4), nn.Linear(FEATURES, 1)
        self.generator = nn.Linear(FEATURES, FEATURES * FEATURES)
        self.scales = nn.ModuleList(Scaled() for _ in range(2))

    def forward(self, x):
        weight = self.generator(x.mean(0)).view(FEATURES, FEATURES)
        x = self.body(x)
        for number, scaled in enumerate(self.scales):
            scaled.given = {"weight": weight * (number + 1)}
            x = scaled(x)
        return self.head(x)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.given = nn.Parameter(torch.ones(FEATURES)), None

    def forward(self, x):
        return x + torch.tanh(x @ self.given["weight"]) * self.scale


class SeesNoGrad(Regressor):
    """Reads a weight without a gradient at the start, and uses the value at the end."""

    def __init__(self):
        super().__init__()
        self.first, self.body, self.head = nn.Linear(FEATURES, FEATURES), mlp(3), nn.Linear(FEATURES, 1)

    def forward(self, x):
        hidden = F.linear(x, self.first.weight, self.first.bias)
        flat = self.first.weight.reshape(FEATURES, -1)
        with torch.no_grad():
            seen = flat.t()
        return self.head(self.body(hidden) @ seen)


class Rebinds(Regressor):
    """Rebinds its buffers in each step: counters of the step, and a running mean of the model's."""

    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(), nn.Linear(FEATURES, 1)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        return self.head(self.body(x)) * (1 + 0.01 * self.count)

    def training_step(self, batch, batch_idx):
        self.count = self.count + 1
        self.seen += batch[0].sum()
        return super().training_step(batch, batch_idx)


@under([STAGES, INTERLEAVED])
@pytest.mark.parametrize("module", [StoresValues, Generates, SeesNoGrad, Rebinds], ids=lambda module: module.__name__)
def test_side_effects_on_modules(worlds, module, layout):
    report = check(worlds, module, layout, steps=2)
    assert report.outcome == "same", str(report)


def removed(make, folder):
    warnings.simplefilter("ignore")
    torch.manual_seed(3)
    module = make()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    strategy = Hybrid3DStrategy(pipeline_parallel_size=2, num_microbatches=2)
    options = {"accelerator": "cpu", "max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 0}
    trainer = Trainer(devices=2, strategy=strategy, precision="64-true", default_root_dir=folder, **options, **quiet)
    trainer.fit(module, **regression_data())
    path = f"{folder}/{trainer.global_rank}.pt"
    torch.save(module.state_dict(), path)
    loaded = make().double()
    loaded.load_state_dict(torch.load(path))
    x = torch.ones(2, FEATURES, dtype=torch.float64)
    weights = [layer.weight.detach().clone() for layer in (module.pre, module.post)]
    module.remove_weight_norm()
    loaded.remove_weight_norm()
    assert torch.equal(module(x), loaded(x))
    return [float(weight.sum()) for weight in weights], module(x).tolist()


@pytest.mark.parametrize("make", [Vocoder, NewVocoder], ids=lambda make: make.__name__)
def test_norms_are_removed_after_fit(worlds, tmp_path, make):
    """On every rank, also where the weights were never computed."""
    first, second = worlds.run(2, removed, make, str(tmp_path))
    assert first[1] == second[1]
