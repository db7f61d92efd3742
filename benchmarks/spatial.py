"""Two ranks that share each image: hybrid3d against Lightning's own strategy in one process.

    python benchmarks/spatial.py

One training step of a U-Net on images of 512 x 512 pixels, one computing thread per rank, from batch to batch after
warm-up. Wall time is that of both ranks together.

Must be reached: CPU seconds of two ranks <= 1.15 x one process.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from lightning.pytorch import LightningModule
from side_by_side import Turn, Variant, compare, fit, print_table, ratios, verdict
from torch import Tensor, nn
from torch.nn import functional as F

RANKS = 2


def _block(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (inputs, outputs):
        layers += [nn.Conv2d(width, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(LightningModule):
    """As Ronneberger et al. (2015), with norms."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(_block(i, o) for i, o in zip([3, *widths], widths[:-1], strict=False))
        self.middle = _block(widths[-2], widths[-1])
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in widths[-2::-1])
        self.up = nn.ModuleList(_block(2 * w, w) for w in widths[-2::-1])
        self.head = nn.Conv2d(width, 3, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Classes of pixels of images ``(samples, 3, height, width)``."""
        skipped, x = [], batch
        for block in self.down:
            skipped.append(block(x))
            x = F.max_pool2d(skipped[-1], 2)
        x = self.middle(x)
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([skipped.pop(), grow(x)], 1))
        return F.cross_entropy(self.head(x), (batch[:, 0] > 0).long())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def _fit(turn: Turn, args: argparse.Namespace, strategy: object, devices: int) -> None:
    images = torch.randn(args.batch, 3, args.size, args.size)
    fit(turn, UNet(args.width, args.depth), images, strategy=strategy, devices=devices)


def one_process(turn: Turn, args: argparse.Namespace) -> None:
    _fit(turn, args, "auto", 1)


def hybrid3d(turn: Turn, args: argparse.Namespace) -> None:
    from lightning_hybrid import Hybrid3DStrategy

    _fit(turn, args, Hybrid3DStrategy(spatial_parallel_size=RANKS, process_group_backend="gloo"), RANKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--size", type=int, default=512, help="height and width")
    parser.add_argument("--batch", type=int, default=2, help="samples per step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="per turn")
    args = parser.parse_args()
    variants = [
        Variant("one process", partial(one_process, args=args), ranks=1),
        Variant("hybrid3d", partial(hybrid3d, args=args)),
    ]
    results = compare(variants, ranks=RANKS, rounds=args.rounds, steps=args.steps)
    print_table(f"U-Net of width {args.width}, {args.batch} images of {args.size} x {args.size}", results)
    one, two = results
    verdict("CPU, two ranks / one process", ratios(two.cpu, one.cpu), at_most=1.15)
    verdict("wall, two ranks / one process", ratios(two.wall, one.wall), at_most=1.0)


if __name__ == "__main__":
    main()
