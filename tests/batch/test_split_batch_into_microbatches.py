"""The number of microbatches of a batch, their contents, and the batches that are not split."""

import numpy
import pytest
import torch

from lightning_hybrid.batch.split import (
    batch_size_of,
    check_count,
    choose_count,
    copied_batch,
    join_batches,
    split,
    split_unevenly,
    why_unsplit,
)
from lightning_hybrid.errors import BatchError


def batch_of(size):
    x = torch.arange(2.0 * size).reshape(size, 2)
    return {"x": x, "names": [str(i) for i in range(size)], "y": numpy.arange(size), "scale": 3, "t": torch.tensor(1.0)}


def test_rows_lists_and_arrays_are_split_and_the_rest_is_shared():
    pieces, weights = split(batch_of(5), 2)
    assert [len(piece["x"]) for piece in pieces] == [3, 2] and weights == [0.6, 0.4]
    assert torch.equal(torch.cat([piece["x"] for piece in pieces]), batch_of(5)["x"])
    assert [piece["names"] for piece in pieces] == [["0", "1", "2"], ["3", "4"]]
    assert [piece["y"].tolist() for piece in pieces] == [[0, 1, 2], [3, 4]]
    assert all(piece["scale"] == 3 and piece["t"] == 1 for piece in pieces)


def test_write_into_one_microbatch_keeps_versions_of_others():
    (first, second), _ = split(torch.ones(4, 1), 2)
    version = second._version
    first.mul_(2)
    assert second._version == version and torch.equal(second, torch.ones(2, 1))


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((torch.ones(2, 1), torch.ones(3, 1)), "different first dimensions"),
        (torch.eye(3).to_sparse(), "layout"),
        ({"a": 1, "b": torch.tensor(2.0)}, "no tensor with a batch dimension"),
    ],
)
def test_unsplit_batches_give_a_reason(batch, words):
    assert batch_size_of(batch) is None and words in why_unsplit(batch, None)
    assert choose_count(batch, 4, 2, None) == 1 and split_unevenly(batch) == ([], [])


@pytest.mark.parametrize(
    ("size", "wanted", "stages", "count"),
    [(8, 3, 2, 3), (2, 3, 2, 2), (8, None, 1, 1), (16, None, 2, 8), (12, None, 2, 6), (3, None, 2, 3), (1, None, 2, 1)],
)
def test_the_number_of_microbatches(size, wanted, stages, count):
    assert choose_count(torch.ones(size, 1), wanted, stages, None) == count


def test_more_microbatches_than_samples_are_refused():
    check_count(torch.ones(4), 4)
    with pytest.raises(BatchError, match=r"num_microbatches=5 .*only 4 samples"):
        check_count(torch.ones(4), 5)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 9, 12])
def test_uneven_split_has_coprime_sizes(size):
    pieces, weights = split_unevenly(torch.arange(size))
    few, rest = map(len, pieces)
    assert few + rest == size and numpy.gcd(few, rest) == 1
    assert weights == pytest.approx([few / size, rest / size])


def test_user_splitter_gives_microbatches_and_weights():
    pieces, weights = split(torch.arange(4), 2, lambda batch, count: [batch[:1], batch[1:]])
    assert [len(piece) for piece in pieces] == [1, 3] and weights == [0.25, 0.75]
    with pytest.raises(BatchError, match="2 microbatches and returned 1"):
        split(torch.arange(4), 2, lambda batch, count: [batch])


def test_batches_of_replicas_are_joined():
    joined = join_batches([[torch.zeros(2, 1), torch.zeros(2)], [torch.ones(2, 1), torch.ones(2)]])
    assert [tensor.shape for tensor in joined] == [(4, 1), (4,)] and joined[1].tolist() == [0, 0, 1, 1]


def test_copied_batch_has_its_own_storage():
    batch = {"x": torch.zeros(2), "tags": [["a"]]}
    copy = copied_batch(batch)
    copy["x"].add_(1)
    copy["tags"][0].append("b")
    assert batch["x"].tolist() == [0, 0] and batch["tags"] == [["a"]]
