"""Operations and ways to write a step that no case of another file has: grids, spectra, solvers, codebooks, bags."""

import math

import torch
from conformance.case import Case, Rows, loaders, tensor_loaders, waves
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


def ints(high, *shape, count=48):
    index = torch.arange(count).view(-1, *[1] * len(shape))
    place = torch.arange(torch.Size(shape).numel()).view(1, *shape)
    return (index * 7 + place * 3 + index * place) % high


class Lit(LightningModule):
    lr = 1e-2

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=len(batch[-1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def small_data():
    return tensor_loaders(waves(6), waves(2, phase=1.0))


class SpatialTransformer(Lit):
    def __init__(self):
        super().__init__()
        self.localization = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 25, 6)
        )
        self.localization[-1].weight.data.mul_(0.1)
        self.localization[-1].bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0.0]))
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4)
        )

    def forward(self, x):
        theta = self.localization(x).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return self.net(F.grid_sample(x, grid, align_corners=False))

    def loss(self, batch):
        return F.cross_entropy(self(batch[0]), batch[1])


def spatial_data():
    return tensor_loaders(waves(1, 12, 12), ints(4).view(-1))


class SuperResolution(Lit):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 5, padding=2),
            nn.Tanh(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(8, 12, 3, padding=1),
        )
        self.shuffle = nn.PixelShuffle(2)

    def forward(self, x):
        return self.shuffle(self.body(x)) + F.interpolate(x, scale_factor=2, mode="bicubic")

    def loss(self, batch):
        x, y = batch
        out = self(x)
        mse = F.mse_loss(out, y)
        patches = F.unfold(out, 4, stride=4)
        self.log("psnr", -10 * torch.log10(mse), prog_bar=True)
        return (
            mse
            + 0.1 * F.l1_loss(patches, F.unfold(y, 4, stride=4))
            + 0.01 * (out[..., 1:] - out[..., :-1]).abs().mean()
        )


def sr_data():
    return tensor_loaders(waves(3, 6, 6), waves(3, 12, 12, phase=0.4))


class AdaptiveLM(Lit):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16, padding_idx=0)
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.head = nn.AdaptiveLogSoftmaxWithLoss(16, 40, cutoffs=[8, 20], div_value=2.0)

    def loss(self, batch):
        tokens, lengths = batch
        packed = pack_padded_sequence(self.embed(tokens[:, :-1]), lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=tokens.shape[1] - 1)
        keep = torch.arange(tokens.shape[1] - 1, device=tokens.device) < lengths[:, None]
        return self.head(out[keep], tokens[:, 1:][keep]).loss


def adaptive_data():
    return tensor_loaders(1 + ints(39, 9), 2 + ints(7).view(-1))


class SpectrogramNet(Lit):
    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(16), persistent=False)
        self.net = nn.Sequential(nn.Conv1d(9, 12, 3), nn.BatchNorm1d(12), nn.ReLU(), nn.Conv1d(12, 12, 3), nn.ReLU())
        self.head = nn.Linear(12, 3)

    def forward(self, wave):
        spec = torch.stft(wave, 16, 8, window=self.window, return_complex=True).abs().clamp(min=1e-5).log()
        spec = (spec - spec.mean(-1, keepdim=True)) / (spec.std(-1, keepdim=True) + 1e-5)
        return self.head(self.net(spec).mean(-1))

    def loss(self, batch):
        return F.cross_entropy(
            self(batch[0]), batch[1], weight=torch.tensor([1.0, 2.0, 0.5], dtype=batch[0].dtype, device=self.device)
        )


def spec_data():
    return tensor_loaders(waves(96), ints(3).view(-1))


def add_codebook(module):
    module.register_buffer("codes", 0.2 * torch.randn(12, 8, generator=torch.Generator().manual_seed(3)))
    module.register_buffer("counts", torch.ones(12))
    module.register_buffer("sums", module.codes.clone())


class Quantizer(nn.Module):
    def __init__(self):
        super().__init__()
        add_codebook(self)

    def forward(self, z):
        index = torch.cdist(z, self.codes).argmin(1)
        one_hot = F.one_hot(index, 12).to(z.dtype)
        if self.training:
            with torch.no_grad():
                self.counts.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(one_hot.t() @ z, alpha=0.1)
                self.codes.copy_(self.sums / self.counts.clamp(min=1e-5)[:, None])
        q = self.codes[index]
        p = one_hot.mean(0)
        return z + (q - z).detach(), F.mse_loss(z, q.detach()), torch.exp(-(p * (p + 1e-10).log()).sum())


class LayerCodebook(Lit):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
        self.dec = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6))
        self.quantizer = Quantizer()

    def quantized(self, z):
        return self.quantizer(z)

    def loss(self, batch):
        q, commit, perplexity = self.quantized(self.enc(batch[0]))
        self.log("perplexity", perplexity)
        return F.mse_loss(self.dec(q), batch[0]) + 0.25 * commit


class OwnCodebook(LayerCodebook):
    """The codebook is the module's own."""

    def __init__(self):
        super().__init__()
        del self.quantizer
        add_codebook(self)

    def quantized(self, z):
        return Quantizer.forward(self, z)


class PINN(Lit):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        self.nu = nn.Parameter(torch.tensor(0.1))

    def loss(self, batch):
        with torch.enable_grad():
            xt = batch[0][:, :2].clone().requires_grad_()
            u = self.net(xt)
            du = torch.autograd.grad(u.sum(), xt, create_graph=True)[0]
            d2 = torch.autograd.grad(du[:, 0].sum(), xt, create_graph=True)[0]
        residual = du[:, 1] + u[:, 0] * du[:, 0] - self.nu * d2[:, 0]
        return residual.square().mean() + F.mse_loss(u, batch[1][:, :1])


class Equilibrium(Lit):
    def __init__(self):
        super().__init__()
        self.inject, self.f, self.out = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 2)
        self.f.weight.data.mul_(0.3)

    def loss(self, batch):
        x = self.inject(batch[0])
        z = torch.zeros_like(x)
        with torch.no_grad():
            iterations = 0
            while iterations < 20:
                iterations += 1
                new = torch.tanh(self.f(z) + x)
                gap = (new - z).norm() / (new.norm() + 1e-9)
                z = new
                if gap < 1e-2:
                    break
        self.log("iterations", float(iterations))
        z = torch.tanh(self.f(z) + x)
        return F.mse_loss(self.out(z), batch[1])


class Bags(Lit):
    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        self.v, self.u, self.w = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(8, 1)
        self.head = nn.Linear(16, 1)

    def loss(self, batch):
        bags, y = batch
        out = []
        for bag in bags:
            h = self.embed(bag)
            a = self.w(torch.tanh(self.v(h)) * torch.sigmoid(self.u(h))).softmax(0)
            out.append(self.head((a * h).sum(0)))
        return F.binary_cross_entropy_with_logits(torch.cat(out), y)


def make_bag(i):
    return waves(3 + i % 4, 6)[i], float(i % 2)


def collate_bags(rows):
    return [r[0] for r in rows], torch.tensor([r[1] for r in rows])


def bag_data():
    return loaders(Rows(make_bag), Rows(make_bag, 16), collate_fn=collate_bags)


class CRF(Lit):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 12)
        self.lstm = nn.LSTM(12, 8, bidirectional=True, batch_first=True)
        self.emit = nn.Linear(16, 4)
        self.trans = nn.Parameter(0.1 * torch.randn(4, 4))
        self.start = nn.Parameter(torch.zeros(4))

    def loss(self, batch):
        tokens, tags, lengths = batch
        e = self.emit(self.lstm(self.embed(tokens))[0])
        score = self.start[tags[:, 0]] + e[:, 0].gather(1, tags[:, :1])[:, 0]
        alpha = self.start + e[:, 0]
        for t in range(1, tokens.shape[1]):
            on = t < lengths
            step = self.trans[tags[:, t - 1], tags[:, t]] + e[:, t].gather(1, tags[:, t : t + 1])[:, 0]
            score = score + torch.where(on, step, torch.zeros_like(step))
            new = torch.logsumexp(alpha[:, :, None] + self.trans + e[:, t, None], 1)
            alpha = torch.where(on[:, None], new, alpha)
        return ((torch.logsumexp(alpha, 1) - score) / lengths).mean()


def crf_data():
    return tensor_loaders(ints(20, 7), ints(4, 7), 3 + ints(5).view(-1))


class SAM(Lit):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.manual_backward(loss)
        norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
        moves = []
        with torch.no_grad():
            for p in self.parameters():
                e = p.grad * (0.05 / (norm + 1e-12))
                p.add_(e)
                moves.append(e)
        opt.zero_grad()
        self.manual_backward(F.mse_loss(self.net(batch[0]), batch[1]))
        with torch.no_grad():
            for p, e in zip(self.parameters(), moves, strict=True):
                p.sub_(e)
        opt.step()
        opt.zero_grad()
        self.log("loss", loss)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self.net(batch[0]), batch[1]))


class Spectral(Lit):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            spectral_norm(nn.Linear(6, 16)),
            nn.LeakyReLU(0.2),
            orthogonal(nn.Linear(16, 16)),
            nn.LeakyReLU(0.2),
            weight_norm(nn.Linear(16, 2)),
        )

    def loss(self, batch):
        return F.mse_loss(self.net(batch[0]), batch[1])


class RayMarch(Lit):
    def __init__(self):
        super().__init__()
        self.register_buffer("freqs", 2.0 ** torch.arange(3))
        self.net = nn.Sequential(nn.Linear(18, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.sigma, self.rgb = nn.Linear(32, 1), nn.Linear(32, 3)

    def loss(self, batch):
        rays, target = batch
        o, d = rays.split(3, -1)
        t = torch.linspace(0.1, 1, 8, device=rays.device, dtype=rays.dtype)
        points = o[:, None] + t[:, None] * d[:, None]
        enc = (points[..., None] * self.freqs).flatten(-2)
        h = self.net(torch.cat([enc.sin(), enc.cos()], -1))
        alpha = 1 - torch.exp(-F.softplus(self.sigma(h)[..., 0]) * 0.1)
        trans = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
        w = alpha * trans
        color = (w[..., None] * self.rgb(h).sigmoid()).sum(1)
        mse = F.mse_loss(color, target)
        self.log("psnr", -10 * mse.log() / math.log(10))
        return mse + 0.01 * (w.sum(-1) - 1).square().mean()


def ray_data():
    return tensor_loaders(waves(6), waves(3, phase=1.0).abs())


CASES = [
    Case(SpatialTransformer, spatial_data),
    Case(SuperResolution, sr_data),
    Case(AdaptiveLM, adaptive_data),
    Case(SpectrogramNet, spec_data),
    Case(OwnCodebook, small_data),
    Case(LayerCodebook, small_data),
    Case(PINN, small_data),
    Case(Equilibrium, small_data),
    Case(Bags, bag_data),
    Case(CRF, crf_data),
    Case(SAM, small_data),
    Case(Spectral, small_data),
    Case(RayMarch, ray_data),
]
