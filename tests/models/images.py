"""Convolutional networks, of images with odd heights and widths."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from models.hand_written import Lit


def images(*size, count=16, batch=4, channels=3):
    """Loaders of random images, or volumes, of a size."""
    x = torch.randn(count, channels, *size, generator=torch.Generator().manual_seed(0))
    return {
        "train_dataloaders": DataLoader(TensorDataset(x), batch),
        "val_dataloaders": DataLoader(TensorDataset(x[:batch]), batch),
    }


def _norms(channels, out, conv, norm):
    first = conv(channels, out, 3, padding=1, bias=False), norm(out), nn.ReLU(inplace=True)
    return nn.Sequential(*first, conv(out, out, 3, padding=1), nn.GroupNorm(2, out), nn.ReLU(inplace=True))


class UNet(Lit):
    """As in segmentation: pads what an odd size lost before it concatenates."""

    optimizer = "sgd"

    def __init__(self):
        super().__init__()
        conv, norm = nn.Conv2d, nn.BatchNorm2d
        self.down = nn.ModuleList(_norms(a, b, conv, norm) for a, b in ((3, 4), (4, 8), (8, 16)))
        self.raise2 = nn.ConvTranspose2d(16, 8, 2, 2)
        self.raise1 = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.up2, self.up1 = _norms(16, 8, conv, norm), _norms(12, 4, conv, norm)
        self.drop, self.head = nn.Dropout2d(0.1), nn.Conv2d(4, 3, 1)

    def join(self, skipped, x):
        missing = [a - b for a, b in zip(skipped.shape[:1:-1], x.shape[:1:-1], strict=True)]
        return torch.cat([skipped, F.pad(x, [each for m in missing for each in (m // 2, m - m // 2)])], 1)

    def forward(self, x):
        first = self.down[0](x)
        second = self.down[1](F.max_pool2d(first, 2))
        third = self.drop(self.down[2](F.max_pool2d(second, 2)))
        x = self.up2(self.join(second, self.raise2(third)))
        return self.head(self.up1(self.join(first, self.raise1(x))))

    def loss(self, batch):
        (x,) = batch
        target = (x[:, 0] > 0).long() + (x[:, 1] > 0.3).long()
        return F.cross_entropy(self(x), target)


class VolumeUNet(Lit):
    optimizer = "sgd"

    def __init__(self):
        super().__init__()
        conv, norm = nn.Conv3d, nn.BatchNorm3d
        self.first, self.second = _norms(2, 4, conv, norm), _norms(4, 8, conv, norm)
        self.up, self.last = nn.Upsample(scale_factor=2, mode="trilinear"), _norms(12, 4, conv, norm)
        self.head = nn.Conv3d(4, 1, 1)

    def loss(self, batch):
        (x,) = batch
        skipped = self.first(x)
        deep = self.up(self.second(F.max_pool3d(skipped, 2)))
        out = self.head(self.last(torch.cat([skipped, deep], 1)))
        shares = out.sigmoid().flatten(1), (x[:, :1] > 0).to(out.dtype).flatten(1)
        dice = 2 * (shares[0] * shares[1]).sum(1) / (shares[0].sum(1) + shares[1].sum(1))
        return 1 - dice.mean()


class ConvNeXtBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gain = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x):
        h = self.depthwise(x).permute(0, 2, 3, 1)
        return x + (self.down(F.gelu(self.up(self.norm(h)))) * self.gain).permute(0, 3, 1, 2)


class ConvNeXt(Lit):
    def __init__(self):
        super().__init__()
        self.stem, self.lower = nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, 16, 2, 2)
        self.first = nn.Sequential(*(ConvNeXtBlock(8) for _ in range(2)))
        self.second = nn.Sequential(*(ConvNeXtBlock(16) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 3)

    def loss(self, batch):
        (x,) = batch
        features = self.second(self.lower(self.first(self.stem(x)))).mean((2, 3))
        return F.cross_entropy(self.head(self.norm(features)), (x.flatten(1)[:, 0] > 0).long())


class Pyramid(Lit):
    """A detector's backbone: deep maps are added to high ones, and all have one head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 7, 2, 3), nn.InstanceNorm2d(4, affine=True), nn.ReLU(inplace=True))
        self.levels = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in ((4, 8), (8, 16), (16, 16)))
        self.lateral = nn.ModuleList(nn.Conv2d(width, 8, 1) for width in (8, 16, 16))
        self.head = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 5, 3, padding=1))

    def loss(self, batch):
        (x,) = batch
        h, maps = self.stem(x), []
        for level, lateral in zip(self.levels, self.lateral, strict=True):
            h = F.silu(level(h))
            maps.append(lateral(h))
        for deep in (2, 1):
            maps[deep - 1] = maps[deep - 1] + F.interpolate(maps[deep], size=maps[deep - 1].shape[-2:])
        found = torch.cat([self.head(each).flatten(2).transpose(1, 2) for each in maps], 1)
        scores, boxes = found[..., 0], found[..., 1:]
        best = scores.detach().argmax(1)
        chosen = boxes[torch.arange(len(boxes)), best]
        return F.binary_cross_entropy_with_logits(scores, torch.zeros_like(scores)) + F.smooth_l1_loss(
            chosen, x.mean((2, 3))[:, [0, 1, 2, 0]]
        )
