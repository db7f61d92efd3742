"""Dtypes of messages between replicas: against sums by hand, on the wire, and under ZeRO."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from harness.fits import Run, assert_bitwise_equal, assert_parity, check, fit, reference_of, refusal
from lightning_hybrid import Hybrid3DStrategy, HybridPrecision
from lightning_hybrid.callbacks import GradientCompression
from lightning_hybrid.errors import PrecisionError
from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.replicate.reducer import GradientReducer
from lightning_hybrid.techniques.zero import Zero
from models.hand_written import Lit

SHAPES = [(7, 5), (11,), (3, 2)]
DTYPES = ["float32", "bfloat16"]


def gradients_of(rank, dtype, step=0):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def reduced(parameter_dtype, reduce_dtype, steps=2, sets_none=True):
    """On a rank: averages of gradients, of which those of the last parameter are missing on rank 1."""
    dtype = getattr(torch, parameter_dtype)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    named = [(str(number), p) for number, p in enumerate(parameters)]
    reducer = GradientReducer(named, dist.group.WORLD, bucket_bytes=64, dtype=getattr(torch, reduce_dtype))
    averages = []
    for step in range(steps):
        reducer.arm()
        own = gradients_of(dist.get_rank(), dtype, step)
        loss = sum((p * g).sum() for p, g in list(zip(parameters, own, strict=True))[: 3 - dist.get_rank()])
        loss.backward()
        reducer.finish()
        averages.append([p.grad.clone() for p in parameters])
        for p in parameters:
            p.grad = None if sets_none else p.grad.zero_()
    assert {message.dtype for message in reducer.messages} == {getattr(torch, reduce_dtype)}
    reducer.close()
    return averages


@pytest.mark.parametrize("sets_none", [True, False])
@pytest.mark.parametrize("reduce_dtype", DTYPES)
@pytest.mark.parametrize("parameter_dtype", DTYPES)
def test_reducer_matches_a_sum_by_hand(worlds, parameter_dtype, reduce_dtype, sets_none):
    """Divided in the wider dtype, rounded to that of the message, summed in it, and cast to that of the gradient."""
    own, message = getattr(torch, parameter_dtype), getattr(torch, reduce_dtype)
    wide = torch.promote_types(own, message)
    ranks = worlds.run(2, reduced, parameter_dtype, reduce_dtype, 2, sets_none)
    for step in range(2):
        both = [gradients_of(rank, own, step) for rank in range(2)]
        both[1][2] = torch.zeros_like(both[1][2])
        expected = [sum((g.to(wide) / 2).to(message) for g in pair).to(own) for pair in zip(*both, strict=True)]
        for averages in ranks:
            for average, value in zip(averages[step], expected, strict=True):
                assert average.dtype is own and torch.equal(average, value)


# --- under a Trainer -------------------------------------------------------------------------------------------------


def by_sgd(module):
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)


def with_dtypes(run, **dtypes):
    return replace(run, trainer={**run.trainer, "plugins": [HybridPrecision("32-true", **dtypes)]})


LAYOUTS = {
    "replicas": {},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3, "reshard_after_forward": True},
    "zero3, gathered once": {"zero_stage": 3, "reshard_after_forward": False},
    "zero2, layer by layer": {"zero_stage": 2, "reshard_after_forward": True},
}
layouts = pytest.mark.parametrize(
    "layout", [n if n in ("replicas", "zero2", "zero3") else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS]
)


def run_of(layout):
    return Run("Layers", dp=2, dtype=torch.float32, change=by_sgd, strategy=LAYOUTS[layout])


@layouts
def test_wider_sums_match_one_process_and_change_no_default(worlds, layout):
    """Of float32 gradients in float64: the average is rounded once, so it is that of float32 or its neighbour."""
    run = run_of(layout)
    check(worlds, with_dtypes(run, reduce_dtype="float64"), timeout=300, tolerance=2e-6)
    plain = worlds.run(2, fit, run)
    same = worlds.run(2, fit, with_dtypes(run, reduce_dtype="float32"))
    assert_bitwise_equal(same, plain)


@layouts
def test_bfloat16_sums_round_gradients(worlds, layout):
    run = replace(run_of(layout), microbatches=1)  # each message is rounded, and what they add up to is not
    ranks, expected = check(worlds, with_dtypes(run, reduce_dtype="bfloat16"), timeout=300, tolerance=0.02)
    for name, gradient in ranks[0].grads[0].items():
        exact = expected.grads[0][name]
        assert not torch.equal(gradient, exact), f"{name} was sent in float32"
        assert torch.equal(gradient, gradient.bfloat16().float()), f"{name} has more bits than its message"
        torch.testing.assert_close(gradient, exact, rtol=0.02, atol=0.01 * float(exact.abs().max()))


class RoundedWeights(torch.autograd.Function):
    """The identity, of bfloat16 values, and of gradients as they are: what a gather in bfloat16 shows to layers."""

    @staticmethod
    def forward(ctx, weight):
        return weight.bfloat16().to(weight.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def computes_with_rounded_weights(module):
    """By hand, in one process: layers see rounded parameters, the optimizer steps exact ones."""
    by_sgd(module)
    loss = module.loss

    def rounded(batch):
        parameters = {name: RoundedWeights.apply(p) for name, p in module.named_parameters()}
        named = {name.rpartition(".")[::2]: value for name, value in parameters.items()}
        modules = dict(module.named_modules())
        originals = {key: modules[key[0]]._parameters.pop(key[1]) for key in named}
        try:
            for (owner, attribute), value in named.items():
                object.__setattr__(modules[owner], attribute, value)
            return loss(batch)
        finally:
            for (owner, attribute), p in originals.items():
                object.__delattr__(modules[owner], attribute)
                modules[owner]._parameters[attribute] = p

    module.loss = rounded


@pytest.mark.parametrize(
    "layout",
    [
        n if n in ("zero2", "zero3") else pytest.param(n, marks=pytest.mark.slow)
        for n in LAYOUTS
        if n not in ("replicas",)
    ],
)
def test_gathers_show_rounded_weights_and_shards_stay_exact(worlds, layout):
    """Layers see rounded weights, and the optimizer steps exact ones, as in a step by hand."""
    run = replace(run_of(layout), num_batches=4)
    by_hand = replace(run, change=computes_with_rounded_weights)
    ranks = worlds.run(2, fit, with_dtypes(run, gather_dtype="bfloat16"), timeout=300)
    assert_parity(ranks, reference_of(worlds, by_hand), run, tolerance=2e-6)
    for value in ranks[0].state.values():
        assert not torch.equal(value, value.bfloat16().float())


class Convolutions(Lit):
    """Autocast rounds all parameters."""

    kind = "images"

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(4))
        self.head = nn.Linear(3 * 8 * 8, 4)

    def loss(self, batch):
        x = batch["pixel_values"]
        for layer in self.layers:
            x = x + layer(x).tanh()
        return F.cross_entropy(self.head(x.flatten(1)), batch["labels"])


ROUNDED_BY_AUTOCAST = {
    "zero3": {},
    "zero2": {"strategy": {"zero_stage": 2}},
    "zero3, gathered once": {"strategy": LAYOUTS["zero3, gathered once"]},
    "recomputed": {"strategy": {**LAYOUTS["zero3"], "recompute": "full"}},
    "pp2": {"pp": 2},
    "convolutions": {"case": Convolutions},
}


@pytest.mark.parametrize(
    "name", ["zero3", *(pytest.param(n, marks=pytest.mark.slow) for n in [*ROUNDED_BY_AUTOCAST][1:])]
)
def test_what_autocast_rounds_may_be_sent_rounded(worlds, name):
    """Linear layers and convolutions see the same bits, in training and validation."""
    usual = {"case": "UNet", "dp": 2, "dtype": torch.float32, "validate": True, "strategy": LAYOUTS["zero3"]}
    run = Run(**{**usual, **ROUNDED_BY_AUTOCAST[name]})
    exact, rounded = (
        replace(run, change=by_sgd, trainer={"plugins": [HybridPrecision("bf16-mixed", gather_dtype=dtype)]})
        for dtype in (None, "bfloat16")
    )
    plain, halved = (worlds.run(run.world_size, fit, each, timeout=300) for each in (exact, rounded))
    assert_bitwise_equal(halved, plain)
    assert all(one.logged == other.logged for one, other in zip(plain, halved, strict=True))


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.slow), 3])
def test_steps_in_the_backward_change_nothing(worlds, stage):
    dtypes = {"reduce_dtype": "bfloat16", "gather_dtype": "bfloat16" if stage else None}
    run = with_dtypes(replace(run_of("zero3"), microbatches=1), **dtypes)
    strategy = {"zero_stage": stage, "reshard_after_forward": True} if stage else {}
    after = worlds.run(2, fit, replace(run, strategy=strategy))
    within = worlds.run(2, fit, replace(run, strategy={**strategy, "optimizer_in_backward": True}))
    for one, other in zip(after, within, strict=True):
        assert all(torch.equal(other.state[name], value) for name, value in one.state.items())


def sent_bytes(run):
    """On a rank: bytes of all-gathers, and of all-to-alls that reduce gradients, and their rows, of one fit."""
    from lightning_hybrid.zero import group

    counted = {"gathered": 0, "reduced": 0, "rows": 0}
    gather, exchange = group.all_gather_single, dist.all_to_all_single

    def counting_gather(received, message, **kwargs):
        counted["gathered"] += message.nbytes
        counted["rows"] += 1
        return gather(received, message, **kwargs)

    def counting_exchange(received, message, **kwargs):
        counted["reduced"] += message.nbytes
        counted["rows"] += len(message)
        return exchange(received, message, **kwargs)

    group.all_gather_single, dist.all_to_all_single = counting_gather, counting_exchange
    try:
        fit(run)
    finally:
        group.all_gather_single, dist.all_to_all_single = gather, exchange
    return counted


def test_half_the_bytes_are_sent(worlds):
    run = run_of("zero3")
    plain = worlds.run(2, sent_bytes, run)[0]
    half = worlds.run(2, sent_bytes, with_dtypes(run, gather_dtype="bfloat16", reduce_dtype="bfloat16"))[0]
    assert plain["gathered"] and plain["reduced"]
    assert half["rows"] == plain["rows"]
    for name in ("gathered", "reduced"):  # rows end at multiples of 16 bytes
        assert 0 <= half[name] - plain[name] // 2 < 16 * plain["rows"]


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["reduce_dtype", "gather_dtype"])
def test_other_dtypes_are_refused(option):
    assert getattr(HybridPrecision(**{option: torch.bfloat16}), option) is torch.bfloat16
    assert getattr(HybridPrecision(**{option: "float16"}), option) is torch.float16
    for value in ("int8", torch.int32, "bf16"):
        with pytest.raises(PrecisionError, match=f"{option}=.* is no dtype of messages; use one of float32"):
            HybridPrecision(**{option: value})


def test_a_dtype_of_no_gather_is_refused(worlds):
    for text in worlds.run(2, refusal, fit, with_dtypes(run_of("replicas"), gather_dtype="bfloat16")):
        assert text.startswith("PrecisionError: gather_dtype=torch.bfloat16 is for parameters that ZeRO gathers")


def test_gathers_of_manual_optimization_are_refused():
    plugin, options = HybridPrecision(gather_dtype="bfloat16"), Hybrid3DStrategy(zero_stage=3).options
    mesh = SimpleNamespace(size=lambda axis: 2, layout=ParallelLayout(data_shard_size=2))
    Zero.check(options, mesh, plugin, is_manual=False)
    with pytest.raises(PrecisionError, match=r"gather_dtype=torch\.bfloat16: in manual optimization"):
        Zero.check(options, mesh, plugin, is_manual=True)


def test_compressed_gradients_have_one_form(worlds):
    run = replace(run_of("replicas"), callback=compression)
    for text in worlds.run(2, refusal, fit, with_dtypes(run, reduce_dtype="bfloat16")):
        assert text.startswith("LayoutError: GradientCompression('fp16') decides in which form gradients are sent")


def compression():
    return GradientCompression("fp16")


def test_the_start_of_a_run_names_what_is_set():
    assert HybridPrecision("bf16-mixed").description == "bf16-mixed"
    plugin = HybridPrecision("bf16-true", master_weights=True, reduce_dtype="float32")
    assert plugin.description == "bf16-true with master_weights, reduce_dtype=float32"
