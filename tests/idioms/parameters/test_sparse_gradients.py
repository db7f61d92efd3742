"""Sparse gradients of embeddings where replicas or shards have rows of the table."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from harness.verification import LAYOUTS, TENSOR, check
from lightning_hybrid.verify import Layout
from models.regression import StepsManually

ROWS, WIDTH = 21, 6


class Table(LightningModule):
    """Two tables: one with many rows, and one with fewer than ranks would share out by rows."""

    optimizer = staticmethod(lambda parameters: torch.optim.SGD(parameters, lr=0.3))

    def __init__(self):
        super().__init__()
        self.items, self.kinds = nn.Embedding(ROWS, WIDTH, sparse=True), nn.EmbeddingBag(1, WIDTH, sparse=True)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def training_step(self, batch, batch_idx=0):
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


class Hooks(OnlyTables):
    """Hooks that read sparse gradients, write them in place, and set others."""

    def on_after_backward(self):
        self.log("rows", self.items.weight.grad.coalesce().values().norm())

    def on_before_optimizer_step(self, optimizer):
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
                parameter.grad = parameter.grad * 3
                self.log(name, parameter.grad.to_dense().abs().sum())
                self.log(f"{name} sum", torch.sparse.sum(parameter.grad))


class Two(StepsManually, Table):
    """SparseAdam beside Adam; one optimizer cannot be for both kinds of gradients."""

    def optimizers(self):
        return _Each(super().optimizers())

    def configure_optimizers(self):
        tables = OwnStep([*self.items.parameters(), *self.kinds.parameters()], lr=0.1)
        return [torch.optim.Adam(self.head.parameters(), lr=0.1), tables]


class _Each(list):
    def zero_grad(self):
        for optimizer in self:
            optimizer.zero_grad()

    def step(self):
        for optimizer in self:
            optimizer.step()


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
]
EACH = [*map(zero, (1, 2, 3)), zero(3, reshard_after_forward=True), *LAYOUTS[:3]]
EACH += [Layout("tp2", devices=2, strategy={"tensor_parallel_size": 2}), TENSOR, zero(3, recompute="full")]
STAGES = {"pipeline_parallel_size": 2}
EACH += [
    Layout(f"pp2, {count} microbatches", devices=2, strategy=STAGES | {"num_microbatches": count}) for count in (2, 4)
]
FEW = {Own: ("zero1 over 2", "pp2"), Hooks: ("zero3 over 2",), Two: ("pp2",)}
OWN = [
    (module, layout) if layout.name in FEW[module] else pytest.param(module, layout, marks=pytest.mark.slow)
    for module in FEW
    for layout in EACH
]


@pytest.mark.parametrize(("module", "layout"), CASES, ids=lambda v: getattr(v, "__name__", None) or v.name)
@pytest.mark.parametrize("accumulated", [1, 2])
def test_matches_one_process(worlds, module, layout, accumulated):
    options = {"trainer": {"accumulate_grad_batches": accumulated}}
    report = check(worlds, module, layout, make_data=data, steps=4, num_microbatches=1, **options)
    assert report.outcome == "same", str(report)


@pytest.mark.parametrize(("module", "layout"), OWN, ids=lambda v: getattr(v, "__name__", None) or v.name)
def test_user_code_gets_sparse_gradients(worlds, module, layout):
    report = check(worlds, module, layout, make_data=data, steps=3, num_microbatches=1)
    assert report.outcome == "same", str(report)
