"""A Lightning script for ZeRO-3 with offload of DeepSpeed, moved here: each line that was removed is behind "before".

    python examples/from_deepspeed.py

ends with

    validation loss 0.81
"""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

# before: from deepspeed.ops.adam import DeepSpeedCPUAdam
import lightning_hybrid  # noqa: F401 (registers the names of strategies)


class Classifier(L.LightningModule):
    # before: def configure_model(self), which DeepSpeed needs to shard layers while they are built; it may stay
    def __init__(self, width=256):
        super().__init__()
        self.embed = nn.Linear(32, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            # before: x = x + deepspeed.checkpointing.checkpoint(layer, x)
            x = x + layer(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        x, label = batch
        return F.cross_entropy(self(x), label)

    def validation_step(self, batch, batch_idx):
        x, label = batch
        self.log("val_loss", F.cross_entropy(self(x), label), sync_dist=True)

    def on_train_epoch_end(self):
        # before: with deepspeed.zero.GatheredParameters([self.head.weight]):
        self.norm = self.head.weight.norm().item()

    def configure_optimizers(self):
        # before: return DeepSpeedCPUAdam(self.parameters(), lr=1e-3)
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loader(seed, samples, **options):
    # Points around ten centres.
    random = torch.Generator().manual_seed(seed)
    label = torch.randint(10, (samples,), generator=random)
    centres = torch.randn(10, 32, generator=torch.Generator().manual_seed(0))
    x = centres[label] + 2 * torch.randn(samples, 32, generator=random)
    return DataLoader(TensorDataset(x, label), batch_size=16, **options)


if __name__ == "__main__":
    L.seed_everything(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        # before: strategy="deepspeed_stage_3_offload",
        strategy="hybrid3d_zero3_offload",
        max_epochs=2,
        gradient_clip_val=1.0,
    )
    trainer.fit(Classifier(), loader(1, 1024, shuffle=True), loader(2, 512))
    if trainer.is_global_zero:
        print(f"validation loss {trainer.callback_metrics['val_loss']:.2f}")
