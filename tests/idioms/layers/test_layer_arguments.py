"""Layers with arguments other than tensors, layers that return a tensor twice, and hooks that a step registers."""

import torch
from torch import nn
from torch.nn import functional as F

from harness.layouts import each_under
from harness.verification import LAYOUTS, check
from models.regression import FEATURES, Regression


class Blocks(Regression):
    """Four layers of a class that each test chooses."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.make() for _ in range(4))

    def make(self):
        return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())

    def loss(self, batch):
        return F.mse_loss(self(batch[0]), batch[1])


# --- hooks that the step itself puts on layers ------------------------------------------------------------------------


class HooksAtFirst(Blocks):
    """Collects outputs of its layers, by hooks that the first call registers."""

    def __init__(self):
        super().__init__()
        self.hooked = False
        self.collected = None

    def collect(self, module, args, output):
        self.collected.append(output)

    def loss(self, batch):
        if not self.hooked:
            for layer in self.layers:
                layer.register_forward_hook(self.collect)
            self.hooked = True
        self.collected = collected = []
        loss = super().loss(batch)
        self.collected = None
        assert len(collected) == 4, len(collected)
        return loss + sum(0.1 * (place + 1) * hidden.square().mean() for place, hidden in enumerate(collected))


# --- what a layer returns ---------------------------------------------------------------------------------------------


class ReturnsSkips(nn.Linear):
    def forward(self, x):
        x = super().forward(x).tanh()
        return x, (x.sin(), x)


class ReturnsTwice(Blocks):
    """Each layer returns its result also as the last of those that later layers skip to."""

    def make(self):
        return ReturnsSkips(FEATURES, FEATURES)

    def forward(self, x):
        skipped = []
        for layer in self.layers:
            x, more = layer(x)
            skipped += more
        return self.head(x + 0.1 * sum(skipped))


# --- arguments of layers ---------------------------------------------------------------------------------------------


class Memory:
    """A custom container class."""

    def __init__(self, rows):
        self.rows = list(rows)

    def of(self, place):
        return self.rows[place]


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x, memory, place):
        return x + self.outer((self.inner(x) + memory.of(place)).tanh())


class Prefixed(Blocks):
    """Values of the first stage reach all layers inside of an object."""

    def __init__(self):
        super().__init__()
        self.prefix = nn.Embedding(4, FEATURES)

    def make(self):
        return Remembers()

    def forward(self, x):
        memory = Memory(self.prefix.weight.sin().unbind())
        for place, layer in enumerate(self.layers):
            x = layer(x, memory, place)
        return self.head(x)


class Biased(nn.Linear):
    def forward(self, x, positions):
        return x + (super().forward(x) + positions(torch.arange(FEATURES)).squeeze(-1)).tanh()


class PassesModule(Blocks):
    """Each layer calls a module with parameters that is passed to it."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Embedding(FEATURES, 1)

    def make(self):
        return Biased(FEATURES, FEATURES)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, self.positions)
        return self.head(x)


# --- modes of torch inside of the step --------------------------------------------------------------------------------


class CountsInInferenceMode(Blocks):
    """Counts are written row by row into a tensor of torch's inference mode."""

    @torch.inference_mode()
    def counts(self, prediction):
        found = torch.zeros(len(prediction), 2)
        for row in range(len(prediction)):
            found[row] = torch.stack([(prediction[row] > 0).sum(), (prediction[row] <= 0).sum()]).to(found.dtype)
        return found

    def training_step(self, batch, batch_idx):
        prediction = self(batch[0])
        self.log("positive", self.counts(prediction.detach())[:, 0].mean())
        return F.mse_loss(prediction, batch[1])


class Reverses(nn.Module):
    """Subtracts first and adds back at the end; in between it stores the numbers."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((FEATURES,), 1.5))
        self.mean, self.spread = torch.zeros(1), None

    def forward(self, x, back):
        if back:
            return x / self.scale * self.spread + self.mean
        self.mean, self.spread = x.mean(1, keepdim=True), x.var(1, keepdim=True).add(1e-5).sqrt()
        return (x - self.mean) / self.spread * self.scale


class NormsAndUndoes(Blocks):
    """RevIN, of the input or of the first layer's output."""

    def __init__(self):
        super().__init__()
        self.outer, self.inner = Reverses(), Reverses()

    def forward(self, x):
        x = self.layers[0](self.outer(x, back=False)).tanh()
        x = self.inner(x, back=False)
        for layer in self.layers[1:]:
            x = layer(x).tanh()
        return self.head(self.outer(self.inner(x, back=True), back=True))


class Inverts(Reverses):
    """Returns it by another method."""

    def forward(self, x):
        return super().forward(x, back=False)

    def inverse(self, x):
        return super().forward(x, back=True)


class UndoneByAMethod(Blocks):
    """As in darts: code around layers reads a stored value of the batch, before one of the model."""

    def __init__(self):
        super().__init__()
        self.norm = Inverts()

    def forward(self, x):
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(self.norm.inverse(x))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.value = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.open = None

    def forward(self, x):
        self.open = self.gate(x).sigmoid()
        return x + self.open * self.value(x)


class ReadsItsGates(Blocks):
    """Each layer stores how open its gate was; the loss and a log read it."""

    def __init__(self):
        super().__init__()
        self.gated = nn.ModuleList(Gated() for _ in range(4))

    def forward(self, x):
        for layer in self.gated:
            x = layer(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("first", self.gated[0].open[:, 0].mean())
        return loss + 0.1 * sum(layer.open.mean() for layer in self.gated)


CASES = [ReturnsTwice, Prefixed, PassesModule, HooksAtFirst, CountsInInferenceMode, NormsAndUndoes]
CASES += [UndoneByAMethod, ReadsItsGates]


@each_under("module", CASES, LAYOUTS[:3])
def test_matches_one_process(worlds, module, layout):
    report = check(worlds, module, layout, steps=3)
    assert report.outcome == "same", str(report)
