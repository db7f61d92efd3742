"""Optimizers with quantized states: found by a trial, parity with one process, bytes, and what is refused."""

import importlib.util
import re
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from harness.fits import EACH_SHARDING, Run, check, fit, reference_of, refusal
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks.monitors.holders import bytes_by_kind, find_holders
from lightning_hybrid.errors import QuantizedStatesError
from lightning_hybrid.optimizers.trial import (
    StateSizes,
    can_step_shards,
    has_low_bit_states,
    steps_full_parameters,
)
from lightning_hybrid.run.description.memory import memory_of_stages
from lightning_hybrid.run.optimization import check_quantized_states
from models.quantized_optimizers import MODULES, By8bit, ByBitsandbytes, Uncompiled

NAMES = list(MODULES)


@pytest.fixture(autouse=True)
def _installed(request):
    name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("name", "8bit")
    package = "bitsandbytes" if name == "bitsandbytes" else "torchao"
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")


def optimizer_of(name, parameters=None, **options):
    if parameters is None:
        parameters = [nn.Parameter(torch.ones(4, 4))]
    if name == "bitsandbytes":
        import bitsandbytes

        return bitsandbytes.optim.AdamW8bit(parameters, **options)
    import torchao.optim

    return getattr(torchao.optim, {"8bit": "AdamW8bit", "4bit": "AdamW4bit", "fp8": "AdamWFp8"}[name])(
        parameters, **options
    )


# --- the trial -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_blocks_need_the_full_parameter(name):
    optimizer = optimizer_of(name)
    assert has_low_bit_states(optimizer)
    assert steps_full_parameters(optimizer)
    assert not optimizer.state, "the trial steps copies"


def test_the_same_step_without_quantization_is_elementwise():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    for optimizer in (
        torch.optim.AdamW([nn.Parameter(torch.ones(2))]),
        bitsandbytes.optim.AdamW32bit([nn.Parameter(torch.ones(2))]),
    ):
        assert can_step_shards(optimizer) and not has_low_bit_states(optimizer)


@pytest.mark.parametrize(
    "make", [torch.optim.Muon, torch.optim.Adafactor, lambda p, lr: optimizer_of("8bit", p, lr=lr)]
)
def test_a_learning_rate_of_zero_hides_nothing(make):
    """A warmup begins there."""
    optimizer = make([nn.Parameter(torch.ones(4, 4))], lr=0.0)
    assert steps_full_parameters(optimizer)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(5,), (64, 63), (64, 64), (65, 64), (300, 400), (1000, 1003), (1024, 513)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_estimated_bytes_of_states_are_those_of_a_step(name, shape, dtype):
    module = nn.Module()
    module.p = nn.Parameter(torch.ones(shape, dtype=dtype))
    optimizer = optimizer_of(name, [module.p])
    expected = StateSizes(optimizer).nbytes(module.p, shape)
    module.p.grad = torch.ones_like(module.p)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    holders = find_holders(module, [optimizer], torch.device("cpu"))
    assert bytes_by_kind(holders)["optimizer_states"] == expected
    if module.p.numel() >= 10**5 and module.p.numel() % 256 == 0:
        assert expected < {"4bit": 1.2}.get(name, 2.2) * module.p.numel()


# --- parity ----------------------------------------------------------------------------------------------------------

FAST = {("8bit", "zero3"), ("bitsandbytes", "tp2")}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if (name, layout) in FAST else pytest.mark.slow)
        for name in NAMES
        for layout in EACH_SHARDING
    ],
)
def test_parity(worlds, name, layout):
    """Blocks are those of one process, since owners have full states."""
    check(worlds, Run(MODULES[name], num_batches=4, callback=Uncompiled, **EACH_SHARDING[layout]), timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_parity_in_32_bits(worlds, name):
    """Gradients differ by their last bits, and so a few states by one code."""
    run = Run(
        MODULES[name], num_batches=4, dtype=torch.float32, callback=Uncompiled, **EACH_SHARDING["tp2 x pp2 x zero3"]
    )
    check(worlds, run, timeout=300, tolerance=1e-3)


def compiled(run):
    return fit(replace(run, callback=None))


@pytest.mark.slow
def test_parity_of_compiled_steps(worlds):
    run = Run(By8bit, num_batches=2, dp=2, strategy={"zero_stage": 3}, callback=Uncompiled)
    check(worlds, run, how=compiled, timeout=600, tolerance=1e-6)


class Decides(By8bit):
    """From the third batch on it branches on a value of the model, so that its ranks hold shards instead of stages."""

    def loss(self, batch):
        loss = super().loss(batch)
        if self.training and self.trainer.fit_loop.epoch_loop.total_batch_idx >= 2 and float(loss) > 0:
            loss = 2 * loss
        return loss


class Changed(Uncompiled):
    """The first batches in stages, and the first after them."""

    def on_train_end(self, trainer, pl_module):
        self.recorded = getattr(trainer.strategy, "pipelined_batches", None)


def fit_decides(run):
    warnings.simplefilter("ignore")  # that the layout changes
    return fit(run)


@pytest.mark.slow
def test_states_are_carried_to_another_layout(worlds):
    run = Run(Decides, pp=2, num_batches=5, callback=Changed)
    expected = reference_of(worlds, run)
    for rank in worlds.run(2, fit_decides, run, timeout=300):
        assert rank.extra == (0, 2)
        torch.testing.assert_close(rank.state, expected.state, rtol=1e-9, atol=1e-10)


class StateBytes(Uncompiled):
    """Bytes of the states on this rank, and the estimate of the run."""

    def on_train_end(self, trainer, pl_module):
        holders = find_holders(pl_module, trainer.optimizers, torch.device("cpu"))
        lifecycle = getattr(trainer.strategy, "_lifecycle", None)
        estimate = [] if lifecycle is None else memory_of_stages(lifecycle.run, trainer.optimizers, 1)
        self.recorded = bytes_by_kind(holders)["optimizer_states"], [each.optimizer_states for each in estimate]


def test_owners_share_the_bytes_of_one_process(worlds):
    run = Run(By8bit, dp=2, strategy={"zero_stage": 3}, callback=StateBytes, dtype=torch.float32)
    full, _ = reference_of(worlds, run).extra
    ranks = [fitted.extra for fitted in worlds.run(2, fit, run, timeout=300)]
    steps = 4 * 2 * len(list(By8bit().parameters()))  # the counts of steps are numbers of 4 bytes
    assert full <= sum(nbytes for nbytes, _ in ranks) <= full + steps
    for _, [estimate] in ranks:
        assert abs(estimate - full / 2) <= steps


# --- refusals --------------------------------------------------------------------------------------------------------


def override(module):
    import bitsandbytes

    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.initialize()
    manager.register_parameters(module.parameters())
    manager.override_config(module.head.weight, "optim_bits", 32)
    manager.register_parameters(module.parameters())


REFUSED = {
    "offload": (Run(By8bit, strategy={"offload": "cpu"}), "offload='cpu' moves the states of AdamW8bit"),
    "overrides": (
        Run(ByBitsandbytes, dp=2, strategy={"zero_stage": 3}, change=override),
        "overrides options of 1 parameters of AdamW8bit",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(worlds, what):
    run, message = REFUSED[what]
    pytest.importorskip("bitsandbytes")
    for text in worlds.run(run.world_size, refusal, fit, run, timeout=300):
        assert re.search(f"QuantizedStatesError: .*{message}", text), text


@pytest.mark.parametrize("name", ["bitsandbytes"])
def test_paged_states_are_refused_where_parameters_are_sharded(name):
    optimizer, options = optimizer_of(name), Hybrid3DStrategy().options
    optimizer.is_paged = True  # one that is built so allocates on a GPU
    check_quantized_states([optimizer], options, is_sharded=False)
    with pytest.raises(QuantizedStatesError, match=r"AdamW8bit has paged states .* set is_paged=False"):
        check_quantized_states([optimizer], options, is_sharded=True)
