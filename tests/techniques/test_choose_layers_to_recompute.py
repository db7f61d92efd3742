"""Layers recomputed in the backward: bitwise equal results, and fewer saved bytes."""

import functools
import re
from dataclasses import replace

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional as F
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from harness.fits import Run, assert_bitwise_equal, fit, refusal, trainer_of
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import ActivationCheckpointing
from lightning_hybrid.techniques.recompute import describe_policies
from models.hand_written import Layers, mlp
from models.hugging_face import GPT2Dropout


def assert_same_bits(worlds, run):
    plain = worlds.run(run.world_size, fit, run)
    for recompute in ("full", "selective"):
        again = worlds.run(run.world_size, fit, replace(run, strategy={**run.strategy, "recompute": recompute}))
        assert_bitwise_equal(again, plain)


class Forces(Layers):
    """The derivative of one submodule by positions, in a step whose other submodule is on another stage."""

    def __init__(self):
        super().__init__()
        self.species = nn.ModuleList(mlp() for _ in range(4))

    def loss(self, batch):
        kinds, positions = batch["x"], batch["x"].clone().requires_grad_(True)
        for layer in self.species:
            kinds = kinds + layer(kinds)
        out = self(positions * kinds)
        [force] = torch.autograd.grad(out.sin().sum(), positions, create_graph=True)
        return force.square().mean() + F.cross_entropy(out, batch["label"])


class TwoLayers(GPT2Dropout):
    layers = 2


RUNS = [
    Run(TwoLayers, microbatches=1, dtype=torch.float32),
    Run(TwoLayers, pp=2, dtype=torch.float32, precision="bf16-mixed"),
    Run(Forces, pp=2),
    pytest.param(Run("GPT2Dropout", pp=2, dp=2), marks=pytest.mark.slow),
    pytest.param(Run(TwoLayers, tp=2, sequence=True), marks=pytest.mark.slow),
    Run("BatchNorms", pp=2),
    pytest.param(Run("Llama", pp=2, strategy={"stages_per_rank": 2}), marks=pytest.mark.slow),
    pytest.param(Run("GPT2", cp=2), marks=pytest.mark.slow),
    pytest.param(Run("T5", pp=2, tp=2), marks=pytest.mark.slow),
    pytest.param(Run("ViT", pp=2, strategy={"schedule": "gpipe"}), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.case}-pp{run.pp}-dp{run.dp}-tp{run.tp}-cp{run.cp}")
def test_bitwise_equal_numbers(worlds, run):
    """With dropout, in half precision, with statistics that a second run must not write, with derivatives."""
    assert_same_bits(worlds, run)


LAYERS = [f"model.transformer.h.{k}" for k in range(4)]
SOME = [
    (["model.transformer.h.1"], LAYERS[1:2]),
    ({"*": "full", "model.transformer.h.*": "keep", "model.transformer.h.3": "full"}, LAYERS[3:]),
    ({GPT2Block: "full", "model.transformer.h.0": "keep"}, LAYERS[1:]),
    ({"*": "selective", "model.transformer.h.*": 0.3, "model.transformer.h.0": "full"}, LAYERS[:1]),
]


@pytest.mark.parametrize(("recompute", "chosen"), SOME, ids=["names", "policies", "class", "selective"])
def test_some_layers(worlds, recompute, chosen):
    [policies] = worlds.run(1, policies_of, recompute)
    assert [name for name in LAYERS if policies[name] == "full"] == chosen


def test_every_second_layer(worlds):
    [policies] = worlds.run(1, policies_of, 2)
    assert list(policies.values()) == ["full" if k % 2 == 0 else "keep" for k in range(len(policies))]
    assert set(LAYERS) <= policies.keys()


class RecordsPolicies(Callback):
    def on_train_start(self, trainer, pl_module):
        self.recorded = dict(trainer.strategy.run.policies)


def policies_of(recompute):
    return fit(Run("GPT2", num_batches=1, strategy={"recompute": recompute}, callback=RecordsPolicies)).extra


class Runs(Callback):
    """How often a layer's code runs in a step; its hook would open the layer for a recording."""

    def __init__(self):
        self.recorded = []

    def on_train_batch_start(self, trainer, pl_module, *_):
        norm = pl_module.model.transformer.h[1].ln_1
        self.count, forward = 0, type(norm).forward

        def counted(x):
            self.count += 1
            return forward(norm, x)

        norm.__dict__["forward"] = counted

    def on_train_batch_end(self, *_):
        self.recorded.append(self.count)


@pytest.mark.parametrize(("recompute", "times"), [("full", 2), ("keep", 1), ("selective", 2)])
def test_single_process_recomputes(worlds, recompute, times):
    """One process and one microbatch need no replay."""
    run = Run("GPT2", microbatches=1, num_batches=2, strategy={"recompute": recompute}, callback=Runs)
    assert worlds.run(1, fit, run)[0].extra == [times] * 2


def test_callback_equals_the_option(worlds):
    """The callback equals the option; both at once must request the same."""
    [option] = worlds.run(1, policies_of, "full")
    [callback] = worlds.run(1, policies_by_callback, None)
    assert option == callback and set(option.values()) == {"full"}
    [message] = worlds.run(1, refusal, policies_by_both, None)
    assert "recompute='full' and recompute=2 are both requested" in message


class Lines(RecordsPolicies):
    def on_train_start(self, trainer, pl_module):
        self.recorded = describe_policies(
            trainer.strategy.run.policies, trainer.strategy.options.recompute
        ).splitlines()


def lines_of(run):
    return fit(run).extra


def compile_a_layer(module):
    module.layers[1].compile(backend="eager")


def test_compiled_modules_are_recomputed_in_full(worlds):
    """It cannot be traced inside; the start table says so."""
    layers = "recomputed in the backward except expensive operations"
    in_full = "recomputed in the backward (in full: compiled)"
    run = Run("Layers", num_batches=1, microbatches=1, strategy={"recompute": "selective"}, callback=Lines)
    for changes, expected in [
        ({}, [f"{layers}: layers.0 .. head (5)"]),
        ({"change": compile_a_layer}, [f"{layers}: layers.0, layers.2 .. head (3)", f"{in_full}: layers.1"]),
        (
            {"strategy": {"recompute": {"layers.*": 0.3}, "compile": {"backend": "eager"}}},
            [f"{in_full}: layers.0 .. layers.3 (4)"],
        ),
    ]:
        assert worlds.run(1, lines_of, replace(run, **changes)) == [expected]


def policies_by_callback(_):
    return fit(Run("GPT2", num_batches=1, callback=RequestsFull)).extra


class RequestsFull(ActivationCheckpointing, RecordsPolicies):
    def __init__(self):
        ActivationCheckpointing.__init__(self, "full")


class RequestsEverySecond(ActivationCheckpointing, RecordsPolicies):
    def __init__(self):
        ActivationCheckpointing.__init__(self, 2)


def policies_by_both(_):
    return fit(Run("GPT2", num_batches=1, callback=RequestsEverySecond, strategy={"recompute": "full"}))


def test_invalid_requests(worlds):
    with pytest.raises(ValueError, match="recompute='half'; use 'full', 'selective', a budget"):
        Hybrid3DStrategy(recompute="half")
    for nothing in (0, 1.5, True, {"*": 2}, [int]):
        with pytest.raises(ValueError, match=re.escape(f"recompute={nothing!r}; use")):
            ActivationCheckpointing(nothing)
    [message] = worlds.run(1, refusal, policies_of, ["model.transformer.g.*"])
    assert "recompute names 'model.transformer.g.*', which matches no layer; nearest: model.tran" in message


@functools.cache
def parser_of(taker):
    parser = ArgumentParser()
    parser.add_class_arguments(taker, "it")
    return parser


@pytest.mark.parametrize(
    "given", [1, 2, 0.3, 1.0, "full", ["layers.*"], {"layers.*": 0.3, "layers.0": "keep"}], ids=str
)
@pytest.mark.parametrize("taker", [Hybrid3DStrategy, ActivationCheckpointing])
def test_yaml_form(taker, given):
    parsed = parser_of(taker).parse_string(yaml.safe_dump({"it": {"recompute": given}})).it.recompute
    assert parsed == given and type(parsed) is type(given)


def test_other_strategies_are_refused():
    trainer = trainer_of(1, "auto", [])
    with pytest.raises(TypeError, match="of lightning_hybrid, and the Trainer has SingleDeviceStrategy"):
        ActivationCheckpointing().setup(trainer, None, "fit")
