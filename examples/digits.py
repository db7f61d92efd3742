"""Train a small ResNet on scikit-learn's handwritten digits, over two pipeline stages.

Convolutions, BatchNorm and skip connections are partitioned like anything else; torchmetrics count each sample once.

    pip install -c constraints.txt '.[examples]'        scikit-learn
    python examples/digits.py
    python examples/digits.py --pipeline 1
"""

import argparse
import warnings

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_hybrid import Hybrid3DStrategy


class Digits(LightningDataModule):
    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        images, labels = load_digits(return_X_y=True)
        images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        labels = torch.tensor(labels)
        self.train = TensorDataset(images[:1400], labels[:1400])
        self.test = TensorDataset(images[1400:], labels[1400:])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.test, self.batch_size)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_1, self.norm_1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv_2, self.norm_2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(x + self.norm_2(self.conv_2(y)))


class ResNet(LightningModule):
    def __init__(self, channels: int = 32, blocks: int = 4, learning_rate: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.body = nn.Sequential(*(Residual(channels) for _ in range(blocks)))
        self.head = nn.Linear(channels, 10)
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(self.stem(images)).mean((2, 3)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.accuracy(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", type=int, default=2, help="pipeline stages")
    parser.add_argument("--microbatches", type=int, default=4, help="parts of each batch")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6 under torch 2.13
    seed_everything(1, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=args.pipeline,
        strategy=Hybrid3DStrategy(pipeline_parallel_size=args.pipeline, num_microbatches=args.microbatches),
        max_epochs=args.epochs,
        enable_model_summary=False,
        log_every_n_steps=10,
    )
    module = ResNet()
    trainer.fit(module, Digits())
    if trainer.is_global_zero:
        loss, accuracy = trainer.callback_metrics["val_loss"], trainer.callback_metrics["val_accuracy"]
        print(f"validation loss {loss:.4f}, accuracy {accuracy:.4f} after {args.epochs} epochs")


if __name__ == "__main__":
    main()
