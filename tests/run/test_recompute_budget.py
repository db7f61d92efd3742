"""A Trainer with ``recompute="35MB"``: equal results in bits, and a peak just under the budget, on each rank."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback

from harness.fits import Run, assert_bitwise_equal, fit, refusal
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import ActivationCheckpointing
from lightning_hybrid.callbacks.monitors.holders import PeakMeter, bytes_by_kind, find_holders
from lightning_hybrid.memory.live import LiveBytes
from models.hugging_face import GPT2, GPT2Dropout


class PeakAndReport(Callback):
    """What a rank chose, and the peak of its last batches: parameters, gradients and states included."""

    def __init__(self):
        self.live = None
        self.recorded = {"peaks": [], "report": None, "shares": None, "recomputed": None}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx >= 3:
            self.live = LiveBytes(torch.device("cpu"))
            states = [v for o in trainer.optimizers for s in o.state.values() for v in s.values()]
            grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
            messages = [m for r in trainer.strategy._active.optimization.reducers.every for m in r.messages]
            counted = [*pl_module.parameters(), *pl_module.buffers(), *grads, *messages, *states]
            self.live.track(each for each in counted if isinstance(each, torch.Tensor))
            self.live.__enter__()

    def on_train_batch_end(self, *_):
        if self.live is not None:
            self.live.__exit__(None, None, None)
            self.recorded["peaks"].append(self.live.peak)
            self.live = None

    def on_train_end(self, trainer, pl_module):
        budgets = [each.budget for each in trainer.strategy.run.techniques if each.budget is not None]
        if budgets:
            report = budgets[0].report
            self.recorded["report"] = report.floor, report.budget
            self.recorded["shares"] = report.kept_share
            self.recorded["recomputed"] = report.recomputed_share


LARGE = Run(GPT2Dropout, batch_size=24, num_batches=5, microbatches=2, dtype=torch.float32, callback=PeakAndReport)
RUNS = [
    pytest.param(replace(LARGE, microbatches=1), id="none"),
    pytest.param(replace(LARGE, microbatches=4, pp=2), id="pp2"),
    pytest.param(replace(LARGE, dp=2, strategy={"zero_stage": 3, "reshard_after_forward": True}), id="zero3"),
    pytest.param(replace(LARGE, tp=2), id="tp2", marks=pytest.mark.slow),
    pytest.param(
        replace(LARGE, microbatches=1, trainer={"accumulate_grad_batches": 2}, num_batches=8),
        id="accumulated",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("run", RUNS)
def test_bits_and_peaks(worlds, run):
    plain = worlds.run(run.world_size, fit, run, timeout=180)
    generous = worlds.run(run.world_size, fit, with_budget(run, "1GB"), timeout=180)
    highest = max(max(rank.extra["peaks"]) for rank in plain)
    floor = max(rank.extra["report"][0] for rank in generous)
    budget = (floor + highest) // 2
    tight = worlds.run(run.world_size, fit, with_budget(run, f"{budget}B"), timeout=180)
    for one, *others in zip(plain, generous, tight, strict=True):
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(one.losses, other.losses, strict=True))
            assert all(torch.equal(value, other.state[name]) for name, value in one.state.items())
            for a, b in zip(one.grads, other.grads, strict=True):
                assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    most = max(max(rank.extra["peaks"]) for rank in tight)
    # What layers receive in their forward is counted as kept, also where no kept result needs it.
    assert (0.8 if run.tp > 1 else 0.95) * budget <= most <= budget, (most, budget)
    for rank in generous:
        assert set(rank.extra["shares"].values()) == {1.0} and rank.extra["recomputed"] == 0.0
    assert min(share for rank in tight for share in rank.extra["shares"].values()) < 1
    for rank in tight:
        shares = rank.extra["shares"].values()
        assert 1 - max(shares) <= rank.extra["recomputed"] <= 1 - min(shares)


def with_budget(run, budget):
    return replace(run, strategy={**run.strategy, "recompute": budget})


def test_a_budget_below_the_floor(worlds):
    [message] = worlds.run(1, refusal, fit, with_budget(replace(LARGE, microbatches=1), "100 KB"))
    assert message.startswith("RecomputeError: recompute='100 KB' allows 100,000 bytes on this rank")
    assert "the peak is" in message and "model.transformer.h." in message


class CompiledPeak(PeakAndReport):
    """The peak of the last batch, of what compiled code allocates too."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == LARGE.num_batches - 1:
            self.live = PeakMeter(torch.device("cpu"))
            with torch._C.DisableTorchFunction():  # the memory of this rank, not full gradients
                held = find_holders(pl_module, trainer.optimizers, torch.device("cpu"))
                self.before = sum(bytes_by_kind(held).values())
                self.live.start(p.grad for p in pl_module.parameters() if isinstance(p.grad, torch.Tensor))

    def on_train_batch_end(self, *_):
        if self.live is not None:
            self.recorded["peaks"].append(self.live.stop(self.before))
            self.live = None


COMPILED = replace(LARGE, strategy={"compile": {"backend": "aot_eager"}}, callback=CompiledPeak)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(replace(COMPILED, dp=2), id="dp2", marks=pytest.mark.slow),
        pytest.param(replace(COMPILED, microbatches=4, pp=2), id="pp2", marks=pytest.mark.slow),
        pytest.param(replace(COMPILED, case=GPT2, tp=2), id="tp2", marks=pytest.mark.slow),
        pytest.param(replace(COMPILED, case=GPT2, microbatches=1), id="none", marks=pytest.mark.slow),
        pytest.param(replace(COMPILED, case=GPT2, microbatches=2), id="microbatches"),
    ],
)
@pytest.mark.extended  # by default in tests/memory/test_budget_of_compiled_layers.py, without a Trainer
def test_compiled_layers(worlds, run):
    """They keep what their compiler saves, or are recomputed in full; they draw the same random numbers both times."""
    plain = worlds.run(run.world_size, fit, run, timeout=300)
    generous = worlds.run(run.world_size, fit, with_budget(run, "1GB"), timeout=300)
    highest = max(max(rank.extra["peaks"]) for rank in generous)
    tolerance = 0.05 if run.tp > 1 else 0.01  # when messages of tensor ranks are released varies by run
    floor = max(rank.extra["report"][0] for rank in generous)
    assert highest == pytest.approx(max(max(rank.extra["peaks"]) for rank in plain), rel=tolerance)
    # Of layers of equal work those are kept that cost least: the last one, which fits just above the floor, and then
    # only as many as a budget for uncompiled layers allows.
    budget = int(floor + (0.1 if run.case is GPT2 else 0.6) * (highest - floor))
    tight = worlds.run(run.world_size, fit, with_budget(run, f"{budget}B"), timeout=300)
    for one, other in zip(generous, tight, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.losses, other.losses, strict=True))
        assert all(torch.equal(value, other.state[name]) for name, value in one.state.items())
    most = max(max(rank.extra["peaks"]) for rank in tight)
    assert most <= budget, (most, budget)
    if run.case is GPT2:  # without random numbers, those of the batch that is profiled uncompiled are equal too
        assert all(torch.equal(a, b) for a, b in zip(plain[0].losses, tight[0].losses, strict=True))
        assert most >= 0.8 * budget  # dropout saves less where it is compiled
    for rank in generous:
        assert set(rank.extra["shares"].values()) == {1.0}
    blocks = [
        [share for fqn, share in rank.extra["shares"].items() if fqn.startswith("model.transformer.h")]
        for rank in tight
    ]
    assert all(len(shares) == 4 // run.pp for shares in blocks)
    assert any(0.0 in shares for shares in blocks) and any(1.0 in shares for shares in blocks)


def compile_a_layer(module):
    module.model.transformer.h[1].compile(backend="eager")


def test_a_layer_that_the_user_compiled_is_refused(worlds):
    [message] = worlds.run(1, refusal, fit, with_budget(replace(LARGE, change=compile_a_layer), "1GB"))
    assert message.startswith("RecomputeError: recompute='1GB' is a budget, ")
    assert "model.transformer.h.1, which you compiled; set compile='units'" in message


class Requested(ActivationCheckpointing, PeakAndReport):
    def __init__(self):
        ActivationCheckpointing.__init__(self, "0.001%")
        PeakAndReport.__init__(self)


def test_a_share_of_the_free_memory(worlds):
    """By a callback; a thousandth of a percent of the host's memory is below the floor."""
    run = replace(LARGE, microbatches=1, callback=Requested)
    [message] = worlds.run(1, refusal, fit, run)
    assert message.startswith("RecomputeError: recompute='0.001%' allows ")
    [fitted] = worlds.run(1, fit, with_budget(replace(LARGE, microbatches=1), "20%"))
    floor, budget = fitted.extra["report"]
    assert budget > 100 * floor


@functools.cache
def parser_of(taker):
    parser = ArgumentParser()
    parser.add_class_arguments(taker, "it")
    return parser


@pytest.mark.parametrize("given", ["6GiB", "500 MB", "50%"])
@pytest.mark.parametrize("taker", [Hybrid3DStrategy, ActivationCheckpointing])
def test_yaml_form(taker, given):
    assert parser_of(taker).parse_string(yaml.safe_dump({"it": {"recompute": given}})).it.recompute == given
    with pytest.raises(ValueError, match="'6 gigabytes'; use 'full', 'selective', a budget such as '6GiB'"):
        taker(recompute="6 gigabytes")


class CompiledSGD(torch.optim.SGD):
    """Compiles its update, as torchao's optimizers do; a dispatch mode is an error for the compiler."""

    def step(self, closure=None):
        loss = None if closure is None else closure()
        update = torch.compile(torch.add, fullgraph=True, backend="eager")
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.copy_(parameter.add(update(parameter.grad.sum(), 1), alpha=1e-3))
        return loss


class StepsCompiled(GPT2Dropout):
    def configure_optimizers(self):
        return CompiledSGD(self.parameters(), lr=0.1)


def test_a_compiled_step_runs_in_profiled_batches(worlds):
    run = replace(LARGE, case=StepsCompiled, microbatches=1, num_batches=3, callback=None)
    [plain] = worlds.run(1, fit, run, timeout=180)
    [other] = worlds.run(1, fit, with_budget(run, "1GB"), timeout=180)
    assert all(torch.equal(a, b) for a, b in zip(plain.losses, other.losses, strict=True))


def fit_with_unlike_budgets(run):
    return fit(with_budget(run, ("411035B", "1 GiB")[dist.get_rank()]))


def test_ranks_of_a_shard_recompute_unlike_layers(worlds):
    """Under ZeRO-3 by layer, those that repeat a layer gather it again."""
    run = replace(LARGE, callback=None, dp=2, strategy={"zero_stage": 3, "reshard_after_forward": True})
    assert_bitwise_equal(worlds.run(2, fit_with_unlike_budgets, run), worlds.run(2, fit, run))
