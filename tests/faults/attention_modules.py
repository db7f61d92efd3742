"""The same of modules with attention, with experts, and from transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from faults.small_modules import loader
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, LONGEST = 24, 16, 12
LENGTHS = [(7,) * 8, (7, 5, 7, 3, 2, 2, 6, 7), (9, 4, 1, 9, 3, 3, 9, 8), (5, 4, 5, 5, 1, 2, 3, 3)]


def padded(lengths: tuple[int, ...], mask: bool = True) -> tuple[Tensor, Tensor | None, Tensor]:
    """Tokens, a mask or None, and the weights of tokens."""
    positions = torch.arange(max(lengths))
    ids = torch.stack([positions * (3 + row) % (VOCABULARY - 2) + 2 for row in range(len(lengths))])
    valid = positions < torch.tensor(lengths)[:, None]
    return ids, valid.long() if mask else None, valid.double() / LONGEST


def texts(replica: int, replicas: int) -> list[Any]:
    """Batches padded to different lengths, each with a mask."""
    return [loader([padded(lengths) for lengths in LENGTHS], replica, replicas)]


def texts_with_late_masks(replica: int, replicas: int) -> list[Any]:
    """The first batches need no mask and have none."""
    batches = [padded((7,) * 8, mask=False), padded((5,) * 8, mask=False), *map(padded, LENGTHS)]
    return [
        loader(batches, replica, replicas),
        loader([padded((6,) * 8, mask=False), padded(LENGTHS[1])], replica, replicas),
    ]


class Text(LightningModule):
    """Trains a model of tokens that a subclass makes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = self.make()

    def make(self) -> nn.Module:
        raise NotImplementedError

    def logits(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        return self.model(input_ids=ids, attention_mask=mask).logits

    def loss(self, batch: Any) -> Tensor:
        ids, mask, weights = batch
        each = F.cross_entropy(self.logits(ids, mask).transpose(1, 2), ids.roll(-1, 1), reduction="none")
        return (each * weights).sum(1).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-4)


# X

TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
NAMED = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


class GPT2(Text):
    def make(self) -> nn.Module:
        config = transformers.GPT2Config(
            **TOKENS, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=LONGEST, embd_pdrop=0, resid_pdrop=0, attn_pdrop=0
        )
        return transformers.GPT2LMHeadModel(config)


class Bert(Text):
    def make(self) -> nn.Module:
        config = transformers.BertConfig(
            **TOKENS, **NAMED, max_position_embeddings=LONGEST, hidden_dropout_prob=0, attention_probs_dropout_prob=0
        )
        return transformers.BertForMaskedLM(config)


class T5(Text):
    def make(self) -> nn.Module:
        config = transformers.T5Config(
            **TOKENS | {"decoder_start_token_id": 0},
            d_model=WIDTH,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            dropout_rate=0,
        )
        return transformers.T5ForConditionalGeneration(config)

    def logits(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        return self.model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids.flip(1)).logits


class Llama(Text):
    key_heads = 2

    def make(self) -> nn.Module:
        grouped = {"num_attention_heads": 4, "num_key_value_heads": self.key_heads}
        config = transformers.LlamaConfig(**TOKENS, **NAMED | grouped, max_position_embeddings=LONGEST)
        return transformers.LlamaForCausalLM(config)


class LlamaOneKeyHead(Llama):
    key_heads = 1


# AC, AD: attention by hand


class Attention(nn.Module):
    """Grouped queries."""

    def __init__(self, heads: int, width: int, key_heads: int) -> None:
        super().__init__()
        self.heads, self.width, self.key_heads = heads, width, key_heads
        size = heads * width
        self.query, self.out = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)
        self.key, self.value = (nn.Linear(size, key_heads * width, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        batch, positions, _ = x.shape
        q = self.query(x).view(batch, positions, self.heads, self.width).transpose(1, 2)
        k, v = (
            layer(x).view(batch, positions, self.key_heads, self.width).transpose(1, 2)
            for layer in (self.key, self.value)
        )
        if self.key_heads < self.heads:
            k, v = (each.repeat_interleave(self.heads // self.key_heads, dim=1) for each in (k, v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(h.transpose(1, 2).reshape(batch, positions, -1))


class Block(nn.Module):
    def __init__(self, heads: int, width: int, key_heads: int, inner: nn.Module | None = None) -> None:
        super().__init__()
        size = heads * width
        self.first, self.second = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attention = Attention(heads, width, key_heads)
        self.inner = inner or nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.inner(self.second(x))


class Grouped(Text):
    """Its heads are as wide as there are heads."""

    sizes = 4, 4, 2

    def make(self) -> nn.Module:
        size = self.sizes[0] * self.sizes[1]
        blocks = [Block(*self.sizes, self.inner(size)) for _ in range(3)]
        return nn.Sequential(nn.Embedding(VOCABULARY, size), *blocks, nn.Linear(size, VOCABULARY))

    def inner(self, size: int) -> nn.Module | None:
        return None

    def logits(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        return self.model(ids)


class OneKeyHead(Grouped):
    sizes = 4, 4, 1


class TwoOfTwo(Grouped):
    sizes = 2, 2, 2


class ThreeHeads(Grouped):
    sizes = 3, 4, 3


class BranchingBlock(Block):
    """Where there is a mask it runs further lines, which use parameters that nothing else uses."""

    def __init__(self, heads: int, width: int, key_heads: int, branch: str) -> None:
        super().__init__(heads, width, key_heads)
        size = heads * width
        self.branch = branch
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, size))
        self.places = nn.Parameter(torch.linspace(-1, 1, LONGEST * size).view(LONGEST, size))
        self.gate = nn.Linear(size, size)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.first(x))
        if mask is not None and self.branch != "inside":
            x = getattr(self, self.branch)(x, mask.unsqueeze(-1))
        h = self.inner[0](self.second(x))
        if mask is not None and self.branch == "inside":
            h = h * mask.unsqueeze(-1)
        return x + self.inner[2](self.inner[1](h))

    def masked(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask * self.scale

    def gated(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * torch.sigmoid(self.gate(x))

    def summed(self, x: Tensor, mask: Tensor) -> Tensor:
        return x.cumsum(1) / 4

    def averaged(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)

    def placed(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.places[: x.shape[1]]

    def attends_twice(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.attention(self.second(x)) * mask


class BranchInside(Text):
    """Its blocks run the branch with full positions."""

    branch = "inside"

    def make(self) -> nn.Module:
        blocks = [BranchingBlock(2, 8, 2, self.branch) for _ in range(2)]
        return nn.ModuleList([nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY)])

    def logits(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        embedding, *blocks, head = self.model
        x = embedding(ids)
        for block in blocks:
            x = block(x, mask)
        return head(x)


class BranchMasked(BranchInside):
    branch = "masked"


class BranchGated(BranchInside):
    branch = "gated"


class BranchSummed(BranchInside):
    branch = "summed"


class BranchAveraged(BranchInside):
    branch = "averaged"


class BranchPlaced(BranchInside):
    branch = "placed"


class BranchAttendsTwice(BranchInside):
    branch = "attends_twice"


# Z


class Listed(nn.Module):
    """Experts in a list, called on their tokens."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.router = nn.Linear(size, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(size, 2 * size), nn.SiLU(), nn.Linear(2 * size, size)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        gates, chosen = self.router(rows).softmax(-1).topk(2)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            taken, place = torch.where(chosen == number)
            out = out.index_add(0, taken, expert(rows[taken]) * gates[taken, place].unsqueeze(-1))
        return out.view_as(x)


class Mixture(Grouped):
    sizes = 2, 8, 2

    def inner(self, size: int) -> nn.Module | None:
        return Listed(size)
