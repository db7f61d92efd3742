"""Predicted memory of recorded steps against what their tensors take in a run: the loss, and recomputation."""

import importlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from harness.fits import trainer_of
from harness.trainer_runs import ignore_warnings
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import MemoryMonitor
from lightning_hybrid.planning.costs import record_costs
from lightning_hybrid.predict.hardware import load_hardware
from lightning_hybrid.predict.layout import PlanLayout
from lightning_hybrid.predict.memory import predict_memory

pl = importlib.import_module("lightning.pytorch")
WIDTH, TOKENS, WORDS, BATCH = 32, 32, 4096, 8


class Tokens(Dataset):
    def __len__(self):
        return 3 * BATCH

    def __getitem__(self, index):
        return (torch.arange(TOKENS) + index) % WORDS


class LanguageModel(pl.LightningModule):
    """Logits of a few small layers take most of the memory."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def loss(self, logits, targets):
        return F.cross_entropy(logits, targets)

    def training_step(self, batch, batch_idx):
        hidden = self.embedding(batch)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.loss(self.head(hidden).flatten(0, 1), batch.flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self):
        return DataLoader(Tokens(), batch_size=BATCH)


class InTwoOperations(LanguageModel):
    def loss(self, logits, targets):
        return F.nll_loss(F.log_softmax(logits, 1), targets)


class Scaled(LanguageModel):
    """Its logits are divided, which saves nothing, and bounded, which saves the bounded ones."""

    def loss(self, logits, targets):
        return F.cross_entropy(torch.tanh(logits / 8) * 8, targets)


class Squares(LanguageModel):
    def loss(self, logits, targets):
        return F.mse_loss(logits, torch.zeros_like(logits))


class OneSequential(LanguageModel):
    """Its linears are in one ``nn.Sequential``, which is recomputed as one layer unless it is cut into stages."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 64), nn.Linear(64, 64)
        modules = (each for _ in range(12) for each in (nn.Linear(64, 64), nn.Tanh()))
        self.layers = nn.ModuleList([nn.Sequential(*modules)])

    def training_step(self, batch, batch_idx):
        return super().training_step(batch % 64, batch_idx)


def predicted(module, precision="32-true", **options):
    recorded = record_costs(pl, module, {}, precision)
    layout = PlanLayout(batch=BATCH, **{"microbatch": BATCH} | options)
    [terms] = predict_memory(recorded.costs, layout, recorded.number_format, load_hardware("cpu")).ranks
    return {name: size for name, size in terms.items() if name != "framework"}


def measured(module, precision="32-true", **options):
    ignore_warnings()
    monitor = MemoryMonitor(step=2)
    trainer_of(1, Hybrid3DStrategy(**options), [monitor], max_steps=2, precision=precision).fit(module)
    [sizes] = monitor.measured
    return sizes["peak"]


@pytest.mark.parametrize("kind", [LanguageModel, InTwoOperations, Scaled])
def test_full_batch(kind):
    terms = predicted(kind())
    assert terms["loss"] > 4 * BATCH * TOKENS * WORDS  # a gradient of the logits and something more, or two of them
    assert sum(terms.values()) == pytest.approx(measured(kind()), rel=0.08), terms


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_microbatches(precision):
    terms = predicted(LanguageModel(), precision, microbatch=2)
    assert sum(terms.values()) == pytest.approx(measured(LanguageModel(), precision, num_microbatches=4), rel=0.08)


def test_loss_in_chunks():
    logits = 4 * BATCH * TOKENS * WORDS
    full, chunks = predicted(LanguageModel()), predicted(LanguageModel(), chunked_loss=True)
    assert chunks["loss"] == 0.0 and sum(full.values()) - sum(chunks.values()) == pytest.approx(3 * logits, rel=0.1)
    assert predicted(Squares(), chunked_loss=True) == predicted(Squares())  # is over no classes
    assert predicted(Squares())["loss"] >= logits


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("kind", [LanguageModel, OneSequential])
def test_recomputation(kind, recompute):
    terms = predicted(kind(), recompute=recompute or "none")
    # Gradients inside of a layer are not predicted; layers are small here.
    assert sum(terms.values()) == pytest.approx(measured(kind(), recompute=recompute), rel=0.12), terms


def test_an_opened_sequential_is_one_layer_until_it_is_cut():
    costs = record_costs(pl, OneSequential(), {}, "32-true").costs
    assert costs.num_layers == 14 and costs.with_stages(2) is costs
    whole = costs.with_stages(1)
    assert whole.num_layers == 3 and whole.parameters == costs.parameters
    assert whole.flops == pytest.approx(costs.flops)
    assert sum(layer.saved for layer in whole.single_layers()) == sum(layer.saved for layer in costs.single_layers())


def test_tensor_ranks_each_save_what_surrounds_attention_and_mlp():
    """Inputs and outputs of both norms of a block."""

    class Encoder(LanguageModel):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            self.layers = nn.ModuleList([layer])

    encoder = max(record_costs(pl, Encoder(), {}, "32-true").costs.layers, key=lambda layer: len(layer.products))
    assert encoder.replicated_saved == 4 * TOKENS * WIDTH < encoder.saved
    linear = max(record_costs(pl, LanguageModel(), {}, "32-true").costs.layers, key=lambda layer: layer.outputs)
    assert linear.replicated_saved <= 2 * TOKENS * WIDTH
