"""Train a vision transformer, or a ResNet with synchronized BatchNorm, on scikit-learn's handwritten digits.

The models are those of `transformers`, built from a configuration. Loader workers shift the images at random;
torchmetrics count each sample once; training writes TensorBoard logs, and keeps the checkpoint of the best accuracy.

    python examples/vit.py                                                       2 stages: 2 processes
    python examples/vit.py --devices 4                                           2 replicas x 2 stages: 4 processes
    python examples/vit.py --model resnet --pipeline 1 --sync-batchnorm          2 replicas, one BatchNorm
    python examples/vit.py --model resnet --devices 4 --sync-batchnorm           the same with 2 stages
    python examples/vit.py --width 192 --layers 12 --heads 3 --epochs 20
"""

import argparse
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy
from transformers import AutoModelForImageClassification, PreTrainedConfig, ResNetConfig, ViTConfig

from lightning_hybrid import Hybrid3DStrategy


class ShiftedImages(Dataset):
    """Images of 16 x 16 pixels, each shifted by up to two of them whenever it is read."""

    def __init__(self, images: Tensor, labels: Tensor, shift: int) -> None:
        self.images = F.interpolate(images[:, None].float() / 16, scale_factor=2, mode="bilinear")
        self.labels, self.shift = labels, shift

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        down, right = torch.randint(-self.shift, self.shift + 1, (2,)).tolist()
        return self.images[index].roll((down, right), (1, 2)), self.labels[index]


class Digits(LightningDataModule):
    def __init__(self, batch_size: int = 64, num_workers: int = 2) -> None:
        super().__init__()
        self.batch_size, self.num_workers = batch_size, num_workers

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images, labels = torch.tensor(digits.images), torch.tensor(digits.target)
        self.train = ShiftedImages(images[:1400], labels[:1400], shift=2)
        self.val = ShiftedImages(images[1400:], labels[1400:], shift=0)

    def loader(self, data: Dataset, is_training: bool) -> DataLoader:
        workers = {"num_workers": self.num_workers, "persistent_workers": self.num_workers > 0}
        return DataLoader(data, self.batch_size, shuffle=is_training, drop_last=is_training, **workers)

    def train_dataloader(self) -> DataLoader:
        return self.loader(self.train, is_training=True)

    def val_dataloader(self) -> DataLoader:
        return self.loader(self.val, is_training=False)


class Classifier(LightningModule):
    """A model of transformers that classifies images."""

    def __init__(self, config: PreTrainedConfig, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.model = AutoModelForImageClassification.from_config(config)
        self.accuracy = MulticlassAccuracy(config.num_labels, average="micro")
        self.learning_rate = learning_rate

    def forward(self, images: Tensor) -> Tensor:
        return self.model(pixel_values=images).logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels, label_smoothing=0.1)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.accuracy(self(images), labels)
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.05)
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.learning_rate, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def config_of(args: argparse.Namespace) -> PreTrainedConfig:
    width, layers = args.width, args.layers
    if args.model == "vit":
        sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
        return ViTConfig(
            image_size=16, patch_size=4, num_channels=1, num_labels=10, num_attention_heads=args.heads, **sizes
        )
    return ResNetConfig(
        num_channels=1, num_labels=10, embedding_size=width // 2, hidden_sizes=[width // 2, width],
        depths=[layers // 2, layers - layers // 2], layer_type="basic"
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["vit", "resnet"], default="vit")
    parser.add_argument("--devices", type=int, default=2, help="processes: stages x replicas")
    parser.add_argument("--pipeline", type=int, default=2, help="pipeline stages")
    parser.add_argument("--microbatches", type=int, default=2, help="parts of each batch")
    parser.add_argument("--sync-batchnorm", action="store_true", help="BatchNorm over the samples of all replicas")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of each loader, in each process")
    parser.add_argument("--accelerator", default="cpu", help="as in Lightning's Trainer")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64, help="images per replica and step")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batches", type=int, help="at most so many batches per epoch")
    parser.add_argument("--out", type=Path, default=Path("lightning_logs/vit"), help="folder for logs and checkpoints")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6 under torch 2.13
    seed_everything(1, workers=True, verbose=False)  # workers of all ranks of a replica draw the same shifts
    best = ModelCheckpoint(args.out / "checkpoints", monitor="val_accuracy", mode="max")
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        strategy=Hybrid3DStrategy(pipeline_parallel_size=args.pipeline, num_microbatches=args.microbatches),
        sync_batchnorm=args.sync_batchnorm,
        max_epochs=args.epochs,
        limit_train_batches=args.batches,
        limit_val_batches=args.batches,
        log_every_n_steps=10,
        logger=TensorBoardLogger(args.out, name="logs"),
        callbacks=[best],
        enable_model_summary=False,
    )
    module = Classifier(config_of(args))
    trainer.fit(module, Digits(args.batch, args.workers))
    if trainer.is_global_zero:
        parameters = sum(parameter.numel() for parameter in module.parameters())
        print(f"{args.model} of {parameters:,} parameters, {trainer.global_step} steps; logs in {args.out}/logs")
        print(f"best validation accuracy {best.best_model_score:.4f}: {best.best_model_path}")


if __name__ == "__main__":
    main()
