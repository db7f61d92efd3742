"""Optimizers of users that combine parameters, called by the module itself, over tensor ranks and ZeRO."""

import pytest
import torch
from torch import nn

from harness.verification import check
from lightning_hybrid.verify import Layout
from models.optimizers import Lamb, Lookahead, ScaledByNorm, ScaledByRows, SharpnessAware
from models.regression import Manual, ManualClosure, ManualStep

TP = {"tensor_parallel_size": 2}
LAYOUTS = {
    "tp2": Layout("tp2", devices=2, strategy=TP),
    "tp2 x zero3": Layout("tp2 x zero3", devices=4, strategy={**TP, "zero_stage": 3}),
    "tp2 x pp2": Layout("tp2 x pp2", devices=4, strategy={**TP, "pipeline_parallel_size": 2}),
    "zero3": Layout("zero3", devices=2, strategy={"zero_stage": 3}),
    "pp2": Layout("pp2", devices=2, strategy={"pipeline_parallel_size": 2}),
    "dp2": Layout("dp2", devices=2),
}


class ByNorm(ManualStep):
    def configure_optimizers(self):
        return ScaledByNorm(self.parameters(), lr=0.1, momentum=0.9)


class ByLamb(ManualStep):
    def configure_optimizers(self):
        return Lamb(self.parameters())


class ByLookahead(ManualStep):
    def configure_optimizers(self):
        return Lookahead(torch.optim.Adagrad(self.parameters(), lr=1e-2))


class ByRows(ManualClosure):
    def configure_optimizers(self):
        return ScaledByRows(self.parameters())


class BySharpness(ManualClosure):
    def configure_optimizers(self):
        return SharpnessAware(self.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


class ByLBFGS(ManualClosure):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


class ByMuon(ManualStep):
    """Its matrices by Muon; its vectors by an optimizer of torch with a hook that reads all of them."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        self.log("loss", loss)

    def configure_optimizers(self):
        matrices, vectors = (
            [p for p in self.parameters() if (p.dim() > 1) is is_matrix] for is_matrix in (True, False)
        )
        adam = torch.optim.Adam(vectors, lr=1e-2)
        adam.register_step_post_hook(self.limit)
        return torch.optim.Muon(matrices, lr=1e-2), adam

    @torch.no_grad()
    def limit(self, optimizer, args, kwargs):
        [group] = optimizer.param_groups
        total = nn.utils.get_total_norm(group["params"])
        for p in group["params"]:
            p.div_(total)


class TwoStepSharpness(torch.optim.Optimizer):
    """As the published implementation: two methods, of which none is ``step``, and an optimizer inside."""

    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        norms = [p.grad.norm(p=2) for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.norm(torch.stack(norms), p=2)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old_p"] = p.data.clone()
                    p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()


class InTwoSteps(Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.first_step()
        self.manual_backward(self.loss(batch))
        optimizer.second_step()
        self.log("loss", loss)

    def configure_optimizers(self):
        return TwoStepSharpness(self.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


class MadeInStep(Manual):
    """Its optimizer is made in the first step, and no Trainer knows it."""

    own = None

    def training_step(self, batch, batch_idx):
        if self.own is None:
            self.own = [ScaledByNorm(self.parameters(), lr=0.1, momentum=0.9)]
        loss = self.loss(batch)
        self.zero_grad()
        self.manual_backward(loss)
        self.own[0].step()
        self.log("loss", loss)

    def configure_optimizers(self):
        return None


class MadeAtStart(ManualStep):
    """A second optimizer is made when the fit starts, and steps the head through ``optimizer.optimizer``'s class."""

    def on_fit_start(self):
        self.own = [torch.optim.Adam(self.head.parameters(), lr=1e-2)]

    def training_step(self, batch, batch_idx):
        body = self.optimizers()
        self.toggle_optimizer(body)
        loss = self.loss(batch)
        self.manual_backward(loss)
        body.optimizer.step()
        body.zero_grad()
        self.untoggle_optimizer(body)
        self.manual_backward(self.loss(batch))
        self.own[0].step()
        self.zero_grad()
        self.log("loss", loss)

    def configure_optimizers(self):
        return Lamb(self.layers.parameters())


MODULES = [ByNorm, ByLamb, ByLookahead, ByRows, BySharpness, ByLBFGS, ByMuon, InTwoSteps, MadeInStep, MadeAtStart]
FAST = {("ByLamb", "tp2"), ("ByLamb", "tp2 x zero3"), ("InTwoSteps", "tp2"), ("MadeInStep", "tp2")}


@pytest.mark.parametrize(
    ("module", "layout"),
    [
        pytest.param(module, layout, marks=() if (module.__name__, layout) in FAST else pytest.mark.slow)
        for module in MODULES
        for layout in LAYOUTS
    ],
)
def test_parity(worlds, module, layout):
    report = check(worlds, module, LAYOUTS[layout], steps=3, num_microbatches=1, timeout=180)
    assert report.outcome == "same", str(report)
