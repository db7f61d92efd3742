"""`lightning.pytorch` or `pytorch_lightning`: one of them in a process, with the same numbers."""

import runpy
import sys
from types import SimpleNamespace

import pytest
import torch

from harness.launched_jobs import run
from harness.trainer_runs import assert_same
from harness.worlds.hidden_packages import OPTIONAL
from lightning_hybrid import namespace
from lightning_hybrid.namespace import follow, package_in_use
from lightning_hybrid.step.tracing import mode as watch

# -- the choice -------------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_imported(monkeypatch):
    for name in namespace.PACKAGES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    fake = SimpleNamespace(import_module=lambda name: monkeypatch.setitem(sys.modules, name, sys))
    monkeypatch.setattr(namespace, "importlib", fake)


@pytest.mark.parametrize(
    ("source", "package"),
    [
        ("import pytorch_lightning as pl", "pytorch_lightning"),
        ("from pytorch_lightning.callbacks import Callback", "pytorch_lightning"),
        ("import lightning as L", "lightning.pytorch"),
        ("import lightning.pytorch, pytorch_lightning", "lightning.pytorch"),
        ("import torch", "lightning.pytorch"),
    ],
)
def test_imports_of_the_file_choose(nothing_imported, source, package):
    follow(compile(source, "user.py", "exec"))
    assert package_in_use() == package


def test_what_is_installed_chooses(nothing_imported, monkeypatch):
    monkeypatch.setattr(namespace, "_is_installed", lambda top: top == "pytorch_lightning")
    assert package_in_use() == "pytorch_lightning"


def test_lightning_frames_are_not_user_lines():
    inner = {"__name__": "pytorch_lightning.core.module", "user_line": watch.user_line}
    exec(compile("def log():\n    return user_line()", "/site/pytorch_lightning/core/module.py", "exec"), inner)
    user = {"__name__": "project.lightning.model", "log": inner["log"]}
    exec(compile("line = log()", "/project/lightning/model.py", "exec"), user)
    assert user["line"] == "/project/lightning/model.py:1"


# -- in a fresh process -----------------------------------------------------------------------------------------------

HIDE = f"from harness.worlds.hidden_packages import hide; hide({{{{*{OPTIONAL}, {{}}}}}})\n"
# The imports are in the order in which isort puts them.
USE = """
import sys
import lightning_hybrid
assert not {"torch", "lightning", "pytorch_lightning", "lightning_fabric"} & set(sys.modules)
from lightning_hybrid import Hybrid3DStrategy, HybridPrecision
from lightning_hybrid.callbacks import AdaScale, PipelineTimeline
import PACKAGE as pl
import importlib, pickle, pkgutil
assert issubclass(AdaScale, pl.Callback) and pickle.loads(pickle.dumps(AdaScale)) is AdaScale
for module in pkgutil.walk_packages(lightning_hybrid.__path__, "lightning_hybrid."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert type(pl.Trainer(strategy="hybrid3d", accelerator="cpu", devices=1).strategy) is Hybrid3DStrategy
plugin, callback = HybridPrecision("bf16-mixed"), PipelineTimeline()
strategy = Hybrid3DStrategy(precision_plugin=plugin)
trainer = pl.Trainer(strategy=strategy, callbacks=callback, logger=False, accelerator="cpu", devices=1)
assert trainer.strategy is strategy and trainer.precision_plugin is plugin and callback in trainer.callbacks
"""
# Both names are one package, whichever of its modules is imported by which.
ONE = """
import pytorch_lightning as pl
import lightning_hybrid, lightning, lightning.pytorch.callbacks, lightning.fabric, lightning_fabric
assert lightning.pytorch is pl and lightning.Trainer is pl.Trainer and lightning.fabric is lightning_fabric
assert lightning.pytorch.callbacks is pl.callbacks and pl.__spec__.name == pl.__name__ == "pytorch_lightning"
assert isinstance(pl.Trainer(strategy="hybrid3d", accelerator="cpu", devices=1).strategy, pl.strategies.Strategy)
"""
MIXED = """
import lightning.pytorch as pl, lightning_hybrid, pytorch_lightning as other
assert type(pl.Trainer(strategy="hybrid3d", accelerator="cpu", devices=1).strategy).__name__ == "Hybrid3DStrategy"
from lightning_hybrid import Hybrid3DStrategy, HybridPrecision, callbacks
class Mine(callbacks.AdaScale): pass
for ours in ({"strategy": "hybrid3d"}, {"strategy": Hybrid3DStrategy()}, {"callbacks": [Mine()]},
             {"plugins": HybridPrecision()}):
    try:
        other.Trainer(accelerator="cpu", devices=1, **ours)
    except TypeError as error:
        print(error)
other.Trainer(accelerator="cpu", devices=1)
"""


@pytest.mark.parametrize(
    "code",
    [
        # By default in strategies/world/test_launchers.py, whose script hides the other one and trains.
        pytest.param(
            HIDE.format('"pytorch_lightning", "lightning_fabric"') + USE.replace("PACKAGE", "lightning.pytorch"),
            marks=pytest.mark.slow,
        ),
        HIDE.format('"lightning"') + USE.replace("PACKAGE", "pytorch_lightning"),
        pytest.param(USE.replace("PACKAGE", "pytorch_lightning"), marks=pytest.mark.slow),
        pytest.param(ONE, marks=pytest.mark.slow),
    ],
    ids=["lightning alone", "pytorch_lightning alone", "isort", "both names"],
)
def test_one_package_in_a_process(code):
    code, output, _ = run([sys.executable, "-W", "ignore", "-c", code])
    assert code == 0, output


def test_trainer_of_the_other_package_names_what_to_do():
    code, output, _ = run([sys.executable, "-W", "ignore", "-c", MIXED])
    assert code == 0, output
    for given in ("strategy='hybrid3d'", "strategy=Hybrid3DStrategy", "callbacks=Mine", "plugins=HybridPrecision"):
        assert f"Trainer({given}): the Trainer is of pytorch_lightning, but lightning.pytorch was imported" in output
    assert output.count("take the Trainer and the module from lightning.pytorch, or import pytorch") == 4


# -- numbers ----------------------------------------------------------------------------------------------------------

TRAIN = """
import sys, warnings
import torch
from lightning_hybrid import Hybrid3DStrategy, HybridPrecision
from lightning_hybrid.callbacks import AdaScale
from PACKAGE import LightningModule
from PACKAGE.cli import LightningCLI
from harness.trainer_runs import weights_of
from models.tiny import Samples, Tiny

warnings.simplefilter("ignore")

class Model(Tiny):
    def __init__(self):
        super().__init__()
        self.layers.float()

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self(batch["x"].float()), batch["y"].float())
        self.log("loss", loss.item(), on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self(batch["x"].float()).mean())

    def train_dataloader(self):
        return torch.utils.data.DataLoader(Samples(), batch_size=4)

    val_dataloader = train_dataloader

assert issubclass(Model, LightningModule)
cli = LightningCLI(Model, args=["fit", "--config", sys.argv[1]], save_config_kwargs={"overwrite": True})
assert type(cli.trainer.strategy) is Hybrid3DStrategy and type(cli.trainer.precision_plugin) is HybridPrecision
assert any(type(callback) is AdaScale for callback in cli.trainer.callbacks)
numbers = weights_of(cli.model) | {name: float(value) for name, value in cli.trainer.callback_metrics.items()}
if cli.trainer.is_global_zero:
    torch.save(numbers, sys.argv[2])
"""
CONFIG = """
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 1
  accumulate_grad_batches: 2
  gradient_clip_val: 1.0
  logger: false
  default_root_dir: FOLDER
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks: [{class_path: lightning_hybrid.callbacks.AdaScale}]
  plugins: [{class_path: lightning_hybrid.HybridPrecision, init_args: {precision: 16-mixed}}]
  strategy:
    class_path: lightning_hybrid.Hybrid3DStrategy
    init_args: {pipeline_parallel_size: 2, num_microbatches: 2, start_method: START}
"""


def run_script(*arguments):
    sys.argv = list(arguments)
    runpy.run_path(arguments[0])


def test_numbers_under_both_packages_are_equal(worlds, tmp_path):
    config, found = tmp_path / "run.yaml", []
    for package in namespace.PACKAGES:
        start = "popen" if package == "lightning.pytorch" else "fork"
        config.write_text(CONFIG.replace("FOLDER", str(tmp_path)).replace("START", start))
        script, numbers = tmp_path / f"{start}.py", str(tmp_path / f"{start}.pt")
        script.write_text(TRAIN.replace("PACKAGE", package))
        if package == "lightning.pytorch":
            worlds.run(2, run_script, str(script), str(config), numbers)
        else:
            code, output, _ = run([sys.executable, str(script), str(config), numbers])
            assert code == 0, output
        found.append(torch.load(numbers))
    assert {"loss", "val", "adascale_gain"} <= set(found[0])
    assert_same(*found, rtol=0, atol=0)


MODULE = """
import pytorch_lightning as pl
import torch
from models.tiny import loader

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))

    def training_step(self, batch, batch_idx):
        return self.layers(batch["x"].to(self.layers[0].weight)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return loader(4)
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["explain", "verify"])
def test_commands_take_modules_of_pytorch_lightning(tmp_path, command):
    (tmp_path / "model.py").write_text(MODULE)
    arguments = [command, f"{tmp_path}/model.py:Model", "--layout", "pp=2"]
    code, output, _ = run([sys.executable, "-m", "lightning_hybrid.cli", *arguments])
    assert code == 0 and "hybrid3d: 2 ranks" in output if command == "explain" else "same" in output, output
