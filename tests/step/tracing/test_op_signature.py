"""Signatures of operations, by which runs are compared, and the user's lines that call them."""

import torch
from torch import nn

from lightning_hybrid.step.tracing.op_signature import selects_rows, signature_of
from lightning_hybrid.step.tracing.torch_call_sites import CallTrace, user_call_sites

HIDDEN, BATCH = torch.ones(4, 2), torch.ones(3, 2)
WEIGHT = nn.Parameter(torch.ones(2, 2))


def signature(name, *leaves):
    return signature_of(name, leaves, lambda tensor: 7 if tensor is HIDDEN else None, {id(WEIGHT): "layer.weight"})


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


def test_row_indices():
    assert selects_rows("__getitem__", (HIDDEN, 0)) and selects_rows("__getitem__", (HIDDEN, slice(1, None)))
    assert selects_rows("__getitem__", (HIDDEN, (slice(2), 0)))
    assert not selects_rows("__getitem__", (HIDDEN, (slice(None), 0)))
    assert not selects_rows("__getitem__", (HIDDEN, torch.tensor([0])))
    assert not selects_rows("narrow", (HIDDEN, 0))


def user_code(x):
    return torch.tanh(x).sum()


def test_calls_have_user_lines():
    with CallTrace() as trace:
        user_code(HIDDEN)
    torch.exp(HIDDEN)  # after the trace
    assert [function.__name__ for function, _ in trace.steps] == ["tanh", "sum"]
    line = f"{__file__}:{user_code.__code__.co_firstlineno + 1}"
    sites = user_call_sites(trace.steps)
    assert set(sites.values()) == {line} and len(sites) == 2, "two functions on one line have two hashes"
    with CallTrace() as again:
        user_code(HIDDEN)
    assert user_call_sites(again.steps) == sites
