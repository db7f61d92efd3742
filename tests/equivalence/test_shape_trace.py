"""Whether two runs make the same calls with the same shapes but for divided widths."""

import pytest
import torch

from lightning_hybrid.equivalence.division import Division
from lightning_hybrid.equivalence.shapes import ShapeTrace, difference_but_width, why_not_same_program


def traced(function, width):
    x = torch.zeros(6, width)
    with ShapeTrace() as trace:
        function(x)
    return trace


def halves(x):
    return x.split([x.shape[-1] // 2] * 2, -1)


PROGRAMS = [
    (lambda x: x * 2, ""),
    (halves, ""),
    (lambda x: x[[]] + x[[]], ""),
    (lambda x: x.split([6, 0]), ""),
    (lambda x: x[:, :4], "__getitem__ selects a fixed number of features"),
    (lambda x: x.narrow(1, 0, 4), "narrow selects a fixed number of features"),
    (lambda x: x.new_zeros(6, 8 if x.shape[1] > 32 else 9), "new_zeros has"),
    (lambda x: x.sin() if x.shape[1] > 32 else x.cos(), "call 1 is sin in the full unit and cos in the narrow one"),
    (lambda x: x.sin() if x.shape[1] > 32 else None, "the full unit makes 2 calls and the narrow one 1"),
]


@pytest.mark.parametrize(("program", "reason"), PROGRAMS, ids=range(len(PROGRAMS)))
def test_difference(program, reason):
    found = difference_but_width(traced(program, 64), traced(program, 16), 4)
    assert found.startswith(reason) and bool(found) is bool(reason), found


def test_divided_size_must_not_become_another_one():
    full, narrow = (traced(torch.sin, width) for width in (24, 6))
    assert not difference_but_width(full, narrow, 4)
    found = why_not_same_program(full, narrow, Division(4, frozenset({24})), 1)
    assert found == "of two sizes that differ both would be 6"
