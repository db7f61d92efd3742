"""Split backwards: what is deferred, what is not, and that the gradients equal torch's."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_hybrid.pipeline.runtime import split_backward as weights_later
from lightning_hybrid.pipeline.runtime.split_backward import SplitBackward, finish

IN_A_UNIT = SimpleNamespace(watch=SimpleNamespace(inside_unit=True))


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setitem(weights_later.MIN_PRODUCTS_TO_DEFER, "cpu", 0)


class Net(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 4)
        self.options = options

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def made(cls=Net, **options):
    torch.manual_seed(1)
    return cls(**options).double()


def run(module, x, step=None):
    """One microbatch with a split backward; the deferred weights, and the gradients after the first part."""
    later = SplitBackward()
    with later.instrumented(IN_A_UNIT):
        with later.forward():
            loss = (module(x) if step is None else step(module, x)).square().sum()
        left = later.backward([loss], [torch.ones_like(loss)])
        first = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
        finish(left)
    names = {id(p): name for name, p in module.named_parameters()}
    assert F.linear is torch._C._nn.linear, "torch's own function must be back"
    return [names[id(one.weight)] for one in left], first


def plainly(module, x, step=None):
    (module(x) if step is None else step(module, x)).square().sum().backward()


def assert_same(one, other, *, tolerance=0.0):
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (2, 1, 3, 4), (0, 4)], ids=str)
def test_only_linear_weight_gradients_are_deferred(shape):
    split, unsplit = made(), made()
    for microbatch in range(3):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        again = x.detach().clone().requires_grad_()
        before = {name: None if p.grad is None else p.grad.clone() for name, p in split.named_parameters()}
        left, first = run(split, x)
        plainly(unsplit, again)
        assert left == ["c.weight", "b.weight", "a.weight"]
        for name in left:
            assert (first[name] is None) if microbatch == 0 else torch.equal(first[name], before[name])
        assert torch.equal(first["a.bias"], unsplit.a.bias.grad) and torch.equal(x.grad, again.grad)
        assert_same(split, unsplit)


class Twice(Net):
    def forward(self, x):
        return self.b(torch.tanh(self.b(self.a(x))))


class TiedLookup(nn.Module):
    def __init__(self, sparse=False):
        super().__init__()
        self.look, self.head = nn.Embedding(5, 4, sparse=sparse), nn.Linear(4, 5, bias=False)
        self.head.weight = self.look.weight

    def forward(self, x):
        return self.head(self.look(x.abs().mul(7).long() % 5))


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.b.weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("cls", "options", "left"),
    [
        (Twice, {}, ["b.weight", "b.weight", "a.weight"]),
        (TiedLookup, {}, ["look.weight"]),
        (Frozen, {}, ["c.weight", "a.weight"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_weights_used_twice_shared_and_frozen(cls, options, left):
    split, unsplit = made(cls, **options), made(cls, **options)
    for _ in range(2):
        x = torch.randn(3, 4, dtype=torch.float64)
        assert run(split, x)[0] == left
        plainly(unsplit, x)
        assert_same(split, unsplit, tolerance=1e-14 if cls is TiedLookup else 0.0)  # two paths to one weight


def test_sparse_weight_gradient_becomes_dense():
    split, unsplit = made(TiedLookup, sparse=True), made(TiedLookup)
    x = torch.randn(3, 4, dtype=torch.float64)
    assert run(split, x)[0] == ["look.weight"]
    plainly(unsplit, x)
    assert_same(split, unsplit, tolerance=1e-14)


# --- observers of the time of a gradient -----------------------------------------------------------------------------


def with_penalty(module, x):
    """The gradient of a gradient, taken in the step."""
    x = x.requires_grad_()
    y = module(x)
    [slope] = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.sum() + slope.square().sum()


def with_inner_gradient(module, x):
    """A gradient of the weight, taken in the step, is complete at once."""
    [of_weight] = torch.autograd.grad(module(x).sum(), module.b.weight, retain_graph=True)
    assert of_weight.abs().sum() > 0
    return module(x) * of_weight.sum()


class RerunsInBackward(torch.autograd.Function):
    """Re-runs the module in its backward, and requests the gradients by name."""

    @staticmethod
    def forward(ctx, x, module, *parameters):
        ctx.save_for_backward(x)
        ctx.module = module
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, gradient):
        [x] = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.module(x)
        grads = torch.autograd.grad(y, [x, *ctx.module.parameters()], gradient)
        return grads[0], None, *grads[1:]


def rerun(module, x):
    return RerunsInBackward.apply(x.requires_grad_(), module, *module.parameters())


def mapped(module, x):
    return torch.vmap(module)(x)


def functional_gradient(module, x):
    return torch.func.grad(lambda given: module(given).sum())(x.requires_grad_()).sum() + module(x)


def along_a_direction(module, x):
    y, slope = torch.func.jvp(module, (x,), (torch.ones_like(x),))
    return y + slope


def forward_mode(module, x):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        return torch.autograd.forward_ad.unpack_dual(module(dual)).tangent


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch._C._nn.linear else out


def under_a_mode(module, x):
    with Doubled():
        return module(x)


def checkpointed(module, x):
    return checkpoint(module, x.requires_grad_(), use_reentrant=False)


def checkpointed_reentrant(module, x):
    return checkpoint(module, x.requires_grad_(), use_reentrant=True)


@pytest.mark.parametrize(
    "step",
    [
        with_penalty,
        with_inner_gradient,
        rerun,
        mapped,
        functional_gradient,
        along_a_direction,
        forward_mode,
        under_a_mode,
        checkpointed,
        checkpointed_reentrant,
    ],
    ids=lambda step: step.__name__,
)
@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # torch's jvp uses it
def test_gradients_in_and_around_the_step_match_torch(step):
    split, unsplit = made(), made()
    for _ in range(2):
        x = torch.randn(3, 4, dtype=torch.float64)
        run(split, x.clone(), step)
        plainly(unsplit, x.clone(), step)
        assert_same(split, unsplit, tolerance=1e-14 if step is functional_gradient else 0.0)


def test_weight_hooks_fire_in_the_backward():
    split, unsplit = made(), made()
    seen = {split: [], unsplit: []}
    for module in (split, unsplit):
        module.a.weight.register_hook(lambda gradient: gradient * 3)
        module.b.weight.register_post_accumulate_grad_hook(lambda p, at=seen[module]: at.append(p.grad.clone()))
    x = torch.randn(3, 4, dtype=torch.float64)
    left, _ = run(split, x)
    plainly(unsplit, x)
    assert left == ["c.weight"]
    assert_same(split, unsplit)
    assert torch.equal(*seen[split], *seen[unsplit])


def test_inactive_hook_does_not_prevent_deferral():
    class Hook:
        is_idle = True

        def __call__(self, parameter):
            pass

    module = made()
    module.b.weight.register_post_accumulate_grad_hook(Hook())
    assert "b.weight" in run(module, torch.randn(3, 4, dtype=torch.float64))[0]


def test_autocast_small_linears_and_glue_are_unchanged(monkeypatch):
    module, x = made().float(), torch.randn(3, 4)

    def autocast(module, x):
        with torch.autocast("cpu", torch.bfloat16):
            return module(x).float()

    assert run(module, x, autocast)[0] == []
    assert run(module, x)[0] == ["c.weight", "b.weight", "a.weight"]
    monkeypatch.setitem(weights_later.MIN_PRODUCTS_TO_DEFER, "cpu", 3 * 6 * 4 + 1)
    assert run(module, x)[0] == ["b.weight"]
    later = SplitBackward()
    with later.instrumented(SimpleNamespace(watch=SimpleNamespace(inside_unit=False))), later.forward():
        loss = module(x).sum()
    assert later.backward([loss], [torch.ones(())]) == []


def test_foreign_linear_is_kept(monkeypatch):
    calls = []
    monkeypatch.setattr(F, "linear", lambda *args: calls.append(1) or torch._C._nn.linear(*args))
    later = SplitBackward()
    with later.instrumented(IN_A_UNIT), later.forward():
        loss = made()(torch.randn(3, 4, dtype=torch.float64)).sum()
    assert len(calls) == 3 and later.backward([loss], [torch.ones((), dtype=torch.float64)]) == []


def test_compiled_module_is_compiled_once():
    """The replacement of torch's function is the same object each time."""
    module, x = made(), torch.randn(3, 4, dtype=torch.float64)
    count = 0

    def backend(graph, inputs):
        nonlocal count
        count += 1
        return graph

    compiled = torch.compile(module, backend=backend)
    torch._dynamo.reset()
    for _ in range(3):
        run(module, x, lambda module, x: compiled(x))
    assert count == 1


def test_backward_error_leaves_nothing_behind():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("no")

    module, later = made(), SplitBackward()
    x = torch.randn(3, 4, dtype=torch.float64)
    with later.instrumented(IN_A_UNIT):
        with later.forward():
            loss = module(Fails.apply(x.requires_grad_())).sum()
            good = module(x.detach()).sum()
        with pytest.raises(ValueError, match="no"):
            later.backward([loss], [torch.ones((), dtype=torch.float64)])
        assert len(later.backward([good], [torch.ones((), dtype=torch.float64)])) == 3


def test_input_written_before_its_weight_gradient_is_an_error():
    module, later, x = made(), SplitBackward(), torch.randn(3, 4, dtype=torch.float64)
    with later.instrumented(IN_A_UNIT), later.forward():
        loss = module(x).sum()
    left = later.backward([loss], [torch.ones((), dtype=torch.float64)])
    x.mul_(2)
    with pytest.raises(RuntimeError, match=r"\(3, 4\), was written in place .* schedule='1f1b'"):
        finish(left)
