"""TensorBoard with curves, and with pictures of the pipeline: what each rank did when, its memory, the whole run.

python examples/tensorboard_pictures.py [FOLDER]        four processes: two pipeline stages, two replicas of each
tensorboard --logdir FOLDER                             the tabs Scalars and Images; FOLDER is logs by default
"""

import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import PipelineTimeline, RunPlot


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(8)))
        self.head = nn.Linear(256, 10)

    def training_step(self, batch, batch_idx):
        x, label = batch
        loss = F.cross_entropy(self.head(self.layers(x)), label)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer, 0.1, 10), "interval": "step"}]

    def train_dataloader(self):
        x = torch.randn(4096, 256, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, x[:, :10].argmax(1)), batch_size=64, shuffle=True)


if __name__ == "__main__":
    L.seed_everything(1)
    logs = Path(sys.argv[1] if len(sys.argv) > 1 else "logs")
    timeline = PipelineTimeline(
        [logs / "timeline.svg", logs / "trace.json"],  # the trace is for ui.perfetto.dev
        step=20,
        ranks="all",
        memory_path=logs / "memory.svg",
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=4,
        max_epochs=2,
        log_every_n_steps=4,
        strategy=Hybrid3DStrategy(pipeline_parallel_size=2, num_microbatches=4),
        logger=TensorBoardLogger(logs),
        callbacks=[LearningRateMonitor(), timeline, RunPlot(logs / "run.png")],
        enable_checkpointing=False,
    )
    trainer.fit(Classifier())
