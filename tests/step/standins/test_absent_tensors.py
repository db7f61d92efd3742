"""Absent tensors, numbers and arrays: they know their shape, and refuse what needs their content."""

import contextlib
import io
import math

import numpy
import pytest
import torch
from torch import nn

from harness.trainer_runs import lines_of_lightning, trainer_of
from lightning_hybrid.errors import ControlFlowError
from lightning_hybrid.step.standins.marks import Marks
from lightning_hybrid.step.standins.numbers import (
    AbsentArray,
    AbsentFloat,
    has_absent_content,
    source_values,
    stand_in_for_content,
)
from lightning_hybrid.step.standins.tensors import drop, fill, is_absent, make_absent, user_attributes
from lightning_hybrid.step.tracing.mode import in_canonical_order
from models.tiny import Tiny, loader


def test_dropped_parameter_keeps_its_identity_and_is_refilled():
    parameter = nn.Parameter(torch.ones(2, 3))
    parameter.tag = "of the user"
    optimizer = torch.optim.SGD([parameter], 0.1)
    drop(parameter)
    assert is_absent(parameter) and isinstance(parameter, nn.Parameter) and parameter.shape == (2, 3)
    assert user_attributes(parameter) == {"tag": "of the user"}
    fill(parameter, nn.Parameter(torch.full((2, 3), 4.0)))
    assert not is_absent(parameter) and optimizer.param_groups[0]["params"][0] is parameter
    assert torch.equal(parameter.detach(), torch.full((2, 3), 4.0)) and parameter.tag == "of the user"


def test_stand_in_has_strides_and_mixes_with_real_tensors():
    absent = make_absent(torch.ones(4, 2).T, requires_grad=True)
    assert absent.stride() == (1, 2) and absent.requires_grad
    assert is_absent(absent + torch.ones(4)) and (absent + torch.ones(4)).shape == (2, 4)


def test_absent_number_refuses_decisions():
    number = AbsentFloat("train.py:3", frozenset({1}))
    assert math.isnan(number + 1) and is_absent(number)
    with pytest.raises(ControlFlowError, match=r"train\.py:3"):
        bool(number > 0)


def test_absent_array_has_sizes_alone():
    array = AbsentArray("train.py:3", torch.ones(2, 3), frozenset({1}))
    assert len(array) == 2 and array.shape == (2, 3) and has_absent_content(array)
    assert source_values(array) == {1}
    for read in (lambda: array + 1, lambda: array[0], lambda: numpy.isfinite(array)):
        with pytest.raises(ControlFlowError, match=r"train\.py:3"):
            read()


def test_tolist_of_absent_tensors():
    nested = stand_in_for_content("tolist", "train.py:3", torch.ones(2, 3), frozenset(), None)
    assert [len(row) for row in nested] == [3, 3] and all(is_absent(number) for row in nested for number in row)
    assert stand_in_for_content("tolist", "", torch.ones(2), frozenset(), 0.5) == [0.5, 0.5]


def test_comparison_is_symmetric():
    first, second, batch = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0]), torch.tensor([0.0, 9.0])

    def ordered(name, func, *args):
        marks = Marks()
        marks.set(first, 1)
        marks.set(second, 2)
        return in_canonical_order(name, func, args, marks, ())

    name, func, args = ordered("le", torch.le, second, first)
    assert name == "ge" and args[0] is first and torch.equal(func(*args), second <= first)
    name, func, args = ordered("gt", torch.gt, batch, first)
    assert name == "lt" and args[0] is first and torch.equal(func(*args), batch > first)
    assert ordered("lt", torch.lt, first, second)[0] == "lt"
    assert ordered("lt", torch.lt, second, 3)[0] == "lt"


class Prints(Tiny):
    """Prints its loss in three ways, each in a line of its own."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        print("loss", loss.item())
        print(f"loss {loss:.3f}")
        print(f"loss {loss.item():.3f}")
        return loss


def run_printing(layout):
    trainer = trainer_of(2, 1, strategy_options=layout)
    with lines_of_lightning() as lines, contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer.fit(Prints(), loader(4))
    told = [line for line in lines if "in place of a number of the model" in line]
    return told, trainer.strategy.run.is_pipelined, printed.getvalue()


def test_lines_that_print_absent_numbers_are_named_once(worlds):
    (told, is_pipelined, printed), (_, _, printed_by_last) = worlds.run(2, run_printing, {"pipeline_parallel_size": 2})
    assert is_pipelined and len(told) == 3 == len(set(told)), told
    assert set(printed.split()) == {"loss", "nan"} and "300" not in printed_by_last, (printed, printed_by_last)
    assert all("test_absent_tensors.py:" in line and "self.log(" in line for line in told), told
