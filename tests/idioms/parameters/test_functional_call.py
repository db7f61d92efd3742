"""``torch.func``: layers called with other weights, and transforms across layers, which no pipeline runs."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from harness.verification import COMBINED, LAYOUTS, check
from lightning_hybrid.verify import Layout
from models.regression import FEATURES, Regressor, mlp

PP2, *_ = LAYOUTS
HIDDEN = 8


class Main(nn.Module):
    def __init__(self):
        super().__init__()
        self.rise, self.fall = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, 1)

    def forward(self, x):
        return self.fall(torch.tanh(self.rise(x)))


class Produced(Regressor):
    """A hypernetwork makes the weights of the main network."""

    def __init__(self):
        super().__init__()
        self.task, self.encoder, self.main = nn.Parameter(torch.randn(4)), mlp(), Main().requires_grad_(False)
        self.hyper = nn.Linear(4, sum(p.numel() for p in self.main.parameters()))

    def forward(self, x):
        shapes = {name: p.shape for name, p in self.main.named_parameters()}
        made = self.hyper(self.task).split([shape.numel() for shape in shapes.values()])
        weights = {name: w.view(shape) for (name, shape), w in zip(shapes.items(), made, strict=True)}
        return functional_call(self.main, weights, (self.encoder(x),))


class Noisy(Regressor):
    """All weights are another draw in each step."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*mlp(), Main())

    def forward(self, x):
        if not self.training:
            return self.net(x)
        return functional_call(self.net, {n: p + 0.1 * torch.randn_like(p) for n, p in self.net.named_parameters()}, x)


class OtherWeights(Regressor):
    """One network runs with the weights of another, and with a plain copy of them."""

    def __init__(self):
        super().__init__()
        self.encoder, self.main, self.other = mlp(), Main(), Main()
        self.kept = {name: p.detach().clone().double() for name, p in self.main.named_parameters()}

    def forward(self, x):
        h = self.encoder(x)
        borrowed = functional_call(self.main, dict(self.other.named_parameters()), (h,))
        return self.main(h) + borrowed + functional_call(self.main, self.kept, (h,))


class Adapts(Regressor):
    """MAML: steps of gradient descent inside the loss (Finn et al. 2017, algorithm 1)."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head, self.rate = mlp(), Main(), nn.Parameter(torch.tensor(0.1))

    def shared_step(self, batch):
        x, y = batch
        with torch.enable_grad():
            h, fast = self.encoder(x), dict(self.head.named_parameters())
            for _ in range(2):
                loss = F.mse_loss(functional_call(self.head, fast, (h,)), y)
                grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
                fast = {name: w - self.rate * g for (name, w), g in zip(fast.items(), grads, strict=True)}
            return F.mse_loss(functional_call(self.head, fast, (h,)), y)


class ByParameters(Regressor):
    """The loss has gradients by parameters, which a transform takes."""

    def __init__(self):
        super().__init__()
        self.encoder, self.main = mlp(), Main()

    def forward(self, x):
        return self.main(self.encoder(x))

    def loss_of(self, weights, h, y):
        return F.mse_loss(functional_call(self.main, weights, (h,)), y)

    def shared_step(self, batch):
        x, y = batch
        grads = torch.func.grad(self.loss_of)(dict(self.main.named_parameters()), self.encoder(x), y)
        return F.mse_loss(self(x), y) + 0.1 * sum(g.square().sum() for g in grads.values())


class OfEachSample(ByParameters):
    """Logs norms of the gradients of single samples."""

    def shared_step(self, batch):
        x, y = batch
        gradients = torch.func.vmap(torch.func.grad(self.loss_of), (None, 0, 0))
        grads = gradients(dict(self.main.named_parameters()), self.encoder(x).detach(), y)
        self.log("norms", sum(g.detach().flatten(1).square().sum(1) for g in grads.values()).sqrt().mean())
        return F.mse_loss(self(x), y)


class Averaged(Regressor):
    """Validates with averages of its weights."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*mlp(), Main())
        self.averages = {}

    def forward(self, x):
        return self.net(x)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        weights = {name: 0.5 * p for name, p in self.net.named_parameters()}
        self.log("val_loss", F.mse_loss(functional_call(self.net, weights, (x,)), y))


TENSOR2 = Layout("tp2", devices=2, strategy={"tensor_parallel_size": 2})
ZERO = Layout("zero 3", devices=2, strategy={"zero_stage": 3})
PP_ZERO = Layout("pp2 x zero 3", devices=4, strategy={"pipeline_parallel_size": 2, "zero_stage": 3})

BY_DEFAULT = [
    *((Produced, layout) for layout in (PP2, TENSOR2, ZERO)),
    *((OtherWeights, layout) for layout in (TENSOR2, ZERO)),
    *((Adapts, COMBINED), (Averaged, TENSOR2), (Noisy, PP2), (ByParameters, TENSOR2), (OfEachSample, ZERO)),
]
LATER = [
    (module, layout)
    for module in (Produced, Noisy, OtherWeights, Adapts, Averaged, ByParameters, OfEachSample)
    for layout in (PP2, COMBINED, TENSOR2, ZERO, PP_ZERO)
    if (module, layout) not in [*BY_DEFAULT, (Noisy, TENSOR2)]
]
CASES = [*BY_DEFAULT, *(pytest.param(*case, marks=pytest.mark.slow) for case in LATER)]


@pytest.mark.parametrize(("module", "layout"), CASES, ids=lambda value: getattr(value, "__name__", None) or value.name)
def test_matches_one_process(worlds, module, layout):
    report = check(worlds, module, layout)
    assert report.outcome == "same", str(report)


class ValidatesWithCopies(Averaged):
    """Validates with copies of its weights, which nothing shows before."""

    def on_train_start(self):
        self.averages = {name: p.detach().clone() for name, p in self.net.named_parameters()}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.mse_loss(functional_call(self.net, self.averages, (x,)), y))


def test_weights_passed_to_later_calls(worlds):
    report = check(worlds, ValidatesWithCopies, TENSOR2)
    assert report.outcome == "same", str(report)


class MapsLayer(Produced):
    def forward(self, x):
        return torch.func.vmap(self.main)(self.encoder(x))


class Tangents(Produced):
    def forward(self, x):
        h = self.encoder(x)
        return self.main(torch.func.jvp(torch.tanh, (h,), (torch.ones_like(h),))[1])


@pytest.mark.parametrize("module", [MapsLayer, Tangents])
def test_transforms_across_layers_run_sharded(worlds, module):
    report = check(worlds, module, PP2)
    assert report.outcome == "same" and "sharded instead of pipelined" in str(report), str(report)
