"""Documents packed into sequences that context ranks shard: no token sees another document."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness.fits import Run, check
from models.cases import sample
from models.hand_written import LENGTH, VOCABULARY, WIDTH, Lit
from models.nano_gpt import MLP
from models.wide import LlamaWide

ONE = [LENGTH]
TWO, OTHER, MANY = [2, 4], [5, 1], [1, 3, 2]


def documents(lengths):
    return torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])


def positions(lengths):
    return torch.cat([torch.arange(length) for length in lengths])


def packed(samples, packings):
    """A batch whose samples are packed by these lengths, in turn by the index of a token of the first sample."""
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    of_samples = [packings[int(sample["input_ids"].sum()) % len(packings)] for sample in samples]
    batch["documents"] = torch.stack([documents(lengths) for lengths in of_samples])
    batch["position_ids"] = torch.stack([positions(lengths) for lengths in of_samples])
    return batch


class PackedLlama(LlamaWide):
    """The module of transformers, which derives the documents from position ids that restart."""

    def loss(self, batch):
        logits = self.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


class PackedAttention(nn.Module):
    """Multi-head attention; `mask_of` makes its mask of what the block is called with."""

    def __init__(self, mask_of):
        super().__init__()
        self.qkv, self.out, self.mask_of = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), mask_of

    def forward(self, x, packing):
        B, T, C = x.shape
        q, k, v = (part.view(B, T, 4, C // 4).transpose(1, 2) for part in self.qkv(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask_of(packing, T))
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class PackedBlock(nn.Module):
    def __init__(self, mask_of):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), PackedAttention(mask_of)
        self.ln_2, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x, packing):
        x = x + self.attn(self.ln_1(x), packing)
        return x + self.mlp(self.ln_2(x))


def causal(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


def mask_itself(packing, length):
    return packing


def mask_of_documents(packing, length):
    """In the attention: the documents of all positions."""
    return ((packing[:, :, None] == packing[:, None, :]) & causal(length))[:, None]


def mask_of_first_documents(packing, length):
    """The same, of as many positions as the hidden state has."""
    return mask_of_documents(packing[:, :length], length)


def mask_of_cumulative_lengths(packing, length):
    """In the attention: `packing` is cumulative lengths (cu_seqlens), the same for all samples."""
    of_position = torch.bucketize(torch.arange(length), packing, right=True)
    return (of_position[:, None] == of_position[None, :]) & causal(length)


class Packed(Lit):
    """A decoder of blocks that are called with the hidden state and the packing."""

    kind = "tokens"
    mask_of = staticmethod(mask_of_documents)
    block = PackedBlock

    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(self.block(self.mask_of) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def packing(self, batch):
        return batch["documents"]

    def loss(self, batch):
        x, packing = self.wte(batch["input_ids"]) + self.wpe(batch["position_ids"]), self.packing(batch)
        for block in self.blocks:
            x = block(x, packing)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())


class MaskInGlue(Packed):
    """The mask is made once in the forward, from the documents."""

    mask_of = staticmethod(mask_itself)

    def packing(self, batch):
        return mask_of_documents(batch["documents"], LENGTH)


class AdditiveMask(MaskInGlue):
    def packing(self, batch):
        return torch.zeros((), dtype=torch.float64).masked_fill(~super().packing(batch), float("-inf"))


class FirstDocuments(Packed):
    mask_of = staticmethod(mask_of_first_documents)


class CumulativeLengths(Packed):
    mask_of = staticmethod(mask_of_cumulative_lengths)

    def packing(self, batch):
        lengths = torch.bincount(batch["documents"][0], minlength=3)
        return lengths.cumsum(0)


class SegmentBlock(PackedBlock):
    """Adds an embedding of each position's document, of as many positions as the hidden state has."""

    def __init__(self, mask_of):
        super().__init__(mask_of)
        self.segments = nn.Embedding(4, WIDTH)

    def forward(self, x, packing):
        return super().forward(x + self.segments(packing[:, : x.shape[1]]), packing)


class Segments(Packed):
    block = SegmentBlock


class PaddingBlock(PackedBlock):
    """Sets positions of padding to zero, of as many as the hidden state has."""

    def forward(self, x, packing):
        return super().forward(x * packing[:, : x.shape[1], None], packing)


class Padding(Packed):
    """The last documents are padding."""

    block = PaddingBlock

    def packing(self, batch):
        return batch["documents"] < 2


class VariableLengths(PackedAttention):
    """Causal attention of each document by itself (`is_causal`), as flash attention does with `cu_seqlens`."""

    def forward(self, x, packing):
        B, T, C = x.shape
        q, k, v = (part.view(B, T, 4, C // 4).transpose(1, 2) for part in self.qkv(x).split(C, dim=2))
        bounds = [0, *packing.tolist()]
        spans = [slice(a, b) for a, b in itertools.pairwise(bounds) if b > a]
        y = torch.cat(
            [F.scaled_dot_product_attention(q[:, :, s], k[:, :, s], v[:, :, s], is_causal=True) for s in spans], 2
        )
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class VariableLengthBlock(PackedBlock):
    def __init__(self, mask_of):
        super().__init__(mask_of)
        self.attn = VariableLengths(mask_of)


class CumulativeLengthsRead(CumulativeLengths):
    block = VariableLengthBlock


def several(samples):
    return packed(samples, [TWO, OTHER, MANY])


def equal(samples):
    """All samples of a batch are packed alike, as `cu_seqlens` assume."""
    return packed(samples, [[TWO, OTHER, MANY][int(samples[0]["input_ids"][0]) % 3]])


def later(samples):
    """The first batch has one document in each sample, and others several."""
    is_first = torch.equal(samples[0]["input_ids"], sample("tokens", 0)["input_ids"])
    return packed(samples, [ONE] if is_first else [TWO, OTHER, MANY])


CP, BOTH = {"cp": 2, "microbatches": 1}, {"tp": 2, "cp": 2, "microbatches": 1}
slow = pytest.mark.slow
CASES = [
    Run(PackedLlama, **CP, collate=several),
    Run(MaskInGlue, **CP, collate=several),
    Run(Packed, **CP, collate=several),
    Run(FirstDocuments, **CP, collate=several),
    Run(Segments, **CP, collate=several),
    Run(CumulativeLengths, **CP, collate=equal),
    Run(CumulativeLengthsRead, **CP, collate=equal),
    *(
        pytest.param(run, marks=slow)
        for run in [
            Run(PackedLlama, **BOTH, collate=several),
            Run(PackedLlama, pp=2, cp=2, collate=several),
            Run(AdditiveMask, **CP, collate=several),
            Run(Packed, pp=2, cp=2, collate=several),
            Run(Packed, **BOTH, collate=several),
            Run(Packed, **BOTH, sequence=True, collate=several),
            Run(FirstDocuments, **BOTH, collate=several),
            Run(Segments, **BOTH, sequence=True, collate=several),
        ]
    ),
]


def name_of(run):
    return f"{run.case.__name__}-pp{run.pp}-tp{run.tp}-cp{run.cp}{'-sequence' * run.sequence}"


@pytest.mark.parametrize("run", CASES, ids=name_of)
def test_parity(worlds, run):
    """Packings differ between samples and batches."""
    ranks, _ = check(worlds, run, timeout=600)
    layers = {fqn: plan for fqn, plan in ranks[0].plans.items() if fqn.rpartition(".")[2].isdecimal()}
    assert all(plan.positions is not None for plan in layers.values())


@pytest.mark.parametrize(
    "case", [PackedLlama, Packed, FirstDocuments, Segments, Padding], ids=lambda case: case.__name__
)
def test_documents_that_begin_after_the_plan_was_proved(worlds, case):
    """The first batch, by which layers are planned and proved, has one document in each sample."""
    check(worlds, Run(case, **CP, num_batches=4, collate=later), timeout=600)
