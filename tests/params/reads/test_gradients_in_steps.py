"""Manual steps that read and write gradients and parameters themselves, where ranks share a layer or its experts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from faults.layouts import FEATURES, LAYOUTS, Case, Regression, check, refusal
from torch import Tensor, nn
from torch.nn import functional as F

from models.expert_modules import StackedWeights

SLOW = pytest.mark.slow


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(FEATURES, 4, bias=False), StackedWeights(FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        gate, chosen = self.router(x).softmax(-1).topk(1)
        return x + self.experts(x, chosen, gate)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 2 * FEATURES), nn.Tanh(), nn.Linear(2 * FEATURES, FEATURES))


class Manual(Regression):
    """Changes gradients between backward and step."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layers = nn.ModuleList(layer() for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        if self.head.weight.grad is None:  # a recording
            return
        self.change(batch, batch_idx)
        optimizer.step()
        self.see()

    def change(self, batch: Any, batch_idx: int) -> None:
        pass

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters() if p.grad is not None]

    def see(self) -> None:
        self.seen.append([float(gradient.norm()) for gradient in self.gradients()])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


class Writes(Manual):
    """By other means in each batch, none of which increases a version but the last."""

    def change(self, batch: Any, batch_idx: int) -> None:
        self.see()
        if batch_idx == 0:
            for gradient in self.gradients():
                gradient.data.add_(-gradient.data.mean(dim=-1, keepdim=True))
        elif batch_idx == 1:
            views = [gradient.data.view(-1) for gradient in self.gradients()]
            self.see()
            for view in views:
                view[0], view[-1] = 0.3, -0.3
        elif batch_idx == 2:
            for gradient in self.gradients():
                gradient.numpy()[0] *= 0.5
        else:
            for gradient in self.gradients():
                gradient.detach().mul_(0.5)
                gradient.data = gradient.data + 0.01
        self.see()


class Refers(Manual):
    """To gradients that a backward, a clip and assignments change."""

    def change(self, batch: Any, batch_idx: int) -> None:
        gradients = self.gradients()
        self.manual_backward(self.loss(batch))
        self.seen.append([float(gradient.norm()) for gradient in gradients])
        for gradient in gradients:
            gradient.mul_(0.5)
        self.clip_gradients(self.optimizers(), 0.05, "norm")
        self.seen.append([float(gradient.norm()) for gradient in gradients])
        for p in self.parameters():
            halved = p.grad * 0.5
            p.grad = None
            assert p.grad is None
            p.grad = halved
            assert p.grad is halved
            halved.add_(0.01)


class InClosure(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            for gradient in self.gradients():
                gradient.data.mul_(0.5)
            self.see()
            return loss

        optimizer.step(closure)


class Differentiates(Manual):
    """By parameters, and gradients of them; from the second batch on, so that the recording does not show it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss, parameters = self.loss(batch), list(self.parameters())
        if batch_idx == 1:
            derivatives = torch.autograd.grad(loss, parameters, allow_unused=True, create_graph=True)
            self.seen.append([float(each.norm()) for each in derivatives])
            loss = loss + 0.1 * sum(each.square().sum() for each in derivatives)
        if batch_idx == 2:
            loss = loss + 0.1 * sum(p.norm() for p in parameters)
        self.manual_backward(loss, create_graph=batch_idx > 1)
        self.see()
        if batch_idx == 2:
            self.manual_backward(0.1 * sum(gradient.square().sum() for gradient in self.gradients()))
        if batch_idx == 3:
            gradients = self.gradients()
            products = torch.autograd.grad(gradients, parameters, [gradient.detach() for gradient in gradients])
            for p, product in zip(parameters, products, strict=True):
                p.grad = p.grad.detach() + 0.1 * product
        self.see()
        optimizer.step()


class Replaces(Manual):
    """Reads parameters, writes them, and calls the module with others."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        if batch_idx:
            others = {name: p * 0.9 for name, p in self.named_parameters()}
            loss = loss + F.mse_loss(torch.func.functional_call(self, others, (batch[0],)), batch[1])
        self.manual_backward(loss)
        optimizer.step()
        for p in self.parameters():
            p.data.clamp_(-0.3, 0.3)
        self.seen.append([float(p.norm()) for p in self.parameters()])


class ReadsStates(Manual):
    """Of its optimizer, also when the step is recorded."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        states = [self.optimizers().state[p] for p in self.parameters()]
        self.seen.append([float(state["step"]) for state in states])


class PlainBackward(Manual):
    """Calls no method of Lightning for the backward, and none of the optimizer itself to clear gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.loss(batch).backward()
        self.see()
        for p in self.parameters():
            p.grad = p.grad * 0.5 if p.grad is not None else None
        torch.autograd.backward([self.loss(batch)])
        self.see()
        optimizer.step()


CASES = (Writes, Refers, InClosure, Differentiates, Replaces, ReadsStates)


@pytest.mark.parametrize(
    ("module", "layer", "layout", "options"),
    [
        *(pytest.param(case, layer, "tp2", {}, id=f"{case.__name__}-{layer.__name__}-tp2")
          for case in CASES for layer in (perceptron, Routed)),
        *(pytest.param(PlainBackward, layer, "tp2", {}, id=f"PlainBackward-{layer.__name__}-tp2")
          for layer in (perceptron, Routed)),
        *(pytest.param(case, perceptron, "tp2 x dp2", {"zero_stage": 3}, id=f"{case.__name__}-zero3", marks=SLOW)
          for case in (Writes, Refers, InClosure, Replaces)),
        *(pytest.param(case, Routed, "dp2", {"expert_parallel_size": 2}, id=f"{case.__name__}-experts", marks=SLOW)
          for case in (Writes, Refers, InClosure)),
        *(pytest.param(case, Routed, "tp2 x dp2", {"expert_parallel_size": 2}, id=f"{case.__name__}-both", marks=SLOW)
          for case in (Writes, Refers, InClosure)),
    ],
)  # fmt: skip
def test_equals_one_process(worlds, tmp_path, module, layer, layout, options):
    check(worlds, Case(partial(module, layer), strategy=options), layout, tmp_path)


class PenalizesInputs(Manual):
    """The second derivatives of experts that ranks share have the weight of one replica too."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        x = batch[0].clone().requires_grad_()
        (derivative,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        self.manual_backward(self.loss(batch) + 0.1 * derivative.square().sum(1).mean())
        self.see()
        optimizer.step()


@pytest.mark.parametrize("options", [{}, pytest.param({"zero_stage": 1}, marks=SLOW)])
def test_second_derivatives_of_shared_experts(worlds, tmp_path, options):
    check(
        worlds, Case(partial(PenalizesInputs, Routed), strategy={"expert_parallel_size": 2, **options}), "dp2", tmp_path
    )


class OfGradients(Manual):
    """Adds a term of the gradients to a second loss."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch), create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in self.gradients())
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch) + 0.1 * penalty)
        optimizer.step()


class StepsInHook(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.optimizers().step()


@pytest.mark.parametrize(
    ("module", "layout", "text"),
    [
        (OfGradients, "zero1", "averages over the 2 replicas"),
        pytest.param(OfGradients, "dp2", "averages over the 2 replicas", marks=SLOW),
        pytest.param(OfGradients, "pp2", "averages over the 2 replicas", marks=SLOW),
        (StepsInHook, "zero3", "outside of training_step"),
        pytest.param(StepsInHook, "zero1", "outside of training_step", marks=SLOW),
    ],
)
def test_what_gradients_of_replicas_lack_is_refused(worlds, tmp_path, module, layout, text):
    texts = worlds.run(LAYOUTS[layout][0], refusal, Case(partial(module, perceptron)), layout, tmp_path)
    assert any(f"StepError: {'manual_backward' if module is OfGradients else 'AdamW'}" in each and text in each
               for each in texts), texts  # fmt: skip


@pytest.mark.parametrize(
    ("module", "layout"),
    [(OfGradients, "tp2"), pytest.param(StepsInHook, "tp2", marks=SLOW), pytest.param(StepsInHook, "dp2", marks=SLOW)],
)
def test_one_replica_has_all_of_gradients(worlds, tmp_path, module, layout):
    check(worlds, Case(partial(module, perceptron)), layout, tmp_path)
