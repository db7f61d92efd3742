"""Saved activations offloaded to a file give the same bits under all layouts; compressed ones, bounded errors."""

import os
import pickle
import tempfile
from dataclasses import replace
from functools import partial

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader

from harness.fits import Run, assert_bitwise_equal, fit, refusal, trainer_of
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import ActivationCompression, ActivationOffload
from models.cases import Samples
from models.hand_written import Layers
from models.hugging_face import GPT2Dropout

FOLDER = os.path.join(tempfile.gettempdir(), f"activations_{os.getuid()}")


class TwoLayers(GPT2Dropout):
    layers = 2


class Offload(ActivationOffload):
    """Records the bytes that layers have saved, those that stayed in memory, and the size of the file."""

    def __init__(self, **arguments):
        super().__init__(**{"min_bytes": 0, "fraction": 1.0, "to": f"disk:{FOLDER}", **arguments})

    def on_train_end(self, trainer, pl_module):
        activations = trainer.strategy.run.activations
        counts = activations.bytes
        self.recorded = counts.saved, counts.on_device, activations._moving.place._end


def assert_same_bits(worlds, run, **arguments):
    plain = worlds.run(run.world_size, fit, run)
    stored = worlds.run(run.world_size, fit, replace(run, callback=partial(Offload, **arguments)))
    assert_bitwise_equal(stored, plain)
    return [rank.extra for rank in stored]


ZERO3 = {"zero_stage": 3, "reshard_after_forward": True}
RUNS = {
    "plain": Run(TwoLayers, microbatches=1, dtype=torch.float32),
    "microbatches in bf16": Run(TwoLayers, microbatches=2, dtype=torch.float32, precision="bf16-mixed"),
    "pp": Run(TwoLayers, pp=2),
    "zero3": Run(TwoLayers, dp=2, strategy=ZERO3),
    "tp": Run(TwoLayers, tp=2, dtype=torch.float32),
}
SLOW = {
    "pp and zero3": Run(TwoLayers, pp=2, dp=2, strategy=ZERO3),
    "pp and tp": Run("Llama", pp=2, tp=2),
    "sequence": Run(TwoLayers, tp=2, sequence=True),
    "zero bubble": Run(TwoLayers, pp=2, strategy={"schedule": "zero_bubble"}),
    "interleaved": Run("Layers", pp=2, strategy={"stages_per_rank": 2}),
}


@pytest.mark.parametrize("name", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_offloaded_activations_give_the_same_bits(worlds, name):
    for saved, on_device, file_bytes in assert_same_bits(worlds, {**RUNS, **SLOW}[name]):
        assert saved > 0 and on_device <= 0.02 * saved  # tensors of ZeRO's and of no bytes aside, all are in the file
        assert file_bytes > 0


@pytest.mark.parametrize("recompute", ["full", pytest.param("selective", marks=pytest.mark.slow)])
def test_with_recomputation(worlds, recompute):
    run = Run(TwoLayers, pp=2, strategy={"recompute": {"*": "keep", "*.h.0": recompute}})
    for saved, on_device, _ in assert_same_bits(worlds, run):
        assert on_device < saved or saved == 0


class Rounded(ActivationCompression):
    def __init__(self, **arguments):
        super().__init__(**{"min_bytes": 256, "every_n_steps": 1, **arguments})
        self.recorded = []

    def on_train_batch_end(self, trainer, *arguments):
        super().on_train_batch_end(trainer, *arguments)
        metrics = trainer.callback_metrics
        self.recorded.append(
            [float(metrics.get(f"activation_{name}", 0.0)) for name in ("compression_ratio", "gradient_error")]
        )


def error_of(one, other):
    """The relative error of all gradients of the first step."""
    pairs = [(one.grads[0][name], other.grads[0][name]) for name in one.grads[0]]
    error = sum(float((a - b).double().square().sum()) for a, b in pairs)
    return (error / sum(float(a.double().square().sum()) for a, _ in pairs)) ** 0.5


LAYOUTS = {
    "plain": Run(TwoLayers, microbatches=1, dtype=torch.float32),
    "microbatches": Run(TwoLayers, dtype=torch.float32),
    "pp": Run(TwoLayers, pp=2, dtype=torch.float32),
    "zero3": Run(TwoLayers, dp=2, dtype=torch.float32, strategy=ZERO3),
    "tp": Run(TwoLayers, tp=2, dtype=torch.float32),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compressed_activations_bound_the_error(worlds, layout):
    run = LAYOUTS[layout]
    plain = worlds.run(run.world_size, fit, run)
    rounded = worlds.run(run.world_size, fit, replace(run, callback=Rounded))
    for one, other in zip(plain, rounded, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.losses[:1], other.losses[:1], strict=True))  # no forward
        assert 1e-4 < error_of(one, other) < 0.03
        assert min(ratio for ratio, _ in other.extra) > 2.5
        assert max(error for _, error in other.extra) < 0.03 and max(error for _, error in other.extra) > 1e-4


class Hooked(TwoLayers):
    """Its batches are compared with their microbatches before they run: exactly, since rounding is not linear."""

    def training_step(self, batch, batch_idx=0):
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(lambda gradient: 2 * gradient)
        return loss


@pytest.mark.parametrize("kind", [TwoLayers, Hooked])
def test_rounding_does_not_depend_on_the_layout(worlds, kind):
    """The numbers that round are keyed by microbatch and layer: stages give the bits of one process."""
    run = replace(LAYOUTS["microbatches"], case=kind, dtype=torch.float64, callback=Rounded)
    [alone] = worlds.run(1, fit, run)
    stages = worlds.run(2, fit, replace(run, pp=2))
    compared = 0
    for rank in stages:
        for name, gradient in rank.grads[0].items():
            if any(f".h.{k}." in name for k in range(2)):
                compared += 1
                torch.testing.assert_close(gradient, alone.grads[0][name], rtol=1e-9, atol=1e-13)
    assert compared > 10


def test_compressed_and_offloaded(worlds):
    """What is compressed is what is moved."""
    [counts] = worlds.run(1, fit_both, LAYOUTS["microbatches"])
    saved, on_device, file_bytes = counts
    assert on_device < 0.3 * saved and file_bytes < 0.6 * saved


def fit_both(run):
    offload = Offload()

    class Both(Rounded):
        def setup(self, trainer, pl_module, stage):
            super().setup(trainer, pl_module, stage)
            offload.setup(trainer, pl_module, stage)

        def on_train_end(self, trainer, pl_module):
            offload.on_train_end(trainer, pl_module)
            self.recorded = offload.recorded

    return fit(replace(run, callback=partial(Both, every_n_steps=0))).extra


class Shares(Callback):
    """Records the share of each layer of this rank."""

    def __init__(self, **arguments):
        self.offload = Offload(**arguments)

    def setup(self, trainer, pl_module, stage):
        self.offload.setup(trainer, pl_module, stage)

    def on_train_start(self, trainer, pl_module):
        self.recorded = dict(trainer.strategy.run.activations._moving.shares)


def shares_of(run, **arguments):
    return fit(replace(run, num_batches=1, callback=partial(Shares, **arguments))).extra


def test_shares_of_stages_and_layers(worlds):
    """By default each stage keeps the bytes of one microbatch; the first has more of them in flight."""
    run = Run(Layers, pp=2, microbatches=4)
    first, second = worlds.run(2, partial(shares_of, fraction=None), run)
    assert set(first.values()) == {0.5} and set(second.values()) == {0.0} and not first.keys() & second.keys()
    first, second = worlds.run(2, partial(shares_of, fraction=[0.75, 0.25]), run)
    assert set(first.values()) == {0.75} and set(second.values()) == {0.25}
    [only] = worlds.run(1, partial(shares_of, fraction={"layers.*": 0.5, "layers.0": 1}), Run(Layers))
    assert only["layers.0"] == 1.0 and only["layers.1"] == 0.5 and only["head"] == 0.0
    [alone] = worlds.run(1, partial(shares_of, fraction=None), Run(Layers))
    assert set(alone.values()) == {1.0}


def test_part_of_the_bytes_is_moved(worlds):
    [(saved, on_device, _)] = assert_same_bits(worlds, Run(TwoLayers, dtype=torch.float32), fraction=0.5)
    assert 0.4 * saved < on_device < 0.7 * saved


def test_refusals(worlds):
    for arguments, message in [
        ({"to": "cpu"}, "ActivationOffload(to='cpu'): the device of this run is 'cpu', whose tensors are in host"),
        ({"fraction": {"layer.*": 0.5}}, "names 'layer.*', which matches no layer; did you mean 'layers."),
        ({"fraction": [0.5, 0.5]}, "has 2 shares and the run has 1 stages"),
        ({"to": "disk:/no_disk/a"}, "ActivationOffload(to='disk:/no_disk/a'): /no_disk does not exist; mount the disk"),
        ({"to": "disk:/proc/no/folder"}, "ActivationOffload(to='disk:/proc/no/folder'): it cannot be written"),
    ]:
        [text] = worlds.run(1, refusal, partial(shares_of, **arguments), Run(Layers))
        assert message in text, text
    run = Run(Layers, strategy={"compile": {"backend": "eager"}}, callback=Rounded)
    [text] = worlds.run(1, refusal, fit, run)
    assert text.startswith("ActivationError: ActivationCompression(bits=8): layers are compiled")


def test_invalid_arguments():
    for arguments in ({"min_bytes": -1}, {"min_bytes": 1.5}, {"fraction": 1.5}, {"fraction": ["a"]}, {"to": "disk"}):
        with pytest.raises(ValueError, match="ActivationOffload"):
            ActivationOffload(**arguments)
    for arguments in ({"bits": 3}, {"bits": True}, {"min_bytes": -1}, {"every_n_steps": -1}):
        with pytest.raises(ValueError, match=r"ActivationCompression|every_n_steps"):
            ActivationCompression(**arguments)
    strategy = Hybrid3DStrategy()
    strategy.request_saved_activations(ActivationCompression(8).request)
    with pytest.raises(ValueError, match="are both requested"):
        strategy.request_saved_activations(ActivationCompression(4).request)


@pytest.mark.parametrize(
    ("taker", "given"),
    [
        (ActivationOffload, {"min_bytes": 1024, "fraction": 0.5, "to": "disk:/scratch"}),
        (ActivationOffload, {"min_bytes": 0, "fraction": [0.5, 1.0], "to": "cpu"}),
        (ActivationOffload, {"min_bytes": 0, "fraction": {"layers.*": 0.5}, "to": "cpu"}),
        (ActivationCompression, {"bits": 4, "min_bytes": 1024, "exclude": ["head"], "every_n_steps": 0}),
    ],
    ids=["number", "stages", "layers", "compression"],
)
def test_yaml_form_and_pickles(taker, given):
    parser = ArgumentParser()
    parser.add_class_arguments(taker, "it")
    parsed = taker(**parser.parse_string(yaml.safe_dump({"it": given})).it)
    assert parsed.request == taker(**given).request
    assert pickle.loads(pickle.dumps(parsed)).request == parsed.request


class Manual(Layers):
    """Calls backward and the optimizer itself, twice in a step."""

    def __init__(self, manual=True):
        super().__init__()
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx=0):
        if self.automatic_optimization:
            return super().training_step(batch, batch_idx)
        for _ in range(2):
            self.optimizers().zero_grad()
            self.manual_backward(self.loss(batch))
            self.optimizers().step()
        return None


def fit_by_command_line(manual, callbacks):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = {"strategy": "hybrid3d", "accelerator": "cpu", "devices": 1, "max_epochs": 1, **quiet}
    config = {"trainer": {**trainer, "callbacks": callbacks}, "model": {"manual": manual}}
    cli = LightningCLI(Manual, args=config, run=False, save_config_callback=None)
    cli.trainer.fit(cli.model, DataLoader(Samples("vectors", 8, torch.float32), 4))
    return cli.model.state_dict(), {name: float(value) for name, value in cli.trainer.callback_metrics.items()}


@pytest.mark.parametrize("manual", [False, True])
def test_callbacks_from_yaml(worlds, manual):
    """Also with manual optimization."""
    text = f"""
    - class_path: lightning_hybrid.callbacks.ActivationOffload
      init_args: {{min_bytes: 0, fraction: {{"layers.*": 1.0}}, to: "disk:{FOLDER}"}}
    - class_path: lightning_hybrid.callbacks.ActivationCompression
      init_args: {{bits: 8, min_bytes: 0, every_n_steps: 1}}
    """
    offload, compression = yaml.safe_load(text)
    [(plain, _)] = worlds.run(1, fit_by_command_line, manual, [])
    [(moved, _)] = worlds.run(1, fit_by_command_line, manual, [offload])
    assert plain.keys() == moved.keys() and all(torch.equal(plain[name], moved[name]) for name in plain)
    [(_, metrics)] = worlds.run(1, fit_by_command_line, manual, [offload, compression])
    assert metrics["activation_compression_ratio"] > 1 and 0 < metrics["activation_gradient_error"] < 0.05


def test_other_strategies_are_refused():
    trainer = trainer_of(1, "auto", [])
    for callback in (ActivationOffload(), ActivationCompression()):
        with pytest.raises(TypeError, match="of lightning_hybrid, and the Trainer has SingleDeviceStrategy"):
            callback.setup(trainer, None, "fit")
