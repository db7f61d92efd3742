"""The GPT that the benchmarks train: even blocks, small vocabulary, so that half the blocks are half the work."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Embed(nn.Module):
    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(length, width)

    def forward(self, text: Tensor) -> Tensor:
        return self.token(text) + self.position(torch.arange(text.shape[1], device=text.device))


class SmallGPT(LightningModule):
    def __init__(self, width: int = 256, layers: int = 8, heads: int = 4, length: int = 128) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = Embed(width, length)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        text, following = batch
        return loss_of(self(text), following)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.parameters())

    def stages(self, num_stages: int) -> list[nn.Sequential]:
        """The same modules cut by hand into stages of equally many blocks."""
        each, rest = divmod(len(self.blocks), num_stages)
        assert not rest
        cuts = [list(self.blocks[i * each : (i + 1) * each]) for i in range(num_stages)]
        cuts[0].insert(0, self.embed)
        cuts[-1] += [self.norm, self.head]
        return [nn.Sequential(*cut) for cut in cuts]


def loss_of(logits: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def optimizer_of(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4)


def batch_of(size: int, length: int) -> tuple[Tensor, Tensor]:
    """The same on every rank."""
    text = torch.randint(0, VOCABULARY, (size, length + 1), generator=torch.Generator().manual_seed(1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def train_alone(turn, model: nn.Module, batch: tuple[Tensor, Tensor], num_microbatches: int) -> None:
    """One process: accumulate the microbatches in a plain loop, step."""
    optimizer = optimizer_of(model.parameters())
    while True:
        turn.border()
        optimizer.zero_grad()
        for text, following in zip(*(part.chunk(num_microbatches) for part in batch), strict=True):
            (loss_of(model(text), following) / num_microbatches).backward()
        optimizer.step()
