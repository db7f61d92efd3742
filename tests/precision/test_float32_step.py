"""Optimizer steps in float32 on bfloat16 parameters, in one process: a hand-written loop, states, and refusals."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_hybrid.errors import PrecisionError
from lightning_hybrid.optimizers.host_pipeline import HostStepPipeline
from lightning_hybrid.optimizers.layer_step import LayerwiseStep
from lightning_hybrid.precision import HybridPrecision, float32_step
from lightning_hybrid.precision.float32_step import MASTER_WEIGHT, Float32Step, drop_unused_masters
from lightning_hybrid.precision.stochastic_rounding import KeyedRounding

SHAPES = [(5, 3), (7,), (2, 3, 4), (1,)]
OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3),  # whose states are made when it is built
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
    "Muon": lambda p: torch.optim.Muon([x for x in p if x.dim() == 2], lr=1e-3),
}


def parameters(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).bfloat16().to(dtype)) for shape in SHAPES]


def set_gradients(parameters, step):
    generator = torch.Generator().manual_seed(100 + step)
    for number, p in enumerate(parameters):
        gradient = torch.randn(p.shape, generator=generator).bfloat16()
        p.grad = None if number == 3 and step == 1 else gradient.to(p.grad_dtype)


def reference(make, steps=6):
    """By hand: float32 masters, of which the gradients are computed in bfloat16."""
    masters = parameters(torch.float32)
    optimizer = make(masters)
    for step in range(steps):
        set_gradients(masters, step)
        optimizer.step()
    return masters, optimizer


@pytest.fixture
def in_float32():
    """Let an optimizer step in float32 until the test ends."""
    made = []

    def start(optimizer, keeps_masters=True, **options):
        made.append(Float32Step(optimizer, keeps_masters=keeps_masters, **options))
        return optimizer

    yield start
    for each in made:
        each.close()


@pytest.fixture(params=[2**24, 8], ids=["at once", "in subsets"])
def subset(request, monkeypatch):
    monkeypatch.setattr(float32_step, "_SUBSET", request.param)


@pytest.mark.usefixtures("subset")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_master_weights_match_a_loop_by_hand(name):
    mine = parameters()
    optimizer = OPTIMIZERS[name](mine)
    addresses = [p.data_ptr() for p in mine]
    made = Float32Step(optimizer, keeps_masters=True)
    for step in range(6):
        set_gradients(mine, step)
        gradients = [p.grad for p in mine]
        optimizer.step()
        assert all(p.grad is gradient for p, gradient in zip(mine, gradients, strict=True))
        assert all(p.dtype is torch.bfloat16 for p in mine)
    masters, other = reference(OPTIMIZERS[name])
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for p, master in zip(mine, masters, strict=True):
        assert torch.equal(p, master.bfloat16())
        if id(p) in stepped:
            state, expected = dict(optimizer.state[p]), other.state[master]
            assert torch.equal(state.pop(MASTER_WEIGHT), master)
            assert state.keys() == expected.keys()
            assert all(torch.equal(torch.as_tensor(state[k]), torch.as_tensor(v)) for k, v in expected.items())
    assert addresses == [p.data_ptr() for p in mine]
    made.close()
    assert "step" not in vars(optimizer) and "load_state_dict" not in vars(optimizer)


def test_small_updates_are_kept_that_bfloat16_drops(in_float32):
    def trained(wraps):
        p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([p], lr=1e-4)
        if wraps:
            in_float32(optimizer)
        for _ in range(100):
            p.grad = torch.ones_like(p)
            optimizer.step()
        return p.detach().float()

    assert torch.equal(trained(wraps=False), torch.ones(4))
    assert torch.equal(trained(wraps=True), torch.full((4,), 0.99).bfloat16().float())


def test_stochastic_rounding_follows_the_mean_update(in_float32):
    p = nn.Parameter(torch.ones(2**14, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([p], lr=1e-4)
    step = 0
    in_float32(optimizer, keeps_masters=False, rounding=KeyedRounding({id(p): "p"}, step=lambda: step))
    for step in range(100):  # noqa: B007
        p.grad = torch.ones_like(p)
        optimizer.step()
    # Each step rounds with a deviation of at most half of 2**-8, so the mean of 2**14 walks has 100**0.5 / 128 of that.
    assert abs(float(p.detach().double().mean()) - 0.99) < 5 * 0.5 * 2**-8 * 10 / 128
    assert MASTER_WEIGHT not in optimizer.state[p] and len(p.unique()) > 2


def test_parameters_written_between_steps_are_adopted(in_float32):
    p = nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([p], lr=1e-4)
    in_float32(optimizer)
    for step in range(2):
        p.grad = torch.ones_like(p)
        optimizer.step()
        if step == 0:
            with torch.no_grad():
                p[1] = 5.0
    expected = torch.tensor([1.0, 5.0, 3.0]) - torch.tensor([1e-4, 0, 1e-4]) - 1e-4
    torch.testing.assert_close(optimizer.state[p][MASTER_WEIGHT], expected, rtol=0, atol=1e-6)


def test_float32_parameters_beside_are_stepped_as_they_are(in_float32):
    norm, weight = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([norm, weight], lr=0.1)
    in_float32(optimizer)
    for p in (norm, weight):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(norm.detach(), torch.full((3,), 0.9)) and not optimizer.state[norm]


def test_closure_and_hooks_run_once_and_an_error_leaves_bfloat16(in_float32):
    mine = parameters()
    optimizer = torch.optim.AdamW(mine, lr=1e-3)
    in_float32(optimizer)
    dtypes = []
    optimizer.register_step_pre_hook(lambda *_: dtypes.append(mine[0].dtype))

    def closure():
        assert mine[0].dtype is torch.bfloat16
        set_gradients(mine, 0)
        return 7

    assert optimizer.step(closure) == 7 and dtypes == [torch.float32]
    optimizer.param_groups[0]["eps"] = "wrong"
    before = copy.deepcopy([p.detach() for p in mine])
    with pytest.raises(TypeError):
        optimizer.step()
    assert all(p.dtype is torch.bfloat16 and torch.equal(p, q) for p, q in zip(mine, before, strict=True))
    assert all(MASTER_WEIGHT in optimizer.state[p] for p in mine)


def test_states_are_loaded_in_float32_and_the_run_goes_on_as_without(in_float32):
    halves = []
    for resumes in (False, True):
        mine = parameters()
        optimizer = torch.optim.AdamW(mine, lr=1e-3)
        in_float32(optimizer)
        for step in range(4):
            if resumes and step == 2:
                state = copy.deepcopy(optimizer.state_dict())
                mine = [nn.Parameter(p.detach().clone()) for p in mine]
                optimizer = torch.optim.AdamW(mine, lr=1e-3)
                in_float32(optimizer)
                optimizer.load_state_dict(state)
                dtypes = {v.dtype for entry in optimizer.state.values() for v in entry.values()}
                assert dtypes == {torch.float32} and all(p.dtype is torch.bfloat16 for p in mine)
            set_gradients(mine, step)
            optimizer.step()
        halves.append([optimizer.state[p] for p in mine])
    for one, other in zip(*halves, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_a_run_without_master_weights_drops_them_or_sets_its_parameters(in_float32):
    masters, _ = reference(OPTIMIZERS["AdamW"])
    mine = parameters()
    optimizer = torch.optim.AdamW(mine, lr=1e-3)
    in_float32(optimizer)
    for step in range(6):
        set_gradients(mine, step)
        optimizer.step()
    state = optimizer.state_dict()
    for dtype, done in ((torch.bfloat16, "dropped"), (torch.float32, "set to them")):
        resumed = [nn.Parameter(p.detach().to(dtype)) for p in mine]
        plain = torch.optim.AdamW(resumed, lr=1e-3)
        plain.load_state_dict(copy.deepcopy(state))
        assert done in drop_unused_masters(plain) and not drop_unused_masters(plain)
        for p, master in zip(resumed, masters, strict=True):
            assert MASTER_WEIGHT not in plain.state[p] and torch.equal(p, master.to(dtype))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "32-true", "master_weights": True}, "master_weights=True, which is for bfloat16"),
        ({"precision": "bf16-mixed", "stochastic_rounding": True}, "stochastic_rounding=True, which is for bfloat16"),
        ({"precision": "bf16-true", "master_weights": True, "stochastic_rounding": True}, "leave out one"),
    ],
)
def test_refused_options(options, words):
    with pytest.raises(PrecisionError, match=words) as caught:
        HybridPrecision(**options)
    assert caught.value.docs == "errors.md#precision-rounding"


def test_lbfgs_is_refused():
    with pytest.raises(PrecisionError, match="LBFGS runs the training step inside"):
        Float32Step(torch.optim.LBFGS(parameters()), keeps_masters=True)


class Counts(torch.optim.SGD):
    """Makes a count of steps of the default dtype, as AdamW8bit of torchao does."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            step = self.state[p].setdefault("step", torch.tensor(0.0))
            step += 1
            p.sub_(p.grad / (1 - 0.999**step))


def test_new_tensors_of_a_step_that_a_training_step_calls_are_float32(in_float32):
    [mine] = parameters()[:1]
    optimizer = in_float32(Counts([mine], lr=1.0))
    mine.grad = torch.full_like(mine, 2**-10)
    expected = (mine.detach().float() - 2**-10 / (1 - torch.tensor(0.999))).bfloat16()
    torch.set_default_dtype(torch.bfloat16)  # as precision="bf16-true" runs training steps
    try:
        optimizer.step()
        assert torch.get_default_dtype() is torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer.state[mine]["step"].dtype is torch.float32
    assert torch.equal(mine, expected)


class StepsTwice(torch.optim.SGD):
    """Calls its closure several times."""

    def step(self, closure):
        closure()
        super().step()
        closure()
        super().step()


class Ascends(torch.optim.SGD):
    """Calls its closure where it has moved the parameters to."""

    @torch.no_grad()
    def step(self, closure):
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad)
        with torch.enable_grad():
            closure()
        super().step()


@pytest.mark.parametrize(("kind", "words"), [(StepsTwice, "several times"), (Ascends, "at changed parameters")])
def test_optimizers_that_run_the_training_step_otherwise_are_refused(in_float32, kind, words):
    mine = parameters()
    before = copy.deepcopy([p.detach() for p in mine])
    optimizer = in_float32(kind(mine, lr=0.0))
    with pytest.raises(PrecisionError, match=f"{kind.__name__} runs the training step {words}") as caught:
        optimizer.step(lambda: set_gradients(mine, 0))
    assert caught.value.docs == "errors.md#precision-optimizer"
    assert all(p.dtype is torch.bfloat16 and p.shape == q.shape for p, q in zip(mine, before, strict=True))


class HostCopies:
    """Copies within the host, in place of a GPU's."""

    def to_host(self, tensors, *, may_be_freed):
        return [tensor.clone() for tensor in tensors], SimpleNamespace(synchronize=lambda: None)

    def into(self, pairs):
        for target, source in pairs:
            target.copy_(source)

    def wait(self):
        pass


@pytest.mark.parametrize("gradients", [None, torch.float32], ids=str)
def test_master_weights_of_states_offloaded_from_a_gpu(monkeypatch, in_float32, gradients):
    """The optimizer's copy on the host steps copies of parameters; states, master weights among them, are shared."""
    pipeline = HostStepPipeline
    monkeypatch.setattr(LayerwiseStep, "_pipeline_to_host", lambda self: pipeline(self._optimizer, HostCopies()))
    mine = parameters()
    for p in mine if gradients is not None else ():
        p.grad_dtype = gradients
    optimizer = in_float32(torch.optim.AdamW(mine, lr=1e-3))
    offloaded = LayerwiseStep(optimizer, [mine[:2], mine[2:]], None)
    in_float32(offloaded.host_optimizer)
    for step in range(6):
        set_gradients(mine, step)
        optimizer.step()
    offloaded.close()
    masters, _ = reference(OPTIMIZERS["AdamW"])
    for p, master in zip(mine, masters, strict=True):
        assert torch.equal(p, master.bfloat16()) and torch.equal(optimizer.state[p][MASTER_WEIGHT], master)
