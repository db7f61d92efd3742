"""Tensor parallelism, with stages and replicas too, matches one process; only a size is given."""

import dataclasses
import re

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging

from harness.fits import Run, check, fit, reference_of, refusal
from lightning_hybrid.errors import TensorPlanError
from lightning_hybrid.techniques.tensor_plans import check_is_even
from lightning_hybrid.tensor.collectives import GroupRanks
from lightning_hybrid.tensor.plan import UnitPlan
from models.mixtures import Routers


def name_of(run):
    return f"{run.case}-pp{run.pp}-dp{run.dp}-tp{run.tp}-m{run.microbatches}"


def slow(*runs):
    """Runs that the others of a list cover."""
    return [pytest.param(run, marks=pytest.mark.slow) for run in runs]


GRID = [
    *slow(Run("GPT2", tp=2, microbatches=1)),  # as with positions
    *slow(Run("GPT2", pp=2, tp=2), Run("GPT2", pp=2, dp=2, tp=2), Run("T5", pp=2, dp=2, tp=2)),  # as Tied below
    *slow(Run("Llama", tp=2, pp=2)),  # as below, with clipping
    Run("T5", tp=2),
    # Their plans are proved in one process.
    *slow(Run("Bert", tp=2), Run("ViT", dp=2, tp=2), Run("Encoder", pp=2, tp=2)),
    *slow(Run("Attention", tp=2)),  # as in Encoder
    Run("Encoder", tp=2),
    Run("UNet", tp=2),
    Run("Tied", pp=2, dp=2, tp=2),
    *slow(Run("Tied", pp=2, tp=2)),
    Run("Recurrent", tp=2),
    Run("InPlace", tp=2),
    Run("GlueParameters", tp=2),
    Run("EncoderDecoder", tp=2),
    *slow(Run("Containers", tp=2)),
    Run("SeveralForwards", tp=2),
]


@pytest.mark.parametrize("run", GRID, ids=name_of)
def test_parity(worlds, run):
    ranks, _ = check(worlds, run)
    for fqn, plan in ranks[0].plans.items():
        if fqn.rpartition(".")[2].isdecimal():  # a layer of a list
            assert not any(group.role == "gathered" for group in plan.groups), plan.lines()
            # The model brings a plan along.
            origin = "the model's own plan" if run.case == "Llama" else "found"
            assert all(group.origin == origin for group in plan.groups), plan.lines()


def test_layer_that_reads_numbers_stays_full(worlds):
    """It may branch on them, differently in each batch."""
    ranks, _ = check(worlds, Run(Routers, tp=2, microbatches=1))
    assert not any(plan.num_sharded for plan in ranks[0].plans.values())


def test_running_statistics_of_channels(worlds):
    """A bias before a norm has a gradient of zero, but for rounding."""
    check(worlds, Run("BatchNorms", tp=2, microbatches=1), tolerance=1e-8)


@pytest.mark.parametrize(
    "run", [Run("Llama", pp=2, tp=2), *slow(Run("GPT2", pp=2, tp=2), Run("GPT2", tp=2))], ids=name_of
)
def test_clipping_counts_each_element_once(worlds, run):
    """Llama has fewer key heads than tensor ranks: they have the same one."""
    _, expected = check(worlds, dataclasses.replace(run, trainer={"gradient_clip_val": 0.05}))
    norm = torch.stack([grad.norm() for grad in expected.grads[0].values()]).norm()
    torch.testing.assert_close(norm, torch.tensor(0.05, dtype=norm.dtype), rtol=1e-4, atol=0)  # it did clip


def muon(module):
    weights = [p for name, p in module.named_parameters() if p.dim() == 2 and ".h." in name]
    module.configure_optimizers = lambda: torch.optim.Muon(weights, lr=1e-2)


def adafactor(module):
    module.configure_optimizers = lambda: torch.optim.Adafactor(module.parameters(), lr=1e-2)


@pytest.mark.parametrize("change", [muon, pytest.param(adafactor, marks=pytest.mark.slow)])
def test_optimizers_that_read_a_full_matrix(worlds, change):
    check(worlds, Run("GPT2", tp=2, change=change), tolerance=1e-6)


def test_dropout_differs_in_regions_and_repeats_in_each_run(worlds):
    run = Run("GPT2Dropout", tp=2, num_batches=1)
    first, second = worlds.run(2, fit, run), worlds.run(2, fit, run)
    without = reference_of(worlds, Run("GPT2", num_batches=1))
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.losses, other.losses, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(one.losses, first[0].losses, strict=True))
    assert not torch.equal(first[0].losses[0], without.losses[0]), "dropout must be on"


def test_indivisible_size_is_refused_if_strict(worlds):
    message = (
        r"tensor_parallel_size=5 shards no layer .*; set it to 2, which divides the numbers of heads .*, or to 1"
        r" .*2 heads of model.transformer.h.0.attn.c_attn and 3 more are not a multiple of 5; "
    )
    for text in worlds.run(5, refusal, fit, Run("GPT2", tp=5, strategy={"strict_layout": True})):
        assert re.search(message, text), text


def test_layers_that_do_not_divide_are_refused_if_strict():
    reasons = {"qkv.weight": "3 heads of qkv are not a multiple of 2 ranks"}
    odd = UnitPlan(size=2, placements={}, uneven={"qkv": (3, "heads")}, replicated_reasons=reasons)
    check_is_even({"blocks.0": dataclasses.replace(odd, replicated_reasons={})}, 2)  # split in another way
    message = (
        r"2 tensor ranks do not divide every layer: 3 heads of blocks.0.qkv and 1 more are not a multiple of 2;"
        r" set tensor_parallel_size=3 on as many devices, or strict_layout=False"
    )
    with pytest.raises(TensorPlanError, match=message):
        check_is_even({"blocks.0": odd, "blocks.1": odd}, 2)


def test_weights_read_by_the_step_are_named(worlds):
    for text in worlds.run(2, refusal, fit, Run("AuxiliaryLosses", tp=2, strategy={"strict_layout": True})):
        assert re.search(r"tensor_parallel_size=2 shards no layer .*read by the step at .*[a-z_]*.py", text), text


class RecordsSizes(Callback):
    """Sizes that hooks see, and actual sizes on a rank."""

    def __init__(self):
        self.recorded = {}

    def on_train_start(self, trainer, pl_module):
        self.recorded["shapes"] = {name: tuple(p.shape) for name, p in pl_module.named_parameters()}
        self.recorded["numel"] = sum(p.numel() for p in pl_module.parameters())

    def on_train_batch_end(self, trainer, pl_module, *_):
        with torch._C.DisableTorchFunction():
            [optimizer] = trainer.optimizers
            self.recorded["local_sizes"] = {
                name: [p.numel(), p.grad.numel(), *(v.numel() for v in optimizer.state[p].values() if v.dim())]
                for name, p in pl_module.named_parameters()
                if p.grad is not None
            }


def test_hooks_see_full_tensors_and_ranks_have_shards(worlds):
    ranks = worlds.run(2, fit, Run("GPT2", tp=2, callback=RecordsSizes))
    expected = reference_of(worlds, Run("GPT2", callback=RecordsSizes))
    for rank in ranks:
        assert rank.extra["shapes"] == expected.extra["shapes"] and rank.extra["numel"] == expected.extra["numel"]
        cut = [name for name in rank.extra["local_sizes"] if ".attn.c_" in name or ".mlp.c_" in name]
        for name in cut:
            share = 1 if name.endswith("c_proj.bias") else 2
            assert [share * size for size in rank.extra["local_sizes"][name]] == expected.extra["local_sizes"][name], (
                name
            )
        assert len(cut) == 4 * 8


def count_sums(run):
    """All-reduces over the tensor ranks in one step, and the fit."""
    counts = []

    class Counts(Callback):
        recorded = counts

        def on_train_batch_start(self, trainer, *_):
            self.before = len(sums)

        def on_train_batch_end(self, trainer, *_):
            counts.append(len(sums) - self.before)

    sums = []
    original = GroupRanks.all_reduce
    GroupRanks.all_reduce = lambda self, tensor: (sums.append(tuple(tensor.shape)), original(self, tensor))[1]
    try:
        return fit(dataclasses.replace(run, callback=Counts)).extra
    finally:
        GroupRanks.all_reduce = original


def test_one_sum_per_direction_for_each_pair(worlds):
    """Four blocks with an attention and an MLP; one microbatch. A lookup, the targets' logits, one into the head."""
    for counts in worlds.run(2, count_sums, Run("GPT2", tp=2, microbatches=1)):
        assert counts[1:] == [4 * 2 * 2 + 1 + 1 + 1]  # layers are proved again in the first batch


class Average(EMAWeightAveraging):
    """Its shards in training, and its content in a file."""

    recorded = None

    def __init__(self):
        super().__init__(decay=0.5)
        self.recorded = {}

    def on_train_batch_end(self, trainer, *args):
        super().on_train_batch_end(trainer, *args)
        with torch._C.DisableTorchFunction():
            self.recorded["local_sizes"] = {n: p.numel() for n, p in self._average_model.module.named_parameters()}
            self.recorded["file"] = {k: v.clone() for k, v in self._average_model.state_dict().items()}


@pytest.mark.slow  # test_checkpoint_callbacks.py saves and resumes averages over tensor ranks
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2, "tp": 2}], ids=str)
def test_weight_averages(worlds, layout):
    """The averaged weights are those that the run ends with."""
    ranks, expected = check(worlds, Run("GPT2", **layout, callback=Average))
    plain = reference_of(worlds, Run("GPT2"))
    name = "model.transformer.h.0.mlp.c_fc.weight"
    assert not torch.equal(plain.state[name], expected.state[name])
    assert ranks[0].extra["local_sizes"][name] * 2 == expected.extra["local_sizes"][name]
    for key, value in expected.extra["file"].items():
        torch.testing.assert_close(ranks[0].extra["file"][key], value, rtol=1e-9, atol=1e-12)


class FreezesAtFirst(Callback):
    """Trains the first layer from the second batch on."""

    recorded = None

    def setup(self, trainer, pl_module, stage):
        self.layers = next(child for child in pl_module.modules() if isinstance(child, torch.nn.ModuleList))
        self.layers[0].requires_grad_(False)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 1:
            self.layers[0].requires_grad_(True)


@pytest.mark.parametrize(
    "layout",
    [{"cp": 2}, {"tp": 2, "sequence": True}, *slow({"tp": 2}, {"tp": 2, "cp": 2}, {"cp": 2, "pp": 2}, {"cp": 3})],
    ids=str,
)
def test_layer_that_is_trained_later(worlds, layout):
    """Its plan is proved while it is frozen, and sums gradients that it has only later."""
    check(worlds, Run("GPT2", **layout, num_batches=3, callback=FreezesAtFirst))


def compile_a_layer(module):
    module.layers[0].compile(backend="eager")


def test_compiled_layer_stays_full(worlds):
    ranks, _ = check(worlds, Run("Layers", tp=2, change=compile_a_layer))
    assert not ranks[0].plans["layers.0"].num_sharded and ranks[0].plans["layers.1"].num_sharded
    assert "torch.compile" in ranks[0].plans["layers.0"].lines()[0]
