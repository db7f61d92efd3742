"""Two microbatches that can show the weights of a loss are found wherever in the batch they are."""

import pytest
import torch

from lightning_hybrid.pipeline.means import LossWeightFinder


def batch_of(counts, rows=2):
    """A batch whose microbatches of some rows have these numbers of unmasked labels in each row."""
    labels = torch.full((len(counts) * rows, 4), -100)
    for row in range(len(labels)):
        labels[row, : counts[row // rows]] = row
    return {"x": torch.zeros(len(labels), 4), "labels": labels}


def unmasked(batch):
    return [int((rows != -100).sum()) for rows in batch["labels"].chunk(2)]


@pytest.mark.parametrize("counts", [(2, 2, 1, 1), (1, 2, 2, 1), (2, 2, 2, 2, 2, 1), (1, 1, 1, 3, 3)])
def test_a_pair_with_different_counts_is_found(counts):
    finder = LossWeightFinder(None, lambda message: None)
    batch = batch_of(counts)
    assert finder.is_open(batch, len(counts))
    pair = finder.two_parts(batch, len(counts))
    assert len(pair["labels"]) == 4  # two microbatches: as much as memory has room for
    first, second = unmasked(pair)
    assert first != second
    assert finder.is_open(pair, 2)


def test_microbatches_of_unequal_sizes_are_paired_at_their_boundary():
    finder = LossWeightFinder(None, lambda message: None)
    labels = torch.zeros(7, 4, dtype=torch.long)  # microbatches of 3, 2 and 2 rows
    labels[5:, 1:] = -100
    pair = finder.two_parts({"labels": labels}, 3)
    assert unmasked(pair) == [8, 2]


def test_without_a_difference_the_first_two_are_taken():
    finder = LossWeightFinder(None, lambda message: None)
    batch = batch_of((2, 2, 2, 2))
    pair = finder.two_parts(batch, 4)
    assert torch.equal(pair["labels"], batch["labels"][:4])
