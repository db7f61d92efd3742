"""Distributed checkpoints: every rank writes its own shards, and any layout resumes from them."""

import random
import tempfile
from pathlib import Path

import numpy
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader

from harness.checkpoint_runs import (
    DP2PP2,
    INTERLEAVED,
    PLAIN,
    PP1,
    PP2,
    PP2TP2,
    TP2,
    V_PLACEMENT,
    ZERO,
    Layout,
    SaveHalfway,
    assert_same_state,
    folders,
    load,
    loader_of,
    save_halfway,
    train,
)
from harness.fits import trainer_of
from lightning_hybrid import Hybrid3DStrategy, HybridPrecision
from lightning_hybrid.checkpoint.read import SavedFolder
from lightning_hybrid.cli import main as command_line
from lightning_hybrid.errors import CheckpointError
from lightning_hybrid.run import checkpoint_files
from models.cases import make

ZERO_TP2 = Layout(1, dp=2, tp=2, options=(("zero_stage", 2),))
ON_DISK = Layout(1, dp=2, options=(("zero_stage", 1), ("offload", f"disk:{tempfile.gettempdir()}")))
ZERO_PP2 = Layout(2, dp=2, options=(("zero_stage", 3), ("reshard_after_forward", True)))


def refusals_of(path):
    """The refusals of a fit that resumes from a path."""
    module = make("Layers")
    trainer = trainer_of(1, Hybrid3DStrategy(), [])
    with pytest.raises(CheckpointError) as refused:
        trainer.fit(module, loader_of(module, PP1, trainer), ckpt_path=path)
    return str(refused.value)


def test_killed_first_save_is_refused_with_an_alternative(worlds, tmp_path):
    """An empty folder with the final name and the incomplete one beside it; also the latter alone."""
    (tmp_path / "step=2.ckpt.incomplete").mkdir()
    (tmp_path / "step=2.ckpt.incomplete" / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "step=2.ckpt").mkdir()
    [message] = worlds.run(1, refusals_of, str(tmp_path / "step=2.ckpt"))
    assert "step=2.ckpt" in message and "began and did not end" in message and "none to begin anew" in message
    worlds.run(1, save_halfway, "Layers", folders(PP1), str(tmp_path / "step=1.ckpt"))
    [message] = worlds.run(1, refusals_of, str(tmp_path / "step=2.ckpt"))
    assert "set ckpt_path to one of the complete ones beside it: step=1.ckpt" in message


def as_single_file(path):
    """A folder as one file of Lightning's would have it."""
    checkpoint = SavedFolder(Path(path)).checkpoint()
    return {**checkpoint, "optimizer_states": [dict(state) for state in checkpoint["optimizer_states"]]}


def assert_same_checkpoint(got, expected, tolerance):
    assert got.keys() == expected.keys()
    assert got["loops"] == expected["loops"] and got["lr_schedulers"] == expected["lr_schedulers"]
    assert list(got["state_dict"]) == list(expected["state_dict"])
    assert_same_state(got["state_dict"], expected["state_dict"], tolerance)
    for a, b in zip(got["optimizer_states"], expected["optimizer_states"], strict=True):
        assert a["param_groups"] == b["param_groups"] and list(a["state"]) == list(b["state"])
        for number, entry in b["state"].items():
            assert entry.keys() == a["state"][number].keys()
            for key, value in entry.items():
                torch.testing.assert_close(a["state"][number][key], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param("BuildsOptimizerInInit", PP2TP2, id="two groups, tied, pp2 x tp2"),
        pytest.param("GPT2", DP2PP2, id="dp2 x pp2", marks=pytest.mark.slow),
        pytest.param("GPT2", PP2TP2, id="fused projections, pp2 x tp2", marks=pytest.mark.slow),
        pytest.param("Decoder", TP2, id="unequal shards, tp2", marks=pytest.mark.slow),
        pytest.param("Tied", INTERLEAVED, id="interleaved", marks=pytest.mark.slow),
        pytest.param("Tied", V_PLACEMENT, id="v placement", marks=pytest.mark.slow),
        pytest.param("Decoder", ZERO_TP2, id="zero, dp2 x tp2", marks=pytest.mark.slow),
        pytest.param("BuildsOptimizerInInit", ZERO_PP2, id="zero, dp2 x pp2", marks=pytest.mark.slow),
        pytest.param("Tied", ON_DISK, id="states on disk", marks=pytest.mark.slow),
    ],
)
def test_folder_equals_the_single_file_bitwise(worlds, tmp_path, case, layout):
    file, folder = str(tmp_path / "file.ckpt"), str(tmp_path / "folder.ckpt")
    worlds.run(layout.world_size, save_halfway, case, layout, file)
    worlds.run(layout.world_size, save_halfway, case, folders(layout), folder)
    assert_same_checkpoint(as_single_file(folder), load(file), tolerance=0)
    sizes = [path.stat().st_size for path in Path(folder).glob("__*")]
    assert len(sizes) == layout.world_size and min(sizes) > 0
    assert command_line(["checkpoint", "verify", folder]) == 0


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        pytest.param(ZERO_TP2, (PP2TP2, PLAIN), id="zero x tp2 by others"),
        pytest.param(PP2TP2, (ZERO_TP2, ON_DISK, DP2PP2), id="pp2 x tp2 by others", marks=pytest.mark.slow),
        pytest.param(ZERO_PP2, (ZERO, TP2), id="zero x pp2 by others", marks=pytest.mark.slow),
        pytest.param(DP2PP2, (TP2, PP1, INTERLEAVED), id="dp2 x pp2 by others", marks=pytest.mark.slow),
        pytest.param(TP2, (PP2TP2, PP2), id="tp2 by others", marks=pytest.mark.slow),
        pytest.param(V_PLACEMENT, (DP2PP2, PLAIN), id="v placement by others", marks=pytest.mark.slow),
        pytest.param(ZERO_PP2, (V_PLACEMENT,), id="zero x pp2 by v placement", marks=pytest.mark.slow),
        pytest.param(PP1, (PP2TP2, DP2PP2), id="one process by others", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "case", ["Tied", *(pytest.param(c, marks=pytest.mark.slow) for c in ("GPT2", "BuildsOptimizerInInit"))]
)
def test_resume_under_every_layout(worlds, tmp_path, case, saving, loading):
    path = str(tmp_path / "half.ckpt")
    [(expected, steps)] = worlds.run(1, train, case, PLAIN, 2)
    worlds.run(saving.world_size, save_halfway, case, folders(saving), path)
    for layout in loading:
        resumed = path
        if layout is PLAIN:
            resumed = str(tmp_path / "one.ckpt")
            assert command_line(["checkpoint", "convert", path, resumed]) == 0
        for state, reached in worlds.run(layout.world_size, train, case, layout, 2, resumed):
            assert reached == steps == 4, layout
            assert_same_state(state, expected)


def lines_of_resume(path, batch_size=8):
    """What a fit in one process prints when it resumes from a path."""
    lines, module = [], make("Tied")
    trainer = trainer_of(1, Hybrid3DStrategy(), [], max_epochs=2)
    loader = DataLoader(loader_of(module, PP1, trainer).dataset, batch_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_files, "rank_zero_info", lambda text: lines.append(text.replace("\n    ", " ")))
        trainer.fit(module, loader, ckpt_path=path)
    return lines


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_resume_under_another_layout_is_printed(worlds, tmp_path, as_folder):
    def saved(name, layout):
        path = str(tmp_path / name)
        worlds.run(layout.world_size, save_halfway, "Tied", folders(layout) if as_folder else layout, path)
        return path

    path = saved("ranks.ckpt", DP2PP2)
    [[line]] = worlds.run(1, lines_of_resume, path)  # its batches are larger, and epochs have as many
    assert line.startswith(
        f"{path} was saved under pipeline_parallel_size=2, data_parallel_size=2 and resumes under one process"
    )
    assert ("random generators of 2 replicas are not restored to 1" in line) == as_folder
    [[_, epochs]] = worlds.run(1, lines_of_resume, path, 4)
    assert "the number of replicas changes from 2 to 1; an epoch has 4 batches instead of 2" in epochs
    [lines] = worlds.run(1, lines_of_resume, saved("one.ckpt", PP1))
    assert lines == []


class Drawing(LightningModule):
    """Draws in its layers, step and loader; in half precision with its own scaler."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3)) for _ in range(4)))
        self.seen = []

    def training_step(self, batch, batch_idx):
        loss = self.layers(batch + 0.1 * torch.rand_like(batch)).square().mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_start(self, batch, batch_idx):
        self.seen.append(random.random() + float(numpy.random.rand()))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Grows(Callback):
    def on_train_start(self, trainer, pl_module):
        if trainer.global_step == 0:
            trainer.precision_plugin.scaler._growth_interval = 3


def drawn(size, sizes, path, seed, *, save=False, resume=False):
    torch.manual_seed(seed), random.seed(seed), numpy.random.seed(seed)
    module = Drawing()
    torch.manual_seed(seed)
    trainer = trainer_of(
        size,
        Hybrid3DStrategy(**sizes, save_distributed_checkpoint=True),
        [Grows(), *([SaveHalfway(path)] if save else [])],
        max_epochs=2,
        plugins=[HybridPrecision("16-mixed")],
    )
    data = DataLoader(torch.randn(16, 8, generator=torch.Generator().manual_seed(1)), batch_size=4, shuffle=True)
    trainer.fit(module, data, ckpt_path=path if resume else None)
    scaler = trainer.precision_plugin.scaler.state_dict()
    return dict(module.state_dict()), module.seen[-2:], scaler, float(trainer.callback_metrics["loss"])


@pytest.mark.parametrize(
    ("size", "sizes"),
    [
        pytest.param(2, {}, id="dp2"),
        pytest.param(2, {"pipeline_parallel_size": 2}, id="pp2"),
        pytest.param(1, {}, id="one process", marks=pytest.mark.slow),
        pytest.param(4, {"pipeline_parallel_size": 2}, id="dp2 x pp2", marks=pytest.mark.slow),
        pytest.param(2, {"tensor_parallel_size": 2}, id="tp2", marks=pytest.mark.slow),
    ],
)
def test_resumed_draws_and_loss_scale_are_bitwise_equal(worlds, tmp_path, size, sizes):
    """The seed of the process that resumes is another one."""
    path = str(tmp_path / "half.ckpt")
    expected = worlds.run(size, drawn, size, sizes, path, 11, save=True)
    for got, wanted in zip(worlds.run(size, drawn, size, sizes, path, 12, resume=True), expected, strict=True):
        assert_same_state(got[0], wanted[0], tolerance=0)
        assert got[1:] == wanted[1:] and got[2]["growth_interval"] == 3
