"""A Trainer of `pytorch_lightning` equals one of `lightning.pytorch`, with objects of either."""

import gc
import logging

import lightning.pytorch.cli
import pytest
import pytorch_lightning
import torch
from pytorch_lightning.cli import LightningCLI
from torch.utils.data import DataLoader

from harness.trainer_runs import assert_same, ignore_warnings, weights_of
from lightning_hybrid import for_lightning, for_pytorch_lightning
from models.tiny import Samples, Tiny

HOMES = {"lightning": for_lightning, "pytorch_lightning": for_pytorch_lightning}
PACKAGES = {"lightning": lightning.pytorch, "pytorch_lightning": pytorch_lightning}


class Single:
    """A half-precision step with a log; for a LightningModule of either namespace."""

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self.layers(batch["x"].float()), batch["y"].float())
        self.log("loss", loss.item(), on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.layers(batch["x"].float()).mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def module_of(top):
    base = PACKAGES[top].LightningModule
    model = type("Model", (Single, base), {})()
    model.layers = Tiny().layers.float()
    return model


def fit(top, objects_of, precision=None, *, as_plugin=False, late=False):
    """Fit with a Trainer and a module of one namespace, and our objects made for that one or the other."""
    ignore_warnings()
    for name in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    home, model = HOMES[objects_of], module_of(top)
    scale = home.AdaScale()
    if late:
        model.configure_callbacks = lambda: scale
    given = {"plugins": home.HybridPrecision(precision)} if as_plugin else {"precision": precision}
    strategy = home.Hybrid3DStrategy(pipeline_parallel_size=2, num_microbatches=2)
    trainer = PACKAGES[top].Trainer(
        strategy=strategy,
        callbacks=[] if late else [scale],
        accelerator="cpu",
        devices=torch.distributed.get_world_size() if torch.distributed.is_initialized() else 2,
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **given,
    )
    assert trainer.strategy is strategy and isinstance(strategy, HOMES[top].Hybrid3DStrategy)
    trainer.fit(model, DataLoader(Samples(), batch_size=4), DataLoader(Samples(), batch_size=4))
    assert isinstance(scale, HOMES[top].AdaScale) and isinstance(strategy.precision_plugin, HOMES[top].HybridPrecision)
    return weights_of(model) | {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.extended  # by default with both command lines, below
@pytest.mark.parametrize(
    ("objects_of", "options"),
    [
        ("pytorch_lightning", {}),
        pytest.param("pytorch_lightning", {"precision": "16-mixed", "as_plugin": True}, marks=pytest.mark.slow),
        ("lightning", {"precision": "16-mixed", "as_plugin": True}),
        pytest.param("lightning", {"late": True}, marks=pytest.mark.slow),
    ],
    ids=["same", "same-16-plugin", "others-16-plugin", "others-late"],
)
def test_stages_are_bitwise_equal_under_both_namespaces(worlds, objects_of, options):
    shared_options = {name: value for name, value in options.items() if name in ("precision", "as_plugin")}
    expected = worlds.run(2, fit, "lightning", "lightning", **shared_options)[0]
    assert {"loss", "val", "adascale_gain"} <= set(expected)
    for result in worlds.run(2, fit, "pytorch_lightning", objects_of, **options):
        assert_same(result, expected, rtol=0, atol=0)


# -- objects of the other namespace -----------------------------------------------------------------------------------


def reachable_from(thing, found):
    for value in gc.get_referents(thing.__dict__, *thing.__dict__.values()):
        if hasattr(value, "__dict__") and not isinstance(value, type) and value not in found:
            found.append(value)
    return found


def moved(top, other):
    made, own = HOMES[other], HOMES[top]
    strategy = made.Hybrid3DStrategy(precision_plugin=made.HybridPrecision("64-true"), pipeline_parallel_size=1)
    strategy.note = "mine"
    callback = made.PipelineTimeline("there.svg")
    trainer = PACKAGES[top].Trainer(strategy=strategy, callbacks=callback, logger=False, accelerator="cpu", devices=1)
    assert (trainer.strategy, strategy.note, str(callback.paths[0])) == (strategy, "mine", "there.svg")
    assert type(callback) is own.PipelineTimeline
    # All of its objects, Lightning's defaults included, are of one namespace.
    reachable = [strategy, *reachable_from(strategy, [])]
    reachable += reachable_from(strategy.precision_plugin, [])
    tops = {type(value).__module__.split(".")[0] for value in reachable}
    assert (PACKAGES[other].__name__.split(".")[0] in tops) is False and PACKAGES[top].__name__.split(".")[0] in tops

    class Derived(made.Hybrid3DStrategy):
        pass

    with pytest.raises(TypeError, match=f"derives from Hybrid3DStrategy for {PACKAGES[other].__name__}, but the Train"):
        PACKAGES[top].Trainer(strategy=Derived(), accelerator="cpu", devices=1)


@pytest.mark.world(1)
def test_trainer_accepts_objects_of_the_other_namespace():
    ignore_warnings()
    moved("pytorch_lightning", "lightning")
    moved("lightning", "pytorch_lightning")


# -- command line -----------------------------------------------------------------------------------------------------

CONFIG = """
trainer:
  accelerator: cpu
  devices: 2
  max_steps: 2
  logger: false
  default_root_dir: FOLDER
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: lightning_hybrid.callbacks.PipelineTimeline
      init_args:
        step: 1
        path: FOLDER/timeline.svg
  plugins:
    - class_path: lightning_hybrid.HybridPrecision
      init_args:
        precision: bf16-mixed
  strategy:
    class_path: lightning_hybrid.Hybrid3DStrategy
    init_args:
      pipeline_parallel_size: 2
      num_microbatches: 2
"""


class Model(Single, pytorch_lightning.LightningModule):
    def __init__(self, layers: int = 4):
        super().__init__()
        self.layers = Tiny(layers).layers.float()

    def train_dataloader(self):
        return DataLoader(Samples(), batch_size=4)


class LightningModel(Single, lightning.pytorch.LightningModule):
    def __init__(self, layers: int = 4):
        super().__init__()
        self.layers = Tiny(layers).layers.float()

    def train_dataloader(self):
        return DataLoader(Samples(), batch_size=4)


def run_cli(top, config):
    ignore_warnings()
    # Both command lines are imported here: the class paths mean the one that reads them.
    kind = {"lightning": lightning.pytorch.cli.LightningCLI, "pytorch_lightning": LightningCLI}[top]
    model = {"lightning": LightningModel, "pytorch_lightning": Model}[top]
    cli = kind(model, args=["fit", "--config", config], save_config_kwargs={"overwrite": True})
    assert type(cli.trainer.strategy) is HOMES[top].Hybrid3DStrategy
    assert any(type(callback) is HOMES[top].PipelineTimeline for callback in cli.trainer.callbacks)
    assert type(cli.trainer.precision_plugin) is HOMES[top].HybridPrecision
    return weights_of(cli.model)


def test_class_paths_of_both_command_lines(worlds, tmp_path):
    config = tmp_path / "layout.yaml"
    config.write_text(CONFIG.replace("FOLDER", str(tmp_path)))
    expected = worlds.run(2, run_cli, "lightning", str(config))[0]
    assert_same(worlds.run(2, run_cli, "pytorch_lightning", str(config))[0], expected, rtol=0, atol=0)
    assert (tmp_path / "timeline.svg").exists()
    # The saved config of a command line can be read again.
    saved = tmp_path / "config.yaml"
    assert "Hybrid3DStrategy" in saved.read_text()
    assert_same(worlds.run(2, run_cli, "pytorch_lightning", str(saved))[0], expected, rtol=0, atol=0)
