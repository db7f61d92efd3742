"""Models as their authors write them match single-process training."""

import itertools

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from harness.layouts import each_under, under
from harness.verification import LAYOUTS, check

PP2, DP2, BOTH, *_ = LAYOUTS
SIDE = 8


def waves(*shape, count=24):
    """Numbers that are a function of the sample's index."""
    index = torch.arange(count, dtype=torch.float64).view(-1, *[1] * len(shape))
    place = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(1, *shape)
    return torch.sin(0.7 * index * (1 + place % 5) + 0.31 * place)


def loaders(*columns, batch_size=4):
    return {"train_dataloaders": DataLoader(TensorDataset(*columns), batch_size)}


def image_data():
    return loaders(waves(3, SIDE, SIDE), torch.arange(24) % 4)


def segmentation_data():
    images = waves(3, SIDE, SIDE)
    return loaders(images, (images.sum(1) > 0).long())


def series_data():
    return loaders(waves(12, 2), waves(3))


def flat_data():
    return loaders(waves(10), waves(1))


class Lit(LightningModule):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


# --- images ----------------------------------------------------------------------------------------------------------


def double_conv(in_channels, out_channels):
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False), nn.BatchNorm2d(out_channels), nn.ReLU(),
        nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False), nn.BatchNorm2d(out_channels), nn.ReLU(),
    )  # fmt: skip


class UNet(Lit):
    def __init__(self, width=4, depth=2):
        super().__init__()
        sizes = [width * 2**level for level in range(depth + 1)]
        self.inc = double_conv(3, sizes[0])
        self.down = nn.ModuleList(double_conv(a, b) for a, b in itertools.pairwise(sizes))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in itertools.pairwise(sizes))
        self.mix = nn.ModuleList(double_conv(2 * size, size) for size in sizes[:-1])
        self.out = nn.Conv2d(sizes[0], 2, 1)

    def forward(self, x):
        skips = [self.inc(x)]
        for down in self.down:
            skips.append(down(F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for up, mix in zip(reversed(self.up), reversed(self.mix), strict=True):
            x = mix(torch.cat([skips.pop(), up(x)], dim=1))
        return self.out(x)

    def training_step(self, batch, batch_idx):
        image, mask = batch
        logits = self(image)
        probability = logits.softmax(1)[:, 1]
        overlap = 2 * (probability * mask).sum((1, 2)) / (probability.sum((1, 2)) + mask.sum((1, 2)) + 1)
        self.log("dice", overlap.mean())
        return F.cross_entropy(logits, mask) + 1 - overlap.mean()


class Inception(nn.Module):
    def __init__(self, channels):
        super().__init__()
        quarter = channels // 4
        self.one = nn.Conv2d(channels, quarter, 1)
        self.three = nn.Sequential(
            nn.Conv2d(channels, quarter, 1), nn.ReLU(), nn.Conv2d(quarter, quarter, 3, padding=1)
        )
        self.five = nn.Sequential(nn.Conv2d(channels, quarter, 1), nn.ReLU(), nn.Conv2d(quarter, quarter, 5, padding=2))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(channels, quarter, 1))

    def forward(self, x):
        return F.relu(torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1))


class ParallelBranches(Lit):
    """A second head in the middle helps while training."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.early = nn.Sequential(Inception(8), Inception(8))
        self.auxiliary = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4))
        self.late = nn.Sequential(Inception(8), Inception(8))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        middle = self.early(F.relu(self.stem(x)))
        logits = self.head(self.late(middle).mean((2, 3)))
        return (logits, self.auxiliary(middle)) if self.training else logits

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits, auxiliary = self(x)
        self.log("accuracy", (logits.argmax(1) == y).double().mean())
        return F.cross_entropy(logits, y) + 0.3 * F.cross_entropy(auxiliary, y)


class Bottleneck(nn.Module):
    def __init__(self, in_channels, channels, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or in_channels != channels:
            self.downsample = nn.Sequential(nn.Conv2d(in_channels, channels, 1, stride), nn.BatchNorm2d(channels))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


class ResNet(Lit):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layer1 = nn.Sequential(Bottleneck(8, 8), Bottleneck(8, 8))
        self.layer2 = nn.Sequential(Bottleneck(8, 16, 2), Bottleneck(16, 16))
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        return self.fc(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y, label_smoothing=0.1)
        self.log("train_loss", loss, prog_bar=True)
        return loss


# --- probability, energy, time ---------------------------------------------------------------------------------------


class VAE(Lit):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.mean, self.log_scale = nn.Linear(16, 3), nn.Linear(16, 3)
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 10))
        self.noise = nn.Parameter(torch.zeros(1))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        hidden = self.encoder(x)
        posterior = Normal(self.mean(hidden), self.log_scale(hidden).exp())
        z = posterior.rsample()
        likelihood = Normal(self.decoder(z), self.noise.exp()).log_prob(x).sum(-1)
        kl = kl_divergence(posterior, Normal(torch.zeros_like(z), torch.ones_like(z))).sum(-1)
        self.log_dict({"kl": kl.mean(), "likelihood": likelihood.mean()})
        return (kl - likelihood).mean()


class Energy(Lit):
    """Forces are derivatives of an energy, and the loss has both."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(10, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.SiLU()) for _ in range(4))
        self.out = nn.Linear(16, 1)

    def forward(self, positions):
        positions = positions.requires_grad_(True)
        h = self.embed(positions)
        for layer in self.layers:
            h = h + layer(h)
        energy = self.out(h)
        (gradient,) = torch.autograd.grad(energy.sum(), positions, create_graph=self.training)
        return energy, -gradient

    def training_step(self, batch, batch_idx):
        positions, target = batch
        energy, forces = self(positions)
        loss = F.mse_loss(energy, target) + 0.1 * F.mse_loss(forces, positions.detach().cos())
        self.log("loss", loss)
        return loss


class Forecaster(Lit):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(2)
        self.lstm = nn.LSTM(2, 8, num_layers=2, batch_first=True)
        self.decoder = nn.LSTMCell(1, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, history, horizon):
        _, (h, c) = self.lstm(self.norm(history))
        h, c, last, outs = h[-1], c[-1], history[:, -1, :1], []
        for _ in range(horizon):
            h, c = self.decoder(last, (h, c))
            last = self.out(h)
            outs.append(last)
        return torch.cat(outs, 1)

    def training_step(self, batch, batch_idx):
        history, future = batch
        loss = F.smooth_l1_loss(self(history, future.shape[1]), future)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


CASES = [
    (UNet, segmentation_data), (ParallelBranches, image_data), (ResNet, image_data), (VAE, flat_data),
    (Forecaster, series_data),
]  # fmt: skip


@each_under("module,data", CASES, [PP2, BOTH], replicated=[], covered_by={CASES[0]: CASES[1]})
def test_matches_one_process(worlds, module, data, layout):
    report = check(worlds, module, layout, make_data=data)
    assert report.outcome == "same", str(report)
    assert report.steps == 2


@pytest.mark.parametrize("layout", [DP2, PP2], ids=lambda layout: layout.name)
def test_forces_through_all_layers_are_one_unit(worlds, layout):
    report = check(worlds, Energy, layout, make_data=flat_data)
    assert report.outcome == "same", str(report)


# --- graphs of any size ----------------------------------------------------------------------------------------------


def collate_graphs(samples):
    """One large graph of disconnected ones; the first dim is that of all nodes."""
    sizes = [len(x) for x, _ in samples]
    starts = torch.tensor([0, *sizes[:-1]]).cumsum(0)
    edges = [torch.stack([torch.arange(n), (torch.arange(n) + 1) % n]) + s for n, s in zip(sizes, starts, strict=True)]
    return {
        "x": torch.cat([x for x, _ in samples]),
        "edge_index": torch.cat(edges, 1),
        "graph": torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)),
        "y": torch.stack([y for _, y in samples]),
    }


def graph_data():
    nodes, targets = waves(6, 5), waves(1)
    samples = [(nodes[i, : 2 + i % 4], targets[i]) for i in range(24)]
    return {"train_dataloaders": DataLoader(samples, 4, collate_fn=collate_graphs)}


class GraphLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.message, self.update = nn.Linear(2 * width, width), nn.Linear(2 * width, width)

    def forward(self, x, edge_index):
        source, target = edge_index
        messages = F.relu(self.message(torch.cat([x[source], x[target]], 1)))
        return x + self.update(torch.cat([x, torch.zeros_like(x).index_add(0, target, messages)], 1))


class GraphNetwork(Lit):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.layers = nn.ModuleList(GraphLayer(8) for _ in range(4))
        self.head = nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        x = self.embed(batch["x"])
        for layer in self.layers:
            x = layer(x, batch["edge_index"])
        count = len(batch["y"])
        pooled = torch.zeros(count, x.shape[1], dtype=x.dtype).index_add(0, batch["graph"], x)
        loss = F.mse_loss(self.head(pooled), batch["y"])
        self.log("loss", loss, batch_size=count)
        return loss


@under([PP2, BOTH])
def test_any_graph_size_in_one_microbatch(worlds, layout):
    report = check(worlds, GraphNetwork, layout, make_data=graph_data, num_microbatches=1)
    assert report.outcome == "same", str(report)


def test_graphs_are_not_split_without_a_splitter(worlds):
    report = check(worlds, GraphNetwork, PP2, make_data=graph_data)
    assert report.outcome == "same", str(report)


# --- manual ----------------------------------------------------------------------------------------------------------


class Gan(LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 10))
        self.critic = nn.Sequential(nn.Linear(10, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1))

    def training_step(self, batch, batch_idx):
        real, _ = batch
        for_generator, for_critic = self.optimizers()
        ones, zeros = torch.ones(len(real), 1, dtype=real.dtype), torch.zeros(len(real), 1, dtype=real.dtype)
        self.toggle_optimizer(for_generator)
        loss = F.binary_cross_entropy_with_logits(self.critic(self.generator(real.flip(1))), ones)
        self.log("g_loss", loss)
        self.manual_backward(loss)
        for_generator.step()
        for_generator.zero_grad()
        self.untoggle_optimizer(for_generator)
        self.toggle_optimizer(for_critic)
        fake = self.generator(real.flip(1)).detach()
        loss = F.binary_cross_entropy_with_logits(self.critic(real), ones)
        loss = (loss + F.binary_cross_entropy_with_logits(self.critic(fake), zeros)) / 2
        self.log("d_loss", loss)
        self.manual_backward(loss)
        for_critic.step()
        for_critic.zero_grad()
        self.untoggle_optimizer(for_critic)

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.generator, self.critic)]


@under([DP2, PP2, BOTH], also=[DP2])
def test_two_manual_optimizers(worlds, layout):
    report = check(worlds, Gan, layout, make_data=flat_data, num_microbatches=1)
    assert report.outcome == "same", str(report)
