"""A first batch that is too special to prove anything, then ordinary ones: the plan is right for both."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from harness.verification import check
from lightning_hybrid.tensor.search.unit import plan_unit
from lightning_hybrid.verify import Layout

WIDTH, HEADS, BATCH = 6, 3, 4  # two ranks do not divide the heads; where these have no effect, half of each would do


class Attention(nn.Module):
    """Heads that a wrong plan cuts inside, and a pair of linears beside them."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def masked(self, scores, mask):
        return scores if mask is None else scores + mask

    def projected(self, y, gate):
        return self.out(y)

    def forward(self, x, mask=None, gate=None):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = self.masked(q @ k.transpose(-1, -2), mask).softmax(-1) @ v
        x = x + self.projected(y.transpose(1, 2).flatten(2), gate)
        return x + self.down(self.up(x).relu())


class Normed(Attention):
    def forward(self, x, mask=None, gate=None):
        return super().forward(F.rms_norm(x, (WIDTH,)), mask, gate)


class Hidden(Attention):
    def masked(self, scores, mask):
        return scores.masked_fill(~mask, -1e9)


class Shown(Attention):
    def masked(self, scores, mask):
        return scores + (1 - mask) * -1e9


class Turned(Attention):
    """Complex rotations from outside, as in the first Llama."""

    def masked(self, scores, mask):
        return (scores * mask).real


class Spectral(Attention):
    """A complex weight between the linears, which mixes their features."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.zeros(WIDTH // 2 + 1, dtype=torch.complex128))

    def projected(self, y, gate):
        return self.out(torch.fft.irfft(torch.fft.rfft(y) * self.filter, n=WIDTH))


class Quantized(Attention):
    """Weights of whole numbers."""

    def __init__(self):
        super().__init__()
        self.of_out = nn.Parameter(torch.arange(WIDTH), requires_grad=False)

    def projected(self, y, gate):
        return self.of_out * self.out(y)


class Zero(Attention):
    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)


class LowRank(Attention):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        nn.init.zeros_(self.b.weight)

    def projected(self, y, gate):
        return self.b(self.a(y))


class Gated(Attention):
    def projected(self, y, gate):
        return gate * self.out(y)


class ByParameter(Attention):
    def __init__(self):
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(()))

    def projected(self, y, gate):
        return self.alpha * self.out(y)

    def ramp(self, step):
        """What a hook does before each step."""


class ByBuffer(ByParameter):
    def __init__(self):
        super().__init__()
        del self.alpha
        self.register_buffer("alpha", torch.zeros(()))

    def ramp(self, step):
        self.alpha.fill_(step)


class ByTensor(ByBuffer):
    def __init__(self):
        super().__init__()
        del self.alpha
        self.alpha = torch.zeros((), dtype=torch.float64)


class ByNumber(ByBuffer):
    """A branch that comes in so slowly that outputs do not show it, while Adam steps by its gradients."""

    def __init__(self):
        super().__init__()
        del self.alpha
        self.alpha = 0.0

    def ramp(self, step):
        self.alpha = step * 1e-7


class Scaled(ByParameter):
    """One number for each hidden feature, all equal at first."""

    def __init__(self):
        super().__init__()
        del self.alpha
        self.register_buffer("alpha", torch.ones(8))

    def forward(self, x, mask=None, gate=None):
        return x + self.down(self.up(x).relu() * self.alpha)

    def ramp(self, step):
        self.alpha.copy_(1 + step * torch.arange(8))


def drawn(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def call(x, **others):
    return {"x": x, **others}


def masks(value):
    return torch.full((BATCH, 1, 4, 4), value, dtype=torch.float64)


ORDINARY, CAUSAL = drawn(BATCH, 4, WIDTH), masks(1.0).tril()
EYE, EQUAL = torch.eye(4).double(), drawn(BATCH, 1, WIDTH).expand(-1, 4, -1)
# name -> layer, the first batch, and what later ones have beside the sequence
CASES = {
    "equal positions": (Attention, call(EQUAL)),
    "equal samples and positions": (Attention, call(drawn(1, 1, WIDTH).expand(BATCH, 4, -1))),
    "proportional positions": (Normed, call(EQUAL * torch.arange(1, 5)[:, None])),
    "zeros": (Attention, call(ORDINARY * 0)),
    "ones": (Attention, call(torch.ones_like(ORDINARY))),
    "one sample": (Attention, call(ORDINARY[:1])),
    "binary and equal": (Attention, call((EQUAL > 0).double())),
    "added mask of zeros": (Attention, call(EQUAL, mask=masks(0.0)), {"mask": (1 - CAUSAL) * -1e9}),
    "mask of True": (Hidden, call(EQUAL, mask=masks(1.0).bool()), {"mask": CAUSAL.bool()}),
    "mask of ones": (Shown, call(EQUAL, mask=masks(1.0)), {"mask": CAUSAL}),
    "each position sees itself": (Shown, call(ORDINARY, mask=EYE.expand(BATCH, 1, 4, 4)), {"mask": CAUSAL}),
    "rotations of nothing": (Turned, call(ORDINARY, mask=masks(0.0) + 0j), {"mask": torch.polar(CAUSAL, CAUSAL)}),
    "complex weight": (Spectral, call(ORDINARY)),
    "whole numbers": (Quantized, call(ORDINARY)),
    "zero-initialized output": (Zero, call(ORDINARY * 0)),
    "zero-initialized adapter": (LowRank, call(ORDINARY * 0)),
    "gate of zero": (Gated, call(ORDINARY, gate=torch.zeros(()).double()), {"gate": torch.ones(()).double()}),
    "gates of samples": (Gated, call(ORDINARY, gate=torch.zeros(BATCH, 1, 1).double()), {"gate": drawn(BATCH, 1, 1)}),
    "plain gate": (Gated, call(ORDINARY, gate=0.0), {"gate": 1e-7}),
    "parameter of zero": (ByParameter, call(ORDINARY)),
    "buffer of zero": (ByBuffer, call(ORDINARY)),
    "tensor of zero": (ByTensor, call(ORDINARY)),
    "number of zero": (ByNumber, call(ORDINARY)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_heads_are_not_cut(name):
    layer, first, *_ = CASES[name]
    groups = plan_unit(layer(), (), first, 2).groups
    assert groups and not [group for group in groups if "qkv" in group.columns and group.rows]


class Module(LightningModule):
    def __init__(self, name):
        super().__init__()
        self.layer, self.head = FITS[name][0](), nn.Linear(WIDTH, 1)

    def training_step(self, batch, batch_idx):
        loss = self.head(self.layer(**batch)).square().mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_start(self, batch, batch_idx):
        if isinstance(self.layer, ByParameter):
            self.layer.ramp(batch_idx)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


class Fit:
    def __init__(self, name):
        self.name = name

    def module(self):
        torch.manual_seed(0)
        return Module(self.name).double()

    def data(self):
        _, first, *others = FITS[self.name]
        batches = [first, *(call(drawn(BATCH, 4, WIDTH, seed=seed), **dict(*others)) for seed in (1, 2))]
        if self.name == "one token":  # a second batch of the later sizes shows no difference from a wrong plan
            batches[1] = call(EQUAL)
        return {"train_dataloaders": DataLoader(batches, batch_size=None)}


FITS = CASES | {"one token": (Attention, call(ORDINARY[:, :1])), "equal scales": (Scaled, call(ORDINARY))}
FEW = ("equal positions", "one token", "gate of zero", "number of zero")


@pytest.mark.parametrize("name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in FITS])
def test_matches_one_process(worlds, name):
    fit, layout = Fit(name), Layout("tp2", devices=2, strategy={"tensor_parallel_size": 2})
    report = check(worlds, fit.module, layout, make_data=fit.data, steps=3, num_microbatches=1)
    assert report.outcome == "same", str(report)
