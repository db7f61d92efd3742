"""Optimizer states that are not in memory between steps: the same numbers to the last bit."""

import os

import pytest
import torch
from lightning.pytorch import Callback
from models import GPT2, make
from torch import nn
from trainer.fitting import Run, fit, refusal
from worlds_plugin import RankError

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.zero.offload import OffloadedStates, steps_in_turn
from lightning_hybrid.zero.state_file import OffloadError, StateFile


def with_offload(run, where):
    return Run(**{**vars(run), "strategy": {**run.strategy, "offload": where}})


def assert_same_bits(worlds, run, where):
    plain = worlds.run(run.world_size, fit, run)
    for one, other in zip(plain, worlds.run(run.world_size, fit, with_offload(run, where)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.losses, other.losses, strict=True))
        assert one.state.keys() == other.state.keys()
        assert all(torch.equal(value, other.state[name]) for name, value in one.state.items())


class TwoLayers(GPT2):
    layers = 2


CLIPPED = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
RUNS = {
    "one process": Run(TwoLayers, num_batches=4, microbatches=1),
    "stages": Run(TwoLayers, pp=2, num_batches=4, trainer=CLIPPED),
    "zero3": Run(TwoLayers, dp=2, num_batches=4, strategy={"zero_stage": 3}, trainer=CLIPPED),
}


@pytest.mark.parametrize("run", list(RUNS.values()), ids=list(RUNS))
def test_states_in_a_file(worlds, tmp_path, run):
    assert_same_bits(worlds, run, f"disk:{tmp_path}/states")
    assert not os.listdir(tmp_path / "states"), "files are left behind"


@pytest.mark.parametrize(
    "run", [pytest.param(RUNS["zero3"], marks=pytest.mark.slow), RUNS["stages"]], ids=["zero3", "stages"]
)
def test_states_on_the_host(worlds, run):
    assert_same_bits(worlds, run, "cpu")


BY_LAYER = Run("GPT2", dp=2, num_batches=4, strategy={"zero_stage": 3, "reshard_after_forward": True}, validate=True)


def all_on_disk(folder):
    return {"parameters": f"disk:{folder}/p", "gradients": "cpu", "optimizer_states": f"disk:{folder}/s"}


@pytest.mark.parametrize(
    "run", [BY_LAYER, pytest.param(RUNS["zero3"], marks=pytest.mark.slow)], ids=["by layer", "by step"]
)
def test_parameters_in_a_file(worlds, tmp_path, run):
    assert_same_bits(worlds, run, all_on_disk(tmp_path))
    assert not os.listdir(tmp_path / "p"), "files are left behind"


class CountsResident(Callback):
    """The most bytes of a file that are in memory when some of them are let go, those of its largest layer, and all."""

    noted = None

    def count(self, file):
        let_go, most = file.let_go, 0

        def counted(region):
            nonlocal most
            most = max(most, file.resident_bytes())
            let_go(region)
            self.noted = most, max(length for _, length in file._regions), file.nbytes

        file.let_go = counted


class ResidentParameters(CountsResident):
    def on_train_start(self, trainer, pl_module):
        [file] = {region.file for region in trainer.strategy._zero.regions.values()}
        assert file.resident_bytes() == 0
        self.count(file)

    def on_train_batch_end(self, trainer, *_):
        assert {region.file.resident_bytes() for region in trainer.strategy._zero.regions.values()} == {0}


def test_of_parameters_in_a_file_two_layers_at_most_are_in_memory(worlds, tmp_path):
    strategy = {"zero_stage": 3, "reshard_after_forward": True, "offload": all_on_disk(tmp_path)}
    run = Run("Layers", dp=2, num_batches=3, change=wider, callback=ResidentParameters, strategy=strategy)
    for rank in worlds.run(2, fit, run):
        most, layer, whole = rank.extra
        assert 0 < most <= 2 * layer < whole / 2


class CutsOff(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            [file] = {region.file for region in trainer.strategy._zero.regions.values()}
            os.ftruncate(file._file.fileno(), 0)


def test_parameters_whose_file_was_cut_off_stop_the_step(worlds, tmp_path):
    strategy = {"zero_stage": 3, "offload": all_on_disk(tmp_path)}
    run = Run("Layers", dp=2, num_batches=3, callback=CutsOff, strategy=strategy)
    with pytest.raises(RankError, match=r"the file with the parameters .* has 0 bytes where"):
        worlds.run(2, fit, run)


class ResidentStates(CountsResident):
    def on_train_start(self, trainer, pl_module):
        [offloaded] = trainer.strategy._offloaded
        self.count(offloaded.file)


def test_two_layers_at_most_are_in_memory(worlds, tmp_path):
    run = Run("Layers", num_batches=3, microbatches=1, change=wider, callback=ResidentStates)
    [rank] = worlds.run(1, fit, with_offload(run, f"disk:{tmp_path}"))
    most, layer, whole = rank.extra
    assert 0 < most <= 2 * layer < whole / 2


def wider(module):
    module.layers = nn.ModuleList(
        nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 16)) for _ in range(6)
    ).double()


def make_optimizer(kind, **options):
    return kind([nn.Parameter(torch.zeros(3, 4))], **options)


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (torch.optim.AdamW, {}, True),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, True),
        (torch.optim.Adagrad, {}, True),
        (torch.optim.LBFGS, {}, False),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_which_optimizers_step_in_turn(kind, options, expected):
    assert steps_in_turn(make_optimizer(kind, **options)) is expected


def test_a_full_disk_is_told_before_anything_changes(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OffloadError, match=r"MiB are free there .*No space left.*name another folder"):
        StateFile(str(tmp_path), [2**20])


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OffloadError, match="cannot be written"):
        StateFile(str(tmp_path / "file" / "folder"), [10])


def test_a_file_that_was_cut_off_stops_the_step_before_it_changes_anything(tmp_path):
    p = nn.Parameter(torch.ones(8, 8))
    optimizer = torch.optim.AdamW([p])
    offloaded = OffloadedStates(optimizer, [[p]], str(tmp_path))
    p.grad = torch.ones_like(p)
    optimizer.step()
    before = p.detach().clone()
    os.ftruncate(offloaded.file._file.fileno(), 0)
    with pytest.raises(OffloadError, match="has 0 bytes where"):
        optimizer.step()
    assert torch.equal(p, before)
    offloaded.file.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": "gpu"}, "offload='gpu'"),
        ({"offload": "disk:"}, "disk:PATH"),
        ({"offload": {"weights": "cpu"}}, "'weights'"),
        ({"offload": {"parameters": "cpu"}, "zero_stage": 2}, "zero_stage=3"),
        ({"offload": {"gradients": "cpu"}}, "zero_stage=1"),
        ({"offload": {"parameters": "cpu"}, "zero_stage": 3}, "must be where the parameters are"),
        ({"offload": {"parameters": "disk:p"}, "zero_stage": 3}, "must be where the parameters are"),
        ({"offload": {"gradients": "disk:p"}, "zero_stage": 3}, "'gradients' .'cpu'."),
    ],
)
def test_options_that_are_none(options, message):
    with pytest.raises(ValueError, match=message):
        Hybrid3DStrategy(**options)


def test_an_optimizer_that_looks_at_all_parameters_is_refused(worlds, tmp_path):
    run = with_offload(Run("Layers", microbatches=1, change=lbfgs), f"disk:{tmp_path}")
    [said] = worlds.run(1, refusal, fit, run)
    assert "LBFGS" in said


def lbfgs(module):
    module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters())


def test_hooks_on_the_step_run_once(tmp_path):
    calls = []
    module = make("Layers")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    offloaded = OffloadedStates(optimizer, [list(layer.parameters()) for layer in module.layers], str(tmp_path))
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step(lambda: calls.append("closure"))
    offloaded.close()
    assert calls == ["closure", "before", "after"]
