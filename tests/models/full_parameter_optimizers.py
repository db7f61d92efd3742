"""A tied language model by optimizers that need all elements of a parameter, each with two groups and weight decay."""

import pytorch_optimizer
import torch

from lightning_hybrid.optim import LAMB, LARS
from models.hand_written import Tied


class Grouped(Tied):
    """The first group has the tied embedding."""

    def groups(self, **options):
        first = [self.embedding.weight, *self.layers[0].parameters()]
        rest = [p for layer in list(self.layers)[1:] for p in layer.parameters()]
        trained = [[p for p in group if p.requires_grad] for group in (first, rest)]
        return [{"params": trained[0], "weight_decay": 0.1}, {"params": trained[1], "weight_decay": 0.0, **options}]


class ByAdafactor(Grouped):
    def configure_optimizers(self):
        return torch.optim.Adafactor(self.groups(lr=3e-2), lr=1e-2)


class ByMuon(Grouped):
    """Matrices alone are trained."""

    def __init__(self):
        super().__init__()
        for p in self.parameters():
            p.requires_grad_(p.dim() == 2)

    def configure_optimizers(self):
        return torch.optim.Muon(self.groups(lr=3e-2), lr=1e-2)


class ByLamb(Grouped):
    def configure_optimizers(self):
        return LAMB(self.groups(lr=3e-2), lr=1e-2)


class ByLars(Grouped):
    def configure_optimizers(self):
        return LARS(self.groups(lr=0.3, nesterov=True), lr=0.1, trust_coefficient=0.1)


class Manually:
    """Calls its optimizer itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx=0):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss.detach()}


class ManuallyByAdafactor(Manually, ByAdafactor):
    pass


class ManuallyByMuon(Manually, ByMuon):
    pass


class ManuallyByLamb(Manually, ByLamb):
    pass


class Shampoo(pytorch_optimizer.Shampoo):
    """A third party's; it counts steps in its groups, and keeps matrices of other shapes than its parameters."""

    steps_parameters_independently = True


class ByShampoo(ByMuon):
    def configure_optimizers(self):
        return Shampoo(self.groups(lr=3e-2), lr=1e-2, preconditioning_compute_steps=2)


MODULES = {"adafactor": ByAdafactor, "muon": ByMuon, "lamb": ByLamb, "lars": ByLars}
