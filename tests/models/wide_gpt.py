"""GPT-2 of Hugging Face in the sizes of GPT-3, for plans without its weights."""

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset


class Tokens(Dataset):
    def __init__(self, length, vocabulary):
        self.length, self.vocabulary = length, vocabulary

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return torch.arange(index, index + self.length) % self.vocabulary


class WideGPT(pl.LightningModule):
    def __init__(
        self, layers: int = 96, width: int = 12288, heads: int = 96, length: int = 2048, batch_size: int = 256
    ):
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": length, "vocab_size": 51200}
        self.model, self.length, self.batch_size = GPT2LMHeadModel(GPT2Config(**sizes)), length, batch_size

    def training_step(self, batch, batch_idx=0):
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self):
        return DataLoader(Tokens(self.length, 51200), batch_size=self.batch_size)
