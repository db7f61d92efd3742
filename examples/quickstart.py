"""An ordinary LightningModule, trained by four processes: two pipeline stages, two replicas of each.

python examples/quickstart.py        about 15 s on a laptop CPU; draws quickstart_timeline.png
"""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import PipelineTimeline


class Classifier(L.LightningModule):
    """Nothing in it knows of stages, replicas or microbatches."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(8)))
        self.head = nn.Linear(256, 10)

    def training_step(self, batch, batch_idx):
        x, label = batch
        logits = self.head(self.layers(x))
        loss = F.cross_entropy(logits, label)
        self.log("loss", loss, prog_bar=True)
        self.log("accuracy", (logits.argmax(1) == label).double().mean(), prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main():
    L.seed_everything(1)  # every process runs this script, and must see the same data
    x = torch.randn(4096, 256)
    label = (x @ torch.randn(256, 10)).argmax(1)
    loader = DataLoader(TensorDataset(x, label), batch_size=64, shuffle=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=4,
        max_epochs=6,
        strategy=Hybrid3DStrategy(pipeline_parallel_size=2, num_microbatches=4),
        callbacks=PipelineTimeline(path="quickstart_timeline.png"),
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Classifier(), loader)
    trainer.save_checkpoint("quickstart.ckpt")  # one file of the full module, which plain Lightning loads


if __name__ == "__main__":
    main()
