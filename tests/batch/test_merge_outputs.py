"""Outputs of microbatches are merged to what one process returns for the full batch."""

from collections import OrderedDict, namedtuple

import numpy
import pytest
import torch

from lightning_hybrid.batch.merge import Microbatches, differ_in_rows, join, join_arguments
from lightning_hybrid.errors import StepError

ROWS = torch.arange(16.0).reshape(8, 2)
NAMES = [f"s{i}" for i in range(8)]
EVEN, UNEVEN, ONES = [2, 2, 2, 2], [3, 3, 2], [1] * 8

Pair = namedtuple("Pair", ["first", "second"])


def joined(function, counts, **options):
    ends = numpy.cumsum(counts)
    parts = [function(ROWS[end - n : end], NAMES[end - n : end]) for end, n in zip(ends, counts, strict=True)]
    return join(parts, [n / 8 for n in counts], counts, **options)


def same(actual, expected):
    assert type(actual) is type(expected), (actual, expected)
    if isinstance(actual, dict):
        assert list(actual) == list(expected)
        return all(same(actual[key], expected[key]) for key in actual)
    if isinstance(actual, list | tuple):
        assert len(actual) == len(expected)
        return all(map(same, actual, expected))
    torch.testing.assert_close(actual, expected) if not isinstance(actual, str | type(None)) else None
    assert isinstance(actual, torch.Tensor | float | numpy.ndarray) or actual == expected, (actual, expected)
    return True


def joined_arguments(calls, weights, counts, **options):
    return join_arguments(dict(enumerate(calls)), Microbatches(weights, counts), **options)


@pytest.mark.parametrize("samples", [1, 2])
def test_arguments_of_a_metric_are_not_its_samples(samples):
    """As many as there are samples in a microbatch."""
    values = [torch.tensor(1.0), torch.tensor(3.0)]
    calls = [((value,) * samples, {}) for value in values]
    assert joined_arguments(calls, [0.5, 0.5], [samples] * 2) == ((torch.tensor(2.0),) * samples, {})


def test_rows_of_a_metric_are_as_many_as_its_labels():
    calls = [((ROWS[i : i + 3][:2], torch.tensor([0, 1])), {}) for i in (0, 3)]
    (rows, labels), _ = joined_arguments(calls, [0.5, 0.5], [3, 3])
    assert same(rows, ROWS[[0, 1, 3, 4]]) and same(labels, torch.tensor([0, 1, 0, 1]))


@pytest.mark.parametrize("counts", [[4, 4], [4, 2]])
def test_rows_that_a_mask_selects_are_joined(counts):
    """Those of predictions and targets, and any where microbatches of as many samples differ, or lack the call."""
    one, other = ((ROWS[i : i + 1], ROWS[i : i + 1, :1]) for i in (0, 3))
    (rows, targets), _ = joined_arguments([(one, {}), (other, {})], [0.5, 0.5], counts)
    assert same(rows, ROWS[[0, 3]]) and same(targets, ROWS[[0, 3], :1])
    mean, _ = joined_arguments([(one[:1], {}), (other[:1], {})], [0.5, 0.5], counts)
    assert same(mean[0], ROWS[[0, 3]].mean(0, keepdim=True))
    assert same(
        joined_arguments([(one[:1], {}), (other[:1], {})], [0.5, 0.5], counts, selects=True)[0][0], ROWS[[0, 3]]
    )
    assert differ_in_rows([(one, {}), ((ROWS[:2], ROWS[:2]), {})], counts) == (counts == [4, 4])
    assert not differ_in_rows([(one, {}), (other, {})], counts)


PER_SAMPLE = {
    "rows": lambda x, names: x,
    "names beside rows": lambda x, names: {"names": names, "o": x},
    "list of rows": lambda x, names: list(x),
    "tuple of names and rows": lambda x, names: (names, x),
    "dict per sample": lambda x, names: [{"name": n, "o": o} for n, o in zip(names, x, strict=True)],
    "dict by name": lambda x, names: dict(zip(names, x, strict=True)),
    "dict by name, in a dict": lambda x, names: {"o": OrderedDict(zip(names, x, strict=True)), "kind": "x"},
    "numbers": lambda x, names: x.int().tolist(),
    "array": lambda x, names: x.numpy(),
    "named tuple": lambda x, names: Pair(x, names),
    "tuple of scalars per sample": lambda x, names: [(n, float(o[0])) for n, o in zip(names, x, strict=True)],
    "mean": lambda x, names: {"mean": x.mean(), "number": float(x.mean())},
    "plain": lambda x, names: {"kind": "regression", "none": None, "scale": 0.1, "index": 7},
    "columns": lambda x, names: {"c": [x[:, 0], x[:, 1], x], "fixed": (x * 2, x.sum(1), x)},
}


@pytest.mark.parametrize("counts", [EVEN, UNEVEN, ONES], ids=["even", "uneven", "ones"])
@pytest.mark.parametrize("step", PER_SAMPLE.values(), ids=PER_SAMPLE)
def test_merge_matches_one_process(step, counts):
    assert same(joined(step, counts), step(ROWS, NAMES))


@pytest.mark.parametrize("counts", [EVEN, UNEVEN, [5, 3]])
def test_samples_in_another_dimension(counts):
    def wide(x, names):
        return torch.cat([x, x, x], 1).T, x.T.unsqueeze(2).repeat(2, 1, 5)

    assert same(joined(wide, counts), wide(ROWS, NAMES))


def test_sizes_of_all_microbatches_decide_whether_a_list_is_per_sample():
    def columns(x, names):
        return [x[:, 0], x[:, 1]]

    assert same(joined(columns, [2, 2, 2, 1, 1]), columns(ROWS, NAMES))
    assert len(joined(columns, EVEN)) == 8  # as many as samples in each of them: an entry per sample


def test_tuples_as_long_as_the_batch_are_unchanged():
    def columns(x, names):
        return x[:, 0], x[:, 1]

    assert same(joined(columns, EVEN), columns(ROWS, NAMES))
    assert same(joined(lambda x, names: tuple(names), EVEN), tuple(NAMES))


def test_tensors_equal_in_all_microbatches_are_unchanged():
    weight = torch.randn(3, 2)
    assert same(joined(lambda x, names: weight, EVEN), weight)


def test_lists_of_data_dependent_length_are_concatenated():
    def found(x, names):
        return [name for name in names if name in ("s1", "s6", "s7")]

    assert joined(found, EVEN) == ["s1", "s6", "s7"]


def test_unmergeable_outputs_are_refused_by_name():
    def padded(x, names):
        return {"tokens": [x.new_zeros(len(x) * 2 + int(x[0, 0]), 1 + int(x[0, 0]))]}

    last = joined(padded, EVEN)["tokens"][0]
    assert last.shape == (16, 13)
    with pytest.raises(StepError, match=r"predict_step returns \['tokens'\]\[0\].*\[4, 1\].*\[16, 13\].*one entry per"):
        joined(padded, EVEN, step="predict_step")
