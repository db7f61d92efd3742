"""Operations whose fake kernel fails are recorded on stand-in values, with parity."""

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal
from torch.nn import functional as F

from harness.one_process_pipeline import assert_same_gradients, pipeline, reference
from models.cases import batch_of, make
from models.hand_written import WIDTH, Layers, mlp


def assert_parity(module, dtype=torch.float64, num_stages=2, tolerance=1e-10):
    batch = batch_of("vectors", range(4), dtype)
    step = lambda: module.loss(batch)  # noqa: E731
    expected, got = reference(module, step), pipeline(module, step, num_stages)
    torch.testing.assert_close(got.loss, expected.loss, rtol=tolerance, atol=0)
    assert_same_gradients(got.grads, expected.grads, tolerance=tolerance)
    return got


class GroupedExperts(nn.Module):
    """A mixture whose fake kernel takes only bfloat16."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH, WIDTH) * 0.1)
        self.router = nn.Linear(WIDTH, 2)

    def forward(self, x):
        scores, expert = self.router(x).softmax(-1).max(-1)
        order = expert.argsort()
        ends = F.one_hot(expert, 2).sum(0).cumsum(0).to(torch.int32)
        mixed = F.grouped_mm(x[order], self.weight, offs=ends)
        return torch.zeros_like(x).index_add(0, order, mixed) * scores[:, None]


def test_fake_kernel_that_refuses_the_dtype(caplog):
    module = make(Layers, torch.float32)
    module.layers = nn.ModuleList(GroupedExperts() for _ in range(4))
    got = assert_parity(module, torch.float32, tolerance=1e-5)
    assert len(got.units[0]) and len(got.units[1])
    assert not caplog.records, "what torch logs of a fake kernel that fails is no failure"


class Cache:
    """Grows with each layer, as a cache of keys and values does."""

    def __init__(self):
        self.rows = {}

    def update(self, layer, x):
        self.rows[layer] = torch.cat([self.rows[layer], x]) if layer in self.rows else x
        return self.rows[layer]


class LoopingExperts(nn.Module):
    """Branches on the chosen experts, after it has written to a cache."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(mlp() for _ in range(3))

    def forward(self, x, cache):
        x = cache.update(self.layer, x)
        chosen = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for expert in F.one_hot(chosen, 3).sum(0).nonzero():
            rows = (chosen == expert[0]).nonzero()[:, 0]
            out.index_add_(0, rows, self.experts[int(expert)](x[rows]))
        return out


class Looping(Layers):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(LoopingExperts(layer) for layer in range(4))

    def forward(self, x):
        cache = Cache()
        for layer in self.layers:
            x = x + layer(x, cache)
        return self.head(x)


def test_unit_is_rerun_from_its_initial_state():
    assert_parity(make(Looping))


class Indexed(Layers):
    """Uses a tensor of zeros together with the model's before it writes the model's into it."""

    def forward(self, x):
        rows = torch.zeros(len(x), WIDTH, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x + rows)
            rows.index_copy_(0, torch.arange(len(x)), x)
        return self.head(rows)


def test_tensor_read_with_the_model_is_written_by_it():
    assert_parity(make(Indexed))


class Sampling(Layers):
    """torch.distributions validates its arguments by branches on tensors."""

    def forward(self, x):
        scale = self.layers[0](x).exp() * self.sign
        z = torch.distributions.Normal(self.layers[1](x), scale).rsample()
        return self.head(self.layers[3](self.layers[2](z)))


def test_distribution_arguments_are_validated_at_runtime(monkeypatch):
    # torch.compile turns these checks off for the process, which another test may have done.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    module = make(Sampling)
    module.sign = 1.0
    batch = batch_of("vectors", range(4))
    unpartitioned = pipeline(module, lambda: module.loss(batch), 1)
    got = pipeline(module, lambda: module.loss(batch), 2)
    torch.testing.assert_close(got.loss, unpartitioned.loss, rtol=1e-10, atol=0)
    assert_same_gradients(got.grads, unpartitioned.grads)
    module.sign = -1.0
    with pytest.raises(ValueError, match="found invalid values"):
        pipeline(module, lambda: module.loss(batch), 2)


class Posterior(nn.Module):
    """Returns a distribution, which validates its arguments."""

    def __init__(self):
        super().__init__()
        self.body, self.mean, self.scale = mlp(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        hidden = self.body(x)
        return self.found(Independent(Normal(self.mean(hidden), self.scale(hidden).exp()), 1))

    def found(self, belief):
        return belief


class Found:
    """An output object of a user class."""

    def __init__(self, belief):
        self.belief, self.energy = belief, belief.mean.square().mean()


class PosteriorInAnObject(Posterior):
    found = Found


class Variational(Layers):
    kind = Posterior

    def __init__(self):
        super().__init__()
        self.layers.extend(mlp() for _ in range(4))
        self.encoder = self.kind()

    def loss(self, batch):
        return self.bound(batch["x"], self.encoder(batch["x"]))

    def bound(self, x, belief):
        hidden, prior = belief.mean, Normal(torch.zeros(WIDTH), torch.ones(WIDTH))
        for layer in self.layers:
            hidden = layer(hidden)
        kl = torch.distributions.kl_divergence(belief.base_dist, prior)
        return F.mse_loss(hidden, x) + kl.mean() - 0.1 * belief.log_prob(x).mean()


class VariationalInAnObject(Variational):
    kind = PosteriorInAnObject

    def bound(self, x, found):
        return super().bound(x, found.belief) + found.energy


def test_layer_returns_a_distribution():
    """Its parameters are read on the other stage."""
    got = assert_parity(make(Variational))
    assert "encoder" in got.units[0] and got.units[1], "else nothing here is about what a unit returns"


def test_object_with_values_is_no_constant():
    """Its numbers would be those of a stand-in; objects of its class are containers."""
    got = assert_parity(make(VariationalInAnObject))
    assert "encoder" in got.units[0] and got.units[1]
