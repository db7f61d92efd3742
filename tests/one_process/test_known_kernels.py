"""What kernels make of stand-ins is known once it has been seen, and is what torch's own fake kernels make."""

import pytest
import torch
from models import CASES, batch_of, make
from one_process.in_process import cut
from torch._subclasses.fake_tensor import FakeTensor

from lightning_hybrid.step import known_kernels
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


def absent(*shape, dtype=torch.float32, strides=None):
    like = torch.empty(shape, dtype=dtype) if strides is None else torch.empty_strided(shape, strides, dtype=dtype)
    return make_absent(like)


A, B, TURNED, ONE = absent(4, 6), absent(6, 5), absent(4, 6, strides=(1, 4)), absent()
CUBE, WHOLE = absent(2, 3, 4), absent(4, 6, dtype=torch.int64)
BINARY = [(A, A), (A, absent(6)), (absent(4, 1), TURNED), (A, ONE), (A, 2), (WHOLE, 2), (WHOLE, 0.5), (WHOLE, A)]
BINARY += [(absent(4, 6, dtype=torch.bfloat16), ONE), (TURNED, TURNED)]
UNARY = [(A,), (TURNED,), (CUBE.transpose(0, 2),), (absent(4, 6, dtype=torch.bfloat16),)]
ON_META = {
    ATEN.mm.default: [(A, B), (TURNED, B), (A, absent(5, 6).t())],
    ATEN.addmm.default: [(absent(5), A, B), (absent(4, 5), TURNED, B)],
    ATEN.bmm.default: [(CUBE, absent(2, 4, 5)), (CUBE.transpose(1, 2), CUBE)],
    ATEN.baddbmm.default: [(absent(2, 3, 5), CUBE, absent(2, 4, 5)), (absent(3, 5), CUBE, absent(2, 4, 5))],
    ATEN.view.default: [(A, [2, -1]), (CUBE, [6, 4]), (TURNED, [4, 2, 3]), (A[1:], [18])],
    ATEN.t.default: [(A,), (absent(3),), (A[1:],)],
    ATEN.transpose.int: [(CUBE, -1, 0), (A[:, 2:], 0, 1)],
    ATEN.permute.default: [(CUBE, [2, 0, 1])],
    ATEN.expand.default: [(absent(4, 1), [4, 6]), (absent(6), [4, -1])],
    ATEN.squeeze.dim: [(absent(4, 1), 1), (A, 1)],
    ATEN.unsqueeze.default: [(A, 1), (TURNED, -1)],
    ATEN.slice.Tensor: [(A, 0, 1, 3), (A, 1, 0, 9223372036854775807, 2), (CUBE, 2, -2)],
    ATEN.select.int: [(CUBE, 1, -1)],
    **dict.fromkeys((ATEN.add.Tensor, ATEN.sub.Tensor, ATEN.mul.Tensor, ATEN.div.Tensor), BINARY),
    ATEN.pow.Tensor_Scalar: [(A, 2), (WHOLE, 2), (WHOLE, 0.5), (TURNED, 3.0)],
    **{func: [(*x, -1, False) for x in UNARY] for func in (ATEN._softmax.default, ATEN._log_softmax.default)},
}


@pytest.mark.parametrize("func", sorted(known_kernels._ON_META, key=str), ids=str)
def test_kernels_that_are_asked_on_the_meta_device(func):
    for args in ON_META.get(func, UNARY):
        made, fake = known_kernels.asked_on_meta(func, args, {}), func(*args)
        for tensor in (made, fake):
            assert type(tensor) is FakeTensor and tensor.device.type == "cpu"
        for what in ("shape", "dtype", "fake_device", "requires_grad"):
            assert getattr(made, what) == getattr(fake, what), (func, args, what)
        assert (made.stride(), made.storage_offset()) == (fake.stride(), fake.storage_offset()), (func, args)
        shares = [tensor.untyped_storage()._cdata == args[0].untyped_storage()._cdata for tensor in (made, fake)]
        assert shares == [func.is_view] * 2, (func, args)


def test_others_are_asked_of_torch():
    real = torch.zeros(4, 6)
    assert known_kernels.asked_on_meta(ATEN.add.Tensor, (A, real), {}) is None, "one has content"
    assert known_kernels.asked_on_meta(ATEN.add.Tensor, (A, A), {"alpha": 2}) is None
    assert known_kernels.asked_on_meta(ATEN.exp.default, (A,), {}) is None
    assert known_kernels.asked_on_meta(ATEN.mm.default, (A, A), {}) is None, "it says what is wrong"
    elsewhere = make_absent(torch.zeros(4, 6), device=torch.device("cuda:0"))
    assert known_kernels.asked_on_meta(ATEN.add.Tensor, (A, elsewhere), {}) is None
    assert known_kernels.asked_on_meta(ATEN.tanh.default, (elsewhere,), {}).fake_device == torch.device("cuda:0")
