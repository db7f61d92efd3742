"""The means in a loss are read off its autograd graph, with what they were divided by."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss

from lightning_hybrid.step.loss_count import means_in, weights_by_count

CLASSES = 4
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)


def batch(count=12, ignored=(1, 2, 7), shape=()):
    generator = torch.Generator().manual_seed(count)
    logits = torch.randn(count, *shape, CLASSES, generator=generator, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (count, *shape), generator=generator)
    y[list(ignored)] = -100
    return logits.requires_grad_(), y


def two_dims(logits, y):
    return F.cross_entropy(logits[None].transpose(1, 2), y[None])


def masked(logits, y):
    mask = (y != -100).double()
    return (logits.square().sum(-1) * mask).sum() / mask.sum()


def summed(logits, y):
    return -0.5 * (-F.cross_entropy(logits, y, reduction="sum") / (y != -100).sum()) - 1


def picked(logits, y):
    return F.mse_loss(logits[y != -100], torch.ones(int((y != -100).sum()), CLASSES, dtype=torch.float64))


def rows(logits, y):
    return logits[y != -100].square().mean().float()


def weighted(logits, y):
    return F.binary_cross_entropy_with_logits(logits[y != -100, 0], torch.ones(int((y != -100).sum())).double()) * 3


def several(logits, y):
    return F.cross_entropy(logits, y) / 2 + 0.1 * masked(logits, y)


def causal(logits, y):
    return ForCausalLMLoss(logits[None], y[None], CLASSES)


FORMS = [
    nn.CrossEntropyLoss(), nn.CrossEntropyLoss(WEIGHT), nn.CrossEntropyLoss(ignore_index=-100, label_smoothing=0.1),
    nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.2), lambda x, y: F.nll_loss(x.log_softmax(-1), y) * 0.3,
    two_dims, masked, summed, picked, rows, weighted, several, causal,
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=[f"form{n}" for n in range(len(FORMS))])
def test_weights_make_the_mean_that_of_the_whole(form):
    logits, y = batch()
    [expected] = torch.autograd.grad(form(logits, y), logits)
    losses = [form(part, labels) for part, labels in zip(logits.split([4, 3, 5]), y.split([4, 3, 5]), strict=True)]
    weights = weights_by_count([means_in(loss) for loss in losses])
    if form is causal:  # its labels are shifted: each part has one fewer
        assert [term.weight for loss in losses for term in means_in(loss)] == [1.0, 2.0, 4.0]
        return
    assert weights is not None and sum(weights) == pytest.approx(1)
    loss = sum(loss * weight for loss, weight in zip(losses, weights, strict=True))
    torch.testing.assert_close(loss, form(logits, y), rtol=1e-6 if form is rows else 1e-12, atol=0)
    [ours] = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(ours, expected, rtol=1e-6 if form is rows else 1e-10, atol=1e-12)


def test_terms_have_their_factors_and_weights():
    logits, y = batch()
    terms = means_in(several(logits, y))
    assert [(term.factor, term.weight) for term in terms] == [(0.5, 9.0), (0.1, 9.0)]


def test_other_losses_are_not_taken_for_means():
    x, y = batch()
    token = F.cross_entropy(x, y)
    each = F.cross_entropy(x, y, reduction="none")
    for loss in (token.sqrt(), token * x.mean(), x.square().sum(), each[0], token + x.square().sum(), 1 / token):
        assert means_in(loss) is None


def test_means_over_different_counts_have_no_weights_in_common():
    def loss(logits, y):
        return F.cross_entropy(logits, y) + logits.square().mean()

    logits, y = batch()
    terms = [means_in(loss(logits[:6], y[:6])), means_in(loss(logits[6:], y[6:]))]
    assert all(len(each) == 2 for each in terms) and weights_by_count(terms) is None
