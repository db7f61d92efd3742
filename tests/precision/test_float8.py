"""Linear layers in float8: the layers of torchao, equal in all layouts that keep the tensors of a layer together."""

import copy
import importlib.util
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader

from harness.fits import Run, check, fit, fit_joined_batches, reference_of, refusal, trainer_of
from lightning_hybrid import Hybrid3DStrategy, HybridPrecision
from lightning_hybrid.errors import Float8Error
from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.precision import Float8
from models.cases import Samples, make
from models.hand_written import Layers

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
EMULATED = Float8(emulate=True)


def plugins(precision="32-true", **options):
    return {"plugins": [HybridPrecision(precision, float8=Float8(emulate=True, **options))]}


# --- one process -----------------------------------------------------------------------------------------------------


def by_hand(module, batches):
    """The losses and the state of a training loop without Lightning, on torchao's layers."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=True, round_scales_to_power_of_2=True)
    convert_to_float8_training(module, config=config, module_filter_fn=lambda m, _: not m.out_features % 16)
    optimizer, losses = module.configure_optimizers(), []
    for batch in batches:
        optimizer.zero_grad()
        loss = module.loss(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, module.state_dict()


class Recorded(Layers):
    optimizer = "sgd"  # steps of Adam are fused under the strategy, and round in another order

    def __init__(self):
        super().__init__()
        self.losses, self.kinds = [], set()

    def training_step(self, batch, batch_idx=0):
        self.kinds |= {type(m).__name__ for m in self.modules() if isinstance(m, nn.Linear)}
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        return loss

    validation_step = None


@pytest.mark.parametrize("has_strategy", [False, True])
def test_one_process_is_bitwise_torchao(has_strategy):
    module = make(Recorded, torch.float32)
    reference = copy.deepcopy(module)
    data = Samples(module.kind, 12, torch.float32)
    loader = DataLoader(data, batch_size=4)
    linears = [m for m in module.modules() if isinstance(m, nn.Linear)]
    keys = list(module.state_dict())
    strategy = Hybrid3DStrategy() if has_strategy else None
    trainer_of(1, strategy, [], **plugins()).fit(module, loader)
    losses, state = by_hand(reference, loader)
    assert len(losses) == 3 and all(torch.equal(a, b) for a, b in zip(module.losses, losses, strict=True))
    assert module.kinds == {"Float8Linear", "Linear"}, "the head has 4 classes"
    assert list(module.state_dict()) == keys == list(state)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    after = [m for m in module.modules() if isinstance(m, nn.Linear)]
    assert all(a is b for a, b in zip(after, linears, strict=True)), "the user's layers are back"


class Marked(nn.Module):
    """Layers of all kinds."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.blocks[1].mark = "of the user"
        self.hooked = nn.Linear(32, 32)
        self.hooked.register_forward_hook(lambda *_: None)
        self.odd = nn.Linear(32, 20)
        self.attention = nn.MultiheadAttention(32, 2)
        self.head = nn.Linear(32, 32)
        self.tied = self.head


def test_layers_that_are_left_are_listed():
    module = Marked()
    layers = Float8(exclude=["blocks.0"], emulate=True).convert(module)
    assert str(layers) == (
        "float8: 4 linear layers multiply in float8; not: blocks.0 (excluded); hooked (has hooks); odd"
        " (out_features=20, no multiple of 16); attention.out_proj (a NonDynamicallyQuantizableLinear with a forward of"
        " its own)"
    )
    assert module.blocks[1].mark == "of the user" and type(module.blocks[1]).__name__ == "Float8Linear"
    assert module.head.weight is module.tied.weight
    layers.restore()
    assert {type(m).__name__ for m in module.modules()} & {"Float8Linear"} == set()
    assert module.head is module.tied


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_recipes(recipe):
    module = make("Layers", torch.float32)
    Float8(recipe=recipe, emulate=True).convert(module)
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    plain = make("Layers", torch.float32)
    error = (module(x) - plain(x)).norm() / plain(x).norm()
    assert 1e-4 < error < 0.1


class Saving(Recorded):
    """Saves while its layers are converted."""

    def on_train_batch_end(self, *_):
        self.keys = set(self.trainer._checkpoint_connector.dump_checkpoint()["state_dict"])


def test_checkpoints_have_the_keys_of_plain_layers():
    module = make(Saving, torch.float32)
    trainer_of(1, Hybrid3DStrategy(), [], **plugins()).fit(module, DataLoader(Samples(module.kind, 4, torch.float32)))
    assert module.keys == set(Layers().state_dict())


def test_a_module_without_storage():
    trainer = trainer_of(1, Hybrid3DStrategy(num_microbatches=2), [], **plugins())
    torch.manual_seed(0)
    with trainer.init_module(empty_init=True):
        module = Recorded()
    loader = DataLoader(Samples(module.kind, 8, torch.float32), batch_size=4)
    trainer.fit(module, loader)
    torch.manual_seed(0)
    plain = Recorded()
    trainer_of(1, Hybrid3DStrategy(num_microbatches=2), [], **plugins()).fit(plain, loader)
    assert "Float8Linear" in module.kinds
    torch.testing.assert_close(module.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)


YAML = """
seed_everything: 7
trainer:
  accelerator: cpu
  logger: false
  plugins:
    - class_path: lightning_hybrid.HybridPrecision
      init_args:
        precision: bf16-mixed
        float8: {exclude: [head, "layers.0.*"], recipe: rowwise, emulate: true}
"""


def test_from_yaml(tmp_path):
    path = tmp_path / "float8.yaml"
    path.write_text(YAML)
    with mock.patch.object(sys, "argv", ["fit.py", "--config", str(path)]):
        plugin = LightningCLI(LightningModule, run=False, save_config_callback=None).trainer.precision_plugin
    assert plugin.precision == "bf16-mixed"
    assert plugin.float8 == Float8(exclude=["head", "layers.0.*"], recipe="rowwise", emulate=True)


def test_halves_of_a_batch_are_cast_as_the_batch():
    """Scales are powers of two; with others the outputs differ by two percent."""
    module = make("Layers", torch.float32)
    EMULATED.convert(module)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.cat([module(x[:32]), module(3 * x[32:])]), module(torch.cat([x[:32], 3 * x[32:]])))


# --- layouts ---------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "pp2": {"pp": 2},
    "zero3": {"dp": 2, "strategy": {"zero_stage": 3}},
    "recompute": {"pp": 2, "strategy": {"recompute": "full"}},
    "dp2": {"dp": 2},
    "zero1": {"dp": 2, "strategy": {"zero_stage": 1}},
    "zero2": {"dp": 2, "strategy": {"zero_stage": 2}},
    "pp2 x zero3": {"pp": 2, "dp": 2, "strategy": {"zero_stage": 3}},
    "pp2 x dp2 interleaved": {"pp": 2, "dp": 2, "strategy": {"stages_per_rank": 2, "schedule": "interleaved_1f1b"}},
    "zero bubble": {"pp": 2, "strategy": {"schedule": "zero_bubble"}},
}


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=() if n in ("pp2", "zero3", "recompute") else pytest.mark.slow) for n in LAYOUTS]
)
def test_parity(worlds, layout):
    run = Run("Layers", num_batches=3, dtype=torch.float32, trainer=plugins(), **LAYOUTS[layout])
    _, expected = check(worlds, run, tolerance=1e-5, timeout=300)
    plain = reference_of(worlds, replace(run, trainer={}))
    difference = max(float(abs(a / b - 1)) for a, b in zip(expected.losses, plain.losses, strict=True))
    assert difference > 1e-4, "the products are in float8"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", "zero3"])
def test_parity_of_llama(worlds, layout):
    run = Run("Llama", dtype=torch.float32, trainer=plugins(), **LAYOUTS[layout])
    check(worlds, run, tolerance=1e-4, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bfloat16_over_stages(worlds, precision):
    run = Run("Layers", pp=2, dtype=torch.float32, trainer=plugins(precision))
    check(worlds, run, fit_joined_batches, tolerance=2e-2, timeout=300)


@pytest.mark.slow
def test_compiled_layers(worlds):
    run = Run("Layers", pp=2, dtype=torch.float32, trainer=plugins(), strategy={"compile": {"backend": "aot_eager"}})
    check(worlds, run, tolerance=1e-5, timeout=600)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tensor_parallel_size", "context_parallel_size", "expert_parallel_size"])
def test_layouts_that_shard_a_product_are_refused(name):
    sizes = {"data_replicate_size": 2, name: 2}
    with pytest.raises(Float8Error, match=f"{name}=2 shards the tensors of a layer"):
        EMULATED.check_layout(ParallelLayout(**sizes))


def test_tensor_ranks_are_refused_before_anything_changes(worlds):
    for text in worlds.run(2, refusal, fit, Run("Layers", tp=2, dtype=torch.float32, trainer=plugins())):
        assert text.startswith("Float8Error: tensor_parallel_size=2"), text


def test_wrong_arguments():
    with pytest.raises(Float8Error, match=r"recipe='blockwise'\) is unknown; use one of tensorwise"):
        Float8(recipe="blockwise")
    with pytest.raises(
        Float8Error, match=r"names 'haed', which matches none of the 9 linear layers .* did you mean '.*head'"
    ):
        Float8(exclude="haed", emulate=True).convert(Layers())
    with pytest.raises(Float8Error, match=r"Layers has no linear layer to convert: layers.0.0, .* \(excluded\)"):
        Float8(exclude="layers.*", emulate=True).convert(Layers())


def test_without_torchao(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(Float8Error, match=r"pip install 'lightning-hybrid\[torchao\]'"):
        EMULATED.convert(Layers())


def test_devices_without_products_in_float8(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Float8Error, match=r"compute capability 8.9 or higher, and torch finds no GPU; pass .*emulate"):
        Float8().convert(Layers())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    with pytest.raises(Float8Error, match=r"8.9 or higher, and NVIDIA A100 has 8.0"):
        Float8().convert(Layers())


def test_a_recipe_that_does_not_follow_autocast_on_a_cpu_is_refused():
    precision = HybridPrecision("bf16-mixed", float8=Float8(recipe="rowwise_with_gw_hp", emulate=True))
    with pytest.raises(Float8Error, match='set recipe="rowwise"'):
        precision.convert_module(make("Layers"))
