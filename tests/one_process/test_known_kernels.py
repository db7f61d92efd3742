"""What kernels make of stand-ins is known once it has been seen, and is what torch's own fake kernels make."""

import pytest
import torch
from models import CASES, batch_of, make
from one_process.in_process import cut

from lightning_hybrid.step.absent import make_absent
from lightning_hybrid.step.costs import CostWatch
from lightning_hybrid.step.known_kernels import KnownKernels

ATEN = torch.ops.aten


def record(module):
    return cut(module, lambda: module.loss(batch_of(module.kind, range(4))), 2).assignment.graph


# Views, writes in place, attention, statistics, convolutions, recurrence; the other cases are slow tests.
TELLING = ("GPT2", "Encoder", "BatchNorms", "InPlace", "UNet", "Recurrent")
EACH = [pytest.param(case, marks=[] if case in TELLING else [pytest.mark.slow]) for case in CASES]


@pytest.mark.parametrize("case", EACH)
def test_recordings_are_the_same(case, monkeypatch):
    """All values with their strides, what is a view of what, what is written, and the costs."""
    module, known = make(case).train(), KnownKernels()
    monkeypatch.setattr(CostWatch, "_known", known)
    first, again = record(module), record(module)
    assert known._known
    monkeypatch.setattr(KnownKernels, "key_of", lambda *_: None)
    asked = record(module)
    assert first == asked
    assert again == asked


def test_a_view_lies_where_its_base_does():
    known, t = KnownKernels(), ATEN.t.default
    whole, rest = make_absent(torch.zeros(4, 6)), make_absent(torch.zeros(5, 6))[1:]
    keys = [known.key_of(t, (base,), {}) for base in (whole, rest)]
    known.learn(keys[0], (whole,), t(whole), is_view=True)
    assert known.again(keys[1], (rest,)) is None, "it begins elsewhere"
    known.learn(keys[1], (rest,), t(rest), is_view=True)
    for key, base in zip(keys, (whole, rest), strict=True):
        again = known.again(key, (base,))
        assert (again.shape, again.stride(), again.storage_offset()) == ((6, 4), (1, 6), base.storage_offset())
        assert again.untyped_storage()._cdata == base.untyped_storage()._cdata


def test_what_no_shapes_tell_is_not_known():
    known, x, real = KnownKernels(), make_absent(torch.zeros(3, 3)), torch.zeros(3, 3)
    for func, args in [
        (ATEN.add_.Tensor, (x, x)),  # written
        (ATEN.nonzero.default, (x,)),
        (ATEN.add.Tensor, (x, float("nan"))),
        (ATEN.imag.default, (make_absent(torch.zeros(3, dtype=torch.complex64)),)),
    ]:
        assert known.key_of(func, args, {}) is None, func
    assert known.key_of(ATEN.add.Tensor, (x, 1), {}) != known.key_of(ATEN.add.Tensor, (x, 1.0), {})
    assert known.key_of(ATEN.add.Tensor, (x, x), {}) != known.key_of(ATEN.add.Tensor, (x, real), {})
    key = known.key_of(ATEN.add.Tensor, (real, real), {})
    known.learn(key, (real, real), real + real, is_view=False)
    assert known.again(key, (real, real)) is None, "it has content"
