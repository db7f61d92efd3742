"""Compiled layers over stages, replicas and tensor ranks match one process without compilation."""

import dataclasses
import functools

import pytest
import torch
import torch.utils.checkpoint
from lightning.pytorch import Callback
from torch.nn import functional as F

from harness.fits import Run, check, fit
from lightning_hybrid.techniques.compile import CompiledLayers
from models.hand_written import Dropouts, Layers
from models.mixtures import Looped, Mixtral
from models.moe_layers import Balanced

QUICK = {"compile": {"backend": "aot_eager"}}  # all but the C++ compiler


class RecordsCompiled(Callback):
    """Records remaining patches of the modules, and the table lines of the units."""

    def __init__(self):
        self.recorded = {}

    def on_train_start(self, trainer, pl_module):
        self.module = pl_module
        self.recorded["lines"] = trainer.strategy.run.technique(CompiledLayers).units.lines()

    def teardown(self, trainer, pl_module, stage):
        self.recorded["left"] = [name for name, m in self.module.named_modules() if {"forward"} & m.__dict__.keys()]


def graphs_of(run):
    """The fit, and how many graphs torch compiled in it on this rank."""
    from torch._dynamo.utils import counters

    counters.clear()
    torch.compiler.reset()
    fitted = fit(dataclasses.replace(run, callback=RecordsCompiled))
    fitted.extra["graphs"] = counters["stats"]["unique_graphs"]
    assert not fitted.extra["left"]
    return fitted


check_compiled = functools.partial(check, how=graphs_of, timeout=240)


def name_of(run):
    return f"{run.case}-pp{run.pp}-dp{run.dp}-tp{run.tp}-m{run.microbatches}"


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


GRID = [
    # An input that needs a gradient and one that needs none are two graphs.
    slow(Run("Layers", dp=2, microbatches=1, strategy=QUICK), 2),  # without a pipeline; recomputed below
    (Run("Layers", pp=2, strategy=QUICK), 2),
    (Run("Layers", tp=2, strategy=QUICK), 2),
    slow(Run("Layers", dp=2, strategy={**QUICK, "zero_stage": 3, "reshard_after_forward": True}), 2),
    slow(Run("Layers", pp=2, dp=2, strategy=QUICK), 2),
    slow(Run("Layers", pp=2, tp=2, strategy=QUICK), 2),
    # Transformers' cache for generation is a list of layers, which each layer reads.
    slow(Run("GPT2", tp=2, microbatches=1, strategy=QUICK), 4),
    slow(Run("GPT2", dp=2, microbatches=1, strategy=QUICK), 4),
    slow(Run("GPT2", pp=2, strategy=QUICK), 2),
    slow(Run("GPT2", pp=2, dp=2, strategy=QUICK), 2),
    slow(Run("GPT2", pp=2, tp=2, strategy=QUICK), 2),
    slow(Run("Llama", dp=2, microbatches=1, strategy=QUICK), 4),
    slow(Run("Llama", pp=2, strategy=QUICK), 2),
    slow(Run("Llama", pp=2, dp=2, strategy=QUICK), 2),
    slow(Run("Llama", tp=2, strategy=QUICK), 4),  # two ranks have the same key head
    slow(Run("Llama", pp=2, tp=2, strategy=QUICK), 2),
]


@pytest.mark.parametrize(("run", "graphs"), GRID, ids=lambda value: name_of(value) if isinstance(value, Run) else "")
def test_parity(worlds, run, graphs):
    ranks, _ = check_compiled(worlds, run)
    assert max(rank.extra["graphs"] for rank in ranks) == graphs
    assert not any("not compiled" in line for line in ranks[0].extra["lines"])


WITH_EXPERTS = {
    "moe layer": slow(Run(Balanced, dp=2, ep=2, microbatches=1, num_batches=1, strategy=QUICK)),
    "Mixtral": slow(Run(Mixtral, dp=2, ep=2, strategy=QUICK)),
    "width": slow(Run(Mixtral, tp=2, strategy=QUICK)),
    "both": slow(Run(Mixtral, dp=2, tp=2, ep=2, strategy={**QUICK, "recompute": "full"}, validate=True)),
    "a list": slow(Run(Looped, dp=2, ep=2, strategy=QUICK)),
    "by the compiler": slow(Run(Balanced, dp=2, ep=2, strategy={"compile": "units"})),
}


@pytest.mark.parametrize("run", list(WITH_EXPERTS.values()), ids=list(WITH_EXPERTS))
def test_sharded_experts_inside_compiled_layers(worlds, run):
    """Code before and after them is compiled, once for all equal layers."""
    ranks, _ = check_compiled(worlds, run, tolerance=1e-9 if run.strategy["compile"] == "units" else 1e-10)
    assert 0 < ranks[0].extra["graphs"] <= 12
    assert not any("not compiled" in line for line in ranks[0].extra["lines"])


def by_sgd(module):
    module.optimizer = "sgd"  # Adam makes differences of float32's size in tiny gradients large


@pytest.mark.parametrize(
    "run",
    [
        # Without a cache on the disk, the C++ compiler takes most of a minute.
        slow(Run("Layers", pp=2, strategy={"compile": "units"})),
        slow(Run("Layers", dp=2, microbatches=1, strategy={"compile": "units"})),
        slow(Run("GPT2", pp=2, strategy={"compile": {"backend": "inductor", "dynamic": False}})),
        slow(Run("GPT2", tp=2, strategy={"compile": "units"})),
        slow(Run("Llama", pp=2, tp=2, strategy={"compile": "units"}, change=by_sgd)),
    ],
    ids=name_of,
)
def test_parity_of_compiled_code(worlds, run):
    # Llama's norms compute in float32 for any input.
    for rank in check_compiled(worlds, run, tolerance=1e-6 if run.case == "Llama" else 1e-9)[0]:
        assert rank.extra["graphs"] and rank.extra["lines"][0].startswith("compiled with inductor")


class TwelveLayers(Layers):
    def __init__(self):
        super().__init__(12)


def test_equal_layers_compile_once_per_mode(worlds):
    """Train and evaluation, with and without a gradient of the input, and once for any number of samples."""
    run = Run(TwelveLayers, last=3, validate=True, strategy=QUICK)
    for rank in check_compiled(worlds, run)[0]:
        assert rank.extra["graphs"] <= 8, "fewer than layers"


@pytest.mark.parametrize("layout", [{"pp": 2}, slow({})], ids=str)
def test_dropout_repeats_in_each_run_and_over_stages(worlds, layout):
    alone, again = (
        worlds.run(1, graphs_of, Run("Dropouts", strategy=QUICK))[0],
        Run("Dropouts", **layout, strategy=QUICK),
    )
    [without] = worlds.run(1, fit, Run("Layers"))
    for rank in worlds.run(again.world_size, graphs_of, again):
        assert all(torch.equal(a, b) for a, b in zip(rank.losses, alone.losses, strict=True))
        assert all(torch.equal(rank.state[name], alone.state[name]) for name in alone.state)
    assert not torch.equal(alone.losses[0], without.losses[0]), "dropout must be on"
    assert len({float(loss) for loss in alone.losses}) == 2


class Recomputed(Layers):
    def forward(self, x):
        for layer in self.layers:
            x = x + torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


class RecomputedDropouts(Dropouts):
    def forward(self, x):
        for layer in self.layers:
            x = F.dropout(x + torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False), 0.1, self.training)
        return self.head(x)


@pytest.mark.parametrize("microbatches", [1, slow(2)])
def test_recomputed_layers_run_compiled_both_times(worlds, microbatches):
    check_compiled(worlds, Run(Recomputed, dp=2, microbatches=microbatches, strategy=QUICK))


@pytest.mark.slow  # as the strategy's recomputation below
def test_recomputation_repeats_the_forward_draws(worlds):
    expected, ranks = (
        worlds.run(2, graphs_of, Run(case, pp=2, strategy=QUICK)) for case in ("Dropouts", RecomputedDropouts)
    )
    for a, b in zip(ranks, expected, strict=True):
        assert all(torch.equal(a.state[name], b.state[name]) for name in b.state)


def compile_a_layer(module):
    module.layers[0].compile(backend="eager")


def test_compiled_modules_are_kept(worlds):
    [rank], _ = check_compiled(worlds, Run("Layers", change=compile_a_layer, strategy=QUICK))
    assert rank.extra["lines"] == [
        "compiled with aot_eager: layers.1 .. layers.3 (3)",
        "not compiled (compiled by you): layers.0",
    ]


@pytest.mark.slow
def test_sharded_sequences_are_not_compiled(worlds):
    ranks, _ = check_compiled(worlds, Run("GPT2", tp=2, sequence=True, strategy=QUICK))
    assert ranks[0].extra["lines"] == [
        "not compiled (positions are sharded over ranks): model.transformer.h.0 .. model.transformer.h.3 (4)"
    ]
    assert not any(rank.extra["graphs"] for rank in ranks)


@pytest.mark.parametrize("case", [slow("Layers"), "Dropouts"])
def test_first_step_is_verified(worlds, case):
    """Layers that draw are not compiled in it, since no other process would draw the same."""
    worlds.run(2, graphs_of, Run(case, pp=2, strategy={**QUICK, "verify_first_step": True}))


@pytest.mark.parametrize("layout", [{"dp": 2, "microbatches": 1}, slow({"pp": 2}), slow({"tp": 2})], ids=str)
def test_layers_recomputed_by_the_strategy(worlds, layout):
    check_compiled(worlds, Run("Layers", **layout, strategy={**QUICK, "recompute": "full"}))


def test_strategy_recomputation_repeats_the_forward_draws(worlds):
    expected, ranks = (
        worlds.run(2, graphs_of, Run("Dropouts", pp=2, strategy={**QUICK, **more})) for more in ({}, {"recompute": 2})
    )
    for a, b in zip(ranks, expected, strict=True):
        assert all(torch.equal(a.state[name], b.state[name]) for name in b.state)
