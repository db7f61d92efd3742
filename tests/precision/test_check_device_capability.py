"""A precision that the device does not have is refused with the device, both capabilities and what works there."""

import pytest
import torch

from harness.trainer_runs import trainer_of
from lightning_hybrid import Hybrid3DStrategy, HybridPrecision
from lightning_hybrid.errors import Float8Error, PrecisionError
from lightning_hybrid.precision.capability import check_device_precision
from lightning_hybrid.precision.float8 import Float8
from models.tiny import Tiny, loader

CUDA = torch.device("cuda", 1)


@pytest.fixture
def capability(monkeypatch):
    def set_to(major, minor):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA T4")
        monkeypatch.setattr(torch.version, "hip", None)

    return set_to


@pytest.mark.parametrize(
    ("precision", "has", "words"),
    [
        ("bf16-mixed", (7, 5), r"precision='bf16-mixed' needs compute capability 8.0, .*7.5; set .*'16-mixed' or"),
        ("bf16-true", (7, 0), r"precision='bf16-true' needs compute capability 8.0, .*7.0; set .*'16-mixed' or"),
        ("16-mixed", (5, 2), r"needs compute capability 5.3, .*5.2; set precision='32-true'"),
        ("bf16-true", (3, 7), r"needs compute capability 8.0, .*3.7; set precision='32-true'"),
        ("float8", (8, 6), r"^float8 needs compute capability 8.9, .*8.6; set precision='bf16-mixed' without float8"),
        ("float8", (7, 5), r"^float8 needs compute capability 8.9, .*7.5; set precision='16-mixed' without float8"),
    ],
)
def test_refused(capability, precision, has, words):
    capability(*has)
    with pytest.raises(PrecisionError, match=words) as caught:
        check_device_precision(precision, CUDA)
    assert "NVIDIA T4 (cuda:1)" in str(caught.value) and caught.value.docs == "errors.md#precision-device"


@pytest.mark.parametrize(
    ("precision", "has"),
    [("bf16-true", (8, 0)), ("bf16-mixed", (9, 0)), ("float8", (8, 9)), ("float8", (10, 0)), ("16-mixed", (7, 5))],
)
def test_allowed(capability, precision, has):
    capability(*has)
    check_device_precision(precision, CUDA)


def test_no_limit_is_known(capability, monkeypatch):
    capability(3, 0)
    for precision in ("32-true", "64-true"):
        check_device_precision(precision, CUDA)
    check_device_precision("float8", torch.device("cpu"))
    monkeypatch.setattr(torch.version, "hip", "6.0")  # whose capabilities are numbered otherwise
    check_device_precision("bf16-true", CUDA)


def test_float64_on_mps_is_refused():
    with pytest.raises(PrecisionError, match="MPS device has no float64; set precision='32-true'"):
        check_device_precision("64-true", torch.device("mps"))


def test_the_strategy_checks_its_device(capability, monkeypatch):
    capability(7, 5)
    for precision, kind, words in (
        ("bf16-mixed", PrecisionError, "NVIDIA T4"),
        ("16-mixed", ValueError, "process_group_backend='gloo': gloo sends no tensor on cuda:1"),
    ):
        plugin = HybridPrecision(precision)
        strategy = Hybrid3DStrategy(precision_plugin=plugin, process_group_backend="gloo", parallel_devices=[CUDA])
        monkeypatch.setattr(type(strategy), "root_device", CUDA)
        with pytest.raises(kind, match=words):
            strategy.setup_environment()


def test_a_lacking_precision_is_found_before_ranks_start(capability, monkeypatch):
    trainer = trainer_of(2, 2, plugins=[HybridPrecision("32-true", float8=Float8())])
    with pytest.raises(Float8Error, match=r"need a GPU .*torch finds no GPU; pass Float8\(emulate=True\)"):
        trainer.fit(Tiny(), loader(4))
    assert not trainer.strategy.launcher.procs
    capability(7, 5)
    trainer = trainer_of(2, 2, precision="bf16-mixed")
    monkeypatch.setattr(type(trainer.strategy), "root_device", CUDA)
    with pytest.raises(PrecisionError, match=r"needs compute capability 8.0, .*7.5; set precision='16-mixed'"):
        trainer.fit(Tiny(), loader(4))
    assert not trainer.strategy.launcher.procs


@pytest.mark.parametrize(
    ("devices", "strategy_options"),
    [(1, {}), (1, {"num_microbatches": 1}), (2, {})],
    ids=["Lightning's strategy", "one process", "before ranks"],
)
def test_a_scaler_without_its_gpu_is_refused(devices, strategy_options, monkeypatch):
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: True)
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = torch.amp.GradScaler(init_scale=1024.0)
    plugins = [HybridPrecision("16-mixed", scaler=scaler)]
    trainer = trainer_of(devices, strategy_options=strategy_options, plugins=plugins)
    with pytest.raises(PrecisionError, match=r"needs a GPU: .*set precision='bf16-mixed' on CPUs"):
        trainer.fit(Tiny(), loader(4))
    assert devices == 1 or not trainer.strategy.launcher.procs


@pytest.mark.parametrize("devices", [1, 2])
def test_two_precisions_are_refused_before_ranks_start(devices):
    plugin = HybridPrecision("bf16-mixed")
    trainer = trainer_of(devices, strategy_options={"precision_plugin": plugin}, precision="bf16-true")
    message = (
        r"Trainer\(precision='bf16-true'\), but .*; delete precision= to train in bf16-mixed, or precision_plugin="
    )
    with pytest.raises(PrecisionError, match=message):
        trainer.fit(Tiny(), loader(4))
    assert devices == 1 or not trainer.strategy.launcher.procs
