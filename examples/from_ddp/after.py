"""The script of `before.py` under another strategy: optimizer states, gradients and parameters in shards (ZeRO-3).

python examples/from_ddp/after.py
"""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import Hybrid3DStrategy


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.layers(x))

    def training_step(self, batch, batch_idx):
        x, label = batch
        loss = F.cross_entropy(self(x), label)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, label = batch
        self.log("val_loss", F.cross_entropy(self(x), label), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loader(seed, samples, **options):
    x = torch.randn(samples, 64, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, x[:, :10].argmax(1)), batch_size=32, **options)


if __name__ == "__main__":
    L.seed_everything(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=Hybrid3DStrategy(zero_stage=3),
        max_epochs=4,
    )
    trainer.fit(Classifier(), loader(1, 2048, shuffle=True), loader(2, 512))
    if trainer.is_global_zero:
        print(f"validation loss {trainer.callback_metrics['val_loss']:.4f}")
