"""Recomputed layers, where ZeRO frees their parameters between forward and backward."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from harness.fits import Run, fit
from lightning_hybrid.zero import group as of_groups
from lightning_hybrid.zero.group import ParameterGroup
from lightning_hybrid.zero.sharding import ZeroSharding

BY_LAYER = {"zero_stage": 3, "reshard_after_forward": True}


def partly_frozen(module):
    """A full layer, and one parameter of another."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("h.1." not in name and "h.0.mlp.c_fc.weight" not in name)


RUNS = {
    "GPT2": Run("GPT2", dp=2),
    "partly frozen": Run("GPT2", dp=2, change=partly_frozen),
    "stages": Run("GPT2", pp=2, dp=2, trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
    "dropout": Run("GPT2Dropout", dp=2),
    "T5": Run("T5", dp=2),
    "written buffers": Run("BatchNorms", dp=2),
    "interleaved": Run("Layers", pp=2, dp=2, strategy={"stages_per_rank": 2}),
    "autocast": Run("Layers", dp=2, dtype=torch.float32, trainer={"precision": "bf16-mixed"}),
}


def recomputed(run, recompute, callback=None):
    strategy = {**run.strategy, **BY_LAYER, "recompute": recompute}
    return dataclasses.replace(run, strategy=strategy, callback=callback)


IN_PART = {"*": "full", "*0": "selective", "*1": 0.1}
USUAL = {"partly frozen": "selective", "stages": IN_PART}


def each_run():
    for name, run in RUNS.items():
        if name in USUAL:
            yield pytest.param(run, [USUAL[name]], id=name)
        yield pytest.param(run, ["selective", IN_PART], id=f"{name}, each", marks=pytest.mark.slow)


@pytest.mark.parametrize(("run", "policies"), list(each_run()))
def test_bitwise_equal(worlds, run, policies):
    plain = worlds.run(run.world_size, fit, recomputed(run, None))
    for recompute in policies:
        for one, other in zip(plain, worlds.run(run.world_size, fit, recomputed(run, recompute)), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one.losses, other.losses, strict=True))
            assert all(torch.equal(value, other.state[name]) for name, value in one.state.items())
            for a, b in zip(one.grads, other.grads, strict=True):
                assert all(torch.equal(a[name], b[name]) for name in a)


class CountsFullLayers(Callback):
    """In a step: gathers of each layer; the most full layers at a time; live references to freed ones."""

    recorded = None

    def setup(self, trainer, pl_module, stage):
        counts = self
        self.gathers, self.most, self.referenced = 0, 0, 0
        gather, free, begin = ParameterGroup.gather, ParameterGroup.free, ZeroSharding.before_backward
        send, freed, layers = of_groups.all_gather_single, [], []
        self.before = [(ParameterGroup, "gather", gather), (ParameterGroup, "free", free)]
        self.before += [(ZeroSharding, "before_backward", begin), (of_groups, "all_gather_single", send)]

        def counted_gather(group):
            gather(group)
            if group.fqn:
                layers[:] = {id(other): other for other in [*layers, group]}.values()
                counts.most = max(counts.most, sum(other.is_full for other in layers))

        def counted_free(group):
            freed.extend(StorageWeakRef(full.untyped_storage()) for full in group._full.values())
            free(group)

        def counted_begin(zero, *args):
            assert freed
            counts.referenced = max(counts.referenced, sum(not reference.expired() for reference in freed))
            begin(zero, *args)

        def counted_send(*args, **kwargs):
            counts.gathers += 1
            return send(*args, **kwargs)

        ParameterGroup.gather, ParameterGroup.free = counted_gather, counted_free
        ZeroSharding.before_backward, of_groups.all_gather_single = counted_begin, counted_send

    def teardown(self, trainer, pl_module, stage):
        for owner, name, member in self.before:
            setattr(owner, name, member)

    def on_train_end(self, trainer, pl_module):
        groups = trainer.strategy.run.active.groups
        self.recorded = {
            "gathers": self.gathers,
            "layers": sum(bool(group.fqn) for group in groups),
            "outside": sum(not group.fqn for group in groups),
            "most": self.most,
            "referenced": self.referenced,
        }


MIXED = {"*": "full", "*0": "selective", "*2": "selective"}


SLOW = [
    pytest.param(None, marks=pytest.mark.slow, id="keep"),
    pytest.param("full", marks=pytest.mark.slow, id="full"),
    pytest.param(MIXED, marks=pytest.mark.slow, id="mixed"),
]


@pytest.mark.parametrize("recompute", ["selective", *SLOW])
def test_at_most_two_layers_are_full_and_unreferenced(worlds, recompute):
    run = recomputed(Run("GPT2", dp=2, num_batches=2, change=partly_frozen), recompute, CountsFullLayers)
    for rank in worlds.run(2, fit, run):
        counted = rank.extra
        assert counted["layers"] >= 4 and counted["most"] <= 2 and counted["referenced"] == 0
        # Each microbatch of each batch: once for the forward, once for the backward, if that needs parameters. The
        # first batch is compared with its shares: five more forwards.
        assert counted["gathers"] <= (2 * 2 * 2 + 5) * counted["layers"] + 3 * counted["outside"]


class Gate(nn.Module):
    """Its backward ends with a result of frozen parameters only, after all gradients of the layer."""

    def __init__(self):
        super().__init__()
        self.frozen, self.bias = nn.Linear(16, 16).double(), nn.Parameter(torch.zeros(16).double())
        self.frozen.requires_grad_(False)

    def forward(self, x):
        gate = torch.sigmoid(self.frozen(torch.ones_like(x)))
        return x * gate + self.bias


def gated(module):
    module.layers = nn.ModuleList(Gate() for _ in range(3))


def fit_with_shares(run):
    shares = (0.02, 1.0)
    return fit(recomputed(run, shares[dist.get_rank()]))


def test_ranks_that_save_different_results_communicate_equally(worlds):
    """Batches of different shapes may lead to different choices; when layers are gathered does not depend on them."""
    run = Run("Layers", dp=2, change=gated)
    plain = worlds.run(2, fit, recomputed(run, None))
    for one, other in zip(plain, worlds.run(2, fit_with_shares, run, timeout=20), strict=True):
        assert all(torch.equal(value, other.state[name]) for name, value in one.state.items())
