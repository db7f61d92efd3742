"""Signatures of operations, by which runs are compared."""

import torch
from torch import nn

from lightning_hybrid.step.standins.marks import Marks
from lightning_hybrid.step.tracing.refusals import signature_of

HIDDEN, BATCH = torch.ones(4, 2), torch.ones(3, 2)
WEIGHT = nn.Parameter(torch.ones(2, 2))
MARKS = Marks()
MARKS.set(HIDDEN, 7)


def signature(name, *leaves):
    return signature_of(name, leaves, MARKS, {id(WEIGHT): "layer.weight"})


def test_values_parameters_and_batch_tensors_differ():
    described, sizes = signature("linear", HIDDEN, WEIGHT, BATCH)
    assert described == ("linear", 7, "layer.weight", (torch.float32, 2, False))
    assert sizes == ((3, 2),)


def test_numbers_are_sizes_and_flags_are_in_the_signature():
    assert signature("sum", HIDDEN, 1, True) == (("sum", 7, "int", (bool, True)), (1,))
    assert signature("sum", HIDDEN, 1, True)[0] == signature("sum", HIDDEN, 2, True)[0]
    assert signature("sum", HIDDEN, 1, True)[0] != signature("sum", HIDDEN, 1, False)[0]


def test_number_arguments_of_units_are_no_sizes():
    assert signature("@layer", HIDDEN, 3) == (("@layer", 7, "int"), ())
