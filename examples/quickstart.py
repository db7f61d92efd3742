"""An ordinary LightningModule, trained by four processes: two pipeline stages, two replicas of each.

python examples/quickstart.py        about 20 s on two cores; draws timeline.png
python examples/quickstart.py LAST.ckpt        goes on from a checkpoint under another layout: two replicas, ZeRO-3
"""

import argparse

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import PipelineTimeline


class Classifier(L.LightningModule):  # nothing in it knows of stages, replicas or microbatches
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(8)))
        self.head = nn.Linear(256, 10)

    def training_step(self, batch, batch_idx):
        x, label = batch
        loss = F.cross_entropy(self.head(self.layers(x)), label)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self):
        x = torch.randn(4096, 256, generator=torch.Generator().manual_seed(1))  # the same in every process
        return DataLoader(TensorDataset(x, x[:, :10].argmax(1)), batch_size=64, shuffle=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", help="where to go on")
    checkpoint = parser.parse_args().checkpoint
    L.seed_everything(1)
    if checkpoint is None:  # 4 processes: 2 pipeline stages x 2 replicas
        devices, epochs, strategy = 4, 4, Hybrid3DStrategy(pipeline_parallel_size=2, num_microbatches=4)
    else:
        devices, epochs, strategy = 2, 5, "hybrid3d_zero3"
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        max_epochs=epochs,
        strategy=strategy,
        enable_model_summary=False,
        callbacks=PipelineTimeline("timeline.png"),
    )
    trainer.fit(Classifier(), ckpt_path=checkpoint)
