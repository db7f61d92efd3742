"""Sparse gradients of embeddings where replicas or shards have rows of the table."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from harness.verification import LAYOUTS, check
from lightning_hybrid.verify import Layout

ROWS, WIDTH = 21, 6


class Table(LightningModule):
    """Two tables: one with many rows, and one with fewer than ranks would share out by rows."""

    optimizer = staticmethod(lambda parameters: torch.optim.SGD(parameters, lr=0.3))

    def __init__(self):
        super().__init__()
        self.items, self.kinds = nn.Embedding(ROWS, WIDTH, sparse=True), nn.EmbeddingBag(1, WIDTH, sparse=True)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def training_step(self, batch, batch_idx):
        items, kinds, y = batch
        h = torch.relu(self.items(items)) + self.kinds(kinds[:, None])
        loss = F.mse_loss(self.head(h), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


class Adagrad(Table):
    optimizer = staticmethod(lambda parameters: torch.optim.Adagrad(parameters, lr=0.1))


class OnlyTables(Table):
    """SparseAdam moves all rows of the gradient, also those of zero."""

    def __init__(self):
        super().__init__()
        self.head.requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.SparseAdam([*self.items.parameters(), *self.kinds.parameters()], lr=0.1)


class OwnStep(torch.optim.SparseAdam):
    """A class of the user's, which reads its gradients itself."""

    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        assert all(gradient.is_sparse for gradient in gradients)
        return super().step(closure)


class Own(OnlyTables):
    def configure_optimizers(self):
        return OwnStep([*self.items.parameters(), *self.kinds.parameters()], lr=0.1)


def data():
    index = torch.arange(64)
    items, y = (index * index * 7 + 3) % ROWS, torch.sin(index.double())[:, None]
    return {"train_dataloaders": DataLoader(TensorDataset(items, torch.zeros_like(index), y), 8)}


def zero(stage, devices=2, **options):
    name = f"zero{stage} over {devices}{''.join(f' {value}' for value in options.values())}"
    return Layout(name, devices=devices, strategy={"zero_stage": stage, **options})


CASES = [
    *((module, zero(stage)) for module in (Table, OnlyTables) for stage in (1, 2, 3)),
    *((module, zero(3, reshard_after_forward=True)) for module in (Adagrad, OnlyTables)),
    (OnlyTables, zero(3, devices=4)),
    (OnlyTables, zero(2, offload="cpu")),
    (Table, LAYOUTS[0]),
    *((Own, zero(stage)) for stage in (1, 2, 3)),
    (Own, zero(3, reshard_after_forward=True)),
    *((Own, layout) for layout in LAYOUTS[:3]),
    (Own, Layout("tp2", devices=2, strategy={"tensor_parallel_size": 2})),
]


@pytest.mark.parametrize(("module", "layout"), CASES, ids=lambda v: getattr(v, "__name__", None) or v.name)
@pytest.mark.parametrize("accumulated", [1, 2])
def test_matches_one_process(worlds, module, layout, accumulated):
    options = {"trainer": {"accumulate_grad_batches": accumulated}}
    report = check(worlds, module, layout, make_data=data, steps=4, num_microbatches=1, **options)
    assert report.outcome == "same", str(report)
