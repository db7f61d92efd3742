"""Odd but legal ways to optimize: what modules do with their optimizers, gradients and parameters."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim.lr_scheduler import LambdaLR

from harness.verification import check
from lightning_hybrid.verify import Layout
from models.optimizers import ScaledByNorm
from models.regression import FEATURES, Manual, ManualClosure, Regression

LAYOUTS = [
    Layout("pp2", devices=2, strategy={"pipeline_parallel_size": 2}),
    Layout("tp2", devices=2, strategy={"tensor_parallel_size": 2}),
    Layout("dp2", devices=2),
    Layout("zero3", devices=2, strategy={"zero_stage": 3}),
    Layout("zero1 x tp2", devices=4, strategy={"tensor_parallel_size": 2, "zero_stage": 1}),
    Layout("zero3 x tp2", devices=4, strategy={"tensor_parallel_size": 2, "zero_stage": 3}),
    Layout("zero1 x pp2", devices=4, strategy={"pipeline_parallel_size": 2, "zero_stage": 1}),
]

# --- manual optimization ---------------------------------------------------------------------------------------------


class Gan(Manual):
    """Two optimizers; both networks read one embedding, which the first one trains."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(8, FEATURES)
        self.critic = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, 1))

    def generated(self, batch):
        x, _ = batch
        for layer in self.layers:
            x = layer(x + self.shared(self.indices(batch)))
        return x

    def indices(self, batch):
        return (batch[0][:, 0] * 3.9 + 4).long()

    def training_step(self, batch, batch_idx):
        generator, critic = self.optimizers()
        self.toggle_optimizer(generator)
        loss = -self.critic(self.generated(batch)).mean()
        self.manual_backward(loss)
        generator.step()
        generator.zero_grad()
        self.untoggle_optimizer(generator)
        self.toggle_optimizer(critic)
        real = batch[0] + self.shared(self.indices(batch)).detach()
        other = self.critic(self.generated(batch).detach()).mean() - self.critic(real).mean()
        self.manual_backward(other)
        self.clip_gradients(critic, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        critic.step()
        critic.zero_grad()
        self.untoggle_optimizer(critic)
        with torch.no_grad():
            for p in self.critic.parameters():
                p.clamp_(-0.3, 0.3)
        self.log_dict({"loss": loss, "other": other})

    def configure_optimizers(self):
        generator = torch.optim.Adam([*self.layers.parameters(), *self.shared.parameters()], lr=1e-2)
        return generator, torch.optim.RMSprop(self.critic.parameters(), lr=1e-2)


class AccumulatesByHand(Manual):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad(set_to_none=False)
        self.log("loss", loss)


class CallsBackward(Manual):
    """Its backward is torch's own."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.optimizers().zero_grad()
        loss.backward()
        self.optimizers().step()
        self.log("loss", loss)


class MixesBackwards(Manual):
    """The backward of its second loss is torch's own."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.loss(batch).backward()
        self.optimizers().step()
        self.log("loss", loss)


class BackwardsBeforeTheLast(Manual):
    """Only its last backward is the strategy's, which averages what the others have left."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.loss(batch).backward()
        self.manual_backward(self.loss(batch))
        self.optimizers().step()
        self.loss(batch).backward()  # of no step
        self.log("loss", loss)


class SetsGradients(Manual):
    """Its gradients are those of ``torch.autograd.grad``, and it sets them."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        parameters = list(self.parameters())
        for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = gradient
        self.optimizers().step()
        self.log("loss", loss)


class GradientPenalty(Manual):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        [first] = torch.autograd.grad(loss, [self.layers[0][0].weight], create_graph=True)
        self.optimizers().zero_grad()
        self.manual_backward(loss + first.square().sum())
        self.optimizers().step()
        self.log("loss", loss)


class StepsByLBFGS(ManualClosure):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2, line_search_fn="strong_wolfe")


class TwoOptimizersOfOneParameter(Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()[batch_idx % 2]
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2), torch.optim.SGD(self.parameters(), lr=0.1)


# --- hooks -----------------------------------------------------------------------------------------------------------


class AverageInHook(Regression):
    """An exponential average in buffers, updated after each step, is validated."""

    def __init__(self):
        super().__init__()
        for number, p in enumerate(self.head.parameters()):
            self.register_buffer(f"average{number}", p.detach().clone())

    def on_before_zero_grad(self, optimizer):
        with torch.no_grad():
            for number, p in enumerate(self.head.parameters()):
                getattr(self, f"average{number}").lerp_(p.detach(), 0.1)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        for layer in self.layers:
            x = layer(x)
        self.log("averaged", F.mse_loss(F.linear(x, self.average0, self.average1), y))


class SkipsSteps(Regression):
    """Its optimizer steps every second batch, with a learning rate of its own."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        if batch_idx % 2:
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * (batch_idx + 1)
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class ScalesGradients(Regression):
    """By the norm of all gradients, and centred along rows."""

    def on_before_optimizer_step(self, optimizer):
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        for p in self.parameters():
            if p.grad is not None and p.grad.dim() > 1:
                p.grad = p.grad / (norm + 1) - p.grad.mean(1, keepdim=True)


class HooksOnParameters(Regression):
    """A gradient is replaced as it arrives."""

    def __init__(self):
        super().__init__()
        self.layers[1][0].weight.register_hook(lambda gradient: gradient - 0.5 * gradient.mean(0, keepdim=True))
        self.layers[2][0].weight.register_hook(lambda gradient: 2 * gradient)


class ClampsWeights(Regression):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            for p in self.layers[1:3].parameters():
                p.clamp_(-0.2, 0.2)
            self.head.weight.div_(self.head.weight.norm())


# --- parameters ------------------------------------------------------------------------------------------------------


class WeightNorm(Regression):
    def __init__(self):
        super().__init__()
        for layer in self.layers[:3]:
            parametrizations.weight_norm(layer[0])


class Orthogonal(Regression):
    def __init__(self):
        super().__init__()
        for layer in self.layers[:3]:
            parametrizations.orthogonal(layer[0], orthogonal_map="householder")


class SpectralNorm(Regression):
    def __init__(self):
        super().__init__()
        for layer in self.layers[:3]:
            parametrizations.spectral_norm(layer[0])


class Unfreezes(Regression):
    def __init__(self):
        super().__init__()
        self.layers[:2].requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            self.layers[:2].requires_grad_(True)
        if batch_idx == 3:
            self.layers[2:].requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Subset(Regression):
    """Most of its trained parameters are in no optimizer: their gradients are never cleared."""

    def configure_optimizers(self):
        return torch.optim.Adam([*self.layers[1].parameters(), self.head.bias], lr=1e-2)


class RatePerLayer(Regression):
    """Groups of two lengths, a schedule for each, and one that is maximized."""

    def configure_optimizers(self):
        groups = [{"params": layer.parameters(), "lr": 0.02 * (n + 1)} for n, layer in enumerate(self.layers)]
        groups[1] |= {"weight_decay": 0.3}
        groups[2] |= {"maximize": True}
        optimizer = torch.optim.SGD([*groups, {"params": self.head.parameters()}], lr=0.1, momentum=0.5)
        scheduler = LambdaLR(optimizer, [lambda step, n=n: 1 / (1 + n * step) for n in range(5)])
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Complex(Regression):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.filters = nn.ParameterList(
            torch.randn(FEATURES, FEATURES, dtype=torch.complex128, generator=generator) / 3 for _ in range(3)
        )

    def forward(self, x):
        for layer, weight in zip(self.layers, self.filters, strict=False):
            x = layer((x.to(weight.dtype) @ weight).abs())
        return self.head(x)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class TiedInGroups(Regression):
    """Two layers share a weight, and a group has a bias of one of them twice, by its two names."""

    def __init__(self):
        super().__init__()
        self.layers[3][0].weight = self.layers[0][0].weight
        self.other = self.layers[2][0].bias

    def configure_optimizers(self):
        shared = [self.layers[0][0].weight]
        rest = [p for p in self.parameters() if p is not shared[0]]
        return torch.optim.Adagrad([{"params": shared, "lr": 0.1}, {"params": rest}], lr=0.02)


class Unregistered(Regression):
    """A parameter in a plain list, which only the optimizer knows."""

    def __init__(self):
        super().__init__()
        self.hidden = [nn.Parameter(torch.ones(FEATURES, dtype=torch.float64))]

    def forward(self, x):
        return super().forward(x * self.hidden[0])

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("hidden", self.hidden[0].norm())

    def configure_optimizers(self):
        return torch.optim.SGD([*self.parameters(), *self.hidden], lr=0.1)


class NewHead(Regression):
    """Its head is replaced in the second epoch."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            generator = torch.Generator().manual_seed(5)
            weight = torch.randn(1, FEATURES, generator=generator, dtype=torch.float64)
            self.head.weight = nn.Parameter(weight)
            self.trainer.optimizers[0].add_param_group({"params": [self.head.weight]})


# --- optimizers that change ------------------------------------------------------------------------------------------


class OtherOptimizer(Regression):
    """Another optimizer takes over in the second epoch."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.trainer.strategy.optimizers = [torch.optim.Adam(self.parameters(), lr=1e-2)]


class OtherOptimizerOfUser(Regression):
    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.trainer.strategy.optimizers = [ScaledByNorm(self.parameters(), lr=0.1)]


class ForgetsState(Regression):
    """Momentum is dropped, and a layer leaves the optimizer."""

    def on_train_batch_start(self, batch, batch_idx):
        [optimizer] = self.trainer.optimizers
        if batch_idx == 2:
            optimizer.state.clear()
            leaving = {id(p) for p in self.layers[1].parameters()}
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) not in leaving]


AUTOMATIC = [
    *(AverageInHook, SkipsSteps, ScalesGradients, HooksOnParameters, ClampsWeights),
    *(WeightNorm, Orthogonal, SpectralNorm, Unfreezes, Subset, RatePerLayer, Complex, TiedInGroups, Unregistered),
    *(NewHead, OtherOptimizer, OtherOptimizerOfUser, ForgetsState),
]
MANUAL = [
    *(Gan, AccumulatesByHand, CallsBackward, SetsGradients, GradientPenalty, StepsByLBFGS),
    *(TwoOptimizersOfOneParameter, MixesBackwards, BackwardsBeforeTheLast),
]


# Where a step is refused, and by which words; a hook may change a run in its middle, which verify calls "failed".
BY_REPLICAS = ("dp2", "zero3", "zero1 x tp2", "zero3 x tp2", "zero1 x pp2")
SHARDED = ("pp2", "tp2", "zero3", "zero1 x tp2", "zero3 x tp2", "zero1 x pp2")
REFUSED = {
    CallsBackward: (BY_REPLICAS, "has not called self.manual_backward"),
    SetsGradients: (BY_REPLICAS, "has not called self.manual_backward"),
    MixesBackwards: (BY_REPLICAS, "has added to it after the last self.manual_backward"),
    NewHead: (("pp2", *BY_REPLICAS), "head.weight, of shape (1, 6), was made after the run had begun"),
    OtherOptimizerOfUser: (SHARDED, "ScaledByNorm has taken the place of another optimizer"),
}
# Its objective is no mean over samples, as that of a batch of one process is no mean over replicas.
MIXES_SAMPLES = {GradientPenalty: BY_REPLICAS}
FAST = {
    *((AccumulatesByHand, "zero1 x tp2"), (Gan, "zero3 x tp2"), (CallsBackward, "dp2"), (NewHead, "dp2")),
    *((MixesBackwards, "dp2"), (BackwardsBeforeTheLast, "dp2")),
    *((HooksOnParameters, "tp2"), (OtherOptimizerOfUser, "zero3"), (Complex, "pp2")),
}
CASES = [(module, layout) for module in (*AUTOMATIC, *MANUAL) for layout in LAYOUTS]


@pytest.mark.parametrize(
    ("module", "layout"),
    [
        pytest.param(
            module,
            layout,
            id=f"{module.__name__}-{layout.name}",
            marks=() if (module, layout.name) in FAST else pytest.mark.slow,
        )
        for module, layout in CASES
        if layout.name not in MIXES_SAMPLES.get(module, ())
    ],
)
def test_parity_or_refused(worlds, module, layout):
    options = {"num_microbatches": 1} if module in MANUAL else {}
    report = check(worlds, module, layout, steps=4, epochs=2, timeout=180, **options)
    layouts, text = REFUSED.get(module, ((), ""))
    if layout.name in layouts:
        assert report.outcome in ("refused", "failed"), str(report)
        assert "StepError: " in report.message and text in report.message, str(report)
    else:
        assert report.outcome == "same", str(report)
