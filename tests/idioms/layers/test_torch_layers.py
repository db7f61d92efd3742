"""Layers of torch beyond a matrix product, and buffers that are written in or around them."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from harness.layouts import each_under, under
from harness.verification import COMBINED, LAYOUTS, TENSOR, call_quietly, check
from models.regression import FEATURES, Regressor, mlp


class Attention(Regressor):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, 8)
        self.attention = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.head = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        hidden = self.embed(x.unsqueeze(-1))
        padding = (x > 0.9) & (x.new_tensor(range(x.shape[1])) > 0)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        for attention, norm in zip(self.attention, self.norms, strict=True):
            out, weights = attention(hidden, hidden, hidden, key_padding_mask=padding, attn_mask=causal)
            hidden = norm(hidden + out) + weights.mean()
        return self.head(hidden[:, -1])


class Transformers(Regressor):
    """An encoder and a decoder of torch."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        memory = self.encoder(self.embed(x.unsqueeze(-1)))
        mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=torch.float64)
        return self.head(self.decoder(self.embed(x[:, :3].unsqueeze(-1)), memory, tgt_mask=mask)[:, -1])


class PaddedTransformer(Regressor):
    """In evaluation torch joins the layers of this encoder by nested tensors."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 4)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        padding = (x > 0.9) & (x.new_tensor(range(x.shape[1])) > 0)
        return self.head(self.encoder(self.embed(x.unsqueeze(-1)), src_key_padding_mask=padding)[:, 0])


class FullTransformer(Regressor):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, 8)
        self.transformer = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.embed(x.unsqueeze(-1))
        return self.head(self.transformer(hidden, hidden[:, :2]).mean(1))


class Convolutions(Regressor):
    """Convolutions and transposed ones, in one to three dimensions."""

    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU())
        self.two = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.InstanceNorm2d(4, affine=True), nn.SiLU())
        self.three = nn.Conv3d(1, 2, (3, 1, 3), padding=(1, 0, 1))
        self.back3, self.back2 = nn.ConvTranspose3d(2, 1, 1), nn.ConvTranspose2d(4, 2, 3, padding=1)
        self.back1 = nn.ConvTranspose1d(4, 1, 3, stride=2, padding=1, output_padding=1)
        self.head = nn.Linear(2 * FEATURES, 1)

    def forward(self, x):
        hidden = self.one(x.unsqueeze(1))
        hidden = self.two(hidden.view(len(x), 2, 2, FEATURES))
        hidden = hidden + self.back3(self.three(hidden.unsqueeze(1))).squeeze(1)
        hidden = self.back2(hidden).reshape(len(x), 4, FEATURES)
        return self.head(self.back1(hidden).squeeze(1))


class Embeddings(Regressor):
    """A padding index, a bag with offsets made in the step, and a tied output."""

    def __init__(self):
        super().__init__()
        self.words, self.bag = nn.Embedding(12, 8, padding_idx=0), nn.EmbeddingBag(12, 8, mode="sum")
        self.body, self.head = mlp(3, 8), nn.Linear(8, 1)

    def forward(self, x):
        tokens = ((x + 1) * 5).long().clamp(0, 11)
        offsets = torch.arange(0, tokens.numel(), tokens.shape[1], device=x.device)
        hidden = self.words(tokens).sum(1) + self.bag(tokens.flatten(), offsets)
        return self.head(self.body(hidden))


class Normed(Regressor):
    """Weight and spectral norms."""

    @staticmethod
    def norms():
        return [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal]

    def __init__(self):
        super().__init__()
        self.lift, self.layers = nn.Linear(FEATURES, 8), nn.ModuleList(norm(nn.Linear(8, 8)) for norm in self.norms())
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        x = self.lift(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class OldNorms(Normed):
    """The older norm functions of torch."""

    @staticmethod
    def norms():
        return [nn.utils.spectral_norm, nn.utils.spectral_norm, old_weight_norm]


def old_weight_norm(layer):
    return call_quietly(nn.utils.weight_norm, (layer,))


class Codebook(nn.Module):
    """Entries are moved towards their inputs, inside a layer."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(FEATURES, FEATURES)
        self.register_buffer("entries", torch.linspace(-1, 1, 5 * FEATURES).view(5, FEATURES).sin().double())
        self.register_buffer("counts", torch.ones(5, dtype=torch.float64))

    def forward(self, x):
        x = self.mix(x)
        nearest = torch.cdist(x, self.entries).argmin(1)
        if self.training:
            chosen = F.one_hot(nearest, 5).to(x.dtype)
            self.counts.mul_(0.9).add_(0.1 * chosen.sum(0))
            self.entries.copy_(0.9 * self.entries + 0.1 * (chosen.T @ x.detach()) / self.counts.unsqueeze(1))
        return x + (self.entries[nearest] - x).detach()


class WritesBuffers(Regressor):
    """A codebook in a layer; a queue, a running mean and a counter in the step."""

    def __init__(self):
        super().__init__()
        self.body, self.codebook, self.head = mlp(), Codebook(), nn.Linear(FEATURES, 1)
        self.register_buffer("queue", torch.zeros(12, FEATURES, dtype=torch.float64))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.register_buffer("running", torch.zeros((), dtype=torch.float64))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x):
        return self.head(self.codebook(self.body(x)))

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = self.body[1](self.body[0](x))
        loss = F.mse_loss(self.head(self.codebook(self.body[3](self.body[2](hidden)))), y)
        loss = (
            loss + 0.01 * (hidden @ self.queue.detach().clone().T).square().mean() * self.running.detach().clone().exp()
        )
        with torch.no_grad():
            place = int(self.pointer)
            self.queue[place : place + 2] = hidden[:2].detach()
            self.pointer[0] = (place + 2) % 12
            self.running.mul_(0.9).add_(0.1 * loss.detach())
            self.num_batches_tracked += 1
        return loss


class StateSpace(nn.Module):
    """A diagonal recurrence, computed by a cumulative scan."""

    def __init__(self, width=8):
        super().__init__()
        self.rate, self.enter = nn.Parameter(torch.linspace(0.1, 1.0, width)), nn.Linear(width, width)
        self.leave, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x):
        decay = -F.softplus(self.rate) * torch.ones_like(x)
        total = decay.cumsum(1)
        state = torch.exp(total) * (torch.exp(-total) * self.enter(x)).cumsum(1)
        return self.norm(x + self.leave(state))


class Scan(Regressor):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Linear(1, 8), nn.ModuleList(StateSpace() for _ in range(4))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.embed(x.unsqueeze(-1))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden[:, -1])


class Mixture(nn.Module):
    """Each expert gets the tokens that chose it."""

    def __init__(self, width=8):
        super().__init__()
        self.router = nn.Linear(width, 3)
        self.experts = nn.ModuleList(mlp(1, width) for _ in range(3))

    def forward(self, x):
        share, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            if token.numel():
                out.index_add_(0, token, share[token, slot, None] * expert(x[token]))
        return x + out, share.mean(0).square().sum()


class Experts(Regressor):
    def __init__(self):
        super().__init__()
        self.lift, self.layers = nn.Linear(FEATURES, 8), nn.ModuleList(Mixture() for _ in range(4))
        self.head = nn.Linear(8, 1)

    def shared_step(self, batch):
        x, y = batch
        hidden, balance = self.lift(x), 0.0
        for layer in self.layers:
            hidden, term = layer(hidden)
            balance = balance + term
        return F.mse_loss(self.head(hidden), y) + 0.01 * balance


MODULES = [
    Attention,
    Transformers,
    PaddedTransformer,
    FullTransformer,
    Convolutions,
    Embeddings,
    Normed,
    OldNorms,
    WritesBuffers,
    Scan,
    Experts,
]


# Buffers are written from the samples of one replica. A full transformer contains its encoder and decoder.
CHOSEN = {"replicated": [Normed, WritesBuffers], "covered_by": {FullTransformer: Transformers}}


@each_under("module", MODULES, [*LAYOUTS, COMBINED], **CHOSEN, slow=[TENSOR])
def test_matches_one_process(worlds, module, layout):
    report = check(worlds, module, layout, steps=2)
    assert report.outcome == "same", str(report)


def gelu_of_sum(x, bias):
    return F.gelu(x + bias) * 0.5


biased_gelu = call_quietly(torch.jit.script, (gelu_of_sum,))


class Biased(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.bias = nn.Linear(FEATURES, FEATURES), nn.Parameter(torch.zeros(FEATURES))

    def forward(self, x):
        return biased_gelu(self.linear(x), self.bias)


class Scripted(Regressor):
    """Functions of torch.jit inside layers and between them."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Biased() for _ in range(4)), nn.Linear(FEATURES, 1)

    def forward(self, x):
        for layer in self.layers:
            x = biased_gelu(layer(x), layer.bias)
        return self.head(x)


@under([LAYOUTS[0], TENSOR], slow=[*LAYOUTS[1:], COMBINED])
def test_torch_jit_functions(worlds, layout):
    report = check(worlds, Scripted, layout)
    assert report.outcome == "same", str(report)
