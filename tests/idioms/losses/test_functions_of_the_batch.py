"""Objectives and backwards that are no means over samples: microbatches train as plain Lightning does."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from harness.trainer_runs import assert_same, trainer_of, weights_of
from models.regression import FEATURES, Regression

SAMPLES, BATCH = 22, 8  # the last batch is shorter, and its microbatches differ


class AddsGradient(torch.autograd.Function):
    """Adds the gradient of an auxiliary loss to that of a model, whatever that is."""

    @staticmethod
    def forward(ctx, x, auxiliary):
        ctx.like = torch.ones_like(auxiliary)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, 0.3 * ctx.like


class ClampsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-0.01, 0.01)


class Plain(Regression):
    def loss(self, batch):
        x, y, mask, _ = batch
        for layer in self.layers:
            x = layer(x)
        return self.objective(x, self.head(self.changed(x)), y, mask)

    def changed(self, h):
        return h

    def objective(self, h, out, y, mask):
        return F.mse_loss(out, y)


class Routed(nn.Module):
    """Adds the gradient of a balance loss in training alone."""

    def __init__(self):
        super().__init__()
        self.linear, self.router = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 3)

    def forward(self, x):
        h = torch.tanh(self.linear(x))
        weights = self.router(h).softmax(-1)
        h = h * weights.amax(-1, keepdim=True)
        return AddsGradient.apply(h, weights.square().mean()) if self.training else h


class Routers(Plain):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Routed() for _ in range(4))


class RoutersAndMask(Routers):
    def objective(self, h, out, y, mask):
        return ((out - y).square() * mask).sum() / mask.sum()


class RoutersThatBranch(Routers):
    """No pipeline can run it."""

    def changed(self, h):
        return h if h.abs().mean().item() < 10 else 2 * h


class ClampsSamples(Plain):
    def changed(self, h):
        return ClampsGradient.apply(h)


class HookAdds(Plain):
    def changed(self, h):
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient + 0.01)
        return h


class HookClipsNorm(Plain):
    def changed(self, h):
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * (0.01 / gradient.norm()).clamp(max=1))
        return h


class ParameterHooks(Plain):
    """Clips gradients of parameters by value, and adds to them."""

    def on_fit_start(self):
        self.head.weight.register_hook(lambda gradient: gradient + 0.1)
        for parameter in self.layers.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))


class ScaledByCount(Plain):
    """Labels of the batch ignore some entries; the mask of the loss is another tensor."""

    def objective(self, h, out, y, mask):
        selected = mask.floor()  # in some microbatches nothing
        return ((out - y).square() * selected).sum() * 1 / selected.sum()


class MaskAndMean(Plain):
    def objective(self, h, out, y, mask):
        return ((out - y).square() * mask).sum() * 2.0 / mask.sum() + 0.3 * out.square().mean()


class WeightsSumToOne(Plain):
    def objective(self, h, out, y, mask):
        return ((out - y).square() * (mask / mask.sum())).sum() + 0.1 * out.square().mean()


class PerPositive(Plain):
    """A focal loss, normalized by the number of positives."""

    def objective(self, h, out, y, mask):
        wrong = (out.sigmoid() - mask).abs()
        each = F.binary_cross_entropy_with_logits(out, mask, reduction="none") * wrong**2
        return each.sum() / mask.sum().clamp(min=1) + 0.1 * h.square().mean()


class Sum(Plain):
    def objective(self, h, out, y, mask):
        return 0.1 * F.mse_loss(out, y, reduction="sum")


class TimesSize(Plain):
    def objective(self, h, out, y, mask):
        return 0.1 * F.mse_loss(out, y) * len(out)


class Root(Plain):
    def objective(self, h, out, y, mask):
        return F.mse_loss(out, y).sqrt()


class Windows(Plain):
    """Trains on windows that it draws from its batch, in an order of its own."""

    def loss(self, batch):
        drawn = torch.randint(0, len(batch[0]), (4,), generator=torch.Generator().manual_seed(0))
        return super().loss([column[drawn] for column in batch])


class WindowsThatBranch(Windows, RoutersThatBranch):
    pass


class Penalized(Plain):
    def objective(self, h, out, y, mask):
        return F.mse_loss(out, y) + 0.01 * sum(p.square().sum() for p in self.parameters())


class Smoothed(Plain):
    def objective(self, h, out, y, mask):
        labels = torch.where(mask == 1, (4 * y.abs()).long() % 4, -100).flatten()
        weight = torch.tensor([1.0, 2.0, 5.0, 0.5], dtype=h.dtype)
        return F.cross_entropy(h[:, :4], labels, weight, label_smoothing=0.1) + F.mse_loss(out, y)


class LaterUneven(Plain):
    """A mean over a mask in a form that no recording shows; the first batch masks nothing."""

    def objective(self, h, out, y, mask):
        return ((out - y).square() * mask).sum().abs() / mask.sum()


class ModuleHookClipsNorm(Plain):
    def __init__(self):
        super().__init__()
        self.head.register_full_backward_hook(
            lambda module, inputs, outputs: (inputs[0] * (0.01 / inputs[0].norm()).clamp(max=1),)
        )


class WordsByFrequency(Plain):
    """The gradient of a row is divided by how often the batch has its word."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(3, FEATURES, scale_grad_by_freq=True)

    def changed(self, h):
        return h + self.words((3 * h[:, 0].sigmoid()).long())


class RareWords(Plain):
    """Few samples have a word in common; so many that some do, but not the first two."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, FEATURES, scale_grad_by_freq=True)

    def changed(self, h):
        return h + self.words((60 * h[:, 0].sigmoid() % 50).long())


class RareWordsAndMask(RareWords):
    def objective(self, h, out, y, mask):
        kept = (mask > 0.5).double()
        return ((out - y).square() * kept).sum() / kept.sum()


class RareWordsOfFunction(RareWords):
    """The words are looked up by the function."""

    def changed(self, h):
        return h + F.embedding((60 * h[:, 0].sigmoid() % 50).long(), self.words.weight, scale_grad_by_freq=True)


class TakesGradient(Plain):
    """The step needs a graph; its mean is over the entries that labels do not ignore."""

    def objective(self, h, out, y, mask):
        [slope] = torch.autograd.grad(out.sum(), h, create_graph=True)
        errors = (out - y).square() + slope.square().mean(-1, keepdim=True)
        return (errors * mask).sum() / mask.sum()


SPLIT = [Routers, RoutersAndMask, ClampsSamples, HookAdds, ParameterHooks, ScaledByCount, Penalized, LaterUneven]
UNSPLIT = [
    WordsByFrequency,
    RareWords,
    RareWordsAndMask,
    RareWordsOfFunction,
    HookClipsNorm,
    ModuleHookClipsNorm,
    Sum,
    TimesSize,
    Root,
    WeightsSumToOne,
    Windows,
]  # none of their weights are right
BY_TERM = [MaskAndMean, PerPositive, Smoothed]  # split in stages, whose recording shows each term


def loader(first_is_even):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    mask = (torch.rand(SAMPLES, 1, generator=generator) > 0.5).double().clamp(min=0.1)
    mask[: BATCH * first_is_even] = 1.0
    y, labels = x.square().mean(1, keepdim=True), torch.where(mask == 1, 1, -100)
    return DataLoader(list(zip(x, y, mask, labels, strict=True)), BATCH)


def fitted(module_class, size=1, pp=1, options=None, batches=1):
    """The weights after a fit, and its warnings about the objective."""
    torch.manual_seed(0)
    trainer = trainer_of(size, pp, strategy_options=options or {}, precision="64-true", accumulate_grad_batches=batches)
    module = module_class()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader(module_class is LaterUneven))
    texts = [str(warning.message) for warning in caught]
    return weights_of(module), [text for text in texts if "batches are not split" in text]


def fitted_all(kinds, *arguments):
    return [fitted(kind, *arguments) for kind in kinds]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kind", [*SPLIT, *UNSPLIT, *BY_TERM, TakesGradient])
def test_one_device_matches_plain_lightning(kind, count):
    expected, _ = fitted(kind, batches=2)
    found, texts = fitted(kind, options={"num_microbatches": count}, batches=2)
    assert_same(found, expected)
    assert len(texts) == (kind not in (*SPLIT, TakesGradient))


@pytest.mark.parametrize("kind", [Routers, Sum])
def test_compiled_layers_match_plain_lightning(kind):
    options = {"num_microbatches": 2, "compile": {"backend": "eager"}}
    assert_same(fitted(kind, options=options)[0], fitted(kind)[0])


@pytest.mark.parametrize("count", [2, 3])
def test_stages_match_plain_lightning(worlds, count):
    kinds = SPLIT + UNSPLIT + BY_TERM if count == 2 else [Routers, RoutersAndMask]
    by_rank = worlds.run(2, fitted_all, kinds, 2, 2, {"num_microbatches": count}, timeout=300)
    for kind, ranks in zip(kinds, zip(*by_rank, strict=True), strict=True):
        expected, _ = fitted(kind)
        for found, _ in ranks:
            assert_same(found, expected)
        assert len(ranks[0][1]) == (kind in UNSPLIT), kind


ZERO3 = {"zero_stage": 3, "reshard_after_forward": True}


@pytest.mark.parametrize(("kind", "pp", "options"), [
    (Routers, 1, {}), (Routers, 1, ZERO3), (Routers, 1, {"zero_stage": 2}),
    (Routers, 1, {"tensor_parallel_size": 2}), (RoutersThatBranch, 2, {}), (WindowsThatBranch, 2, {}),
    (HookClipsNorm, 1, ZERO3), (Routers, 2, {"schedule": "zero_bubble"}), (ParameterHooks, 1, {}),
    (ParameterHooks, 1, ZERO3),
], ids=str)  # fmt: skip
def test_added_gradients_count_once_under_any_layout(worlds, kind, pp, options):
    sizes = {} if pp > 1 or "tensor_parallel_size" in options else options
    expected = worlds.run(2, fitted, kind, 2, 1, sizes) if sizes or (pp == 1 and not options) else [fitted(kind)] * 2
    for (found, _), (weights, _) in zip(
        worlds.run(2, fitted, kind, 2, pp, {**options, "num_microbatches": 2}), expected, strict=True
    ):
        assert_same(found, weights)
