"""Models whose parts differ in cost: two towers that are compared, and an image encoder before a language model."""

import torch
from torch import nn
from torch.nn import functional as F

from models.hand_written import LENGTH, VOCABULARY, WIDTH, Lit
from models.resnet import BasicBlock


class Block(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, causal=False):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(y)
        return x + self.mlp(self.norm2(x))


class Patches(nn.Module):
    """Images of 8 x 8 pixels as 16 tokens."""

    def __init__(self):
        super().__init__()
        self.project = nn.Conv2d(3, WIDTH, 2, 2)
        self.positions = nn.Parameter(0.1 * torch.randn(16, WIDTH))

    def forward(self, pixels):
        return self.project(pixels).flatten(2).transpose(1, 2) + self.positions


class Captions(Lit):
    """Base: images with a caption that follows from the label."""

    kind = "images"

    def caption(self, labels):
        return (labels[:, None] * 5 + torch.arange(LENGTH, device=labels.device)) % VOCABULARY


class TwoTowers(Captions):
    """CLIP (Radford et al. 2021): a convolutional image tower and a transformer, and a contrastive loss."""

    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(BasicBlock(3, 8), BasicBlock(8, WIDTH, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.tokens, self.text = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.image_head, self.text_head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def loss(self, batch):
        image = F.normalize(self.image_head(self.image(batch["pixel_values"])), dim=-1)
        x = self.tokens(self.caption(batch["labels"]))
        for layer in self.text:
            x = layer(x, causal=True)
        text = F.normalize(self.text_head(x[:, -1]), dim=-1)
        logits, own = self.scale.exp() * image @ text.T, torch.arange(len(image), device=image.device)
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


class VisionLanguage(Captions):
    """An image encoder whose tokens stand before those of a decoder."""

    def __init__(self):
        super().__init__()
        self.patches, self.encoder = Patches(), nn.ModuleList(Block() for _ in range(3))
        self.projector = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.tokens, self.decoder = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def loss(self, batch):
        x, caption = self.patches(batch["pixel_values"]), self.caption(batch["labels"])
        for layer in self.encoder:
            x = layer(x)
        x = torch.cat([self.projector(x), self.tokens(caption)], 1)
        for layer in self.decoder:
            x = layer(x, causal=True)
        logits = self.head(self.norm(x))[:, -LENGTH:-1]
        return F.cross_entropy(logits.flatten(0, 1), caption[:, 1:].flatten())
