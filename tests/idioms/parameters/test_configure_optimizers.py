"""`configure_optimizers` sees the module of one process: its shapes, its values, and what it computes of a batch."""

import re

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from harness.trainer_runs import assert_same, ignore_warnings, trainer_of, weights_of
from models.regression import Manual, ManualStep, Regression, regression_data

EXAMPLES = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6)


class Groups(Regression):
    """Groups by shape, and learning rates by fan-in and size, which a scheduler built here changes."""

    def configure_optimizers(self):
        large = [p for p in self.parameters() if p.ndim >= 2 and p.numel() >= 36]
        small = [
            {"params": [p], "lr": 0.1 / p.shape[0]} for p in self.parameters() if not (p.ndim >= 2 and p.numel() >= 36)
        ]
        optimizer = torch.optim.AdamW([{"params": large, "weight_decay": 0.3}, *small], lr=0.01, weight_decay=0.0)
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.1, steps), "interval": "step"}
        ]


class Initialises(Regression):
    """Runs the module and its backward on a batch, writes values, and groups by names and norms."""

    def configure_optimizers(self):
        out = self(EXAMPLES)
        out.square().mean().backward()
        rates = {name: 0.1 / float(1 + p.grad.norm() + p.norm()) for name, p in self.named_parameters()}
        with torch.no_grad():
            self.head.bias.copy_(out.mean(0))
            self.layers[0][0].weight.data = self.layers[0][0].weight.data * out.std()
        groups = [{"params": [p], "lr": rates[n]} for n, p in self.named_parameters() if re.search("weight$", n)]
        rest = [p for n, p in self.named_parameters() if not re.search("weight$", n)]
        return torch.optim.SGD([*groups, {"params": rest}], lr=0.05, momentum=0.9)


class SlowWeights(torch.optim.Optimizer):
    """Keeps a copy of each parameter in a list, and numbers by parameter, from the start."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.members = self.param_groups[0]["params"]
        self.slow = [p.detach().clone() for p in self.members]
        self.norms = {p: float(p.detach().norm()) for p in self.members}

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for p, slow in zip(self.members, self.slow, strict=True):
            p.sub_(self.param_groups[0]["lr"] * p.grad / (1 + self.norms[p]))
            slow.lerp_(p, 0.5)
            p.copy_(slow)
        return loss


class Keeps(Regression):
    def configure_optimizers(self):
        return SlowWeights(self.parameters())


class StatesFromTheStart(ManualStep):
    def configure_optimizers(self):
        groups = [{"params": [p], "lr": 0.1 / p.shape[-1]} for p in self.parameters()]
        return torch.optim.Adagrad(groups, initial_accumulator_value=0.1)


class TwoBySize(Manual):
    def training_step(self, batch, batch_idx):
        x, y = batch
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(F.mse_loss(self(x), y))
            optimizer.step()

    def configure_optimizers(self):
        large = [p for p in self.parameters() if p.numel() >= 36]
        small = [p for p in self.parameters() if p.numel() < 36]
        return [torch.optim.AdamW(large, lr=0.01), torch.optim.SGD(small, lr=0.1, momentum=0.9)]


def fit(module, size, options):
    ignore_warnings()
    torch.manual_seed(0)
    model, data = module().double(), regression_data()["val_dataloaders"].dataset
    trainer = trainer_of(size, strategy_options=options, max_epochs=2)
    replicas = 1 if options.keys() & {"pipeline_parallel_size", "tensor_parallel_size"} else size
    sampler = DistributedSampler(data, replicas, trainer.global_rank % replicas, shuffle=False)
    trainer.fit(model, DataLoader(data, 8 // replicas, sampler=sampler))
    return weights_of(model)


ZERO3, PP2, TP2 = {"zero_stage": 3}, {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}
DEFAULT = [
    *[(Groups, ZERO3), (Groups, TP2), (Initialises, ZERO3), (Initialises, PP2)],
    *[(Keeps, ZERO3), (Keeps, PP2), (StatesFromTheStart, ZERO3), (TwoBySize, PP2)],
]
MODULES = [Groups, Initialises, Keeps, StatesFromTheStart, TwoBySize]
OTHERS = [ZERO3, PP2, TP2, {"zero_stage": 1}, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}]
SLOW = [(module, options) for module in MODULES for options in OTHERS if (module, options) not in DEFAULT]


@pytest.mark.parametrize(
    ("module", "options"), [*DEFAULT, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_sees_the_full_module(worlds, module, options):
    [expected] = worlds.run_once(1, fit, module, 1, {})
    size = 4 if len(options) > 1 else 2
    for weights in worlds.run(size, fit, module, size, options):
        assert_same(weights, expected)
