"""A user's tensor plan under a Trainer, plans that are cached between runs, and their messages."""

import json
import os
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from harness.fits import Run, assert_parity, fit, reference_of, refusal, trainer_of
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.run.description import table as announcing
from lightning_hybrid.step.objects.modules import lines_of_layers
from lightning_hybrid.techniques.tensor import plan_folder
from lightning_hybrid.techniques.tensor_plans import warn_across_nodes
from lightning_hybrid.tensor.search.cache import FILE_NAME
from models.regression import FEATURES, Regression, regression_data


def planned(**plan):
    return Run("Layers", tp=2, strategy={"tensor_parallel_plan": plan}, microbatches=1)


def origins(plans):
    return {group.origin for plan in plans.values() for group in plan.groups}


def test_user_plan_is_applied_by_stage_and_layer(worlds):
    plan = {"layers.*.0": "colwise", "layers.1": "replicated", "head": "colwise_gather_output"}
    run = Run("Layers", pp=2, tp=2, strategy={"tensor_parallel_plan": plan})
    ranks = worlds.run(4, fit, run)
    expected = reference_of(worlds, run)
    assert_parity(ranks, expected, run)
    plans = ranks[0].plans
    assert origins(plans) == {"your plan"} and plans.keys() == {*(f"layers.{k}" for k in range(4)), "head"}
    assert not plans["layers.1"].num_sharded and plans["layers.2"].num_sharded and plans["head"].num_sharded
    assert ranks[3].plans == plans
    text = "\n".join(lines_of_layers({fqn: plan.lines() for fqn, plan in plans.items()}))
    assert "layers.0 .. layers.3 (3)\n    0 -> 2 (your plan: split by output features)" in text
    assert "replicated (your plan has 'layers.1': 'replicated')" in text


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (
            {"layers.*.9": "rowwise"},
            r"TensorPlanError.*'layers.\*.9', which is no module; did you mean 'layers\.\*\.\*'",
        ),
        ({"layers.*.0": "rowwise"}, r"TensorPlanError.*layers.0.0 is rowwise, but no colwise linear feeds it"),
    ],
)
def test_infeasible_plan_stops_all_ranks(worlds, plan, words):
    for refused_with in worlds.run(2, refusal, fit, planned(**plan)):
        assert re.search(words, refused_with), refused_with


def fit_twice(folder):
    """Two fits on this rank: the plans of each, and its start messages."""
    seen = []
    original, announcing.rank_zero_info = announcing.rank_zero_info, seen.append
    try:
        callback = {"callback": _Checkpoints, "trainer": {"default_root_dir": folder, "enable_checkpointing": True}}
        fitted = [fit(Run("Layers", tp=2, microbatches=1, num_batches=1, **callback)) for _ in range(2)]
    finally:
        announcing.rank_zero_info = original
    return [one.plans for one in fitted], [text for text in seen if "hybrid3d" in text]


class _Checkpoints(ModelCheckpoint):
    def __init__(self):
        super().__init__(save_top_k=0)
        self.recorded = None


def test_second_run_only_proves_cached_plans(worlds, tmp_path):
    ranks = worlds.run(2, fit_twice, str(tmp_path))
    for (first, second), _ in ranks:
        kinds = [plan for plan in second.values() if plan.num_trials]  # like layers share a plan
        assert kinds and all(plan.num_trials == 2 for plan in kinds)  # one proof, in one mode and unwatched
        assert sum(plan.num_trials for plan in first.values()) > sum(plan.num_trials for plan in kinds)
        for fqn, plan in first.items():
            assert plan.groups == second[fqn].groups and plan.placements == second[fqn].placements
    texts = [
        line
        for text in ranks[0][1]
        for line in text.replace("\n    ", " ").splitlines()
        if line.startswith("how to split layers")
    ]
    assert texts[0].startswith("how to split layers: found for 3 layers, and read for 0 from ")
    assert texts[1].startswith("how to split layers: found for 0 layers, and read for 3 from ")
    file = tmp_path / "checkpoints" / ".hybrid3d" / FILE_NAME
    assert json.loads(file.read_text())["plans"] and not [name for name in os.listdir(file.parent) if name[0] == "."]


def trainer_with(dirpath, *loggers, fast_dev_run=False):
    callbacks = [] if dirpath is None else [SimpleNamespace(dirpath=dirpath)]
    return SimpleNamespace(
        checkpoint_callbacks=callbacks, loggers=list(loggers), default_root_dir="/root", fast_dev_run=fast_dev_run
    )


def test_plans_are_written_where_the_next_run_reads_them():
    numbered = SimpleNamespace(save_dir="/logs", name="gpt", version=3)
    named = SimpleNamespace(save_dir=None, name="gpt", version="abc")
    assert plan_folder(trainer_with("/mine")) == "/mine/.hybrid3d"
    assert plan_folder(trainer_with("/mine", numbered)) == "/mine/.hybrid3d"
    assert plan_folder(trainer_with("/logs/gpt/version_3/checkpoints", numbered)) == "/logs/gpt/.hybrid3d"
    assert plan_folder(trainer_with("/root/gpt/abc/checkpoints", named)) == "/root/gpt/.hybrid3d"
    assert plan_folder(trainer_with(None)) is None
    assert plan_folder(trainer_with("memory://mine")) is None
    assert plan_folder(trainer_with("/mine", fast_dev_run=1)) is None


def test_tensor_ranks_on_several_nodes_give_a_warning():
    for ranks_per_node, lie in ((6, "4 to 7"), (2, "0 to 3")):
        with pytest.warns(UserWarning, match=rf"=4 does not divide the {ranks_per_node} ranks of a node.* {lie} are"):
            warn_across_nodes(4, ranks_per_node, 4)
    warn_across_nodes(4, 8, 2)
    warn_across_nodes(4, 6, 1)


def fit_on_two_nodes():
    os.environ.update(GROUP_RANK=os.environ["RANK"], LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Run("Layers", tp=2, microbatches=1, num_batches=1, trainer={"devices": 1, "num_nodes": 2}))
    return sum("tensor_parallel_size=2 does not divide the 1 ranks of a node" in str(w.message) for w in caught)


def test_number_of_nodes(worlds):
    assert worlds.run(2, fit_on_two_nodes) == [1, 0]


class ThreeHeads(Regression):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(SelfAttention(FEATURES, heads=3) for _ in range(2))

    def forward(self, x):
        return super().forward(torch.stack([x, x.cos(), x.sin(), x.square()], 1)).mean(1)


class SelfAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 8), nn.Linear(8, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(self.up(x).relu())


def warnings_of_fit(_):
    strategy = Hybrid3DStrategy(tensor_parallel_size=2, sequence_parallel=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_of(2, strategy, [], limit_train_batches=1).fit(
            ThreeHeads().double(), regression_data()["train_dataloaders"]
        )
    return [str(warning.message) for warning in caught if "sequence_parallel" in str(warning.message)]


def test_warns_of_layers_with_full_sequences(worlds):
    [[text], []] = worlds.run(2, warnings_of_fit, None)
    assert "sequence_parallel=True is inactive in some layers" in text
    assert "(layers.0 and 1 more: 3 heads of qkv are not a multiple of 2 ranks, so each rank" in text
