"""Segment shapes with a U-Net, whose skip connections cross the pipeline stages: circles, squares and noise.

python examples/unet.py                                          2 stages: 2 processes
python examples/unet.py --devices 4                              2 replicas x 2 stages: 4 processes
python examples/unet.py --pipeline 1 --spatial 2                 each image over 2 processes, by halves
python examples/unet.py --devices 1 --pipeline 1                 one process
"""

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.segmentation import MeanIoU

from lightning_hybrid import Hybrid3DStrategy


def shapes(count: int, seed: int, size: int = 48) -> TensorDataset:
    """Noisy images of a circle (class 1) and a square (class 2) of equal brightness, and the class of each pixel."""
    random = torch.Generator().manual_seed(seed)  # the same on every rank
    masks = torch.zeros(count, size, size, dtype=torch.long)
    for mask in masks:
        for kind in (1, 2):
            row, column = torch.randint(10, size - 10, (2,), generator=random).tolist()
            down, right = (torch.arange(size) - row)[:, None].abs(), (torch.arange(size) - column)[None].abs()
            mask[down**2 + right**2 <= 81 if kind == 1 else torch.maximum(down, right) <= 8] = kind
    images = (masks > 0) + 0.5 * torch.randn(masks.shape, generator=random)
    return TensorDataset(images[:, None], masks)


def block(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (inputs, outputs):
        layers += [nn.Conv2d(width, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(LightningModule):
    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(block(i, o) for i, o in zip([1, *widths], widths[:-1], strict=False))
        self.middle = block(widths[-2], widths[-1])
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in widths[-2::-1])
        self.up = nn.ModuleList(block(2 * w, w) for w in widths[-2::-1])
        self.head = nn.Conv2d(width, 3, 1)
        self.iou = MeanIoU(num_classes=3, input_format="index")

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for block in self.down:
            skipped.append(block(x))
            x = F.max_pool2d(skipped[-1], 2)
        x = self.middle(x)
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([skipped.pop(), grow(x)], 1))
        return self.head(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.iou(self(batch[0]).argmax(1), batch[1])
        self.log("val_iou", self.iou, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def draw(images: Tensor, masks: Tensor, found: Tensor, path: Path) -> None:
    """Rows of images, true classes and found classes."""
    figure = Figure(figsize=(1.3 * len(images), 4), layout="constrained")
    rows = {"image": images[:, 0], "true": masks, "found": found}
    for line, (name, row) in zip(figure.subplots(3, len(images)), rows.items(), strict=True):
        for axes, picture in zip(line, row, strict=True):
            axes.imshow(picture, cmap="gray" if name == "image" else "viridis")
            axes.set(xticks=[], yticks=[])
        line[0].set_ylabel(name)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="processes: stages x replicas x spatial ranks")
    parser.add_argument("--pipeline", type=int, default=2, help="pipeline stages")
    parser.add_argument("--spatial", type=int, default=1, help="processes that share each image")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("lightning_logs/unet"), help="folder of all files")
    args = parser.parse_args()
    seed_everything(1, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=Hybrid3DStrategy(pipeline_parallel_size=args.pipeline, spatial_parallel_size=args.spatial),
        max_epochs=args.epochs,
        default_root_dir=args.out,
        enable_model_summary=False,
    )
    module, held_out = UNet(), shapes(64, seed=2)
    training = DataLoader(shapes(args.images, seed=1), batch_size=16, shuffle=True)
    trainer.fit(module, training, DataLoader(held_out, batch_size=16))
    if trainer.is_global_zero:
        images, masks = held_out[:6]
        with torch.no_grad():  # the module is full again, on every rank
            draw(images, masks, module.eval()(images).argmax(1), args.out / "shapes.png")
        print(f"loss {trainer.callback_metrics['loss']:.3f}, mean IoU {trainer.callback_metrics['val_iou']:.3f}")
        print(f"{args.out}/shapes.png")


if __name__ == "__main__":
    main()
