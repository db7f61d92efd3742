"""Train a Llama from scratch through LightningCLI: its layout and its sizes are those of llama.yaml.

sbatch llama.sbatch                                               in this folder, on a node of 8 GPUs
lightning-hybrid dryrun train.py --config llama.yaml              what each rank would hold and send, on one CPU
"""

from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, LlamaConfig


class Windows(Dataset):
    """Windows of a row of tokens, one after the other."""

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> Tensor:
        window = self.tokens[index * self.length : (index + 1) * self.length]
        return torch.from_numpy(window.astype(np.int64))


class Tokens(LightningDataModule):
    def __init__(self, path: str = "", length: int = 4096, batch_size: int = 16) -> None:
        super().__init__()
        self.path, self.length, self.batch_size = path, length, batch_size

    def train_dataloader(self) -> DataLoader:
        if self.path:
            tokens = np.memmap(self.path, dtype=np.uint32, mode="r")
        else:  # the same random numbers on every rank
            tokens = np.random.default_rng(1).zipf(1.5, 256 * self.length).clip(max=100).astype(np.uint32)
        return DataLoader(Windows(tokens, self.length), self.batch_size, shuffle=True, drop_last=True)


class Llama(LightningModule):
    def __init__(self, config: dict[str, Any], learning_rate: float = 3e-4) -> None:
        super().__init__()
        self.config, self.learning_rate = LlamaConfig(**config), learning_rate

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            with self.trainer.init_module(empty_init=True):  # each rank fills its own parameters
                self.model = AutoModelForCausalLM.from_config(self.config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), self.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.learning_rate, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


if __name__ == "__main__":
    LightningCLI(Llama, Tokens, seed_everything_default=1, save_config_kwargs={"overwrite": True})
