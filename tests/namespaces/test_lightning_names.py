"""`lightning.pytorch` and `pytorch_lightning`: which one a user file uses, and one source for both."""

import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import lightning_hybrid
from harness.worlds.hidden_packages import OPTIONAL
from lightning_hybrid.namespaces import detect_lightning_namespace as namespaces
from lightning_hybrid.namespaces import lightning_namespaces
from lightning_hybrid.namespaces import load_twins_for_pytorch_lightning as twins
from lightning_hybrid.namespaces.detect_lightning_namespace import namespace_for
from lightning_hybrid.namespaces.lightning_namespaces import LIGHTNING, PYTORCH_LIGHTNING
from lightning_hybrid.step.tracing import intercept_step_operations as watch
from lightning_hybrid.strategies.hybrid3d import Hybrid3DStrategy

ROOT = Path(__file__).parents[2]
SOURCES = [path for room in twins._TWIN_PACKAGES for path in sorted((ROOT / "lightning_hybrid" / room).glob("*.py"))]

# -- whose classes ----------------------------------------------------------------------------------------------------


@pytest.fixture
def imported(monkeypatch):
    """Sets which namespaces are imported and installed; both are installed by default."""

    def pretend(*tops, installed=("lightning", "pytorch_lightning")):
        for namespace in (LIGHTNING, PYTORCH_LIGHTNING):
            monkeypatch.delitem(sys.modules, namespace.package, raising=False)
            if namespace.top in tops:
                monkeypatch.setitem(sys.modules, namespace.package, sys)
        monkeypatch.setattr(namespaces, "_is_installed", lambda namespace: namespace.top in installed)

    return pretend


def namespace_of(source, name="user", **names):
    """The namespace for a file that calls `frame()` to find it; imports that are not run still count."""
    file = {"__name__": name, "frame": lambda: sys._getframe(1), **names}
    exec(textwrap.dedent(source), file)
    return namespace_for(file["found"])


NOT_RUN = "found = frame()\nif not found:\n    "


@pytest.mark.parametrize("others", [(), ("lightning",), ("lightning", "pytorch_lightning")], ids=str)
@pytest.mark.parametrize(
    "source", ["import pytorch_lightning as pl", "from pytorch_lightning.callbacks import Callback"]
)
def test_file_uses_the_namespace_of_its_imports(imported, source, others):
    imported(*others)
    assert namespace_of(NOT_RUN + source) is PYTORCH_LIGHTNING


def test_file_with_only_a_model_uses_the_namespace_of_the_model(imported):
    imported("lightning", "pytorch_lightning")
    base = type("LightningModule", (), {"__module__": "pytorch_lightning.core.module"})
    model = type("Model", (base,), {"__module__": "project.model"})
    assert namespace_of("def build():\n    return frame()\nfound = build()", Model=model) is PYTORCH_LIGHTNING


def test_private_names_are_checked_once(monkeypatch):
    """Parsers of command lines read a class by its path a thousand times."""
    checked = []
    monkeypatch.setattr(lightning_namespaces, "check_lightning_internals", checked.append)
    lightning_namespaces._load.cache_clear()
    assert {lightning_hybrid.Hybrid3DStrategy for _ in range(3)} == {Hybrid3DStrategy}
    assert checked == ["lightning.pytorch"]


@pytest.mark.parametrize("named", ["", "import lightning.pytorch, pytorch_lightning"])
def test_default_is_the_imported_namespace(imported, named):
    imported("pytorch_lightning")
    assert namespace_of(NOT_RUN + (named or "pass")) is PYTORCH_LIGHTNING
    imported("lightning")
    assert namespace_of(NOT_RUN + (named or "pass")) is LIGHTNING


def test_running_namespace_wins_and_lightning_is_the_default(imported):
    imported("lightning", "pytorch_lightning")
    assert namespace_of("found = frame()") is LIGHTNING
    cli = {"__name__": "pytorch_lightning.cli"}
    exec("def run(function):\n    return function()", cli)
    assert namespace_of("def find():\n    return frame()\nfound = run[0](find)", "jsonargparse", run=[cli["run"]]) is (
        PYTORCH_LIGHTNING
    )


def test_missing_namespace_is_never_used(imported):
    imported(installed=("lightning",))
    assert namespace_of(NOT_RUN + "import pytorch_lightning as pl") is LIGHTNING
    imported(installed=())
    with pytest.raises(ModuleNotFoundError, match="lightning or pytorch-lightning, but neither is installed"):
        namespace_of("found = frame()")


# -- one source -------------------------------------------------------------------------------------------------------


def compiled(source):
    return twins._TwinLoader("twin", "twin.py").source_to_code(source, "twin.py")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_second_copy_does_not_import_the_first_namespace(path):
    loaded = twins._TwinLoader("twin", str(path)).source_to_code(path.read_bytes(), str(path))
    codes, imports = [loaded], []
    for code in codes:
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
        imports += [name for name in code.co_names if name.split(".")[0] == "lightning"]
    assert not imports


@pytest.mark.parametrize(
    "source",
    [
        "import lightning.pytorch",
        "import lightning as L",
        "from lightning import pytorch",
        "from . import hybrid3d",
        "from lightning_hybrid import strategies",
        "from lightning_hybrid.precision import HybridPrecision",
        "def late():\n    import lightning.fabric",
    ],
)
def test_unrenamable_import_is_refused(source):
    with pytest.raises(ImportError, match=r"twin\.py:\d: write"):
        compiled(source)


def test_lightning_frames_are_not_user_lines():
    inner = {"__name__": "pytorch_lightning.core.module", "user_line": watch.user_line}
    exec(compile("def log():\n    return user_line()", "/site/pytorch_lightning/core/module.py", "exec"), inner)
    user = {"__name__": "project.lightning.model", "log": inner["log"]}
    exec(compile("line = log()", "/project/lightning/model.py", "exec"), user)
    assert user["line"] == "/project/lightning/model.py:1"


# -- in a fresh process -----------------------------------------------------------------------------------------------

BLOCK = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from harness.worlds.hidden_packages import hide
hide({{missing}})
"""
# The imports are in the order in which isort puts them.
USE = """
import lightning_hybrid
assert not {{"torch", "lightning", "pytorch_lightning", "lightning_fabric"}} & set(sys.modules)
from lightning_hybrid import Hybrid3DStrategy, HybridPrecision
from lightning_hybrid.callbacks import AdaScale, PipelineTimeline
import {package} as pl
assert not {missing} & set(sys.modules)
from {package}.plugins.precision import Precision
from {package}.strategies import Strategy

import importlib, inspect, pickle
assert issubclass(Hybrid3DStrategy, Strategy) and issubclass(HybridPrecision, Precision)
assert issubclass(AdaScale, pl.Callback) and issubclass(PipelineTimeline, pl.Callback)
import {home} as home
assert home.AdaScale is AdaScale and pickle.loads(pickle.dumps(AdaScale)) is AdaScale
lines, first = inspect.getsourcelines(Hybrid3DStrategy.__init__)
assert lines[0].strip() == "def __init__(" and first == Hybrid3DStrategy.__init__.__code__.co_firstlineno
for name in {modules}:
    importlib.import_module(Hybrid3DStrategy.__module__.removesuffix("strategies.hybrid3d") + name)
assert isinstance(pl.Trainer(strategy="hybrid3d", accelerator="cpu", devices=1).strategy, Hybrid3DStrategy)
plugin, callback = HybridPrecision("bf16-mixed"), PipelineTimeline()
strategy = Hybrid3DStrategy(precision_plugin=plugin)
trainer = pl.Trainer(strategy=strategy, callbacks=callback, logger=False, accelerator="cpu", devices=1)
assert trainer.strategy is strategy and trainer.precision_plugin is plugin and callback in trainer.callbacks
"""
MODULES = [f"{path.parent.name}.{path.stem}".removesuffix(".__init__") for path in SOURCES]


@pytest.mark.parametrize(
    ("namespace", "missing"),
    [
        # By default in strategies/world/test_launchers.py, whose script hides the other one and trains.
        pytest.param(LIGHTNING, {"pytorch_lightning", "lightning_fabric"}, marks=pytest.mark.slow),
        (PYTORCH_LIGHTNING, {"lightning"}),
    ],
    ids=lambda value: getattr(value, "top", ""),
)
def test_everything_imports_with_one_namespace_missing(namespace, missing):
    missing = {*missing, *OPTIONAL}
    code = BLOCK.format(missing=missing) + USE.format(
        package=namespace.package, home=namespace.explicit_home, modules=MODULES, missing=missing
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr


def test_shared_files_are_one_module():
    # A scaler of a user's passes the check for its class in both.
    assert PYTORCH_LIGHTNING.counterpart_of("lightning_hybrid.precision.scaler") is None
    assert PYTORCH_LIGHTNING.counterpart_of("lightning_hybrid.step.recording.recorder_function_mode") is None
    assert PYTORCH_LIGHTNING.counterpart_of("lightning_utilities") is None
    twin = PYTORCH_LIGHTNING.counterpart_of("lightning_hybrid.strategies.hybrid3d")
    assert twin == "lightning_hybrid.for_pytorch_lightning.strategies.hybrid3d"
    assert LIGHTNING.counterpart_of(twin) == "lightning_hybrid.strategies.hybrid3d"
