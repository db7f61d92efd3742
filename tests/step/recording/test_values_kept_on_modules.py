"""Values that a step keeps, and operations that select rows of them."""

import torch

from lightning_hybrid.step.recording.kept import selects_rows

HIDDEN = torch.ones(4, 2)


def test_indices_that_select_rows():
    assert selects_rows("__getitem__", (HIDDEN, 0)) and selects_rows("__getitem__", (HIDDEN, slice(1, None)))
    assert selects_rows("__getitem__", (HIDDEN, (slice(2), 0)))
    assert not selects_rows("__getitem__", (HIDDEN, (slice(None), 0)))
    assert not selects_rows("__getitem__", (HIDDEN, torch.tensor([0])))
    assert not selects_rows("narrow", (HIDDEN, 0))
