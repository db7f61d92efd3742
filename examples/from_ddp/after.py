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
        layers = []
        for inputs, stride in ((1, 1), (16, 2), (16, 2)):
            layers += [nn.Conv2d(inputs, 16, 3, stride, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Flatten())
        self.head = nn.Linear(16 * 16, 10)

    def forward(self, images):
        return self.head(self.layers(images))

    def training_step(self, batch, batch_idx):
        images, label = batch
        loss = F.cross_entropy(self(images), label)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, label = batch
        self.log("val_loss", F.cross_entropy(self(images), label), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(seed, samples, **options):
    # Noisy images with a bright row, whose number is the class.
    random = torch.Generator().manual_seed(seed)
    images, label = torch.randn(samples, 1, 16, 16, generator=random), torch.randint(10, (samples,), generator=random)
    images[torch.arange(samples), 0, label + 3] += 1
    return DataLoader(TensorDataset(images, label), batch_size=32, **options)


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
