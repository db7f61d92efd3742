"""Tensors that the host reads together."""

import math

import pytest
import torch

from lightning_hybrid import host_copies
from lightning_hybrid.host_copies import HostReads, read_all, read_numbers

DTYPES = [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float32]


def tensors():
    made = [torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES]
    made += [made[0].T, made[0][:, ::2], made[4].conj(), made[4].real[:1, :1], torch.zeros(0), torch.tensor(2**62 + 1)]
    return [*made, torch.full((), math.nan), torch.ones(3, requires_grad=True)]


@pytest.mark.parametrize("host", ["cpu", "none"])
def test_tensors_of_any_dtype_and_strides_are_read_as_they_are(monkeypatch, host):
    monkeypatch.setattr(host_copies, "_HOST", host)
    for read, given in zip(read_all(tensors()), tensors(), strict=True):
        assert read.dtype is given.dtype and not read.requires_grad
        torch.testing.assert_close(read, given.detach(), rtol=0, atol=0, equal_nan=True)


def test_nothing_is_read():
    assert read_all([]) == [] and read_numbers([]) == []


def test_numbers_and_tensors_of_one_element_keep_their_order():
    assert read_numbers([1.5, torch.tensor(2), 3, torch.tensor([4.25])]) == [1.5, 2.0, 3.0, 4.25]


@pytest.fixture
def num_copies(monkeypatch):
    calls = []
    monkeypatch.setattr(host_copies, "read_all", lambda given: calls.append(len(given)) or read_all(given))
    return calls


def test_what_waits_is_read_at_once(num_copies):
    reads = HostReads()
    first, second = reads.add(torch.tensor(1)), reads.add(torch.tensor(2))
    assert reads.take(second) == 2 and reads.take(first) == 1
    third = reads.add(torch.tensor(3))
    assert reads.take(third) == 3 and num_copies == [2, 1]
