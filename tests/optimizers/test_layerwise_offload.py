"""Optimizer states that are not in memory between steps: bitwise equal results."""

import dataclasses
import os
import re

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from harness.fits import Run, fit, refusal
from harness.resident_file import resident_bytes
from harness.simulated_host import SimulatedHost
from harness.trainer_runs import trainer_of
from harness.zero_runs import KINDS, SUBSETS, assert_bits, assert_same_bits, with_offload
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.errors import OffloadError
from lightning_hybrid.optimizers.layer_step import LayerwiseStep
from lightning_hybrid.optimizers.state_file import Region, StateFile
from lightning_hybrid.optimizers.trial import steps_independently
from models.cases import make
from models.hugging_face import GPT2
from models.tiny import Tiny, loader


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


def parameters_on_disk(folder):
    return {"parameters": f"disk:{folder}/p"}


def all_on_disk(folder):
    return {**parameters_on_disk(folder), "gradients": "cpu", "optimizer_states": f"disk:{folder}/s"}


@pytest.mark.parametrize(
    ("run", "where"),
    [
        pytest.param(BY_LAYER, all_on_disk, id="by layer"),
        pytest.param(RUNS["zero3"], parameters_on_disk, id="by step, parameters", marks=pytest.mark.slow),
        pytest.param(BY_LAYER, parameters_on_disk, id="by layer, parameters", marks=pytest.mark.slow),
        pytest.param(RUNS["zero3"], all_on_disk, id="by step", marks=pytest.mark.slow),
    ],
)
def test_parameters_in_a_file(worlds, tmp_path, run, where):
    assert_same_bits(worlds, run, where(tmp_path))
    assert not os.listdir(tmp_path / "p"), "files are left behind"


@pytest.mark.slow
@pytest.mark.parametrize("subset", ["", "g", "s", "gs"])
def test_parameters_in_a_file_of_another_device(worlds, tmp_path, subset):
    where = parameters_on_disk(tmp_path) | {KINDS[letter]: "cpu" for letter in subset}
    run = dataclasses.replace(with_offload(BY_LAYER, where), callback=SimulatedHost)
    ranks = worlds.run(2, fit, run)
    assert_bits(worlds.run(2, fit, BY_LAYER), ranks, by_other_kernels=True)
    parameters, gradients, states, between = SUBSETS[f"p{subset}"]
    for rank in ranks:
        assert rank.extra == {"within": {(parameters, gradients)}, "states": {states}, "between": {between}}


def each_subset():
    for stage, per_layer in ((3, True), (3, False), (2, False), (1, True)):
        subsets = [subset for subset in SUBSETS if stage == 3 or "p" not in subset]
        yield pytest.param(stage, per_layer, subsets, id=f"stage {stage}{' by layer' if per_layer else ''}")


@pytest.mark.slow  # by default in files, in test_parameters_in_a_file
@pytest.mark.parametrize(("stage", "per_layer", "subsets"), list(each_subset()))
def test_each_subset_on_the_host(worlds, stage, per_layer, subsets):
    """Bitwise equal, and no operation reads two devices."""
    strategy = {"zero_stage": stage, "reshard_after_forward": per_layer}
    run = Run("Tied", dp=2, num_batches=4, validate=True, strategy=strategy, trainer=CLIPPED)
    plain = worlds.run(2, fit, run)
    for subset in subsets:
        where = {KINDS[letter]: "cpu" for letter in subset}
        ranks = worlds.run(2, fit, dataclasses.replace(with_offload(run, where), callback=SimulatedHost))
        assert_bits(plain, ranks, by_other_kernels=True)
        parameters, gradients, states, between = SUBSETS[subset]
        seen = {"within": {(parameters, gradients)}, "states": {states}, "between": {between}}
        assert all(rank.extra == seen for rank in ranks), subset


class CountsResident(Callback):
    """The maximal resident bytes of a file at each release, those of its largest layer, and all."""

    recorded = None

    def count(self, file):
        self.evict, most = Region.evict, 0

        def counted(region):
            nonlocal most
            if region.file is not file:
                return self.evict(region)
            most = max(most, resident_bytes(file))
            self.evict(region)
            self.recorded = most, max(map(len, file.maps)), file.nbytes

        Region.evict = counted

    def teardown(self, trainer, pl_module, stage):
        Region.evict = self.evict


class ResidentParameters(CountsResident):
    def on_train_start(self, trainer, pl_module):
        [file] = {region.file for region in trainer.strategy.run.active.regions.values()}
        assert resident_bytes(file) == 0
        self.count(file)

    def on_train_batch_end(self, trainer, *_):
        assert {resident_bytes(region.file) for region in trainer.strategy.run.active.regions.values()} == {0}


@pytest.mark.parametrize("where", [all_on_disk, pytest.param(parameters_on_disk, marks=pytest.mark.slow)])
def test_at_most_two_layers_of_file_parameters_are_in_memory(worlds, tmp_path, where):
    strategy = {"zero_stage": 3, "reshard_after_forward": True, "offload": where(tmp_path)}
    run = Run("Layers", dp=2, num_batches=1, change=wider, callback=ResidentParameters, strategy=strategy)
    for rank in worlds.run(2, fit, run):
        most, layer, total = rank.extra
        assert 0 < most <= 2 * layer < total / 2


class CutsOff(Callback):
    """Cuts the parameters' file off after a batch."""

    recorded = None
    batch, saves = 1, False

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == self.batch:
            [file] = {region.file for region in trainer.strategy.run.active.regions.values()}
            os.ftruncate(file._file.fileno(), 0)
            if self.saves:
                trainer.save_checkpoint("nowhere.ckpt")


class CutsOffBeforeItSaves(CutsOff):
    saves = True


def values_after_failing(run):
    kept = []
    text = refusal(fit, dataclasses.replace(run, change=kept.append))
    return text, [bool(p.isnan().all()) for p in kept[0].parameters() if p.numel() > 1]


@pytest.mark.parametrize(
    ("callback", "num_batches", "validates"),
    [(CutsOff, 3, False), (CutsOff, 2, False), (CutsOff, 2, True), (CutsOffBeforeItSaves, 2, False)],
    ids=["before a step", "before the end", "before validation", "before a checkpoint"],
)
def test_truncated_parameter_file_stops_the_run(worlds, tmp_path, callback, num_batches, validates):
    """With an error, not a signal; parameters that a notebook could still read are NaN."""
    strategy = {"zero_stage": 3, "offload": all_on_disk(tmp_path)}
    run = Run("Layers", dp=2, num_batches=num_batches, callback=callback, strategy=strategy, validate=validates)
    for text, lost in worlds.run(2, values_after_failing, run):
        assert re.search(r"the file with the parameters .* has 0 bytes where", text) and all(lost), text


class ResidentStates(CountsResident):
    def on_train_start(self, trainer, pl_module):
        [offloaded] = trainer.strategy._lifecycle.optimization.moved
        self.count(offloaded.file)


def test_at_most_two_layers_are_in_memory(worlds, tmp_path):
    run = Run("Layers", num_batches=3, microbatches=1, change=wider, callback=ResidentStates)
    [rank] = worlds.run(1, fit, with_offload(run, f"disk:{tmp_path}"))
    most, layer, total = rank.extra
    assert 0 < most <= 2 * layer < total / 2


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
def test_optimizers_that_step_layer_by_layer(kind, options, expected):
    assert steps_independently(make_optimizer(kind, **options)) is expected


def test_full_disk_is_reported_before_any_change(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OffloadError, match=r"B are free there .*No space left.*name another folder"):
        StateFile(str(tmp_path), [2**20])


def test_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OffloadError, match="cannot be written"):
        StateFile(str(tmp_path / "file" / "folder"), [10])


def test_truncated_file_stops_the_step_before_any_change(tmp_path):
    p = nn.Parameter(torch.ones(8, 8))
    optimizer = torch.optim.AdamW([p])
    offloaded = LayerwiseStep(optimizer, [[p]], str(tmp_path))
    p.grad = torch.ones_like(p)
    optimizer.step()
    before = p.detach().clone()
    os.ftruncate(offloaded.file._file.fileno(), 0)
    with pytest.raises(OffloadError, match="has 0 bytes where"):
        optimizer.step()
    assert torch.equal(p, before)
    offloaded.file.close()
    offloaded._undo()  # close() would read the states, which are gone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": "gpu"}, "offload='gpu'"),
        ({"offload": "disk:"}, "disk:PATH"),
        ({"offload": {"weights": "cpu"}}, "'weights'"),
        ({"offload": {"parameters": "cpu"}, "zero_stage": 2}, "zero_stage=3"),
        ({"offload": {"gradients": "cpu"}}, "zero_stage=1"),
        ({"offload": {"gradients": "disk:p"}, "zero_stage": 3}, "'gradients': 'disk:p'.; use 'cpu'"),
    ],
)
def test_invalid_options(options, message):
    with pytest.raises(ValueError, match=message):
        Hybrid3DStrategy(**options)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_disk_that_is_not_mounted_is_refused_before_ranks_start(devices):
    offload = {"optimizer_states": "disk:/no_such_disk/states"}
    trainer = trainer_of(devices, strategy_options={"offload": offload})
    with pytest.raises(OffloadError, match=r"offload.*: /no_such_disk does not exist; mount the disk, or make"):
        trainer.fit(Tiny(), loader(4))
    assert devices == 1 or not trainer.strategy.launcher.procs
    assert not os.path.exists("/no_such_disk")


def test_states_lost_by_truncation_after_the_run_are_reported(tmp_path):
    p = nn.Parameter(torch.ones(8, 8))
    optimizer = torch.optim.AdamW([p])
    offloaded = LayerwiseStep(optimizer, [[p]], str(tmp_path))
    p.grad = torch.ones_like(p)
    optimizer.step()
    os.ftruncate(offloaded.file._file.fileno(), 0)
    with pytest.warns(UserWarning, match="AdamW are lost"):
        offloaded.close()
    assert optimizer.state[p]["exp_avg"].isnan().all()


def test_step_hooks_run_once(tmp_path):
    calls = []
    module = make("Layers")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    offloaded = LayerwiseStep(optimizer, [list(layer.parameters()) for layer in module.layers], str(tmp_path))
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step(lambda: calls.append("closure"))
    offloaded.close()
    assert calls == ["closure", "before", "after"]
