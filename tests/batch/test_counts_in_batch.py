"""The denominator of a mean loss is found only among the labels and masks of a batch."""

from collections import UserDict

import pytest
import torch

from lightning_hybrid.batch.denominators import (
    Count,
    Mean,
    find_counts,
    uneven_masks,
    weights_differ,
)
from lightning_hybrid.batch.split import split_unevenly

LABELS = torch.tensor([[1, -100, -100], [2, 3, -100], [-100, 5, 6], [7, 8, -100], [9, -100, 1]])
LOSSES = torch.linspace(0.5, 3, LABELS.numel(), dtype=torch.float64).reshape(LABELS.shape).square()
BATCH = {"labels": LABELS, "losses": LOSSES}


def over_labels(batch):
    return float(batch["losses"][batch["labels"] != -100].mean())


def over_samples(batch):
    return float(batch["losses"].mean())


def over_shifted_labels(batch):
    return float(batch["losses"][:, 1:][batch["labels"][:, 1:] != -100].mean())


def squared_mean_over_labels(batch):
    return over_labels(batch) ** 2  # a mean, but not linear in it


def counts_of(loss):
    microbatches, weights = split_unevenly(BATCH)
    values = Mean(loss(BATCH), [[loss(each) for each in microbatches]])
    return find_counts(values, BATCH, [(microbatches, weights)], torch.float64)


def test_mean_over_labels_is_weighted_by_label_count():
    found = counts_of(over_labels)
    assert found == (Count(0, -100),)
    microbatches, _ = split_unevenly(BATCH)
    weights = found[0].weights(microbatches)
    assert sum(weights) == pytest.approx(1)
    mean = sum(over_labels(each) * weight for each, weight in zip(microbatches, weights, strict=True))
    assert mean == pytest.approx(over_labels(BATCH), rel=1e-14)


def test_shifted_labels_skip_the_first_column():
    assert Count(0, -100, 1) in counts_of(over_shifted_labels)


@pytest.mark.parametrize("loss", [over_samples, squared_mean_over_labels])
def test_other_tensors_are_no_count(loss):
    assert counts_of(loss) == ()


@pytest.mark.parametrize("term", [5e-11, 2e-10])
def test_a_term_that_mixes_within_rounding_hides_no_count(term):
    """However far the mean over samples is: a step is not split at first, and unsplit by a later batch."""

    def mixed(batch):
        labels = batch["labels"] != -100
        return over_labels(batch) + term * float(labels.double().mean()) ** 2

    for scale in (1.0, 1e-6):  # of what the loss differs by between samples
        batch = {**BATCH, "losses": 1 + scale * LOSSES}
        microbatches, weights = split_unevenly(batch)
        values = Mean(mixed(batch), [[mixed(each) for each in microbatches]])
        assert find_counts(values, batch, [(microbatches, weights)], torch.float64)[0] == Count(0, -100)


def test_count_describes_itself():
    batch = {"ids": torch.ones(2, 3), "rows": [torch.ones(2), torch.zeros(2)]}
    assert Count(0, None, 1).describe(batch) == "sum of batch['ids'], without the first column"
    assert Count(2, -100).describe(batch) == "number of entries other than -100 of batch['rows'][1]"
    other = UserDict(batch)  # no container that torch knows
    assert Count(0, -100).describe(other) in (
        "number of entries other than -100 of tensor 0 of the batch",
        "number of entries other than -100 of batch['ids']",
    )


def test_zero_counts_have_no_weights():
    assert Count(0, -100).weights([torch.full((2, 2), -100)]) is None
    assert Count(3, -100).of(BATCH) == 0


def test_counts_that_differ_on_a_batch_are_distinct():
    microbatches, weights = split_unevenly(BATCH)
    assert weights_differ([Count(0, -100), Count(0, -100, 1)], microbatches)
    assert not weights_differ([Count(0, -100), Count(0, -100)], microbatches)
    assert uneven_masks(BATCH, microbatches, weights) == {Count(0, -100)}
