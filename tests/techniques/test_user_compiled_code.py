"""Code compiled by users: layers run compiled, and a model whose layers are observed runs eagerly."""

import warnings

import pytest
import torch
from faults.layouts import Case, Regression
from faults.layouts import check as check_layout
from lightning.pytorch import Callback
from torch import nn

from harness.trainer_runs import assert_same, ignore_warnings, trainer_of, weights_of
from models.tiny import FEATURES, Tiny, loader

OPERATIONS: list[list[str]] = []  # of each graph that this process compiled


def recording_backend(graph, inputs):
    """A backend that runs the graph as it is."""
    OPERATIONS.append([node.name for node in graph.graph.nodes if node.op not in ("placeholder", "output")])
    return graph.forward


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Plain(Tiny):
    def __init__(self):
        super().__init__(layers=0)
        torch.manual_seed(2)
        self.model = Model().double()
        self.squared = nn.functional.mse_loss

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        return self.squared(self(batch["x"]), batch["y"])


class CompiledModel(Plain):
    def __init__(self):
        super().__init__()
        self.model = torch.compile(self.model, backend=recording_backend)


class CompiledModelInPlace(Plain):
    def __init__(self):
        super().__init__()
        self.model.compile(backend=recording_backend)


class Forward(Plain):
    def __init__(self):
        super().__init__()
        self.model.forward = torch.compile(self.model.forward, backend=recording_backend)


class Loss(Plain):
    def __init__(self):
        super().__init__()
        self.squared = torch.compile(nn.functional.mse_loss, backend=recording_backend)


class Layers(Plain):
    def __init__(self):
        super().__init__()
        for place, layer in enumerate(self.model.layers):
            self.model.layers[place] = torch.compile(layer, backend=recording_backend)


class LayersInPlace(Plain):
    def __init__(self):
        super().__init__()
        for layer in self.model.layers:
            layer.compile(backend=recording_backend)


class CompiledTwice(Regression):
    def __init__(self):
        super().__init__()
        self.layers[1] = torch.compile(self.layers[1], backend="eager")
        self.layers[2].compile(backend="eager")


class Policies(Callback):
    """Records how each layer is recomputed."""

    def on_train_start(self, trainer, pl_module):
        self.recorded = dict(trainer.strategy.run.policies)


def policies_of(case, options):
    ignore_warnings()
    warnings.simplefilter("ignore")
    policies = Policies()
    trainer_of(2, 2, strategy_options=options, callbacks=[policies]).fit(case(), loader(4, 8))
    return policies.recorded


def run(size, pp, case, options):
    ignore_warnings()
    torch.compiler.reset()
    OPERATIONS.clear()
    model = case()
    trainer = trainer_of(size, pp, strategy_options=options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, loader(4, 14))  # the last batch is short
    weights = {name.replace("_orig_mod.", ""): weight for name, weight in weights_of(model).items()}
    warned = [str(warning.message) for warning in caught if "compiled" in str(warning.message)]
    return weights, [graph for graph in OPERATIONS if graph], warned


def check(worlds, case, options):
    [(expected, _, _)] = worlds.run(1, run, 1, 1, Plain, {})
    ranks = worlds.run(2, run, 2, 2, case, {"num_microbatches": 2, **options})
    for weights, _, _ in ranks:
        assert_same(weights, expected)
    return ranks


@pytest.mark.parametrize("case", [CompiledModel, CompiledModelInPlace, Forward, Loss])
def test_compiled_code_around_stage_layers_runs_eagerly(worlds, case):
    for rank, (_, graphs, warned) in enumerate(check(worlds, case, {})):
        assert not graphs, "nothing of what watches the step is compiled either"
        names_it = case in (CompiledModel, CompiledModelInPlace) and rank == 0
        assert len(warned) == names_it
        if names_it:
            assert "model: it is compiled as one module" in warned[0] and "compile='units'" in warned[0]


@pytest.mark.parametrize("case", [Layers, LayersInPlace])
def test_compiled_layers_run_compiled(worlds, case):
    for _, graphs, warned in check(worlds, case, {}):
        assert graphs and all("tanh" in graph for graph in graphs), "layers, and nothing around them"
        assert not warned


def test_layers_of_a_compiled_model_compile_separately_on_request(worlds):
    for _, graphs, _ in check(worlds, CompiledModel, {"compile": {"backend": recording_backend}}):
        assert graphs and all("tanh" in graph for graph in graphs)


@pytest.mark.parametrize("case", [CompiledModel, CompiledModelInPlace])
def test_compiled_model_is_cut_over_stages(worlds, case):
    [(expected, _, _)] = worlds.run(1, run, 1, 1, Plain, {})
    for weights, _, _ in worlds.run(4, run, 4, 2, case, {"tensor_parallel_size": 2, "num_microbatches": 2}):
        assert_same(weights, expected)


@pytest.mark.parametrize(("case", "policy"), [(Plain, "selective"), (CompiledModel, "selective"), (Layers, "full")])
def test_compiled_model_over_stages_is_recomputed_selectively(worlds, case, policy):
    options = {"num_microbatches": 2, "recompute": "selective"}
    for policies in worlds.run(2, policies_of, case, options):
        assert {policies[name] for name in policies if ".layers." in name} == {policy}


def compiled_module():
    return torch.compile(Plain(), backend=recording_backend)


WHOLE = {
    "one device": (1, 1, {"num_microbatches": 1}),
    "pp2": (2, 2, {"num_microbatches": 2}),
    "tp2": (2, 1, {"tensor_parallel_size": 2}),
    "zero3": (2, 1, {"zero_stage": 3, "reshard_after_forward": True}),
    "zero1": (2, 1, {"zero_stage": 1}),
}


@pytest.mark.parametrize("layout", WHOLE)
def test_a_module_that_is_passed_compiled_is_compiled_by_layers(worlds, layout):
    size, pp, options = WHOLE[layout]
    [expected, *_] = worlds.run(size, run, size, pp, Plain, options)
    for weights, graphs, warned in worlds.run(size, run, size, pp, compiled_module, options):
        assert_same(weights, expected[0])
        assert bool(graphs) == (layout != "tp2"), "sharded layers of this width are intercepted"
        assert all("tanh" in graph for graph in graphs) and not warned


@pytest.mark.world(1)
def test_a_strategy_compiles_only_the_module_that_was_passed_compiled():
    trainer = trainer_of(1, 1, strategy_options={"num_microbatches": 1})
    module, other = Plain(), Plain()
    step = module.training_step
    trainer.fit(torch.compile(module, backend=recording_backend, dynamic=False), loader(4, 14))
    assert trainer.strategy.options.compile == {"dynamic": False, "backend": recording_backend}
    assert module.training_step == step and "training_step" not in vars(module)
    trainer.fit(other, loader(4, 14))
    assert trainer.strategy.options.compile is None


@pytest.mark.parametrize("layout", ["pp2 x dp2", pytest.param("zero3 layerwise", marks=pytest.mark.slow)])
def test_layers_that_are_gathered_are_compiled(worlds, tmp_path, layout):
    """In a stage, the compiler traces the code around a layer that it was told to compile in place."""
    check_layout(worlds, Case(CompiledTwice, strategy={"zero_stage": 3}), layout, tmp_path)
