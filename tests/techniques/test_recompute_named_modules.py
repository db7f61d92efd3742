"""Modules that contain layers, recomputed as one where they are named: blocks with lists of heads and of experts."""

import dataclasses
import importlib

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from harness.fits import Run, assert_bitwise_equal, check, fit
from harness.live_storages import LiveStorages
from lightning_hybrid.callbacks import ActivationCompression
from lightning_hybrid.errors import RecomputeError
from lightning_hybrid.memory.recompute.policies import layer_policies
from lightning_hybrid.planning.plan import make_plan
from lightning_hybrid.techniques.layers import LayerTechnique, computed_parameters
from lightning_hybrid.techniques.recompute import recompute_plain_layers
from models.cases import Samples
from models.hand_written import LENGTH, VOCABULARY, WIDTH, Lit, mlp
from models.mixtures import Expert, LoopedExperts

pl = importlib.import_module("lightning.pytorch")
SLOW = pytest.mark.slow


class Block(nn.Module):
    """It calls the members of one list on the same input, and routes rows to those of the other."""

    dropout = 0.1

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(self.dropout)
        self.heads, self.moe = nn.ModuleList(mlp() for _ in range(2)), LoopedExperts()

    def forward(self, x):
        inner = self.norm(x)
        x = x + self.drop(sum(head(inner) for head in self.heads))
        return x + self.moe(x)


class Blocks(Lit):
    kind = "tokens"
    block, by_user = Block, False

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, batch):
        x = self.embed(batch["input_ids"])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.by_user else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())


class ExactBlock(Block):
    dropout = 0.0


class ExactBlocks(Blocks):
    block = ExactBlock


class Halved(LayerTechnique):
    def forward(self, name, layer, forward, *args, **kwargs):
        with computed_parameters(layer, lambda parameter: parameter * 0.5):
            return forward(*args, **kwargs)


class Compressed(ActivationCompression):
    recorded = None

    def __init__(self):
        super().__init__(bits=8, min_bytes=64, exclude=["embed", "head"])


LAYERWISE = {"zero_stage": 3, "reshard_after_forward": True}
RUNS = {
    "one process": Run(Blocks, microbatches=1),
    "technique": Run(Blocks, microbatches=1, strategy={"techniques": [Halved()]}),
    "microbatches": pytest.param(Run(Blocks, trainer={"accumulate_grad_batches": 2}), marks=SLOW),
    "bf16": pytest.param(Run(Blocks, dtype=torch.float32, precision="bf16-mixed"), marks=SLOW),
    "compiled": pytest.param(Run(Blocks, strategy={"compile": {"backend": "eager"}}), marks=SLOW),
    "replicas": pytest.param(Run(Blocks, dp=2), marks=SLOW),
    "zero1": pytest.param(Run(Blocks, dp=2, strategy={"zero_stage": 1}), marks=SLOW),
    "zero2": pytest.param(Run(Blocks, dp=2, strategy={"zero_stage": 2}), marks=SLOW),
    "zero3 by layer": Run(Blocks, dp=2, strategy=LAYERWISE),
    "tensor": pytest.param(Run(Blocks, tp=2), marks=SLOW),
    "tensor, sequence": pytest.param(Run(Blocks, tp=2, sequence=True), marks=SLOW),
    "experts": pytest.param(Run(Blocks, dp=2, ep=2), marks=SLOW),
    "stages": pytest.param(Run(Blocks, pp=2, trainer={"accumulate_grad_batches": 2}), marks=SLOW),
    "stages, zero3": pytest.param(Run(Blocks, pp=2, dp=2, strategy=LAYERWISE), marks=SLOW),
}


def recomputed(run, recompute):
    return dataclasses.replace(run, strategy={**run.strategy, "recompute": recompute})


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_bitwise_equal(worlds, run):
    """Dropout draws the same numbers again, in blocks whose parts are gathered, sharded, compiled or stored."""
    kept = worlds.run(run.world_size, fit, run)
    assert_bitwise_equal(worlds.run(run.world_size, fit, recomputed(run, [Block])), kept)


class ByUser(Blocks):
    by_user = True


class ExactByUser(ExactBlocks):
    by_user = True


@pytest.mark.parametrize(
    ("case", "kept", "strategy"),
    [(ByUser, Blocks, {"recompute": "full"}), (ExactByUser, ExactBlocks, {"techniques": [Halved()]})],
    ids=["recomputed", "technique"],
)
def test_layers_inside_of_the_users_checkpoints(worlds, case, kept, strategy):
    """They run in the backward as in the forward, also where Lightning runs it."""
    run = Run(kept, microbatches=1, strategy={name: value for name, value in strategy.items() if name != "recompute"})
    expected = worlds.run(1, fit, run)
    assert_bitwise_equal(worlds.run(1, fit, dataclasses.replace(run, case=case, strategy=strategy)), expected)


def test_what_is_recomputed_is_not_compressed(worlds):
    run = Run(Blocks)
    kept = worlds.run(1, fit, run)
    compressed = dataclasses.replace(recomputed(run, [Block]), callback=Compressed)
    assert_bitwise_equal(worlds.run(1, fit, compressed), kept)


EXACT = {
    "zero3 by layer": Run(ExactBlocks, dp=2, strategy=LAYERWISE),
    "tensor": pytest.param(Run(ExactBlocks, tp=2), marks=SLOW),
    "experts": pytest.param(Run(ExactBlocks, dp=2, ep=2), marks=SLOW),
    "stages": pytest.param(Run(ExactBlocks, pp=2), marks=SLOW),
}


@pytest.mark.parametrize("run", EXACT.values(), ids=EXACT)
def test_equals_one_process(worlds, run):
    check(worlds, recomputed(run, {"blocks.*": "full", "blocks.1": "selective"}))


class Policies(Callback):
    def on_train_start(self, trainer, pl_module):
        self.recorded = dict(trainer.strategy.run.policies)


def policies_of(run):
    return fit(dataclasses.replace(run, num_batches=1, callback=Policies)).extra


@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=SLOW)])
def test_stages_recompute_the_same_modules(worlds, pp):
    for rank in worlds.run(pp, policies_of, recomputed(Run(Blocks, pp=pp), {Block: "full", "blocks.3": 0.5})):
        chosen = {fqn: policy for fqn, policy in rank.items() if policy != "keep"}
        assert chosen == {**{f"blocks.{k}": "full" for k in range(3)}, "blocks.3": 0.5}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Enclosed(Blocks):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Net()])


@pytest.mark.parametrize("recompute", [[Net], ["blocks.0"]], ids=["class", "name"])
def test_what_stages_cut_is_recomputed_unit_by_unit(worlds, recompute):
    assert recomputed_names(recompute, Enclosed()) == ["blocks.0"]
    for rank in worlds.run(2, policies_of, recomputed(Run(Enclosed, pp=2), recompute)):
        units = [fqn for fqn, policy in rank.items() if policy == "full"]
        assert len(units) > 1 and all(fqn.startswith("blocks.0.blocks.") for fqn in units)


class Static(Blocks):
    """The same with lists whose members are all called, which plans record."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.moe = nn.Identity()


def plan_of(recompute):
    module = Static()
    loader = DataLoader(Samples(module.kind, 16, torch.float32), batch_size=8)
    [memory] = make_plan(pl, module, {"train_dataloaders": loader}, 1, {"recompute": recompute}, "32-true").memory
    return memory.activations


def test_plans_count_what_named_modules_save():
    """Each block saves its input alone; layers save theirs, and what is computed between them."""
    values = 8 * LENGTH * WIDTH * 4
    kept, parts, blocks = plan_of(None), plan_of("full"), plan_of([Block])
    assert blocks < parts < kept
    assert blocks - plan_of(["blocks.0", "blocks.1", "blocks.2", "blocks.3", "embed", "head"]) <= values
    saved = [plan_of([f"blocks.{k}" for k in range(count)]) for count in range(1, 5)]
    assert len({before - after for before, after in zip([kept, *saved], saved, strict=False)}) == 1


def recomputed_names(recompute, module=None):
    layers = recompute_plain_layers(module or Blocks(), recompute, compiled=False)
    return [fqn for fqn, policy in layers.policies.items() if policy != "keep"]


BLOCKS = [f"blocks.{k}" for k in range(4)]


@pytest.mark.parametrize(
    ("recompute", "names"),
    [
        ([Block], BLOCKS),
        (["blocks.*"], BLOCKS),
        (["blocks.0", "blocks.2"], ["blocks.0", "blocks.2"]),
        ([Expert, Block], BLOCKS),
        ([Block, Expert], BLOCKS),
        ({"*": "full", "blocks.*": "keep"}, ["embed", "head"]),
        ({"blocks.0.heads.1": "keep", "blocks.*": "full"}, BLOCKS),
        (["blocks.0.heads.*"], ["blocks.0.heads.0", "blocks.0.heads.1"]),
        (["blocks.0.moe"], ["blocks.0.moe"]),
        (["blocks.*.moe.experts.1"], [f"{name}.moe.experts.1" for name in BLOCKS]),
        ([LoopedExperts, "head"], [*(f"{name}.moe" for name in BLOCKS), "head"]),
    ],
    ids=str,
)
def test_what_is_named_is_the_layer(recompute, names):
    assert recomputed_names(recompute) == names


class Mixtures(Blocks):
    """Blocks whose only list is of experts, with as many of them as there are classes and blocks."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 4)
        for block in self.blocks:
            block.heads = nn.ModuleList([mlp()])


def test_experts_are_parts_of_their_block():
    """By default too; other lists inside of blocks, which the forward may call one after the other, have layers."""
    assert recomputed_names("full", Mixtures()) == ["embed", *BLOCKS, "head"]
    assert recomputed_names(2, Mixtures()) == ["embed", "blocks.1", "blocks.3"]
    assert recomputed_names("full") == [
        "embed",
        *(f"{name}.{part}" for name in BLOCKS for part in ("heads.0", "heads.1", "moe")),
        "head",
    ]


def test_classes_by_name():
    """As a config file has them."""
    for name in ("Block", f"{Block.__module__}.Block"):
        assert recomputed_names([name]) == recomputed_names([Block]) == BLOCKS


def test_inner_choices_are_refused():
    with pytest.raises(
        RecomputeError, match=r"names blocks.0.moe with 'keep', which is inside of blocks.0 with 'full'"
    ):
        recomputed_names({Block: "full", "blocks.*.moe": "keep"})
    with pytest.raises(RecomputeError, match="recompute names 'blocks', which matches no layer; nearest: blocks"):
        recomputed_names(["blocks"])
    layers = {"a": nn.Linear(2, 2), "b": nn.LayerNorm(2)}
    assert layer_policies({"b": "full"}, layers) == {"a": "keep", "b": "full"}


def saved_bytes(module, recompute):
    torch.manual_seed(0)
    batch = {"input_ids": torch.arange(96).view(16, 6) % VOCABULARY}
    batch["labels"] = batch["input_ids"] % 4
    with LiveStorages() as live, recompute_plain_layers(module, recompute, compiled=False).running():
        loss = module.loss(batch)
    saved = live.bytes()
    loss.backward()
    return saved


def test_saves_no_more_than_the_users_checkpoints():
    by_user = Blocks()
    by_user.by_user = True
    kept, least, named = saved_bytes(Blocks(), "keep"), saved_bytes(by_user, "keep"), saved_bytes(Blocks(), [Block])
    assert named <= least < 0.3 * kept
    assert saved_bytes(Mixtures(), "full") <= saved_bytes(Mixtures(), [Block])
