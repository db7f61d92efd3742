"""Hand-written references of optimizers with float32 master weights, and a module whose gradients are exact."""

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import Optimizer


class HandWrittenMasters(Optimizer):
    """Steps float32 copies of bfloat16 parameters by an optimizer of these, written for one process."""

    def __init__(self, parameters, make):
        parameters = list(parameters)
        super().__init__(parameters, {"lr": 0.0})
        self.masters = [nn.Parameter(p.detach().float()) for p in parameters]
        self.inner = make(self.masters)

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        parameters = self.param_groups[0]["params"]
        for p, master in zip(parameters, self.masters, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        self.inner.step()
        for p, master in zip(parameters, self.masters, strict=True):
            p.copy_(master)
        return loss


class ExactSums(LightningModule):
    """Sums of products with multiples of 1/4: gradients are exact in bfloat16, in any order of summation."""

    def __init__(self, optimizer=torch.optim.AdamW, **options):
        super().__init__()
        self.shapes = {"matrix": (6, 4), "vector": (8,), "tall": (33, 2)}
        generator = torch.Generator().manual_seed(3)
        for name, shape in self.shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))
        self.optimizer, self.options = optimizer, {"lr": 1e-3, **options}

    def training_step(self, batch):
        factors = batch["x"].mean(0)  # [1, 1], a multiple of 1/4
        return sum(((p * factors) * (i + 1)).sum() for i, p in enumerate(self.parameters()))

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), **self.options)


class ManualExactSums(ExactSums):
    """Calls its optimizer itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch))
        optimizer.step()
