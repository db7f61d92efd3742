"""A script for any launcher: python, torchrun.sh and slurm.sh start it unchanged."""

import os

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import Hybrid3DStrategy


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)), nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self):
        x = torch.randn(1024, 64, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=64)


if __name__ == "__main__":
    L.seed_everything(1)  # every rank draws the same data
    trainer = L.Trainer(
        accelerator=os.environ.get("ACCELERATOR", "cpu"),
        devices=int(os.environ.get("DEVICES", "2")),  # ranks on each node
        num_nodes=int(os.environ.get("NODES", "1")),
        max_epochs=2,
        precision="32-true",  # on GPUs "bf16-mixed", say
        strategy=Hybrid3DStrategy(pipeline_parallel_size=2),
        callbacks=ModelCheckpoint("checkpoints", save_last=True),
    )
    trainer.fit(Module(), ckpt_path="last")  # goes on where a job that was ended has saved
    loss = trainer.callback_metrics["loss"]
    print(f"rank {trainer.strategy.mesh.rank} on node {trainer.node_rank}: loss {loss:.6f}", flush=True)
