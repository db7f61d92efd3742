"""Train a GAN on scikit-learn's handwritten digits with manual optimization: two optimizers, `toggle_optimizer`.

The step calls `backward` and steps its optimizers itself, so it cannot be partitioned over pipeline stages. Replicas
shard the optimizer states, gradients and parameters (ZeRO). The ranks of a pipeline shard them too, and each runs the
full batch, as a warning at the start says. A picture of generated digits is written beside the logs.

    python examples/gan.py                        2 replicas, ZeRO-3: 2 processes
    python examples/gan.py --zero 1               they shard optimizer states alone
    python examples/gan.py --pipeline 2           2 pipeline ranks, which hold shards
    python examples/gan.py --devices 1            one process
"""

import argparse
import itertools
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import Hybrid3DStrategy


class Digits(LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1  # [N, 64], in [-1, 1]
        return DataLoader(TensorDataset(images), self.batch_size, shuffle=True, drop_last=True)


def mlp(*widths: int) -> nn.Sequential:
    linears = [nn.Linear(*pair) for pair in itertools.pairwise(widths)]
    return nn.Sequential(*(nn.Sequential(linear, nn.LeakyReLU(0.2)) for linear in linears[:-1]), linears[-1])


class GAN(LightningModule):
    def __init__(self, latent: int = 32, width: int = 256, learning_rate: float = 5e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = mlp(latent, width, width, 64)
        self.discriminator = mlp(64, width, width, 1)

    def forward(self, latent: Tensor) -> Tensor:
        return self.generator(latent).tanh()

    def loss(self, images: Tensor, *, is_real: bool) -> Tensor:
        logits = self.discriminator(images)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        (real,) = batch
        optimizer_g, optimizer_d = self.optimizers()
        latent = torch.randn(len(real), self.hparams.latent, device=self.device)

        self.toggle_optimizer(optimizer_d)
        loss_d = self.loss(real, is_real=True) + self.loss(self(latent).detach(), is_real=False)
        optimizer_d.zero_grad()
        self.manual_backward(loss_d)
        optimizer_d.step()
        self.untoggle_optimizer(optimizer_d)

        self.toggle_optimizer(optimizer_g)
        loss_g = self.loss(self(latent), is_real=True)
        optimizer_g.zero_grad()
        self.manual_backward(loss_g)
        optimizer_g.step()
        self.untoggle_optimizer(optimizer_g)
        self.log_dict({"loss_d": loss_d, "loss_g": loss_g}, prog_bar=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        options = {"lr": self.hparams.learning_rate, "betas": (0.5, 0.999)}
        return [
            torch.optim.Adam(self.generator.parameters(), **options),
            torch.optim.Adam(self.discriminator.parameters(), **options),
        ]


def draw(module: GAN, path: Path) -> None:
    from matplotlib.figure import Figure

    with torch.no_grad():
        images = module(torch.randn(64, module.hparams.latent, generator=torch.Generator().manual_seed(1)))
    figure = Figure(figsize=(4, 4))
    axes = figure.add_axes((0, 0, 1, 1))
    images = F.pad(images.view(8, 8, 8, 8), (1, 1, 1, 1), value=-1)  # [row, column, height, width]
    axes.imshow(images.permute(0, 2, 1, 3).reshape(80, 80), cmap="gray")
    axes.axis("off")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="processes: replicas x pipeline ranks")
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline ranks, which hold shards")
    parser.add_argument("--zero", type=int, default=3, help="ZeRO stage, where there are several replicas")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=64, help="images of all replicas together")
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6 under torch 2.13
    seed_everything(1, verbose=False)
    replicas = args.devices // args.pipeline
    trainer = Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=Hybrid3DStrategy(pipeline_parallel_size=args.pipeline, zero_stage=args.zero if replicas > 1 else 0),
        max_epochs=args.epochs,
        log_every_n_steps=10,
        enable_model_summary=False,
    )
    module = GAN(width=args.width)
    trainer.fit(module, Digits(args.batch // replicas))
    path = Path(trainer.log_dir) / "digits.png"  # of all ranks: the first one knows the version
    if trainer.is_global_zero:  # the module is full again, on every rank
        draw(module, path)
        loss_d, loss_g = trainer.callback_metrics["loss_d"], trainer.callback_metrics["loss_g"]
        print(f"\ndiscriminator {loss_d:.3f}, generator {loss_g:.3f} after {trainer.global_step // 2} batches; {path}")


if __name__ == "__main__":
    main()
