"""A file that is no whole checkpoint is refused before ranks start, with those beside it that are whole."""

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.checkpoint.archive import check_archive
from lightning_hybrid.errors import CheckpointError, IncompleteCheckpoint
from models.tiny import Tiny, loader


def half(content):
    return content[: len(content) // 2]


def overwritten(content):
    at = content.index(b"state_dict")
    return content[: at - 20] + b"x" * 60 + content[at + 40 :]


DAMAGES = {
    "truncated": (half, IncompleteCheckpoint, "truncated"),
    "empty": (lambda _: b"", IncompleteCheckpoint, "it is empty"),
    "overwritten": (overwritten, CheckpointError, "changed after it was written"),
    "text": (lambda _: b"step: 3", CheckpointError, "it is no file of torch.save: it begins with b'step: 3'"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "good.ckpt"
    trainer = Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False)
    trainer.fit(Tiny(), loader(4))
    trainer.save_checkpoint(path)
    return path


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_refused_and_others_named(saved, damage, devices):
    change, kind, words = DAMAGES[damage]
    content = change(saved.read_bytes())
    path = saved.parent / f"{damage}.ckpt"
    path.write_bytes(content)
    strategy = Hybrid3DStrategy(pipeline_parallel_size=devices)
    options = {"logger": False, "enable_checkpointing": False, "max_epochs": 1}
    trainer = Trainer(accelerator="cpu", devices=devices, strategy=strategy, **options)
    with pytest.raises(
        kind, match=rf"{damage}.ckpt \({len(content):,} bytes\) cannot be read: .*{words}.*: good.ckpt(\n|$)"
    ):
        trainer.fit(Tiny(), loader(4), ckpt_path=path)
    assert devices == 1 or not trainer.strategy.launcher.procs


@pytest.mark.parametrize("is_archive", [True, False])
def test_complete_files_pass(tmp_path, is_archive):
    torch.save({"state_dict": {}}, tmp_path / "own.ckpt", _use_new_zipfile_serialization=is_archive)
    check_archive(tmp_path / "own.ckpt")


def test_archive_without_checksums_passes(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"state_dict": {"w": torch.ones(9)}}, tmp_path / "own.ckpt")
    finally:
        torch.serialization.set_crc32_options(before)
    check_archive(tmp_path / "own.ckpt")
