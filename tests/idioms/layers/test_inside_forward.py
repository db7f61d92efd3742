"""Operations inside forward: derivatives of the model, state on self, hooks, recurrence, repeated calls."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from harness.layouts import each_under, under
from harness.verification import COMBINED, LAYOUTS, check
from models.regression import FEATURES, Regressor, mlp

PP2, DP2, BOTH, INTERLEAVED, *_ = LAYOUTS


# --- derivatives -----------------------------------------------------------------------------------------------------


class Potential(nn.Module):
    """Energies and forces; the derivative is taken inside."""

    def __init__(self):
        super().__init__()
        self.layers = mlp(3)
        self.readout = nn.Linear(FEATURES, 1)

    def forward(self, positions):
        with torch.enable_grad():
            positions.requires_grad_(True)
            energy = self.readout(self.layers(positions))
            (gradient,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        return energy, -gradient


class Forces(Regressor):
    def __init__(self):
        super().__init__()
        self.potential = Potential()

    def shared_step(self, batch):
        positions, target = batch
        energy, forces = self.potential(positions)
        return F.mse_loss(energy, target) + 0.1 * F.mse_loss(forces, torch.sin(positions.detach()))


class ForcesOfPart(Regressor):
    """The derivative is taken inside one submodule of a larger model."""

    def __init__(self):
        super().__init__()
        self.potential = Potential()
        self.correction = mlp(4, 12)
        self.readout = nn.Linear(12, 1)

    def shared_step(self, batch):
        positions, target = batch
        energy, forces = self.potential(positions)
        features = torch.cat([forces, positions.detach()], dim=1)
        return F.mse_loss(energy + self.readout(self.correction(features)), target)


class ForcesOfSpecies(Regressor):
    """Other inputs of the energies come from layers without derivatives."""

    def __init__(self):
        super().__init__()
        self.species, self.layers, self.readout = mlp(4), mlp(2), nn.Linear(FEATURES, 1)

    def shared_step(self, batch):
        positions, target = batch
        kinds = self.species(torch.cos(positions))
        with torch.enable_grad():
            positions = positions.clone().requires_grad_(True)
            distances = positions.square() + 0.1 * positions
            energy = self.readout(self.layers(distances + kinds) * positions)
            (gradient,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        return F.mse_loss(energy, target) + 0.1 * F.mse_loss(-gradient, torch.sin(positions.detach()))


class ForcesThroughShared(ForcesOfSpecies):
    """A layer before the derivative is also inside of it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(self.species[0], *self.layers)


class ForcesOfStoredPositions(ForcesOfSpecies):
    """A layer finds the positions on itself, and not among its arguments."""

    class Scaled(nn.Linear):
        positions = None

        def forward(self, x):
            return super().forward(x) * self.positions

    def __init__(self):
        super().__init__()
        self.layers[0] = self.Scaled(FEATURES, FEATURES)

    def shared_step(self, batch):
        positions, target = batch
        with torch.enable_grad():
            positions = positions.clone().requires_grad_(True)
            self.layers[0].positions = positions
            energy = self.readout(self.layers(self.species(torch.cos(positions.detach()))))
            (gradient,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        self.layers[0].positions = None
        return F.mse_loss(energy, target) + 0.1 * F.mse_loss(-gradient, torch.sin(positions.detach()))


class GradientPenalty(Regressor):
    """The derivative of the output by a hidden layer, penalised."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.head = mlp(4), mlp(2), nn.Linear(FEATURES, 1)

    def forward(self, x):
        return self.head(self.decoder(self.encoder(x)))

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = self.encoder(x)
        out = self.head(self.decoder(hidden))
        (slope,) = torch.autograd.grad(out.sum(), hidden, create_graph=True)
        return F.mse_loss(out, y) + 0.1 * slope.square().sum(1).mean()


# --- state on self ---------------------------------------------------------------------------------------------------


class LazyMask(Regressor):
    """Masks and positions are built on first use, and cached."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, FEATURES)
        self.body, self.head = mlp(), nn.Linear(FEATURES, 1)
        self.mask = None
        self._positions = {}

    def positions(self, length, device):
        if length not in self._positions:
            self._positions[length] = torch.arange(length, device=device, dtype=torch.float64) / length
        return self._positions[length]

    def forward(self, x):
        hidden = self.embed(x.unsqueeze(-1)) + self.positions(x.shape[1], x.device).unsqueeze(-1)
        if self.mask is None or self.mask.shape[0] != hidden.shape[1]:
            self.mask = torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool).tril().to(hidden.device)
        scores = (hidden @ hidden.transpose(1, 2)).masked_fill(~self.mask, float("-inf"))
        return self.head(self.body(scores.softmax(-1) @ hidden)).mean(1)


class MaskLikeHidden(Regressor):
    """The cached mask takes its shape and type from a hidden state."""

    def __init__(self):
        super().__init__()
        self.first, self.body, self.head = nn.Linear(FEATURES, FEATURES), mlp(), nn.Linear(FEATURES, 1)
        self.scale = None

    def forward(self, x):
        hidden = self.first(x)
        if self.scale is None or self.scale.shape != hidden.shape:
            self.scale = torch.ones_like(hidden) * 0.5 + hidden.new_zeros(hidden.shape[1])
        return self.head(self.body(hidden * self.scale))


class Truncated(Regressor):
    """Hidden states are carried from batch to batch, detached."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(1, FEATURES, batch_first=True)
        self.body, self.head = mlp(), nn.Linear(FEATURES, 1)
        self.hidden = None

    def on_train_epoch_start(self):
        self.hidden = None

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = x.new_zeros(1, x.shape[0], FEATURES) if self.hidden is None else self.hidden
        out, hidden = self.cell(x.unsqueeze(-1), hidden)
        self.hidden = hidden.detach()
        loss = F.mse_loss(self.head(self.body(out[:, -1])), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        out, _ = self.cell(x.unsqueeze(-1))
        self.log("val_loss", F.mse_loss(self.head(self.body(out[:, -1])), y))


class Stashing(Regressor):
    """A forward hook stores activations, and the loss uses them."""

    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(), nn.Linear(FEATURES, 1)
        self.activations = {}
        for place in (0, 2):
            self.body[place][0].register_forward_hook(partial(self.store, f"layer {place}"))

    def store(self, name, module, args, output):
        self.activations[name] = output

    def forward(self, x):
        return self.head(self.body(x))

    def shared_step(self, batch):
        loss = super().shared_step(batch)
        penalty = sum(activation.abs().mean() for activation in self.activations.values())
        self.log("penalty", penalty)
        return loss + 0.01 * penalty


# --- recurrence ------------------------------------------------------------------------------------------------------


class Packed(Regressor):
    """An LSTM over packed sequences of different lengths, then a GRU cell in a loop."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, 8)
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.cell = nn.GRUCell(16, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        lengths = 2 + (x[:, 0] > 0).long() * 3
        packed = pack_padded_sequence(self.embed(x.unsqueeze(-1)), lengths, batch_first=True, enforce_sorted=False)
        out, (hidden, _) = self.lstm(packed)
        out, _ = pad_packed_sequence(out, batch_first=True)
        state = hidden[-1]
        for step in range(out.shape[1]):
            state = self.cell(out[:, step], state)
        return self.head(state)


class BatchNormEverywhere(Regressor):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU())
        self.body = nn.Sequential(*(nn.Sequential(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4)) for _ in range(2)))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(8, 1))

    def forward(self, x):
        return self.head(self.body(self.stem(x.unsqueeze(1))))


# --- several calls, complex numbers, compiled parts ------------------------------------------------------------------


class Siamese(Regressor):
    """One encoder sees two views of each sample."""

    def __init__(self):
        super().__init__()
        self.encoder, self.projector = mlp(), nn.Linear(FEATURES, 3)

    def forward(self, x):
        return F.normalize(self.projector(self.encoder(x)), dim=1)

    def shared_step(self, batch):
        x, y = batch
        left, right = self(x), self(x.flip(1))
        return (2 - 2 * (left * right).sum(1)).mean() + F.mse_loss(left[:, :1], y)


class Fourier(Regressor):
    """Complex weights act on Fourier modes."""

    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(1, 4)
        modes = [torch.randn(4, 4, FEATURES // 2 + 1, dtype=torch.complex128) / 4 for _ in range(3)]
        self.spectral = nn.ParameterList(modes)
        self.mix = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        hidden = self.lift(x.unsqueeze(-1))
        for weight, mix in zip(self.spectral, self.mix, strict=True):
            modes = torch.einsum("bmi,iom->bmo", torch.fft.rfft(hidden, dim=1), weight)
            hidden = F.gelu(torch.fft.irfft(modes, n=hidden.shape[1], dim=1) + mix(hidden))
        return self.head(hidden).mean(1)


class ComplexStream(Regressor):
    """The values between layers are complex."""

    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(FEATURES, 4, dtype=torch.complex128)
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.complex128) for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.lift(torch.complex(x, x.cos()))
        for layer in self.layers:
            hidden = layer(hidden) * torch.exp(1j * hidden.angle())
        return self.head(torch.view_as_real(hidden).flatten(1))


class CompiledPart(Regressor):
    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(), nn.Linear(FEATURES, 1)
        self.body[1] = torch.compile(self.body[1], backend="eager")

    def forward(self, x):
        return self.head(self.body(x))


class Policy(Regressor):
    """A distribution that validates its arguments under user modes, and a stored number."""

    def __init__(self):
        super().__init__()
        self.layers, self.kept = nn.Sequential(*mlp(), nn.Linear(FEATURES, 1)), []

    def shared_step(self, batch):
        with torch.device("cpu"):
            loss = -torch.distributions.Normal(self.layers(batch[0]), 1.0).log_prob(batch[1]).mean()
        self.kept.append(loss.item())
        return loss


SAME = [
    ForcesOfPart,
    ForcesOfSpecies,
    ForcesThroughShared,
    ForcesOfStoredPositions,
    GradientPenalty,
    LazyMask,
    MaskLikeHidden,
    Truncated,
    Stashing,
    Packed,
    BatchNormEverywhere,
    Siamese,
    Fourier,
    ComplexStream,
    CompiledPart,
    Policy,
]


# The verification compares only the real part of complex parameters in one place.
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@each_under(
    "module",
    SAME,
    [*LAYOUTS, COMBINED],
    replicated=[BatchNormEverywhere],
    covered_by={ForcesThroughShared: ForcesOfSpecies, MaskLikeHidden: LazyMask, ComplexStream: Fourier},
)
def test_matches_one_process(worlds, module, layout):
    report = check(worlds, module, layout, steps=2, trainer={"inference_mode": False})
    assert report.outcome == "same", str(report)


@under([PP2, BOTH])
def test_derivative_through_the_full_model_is_not_pipelined(worlds, layout):
    options = {"steps": 2, "trainer": {"inference_mode": False}}
    assert check(worlds, Forces, DP2, **options).outcome == "same"
    report = check(worlds, Forces, layout, **options)
    assert report.outcome == "same" and "sharded instead of pipelined" in str(report), str(report)


def test_sync_batch_norm_has_no_reference(worlds):
    """It is tested separately: in one process replicas run one after the other."""
    report = check(worlds, BatchNormEverywhere, DP2, steps=2, trainer={"sync_batchnorm": True})
    assert report.outcome == "failed" and "2 replicas at once" in report.message, str(report)
