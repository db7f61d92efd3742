"""Gradients of bfloat16 parameters are added in float32 over microbatches and batches, where replicas sum in it."""

from dataclasses import replace

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, default_collate

from harness.fits import Run, fit, fit_reference, trainer_of
from lightning_hybrid import Hybrid3DStrategy, HybridPrecision
from models.cases import Samples, make, sample

SAMPLES, MANY = 32, 16
WIDE = {"master_weights": True, "reduce_dtype": "float32"}
BY_LAYER = {"zero_stage": 3, "reshard_after_forward": True}
LAYOUTS = {
    "pp2": {"pp": 2},
    "tp2": {"tp": 2},
    "zero3": {"dp": 2, "strategy": BY_LAYER},
    "one process": {},
    "dp2": {"dp": 2},
    "zero2": {"dp": 2, "strategy": {"zero_stage": 2}},
    "zero3, gathered once": {"dp": 2, "strategy": {"zero_stage": 3, "reshard_after_forward": False}},
    "pp2 x zero3": {"pp": 2, "dp": 2, "strategy": BY_LAYER},
    "zero bubble": {"pp": 2, "strategy": {"schedule": "zero_bubble"}},
    "recomputed": {"pp": 2, "strategy": {"recompute": "full"}},
    "offloaded": {"dp": 2, "strategy": {**BY_LAYER, "offload": "cpu"}},
}
FAST = {"pp2", "tp2", "zero3"}
layouts = pytest.mark.parametrize(
    "layout", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)


def by_leaps(module):
    """So fast that each parameter moves in bfloat16, as the harness expects."""
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=1e6)


def by_leaps_from_rounded(module):
    by_leaps(module)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(p.bfloat16())


def run_of(count, layout, case="GPT2", *, accumulates=False, **options):
    """One optimizer step of all samples, in so many microbatches, or batches of one."""
    each = SAMPLES // layout.get("dp", 1)
    sizes = {"batch_size": each, "microbatches": count, "num_batches": 1}
    if accumulates:
        sizes = {"batch_size": each // count, "microbatches": 1, "num_batches": count}
    trainer = {"accumulate_grad_batches": count if accumulates else 1}
    trainer["plugins"] = [HybridPrecision("bf16-true", **(options or WIDE))]
    return Run(case, dtype=torch.bfloat16, change=by_leaps, trainer=trainer, **sizes, **layout)


def gradients_of(worlds, run):
    found = {}
    for rank in worlds.run(run.world_size, fit, run, timeout=300):
        found |= {name: gradient.double() for name, gradient in rank.grads[0].items()}
    return found


def error_of(worlds, run):
    """The 2-norm of the error of all gradients, against one process in float32."""
    trainer = {name: value for name, value in run.trainer.items() if name != "plugins"}
    exact = replace(run, dtype=torch.float32, change=by_leaps_from_rounded, trainer=trainer)
    [expected] = worlds.run(1, fit_reference, replace(exact, pp=1, tp=1, microbatches=1, strategy={}))
    found, wanted = gradients_of(worlds, run), expected.grads[0]
    assert found.keys() == wanted.keys()
    squares = sum(float((found[name] - value).square().sum()) for name, value in wanted.items())
    return (squares / sum(float(value.double().square().sum()) for value in wanted.values())) ** 0.5


@layouts
def test_many_microbatches_are_as_exact_as_one(worlds, layout):
    one, many = (error_of(worlds, run_of(count, LAYOUTS[layout])) for count in (1, MANY))
    assert 0 < many < 1.02 * one


@pytest.mark.parametrize("layout", ["zero3", *(pytest.param(n, marks=pytest.mark.slow) for n in ("tp2", "dp2"))])
def test_many_batches_are_as_exact_as_one(worlds, layout):
    one, many = (error_of(worlds, run_of(count, LAYOUTS[layout], accumulates=True)) for count in (1, MANY))
    assert 0 < many < 1.02 * one


def with_hooks_on_gradients(module):
    """Hooks that read and write gradients, also of parameters of other stages: twice and half of each."""

    def halve(optimizer):
        for p in module.parameters():
            p.grad = p.grad * 0.5
            assert p.grad.norm() >= 0

    by_leaps(module)
    module.on_before_optimizer_step = halve
    for p in module.parameters():
        p.register_hook(lambda gradient: gradient * 2.0)


@pytest.mark.parametrize(
    "layout", ["pp2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("tp2", "zero3", "pp2 x zero3"))]
)
def test_hooks_see_them(worlds, layout):
    run = run_of(2, LAYOUTS[layout])
    expected, found = gradients_of(worlds, run), gradients_of(worlds, replace(run, change=with_hooks_on_gradients))
    for name, gradient in expected.items():  # in a backward over tensor ranks hooks add before others do
        torch.testing.assert_close(found[name], gradient, rtol=0.02, atol=0.02 * float(gradient.abs().max()))


@pytest.mark.slow
def test_steps_in_the_backward_change_nothing(worlds):
    run = run_of(4, LAYOUTS["zero3"], case="Layers")
    after = worlds.run(2, fit, run)
    within = worlds.run(2, fit, replace(run, strategy={**run.strategy, "optimizer_in_backward": True}))
    for one, other in zip(after, within, strict=True):
        assert all(torch.equal(other.state[name], value) for name, value in one.state.items())


class MeasuresGradients(Callback):
    """Bytes of gradients before the optimizer's step, estimated and present."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        from lightning_hybrid.run.description.memory import memory_of_stages

        [memory] = memory_of_stages(trainer.strategy.run, trainer.optimizers, 1)
        with torch._C.DisableTorchFunction():
            gradients = [p.grad for p in pl_module.parameters()]
        self.recorded = memory.gradients, sum(gradient.nbytes for gradient in gradients)


@pytest.mark.parametrize("options", [WIDE, {"master_weights": True}, {"reduce_dtype": "float32"}], ids=str)
def test_their_memory_is_estimated(worlds, options):
    """Without optimizers that step in float32 they stay bfloat16, whatever replicas sum in."""
    run = replace(run_of(2, LAYOUTS["zero3"], case="Layers", **options), callback=MeasuresGradients)
    first = worlds.run(2, fit, run)[0]
    estimated, present = first.extra
    numel = sum(value.numel() for value in first.state.values())
    assert estimated == present == numel // 2 * (4 if options is WIDE else 2)


def after_a_fit():
    """The dtypes of gradients after a fit, and of a backward of the user's in float32 after it."""
    module = make("Layers", torch.bfloat16)
    by_leaps(module)
    trainer = trainer_of(1, Hybrid3DStrategy(), [], plugins=[HybridPrecision("bf16-true", **WIDE)])
    trainer.fit(module, DataLoader(Samples("vectors", 4, torch.bfloat16), batch_size=2))
    before = {p.grad.dtype for p in module.parameters() if p.grad is not None}
    module.zero_grad()
    module.float().loss(default_collate([sample("vectors", 0, torch.float32)])).backward()
    return before, {p.grad.dtype for p in module.parameters()}


def test_gradients_have_the_dtype_of_parameters_after_a_fit(worlds):
    [(before, after)] = worlds.run(1, after_a_fit)
    assert before <= {torch.bfloat16} and after == {torch.float32}
