"""Heads of recorded modules: the planned tensor ranks divide them, and a run shards all layers over these."""

import importlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_hybrid.params.placement import Shard
from lightning_hybrid.planning.costs import record_costs
from lightning_hybrid.planning.plan import make_plan
from lightning_hybrid.predict.candidates import Candidates
from lightning_hybrid.predict.hardware import load_hardware
from lightning_hybrid.predict.layout import Allowed
from models import hand_written, hugging_face
from models.cases import batch_of
from models.hand_written import VOCABULARY, WIDTH, Lit

pl = importlib.import_module("lightning.pytorch")
ARCHITECTURES = {
    "GPT-2": (hugging_face.GPT2, 4, 4),
    "Llama": (hugging_face.Llama, 4, 2),
    "BERT": (hugging_face.Bert, 4, 4),
    "ViT": (hugging_face.ViT, 4, 4),
    "T5": (hugging_face.T5, 4, 4),
    "nn.TransformerEncoder": (hand_written.Encoder, 4, 4),
}


class Samples(Dataset):
    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {name: value[0] for name, value in batch_of(self.kind, [index], torch.float32).items()}


def fitted(module):
    loader = DataLoader(Samples(module.kind), batch_size=2)
    return {"train_dataloaders": loader, "val_dataloaders": loader}


def sizes_of(costs):
    """Numbers of tensor ranks that are planned, of 2 to 8."""
    candidates = (Candidates(costs, load_hardware("h100"), ranks, 8, False, {}, Allowed()) for ranks in range(2, 9))
    return {size for each in candidates for size in each.tensor_sizes() if size > 1}


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.extended] if name == "T5" else []) for name in ARCHITECTURES]
)
def test_planned_tensor_ranks_shard_all_layers(name):
    base, heads, key_heads = ARCHITECTURES[name]
    if base is not hand_written.Encoder:
        pytest.importorskip("transformers")
    case = type(base.__name__, (base,), {"heads": heads, "layers": 2})
    module = case()
    costs = record_costs(pl, module, fitted(module), "32-true").costs
    assert (costs.heads, costs.key_value_heads) == (heads, key_heads)
    planned = sizes_of(costs)
    assert planned == {size for size in (2, 4) if key_heads % size == 0}
    size = max(planned)
    plan = make_plan(pl, module := case(), fitted(module), size, {"tensor_parallel_size": size}, "32-true")
    plans = plan.partition.run.plans
    layers = {fqn: each for fqn, each in plans.items() if fqn.rpartition(".")[2].isdigit()}
    assert len(layers) >= 2 and not any(each.uneven for each in layers.values())
    for fqn, each in layers.items():
        for parameter, value in module.get_submodule(fqn).named_parameters():
            if value.dim() == 2 and "relative_attention_bias" not in parameter:  # T5's table of few rows
                assert isinstance(each.placements[parameter], Shard), f"{fqn}.{parameter}"


def test_tensor_ranks_that_do_not_divide_the_width_of_layers_are_not_planned():
    """Four heads, and an inner width that is no multiple of four."""

    class Uneven(hand_written.Encoder):
        heads = 4

        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, 4, 30, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    module = Uneven()
    costs = record_costs(pl, module, fitted(module), "32-true").costs
    assert costs.heads == 4 and sizes_of(costs) == {2}


class Attention(nn.Module):
    """Attention in a kernel or in products, with fewer heads of keys that are repeated or read by several."""

    def __init__(self, kind, heads, key_heads):
        super().__init__()
        self.kind, self.heads, self.key_heads = kind, heads, key_heads
        size = WIDTH // heads
        self.q, self.k, self.v = (nn.Linear(WIDTH, size * number) for number in (heads, key_heads, key_heads))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (number, -1)).transpose(1, 2)
            for part, number in (
                (self.q(x), self.heads), (self.k(x), self.key_heads), (self.v(x), self.key_heads),
            )
        )  # fmt: skip
        if self.kind == "kernel":
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.key_heads)
        else:
            k, v = (part.repeat_interleave(self.heads // self.key_heads, dim=1) for part in (k, v))
            out = (q @ k.transpose(2, 3)).softmax(-1) @ v
        return x + self.out(out.transpose(1, 2).flatten(2))


class Attentions(Lit):
    kind = "tokens"

    def __init__(self, *attentions):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(attentions)

    def loss(self, batch):
        x = self.embedding(batch["input_ids"])
        for layer in self.layers:
            out = layer(x, x, x) if isinstance(layer, nn.MultiheadAttention) else layer(x)
            x = out[0] if isinstance(out, tuple) else out
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize(
    ("layers", "heads", "key_heads"),
    [
        ([("kernel", 4, 4)], 4, 4),
        ([("kernel", 8, 2)], 8, 2),
        ([("products", 4, 4)], 4, 4),
        ([("products", 8, 2)], 8, 2),
        ([("kernel", 8, 8), ("products", 4, 4)], 4, 4),
        ([("kernel", 8, 4), ("kernel", 8, 2)], 8, 2),
    ],
)
def test_heads_of_kernels_and_products(layers, heads, key_heads):
    module = Attentions(*(Attention(*layer) for layer in layers))
    costs = record_costs(pl, module, fitted(module), "32-true").costs
    assert (costs.heads, costs.key_value_heads) == (heads, key_heads)


@pytest.mark.parametrize("layers", [1, 2])
def test_heads_of_attention_with_weights_returned(layers):
    """Its products have the batch and the heads in one dim."""
    module = Attentions(*(nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(layers)))
    assert record_costs(pl, module, fitted(module), "32-true").costs.heads == 4


def test_modules_without_attention_have_no_heads():
    """A softmax, and a batched product, by themselves."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.stack = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(2, WIDTH, WIDTH))

        def forward(self, x):
            return torch.bmm(x, self.stack) * self.linear(x).softmax(-1)

    module = Attentions(Gated(), Gated())
    costs = record_costs(pl, module, fitted(module), "32-true").costs
    assert costs.heads is None and costs.key_value_heads is None
