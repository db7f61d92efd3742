"""Folders of distributed checkpoints: complete or refused after any interruption."""

import io
import json
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.utils._pytree import tree_leaves

from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.checkpoint import folder
from lightning_hybrid.checkpoint import write as writing
from lightning_hybrid.checkpoint.background import BackgroundSave
from lightning_hybrid.checkpoint.contents import describe_layout, problems
from lightning_hybrid.checkpoint.convert import to_file, to_folder
from lightning_hybrid.checkpoint.read import SavedFolder, _Index
from lightning_hybrid.checkpoint.write import covered, prepare
from lightning_hybrid.cli import main as command_line
from lightning_hybrid.errors import CheckpointError, IncompleteCheckpoint

ROOT = Path(__file__).parents[2]


def checkpoint(step):
    """A small one of Lightning's, with tied weights and an optimizer."""
    weight = torch.arange(12.0).reshape(3, 4) + step
    state = {
        0: {"step": torch.tensor(float(step)), "exp_avg": weight / 3, "none": None},
        1: {"step": torch.tensor(2.0), "exp_avg": torch.ones(2, dtype=torch.bfloat16)},
    }
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}]
    return {
        "epoch": 1,
        "global_step": step,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": {"a.weight": weight, "head.weight": weight, "b.bias": torch.ones(2), "b.count": torch.tensor(3)},
        "optimizer_states": [{"state": state, "param_groups": groups}],
        "callbacks": {"average": {"weights": [torch.arange(5000.0)], "best": torch.tensor(0.25)}},
        "lr_schedulers": [{"last_epoch": step}],
    }


@pytest.fixture
def saved(tmp_path):
    """A folder of step 3, and where it was made from."""
    torch.save(checkpoint(3), tmp_path / "plain.ckpt")
    to_folder(tmp_path / "plain.ckpt", tmp_path / "saved.ckpt")
    return tmp_path / "saved.ckpt"


def step_of(path):
    return SavedFolder(path).manifest["step"]


def save(path, step):
    return prepare(checkpoint(step), path, None, {"layout": {}, "versions": {}, "step": step, "epoch": 0})


def test_file_and_folder_convert_into_each_other(saved, tmp_path, capsys):
    back = tmp_path / "back.ckpt"
    assert command_line(["checkpoint", "convert", str(saved), str(back)]) == 0
    got, expected = torch.load(back), torch.load(tmp_path / "plain.ckpt")
    assert list(got) == list(expected)
    assert got["state_dict"]["a.weight"].data_ptr() == got["state_dict"]["head.weight"].data_ptr()
    leaves, wanted = tree_leaves(got), tree_leaves(expected)
    assert len(leaves) == len(wanted)
    for leaf, other in zip(leaves, wanted, strict=True):
        assert type(leaf) is type(other) and (torch.equal(leaf, other) if torch.is_tensor(leaf) else leaf == other)
    assert sorted(os.listdir(tmp_path)) == ["back.ckpt", "plain.ckpt", "saved.ckpt"]
    capsys.readouterr()
    assert command_line(["checkpoint", "inspect", str(saved)]) == 0
    short = capsys.readouterr().out
    assert (
        "step 3, epoch 1" in short and short.count("optimizer/0/*/exp_avg ") == 2 and "#" not in short
    )  # of two dtypes
    assert command_line(["checkpoint", "inspect", "--all", str(saved)]) == 0
    shown = capsys.readouterr().out
    assert short.splitlines()[:4] == shown.splitlines()[:4]
    assert "step 3, epoch 1" in shown and "optimizer/0/#1/exp_avg" in shown and "bfloat16" in shown
    assert "head.weight" not in shown  # saved once
    assert command_line(["checkpoint", "inspect", "--json", str(saved)]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["step"] == 3 and content["tensors"]["optimizer/0/#1/exp_avg"]["dtype"] in shown
    assert command_line(["checkpoint", "inspect", str(tmp_path / "missing.ckpt")]) == 2
    assert command_line(["checkpoint", "convert", str(saved), str(back)]) == 2
    capsys.readouterr()
    assert command_line(["checkpoint", "verify", str(back)]) == 2
    assert "back.ckpt is one file; verify reads folders; convert it first" in capsys.readouterr().err
    assert command_line(["checkpoint", "inspect", "--json", str(back)]) == 0
    of_file = json.loads(capsys.readouterr().out)
    assert of_file["tensors"] == content["tensors"] and of_file["step"] == 3


def test_layout_stays_in_file_and_folder(tmp_path, capsys):
    file, folder, back = (tmp_path / name for name in ("one.ckpt", "folder.ckpt", "back.ckpt"))
    torch.save({"state_dict": {"w": torch.ones(2)}, "hybrid3d": {"layout": {"pp": 2, "tp": 2}}}, file)
    assert command_line(["checkpoint", "convert", str(file), str(folder)]) == 0
    assert command_line(["checkpoint", "convert", str(folder), str(back)]) == 0
    for path in (file, folder, back):
        capsys.readouterr()
        assert command_line(["checkpoint", "inspect", str(path)]) == 0
        assert "saved under pipeline_parallel_size=2, tensor_parallel_size=2" in capsys.readouterr().out


def test_large_tensors_convert_on_disk(tmp_path):
    saved_dict = {"state_dict": {"w": torch.randn(700, 1000), "half": torch.randn(700_000).bfloat16()}}
    torch.save(saved_dict, tmp_path / "plain.ckpt")
    progress = []
    to_folder(tmp_path / "plain.ckpt", tmp_path / "saved.ckpt", tell=lambda *line: progress.append(line))
    assert sorted(line[0] for line in progress) == ["model/half", "model/w"]
    assert [line[1:] for line in progress] == [(0, 2), (1, 2)]
    progress.clear()
    to_file(tmp_path / "saved.ckpt", tmp_path / "back.ckpt", tell=lambda *line: progress.append(line))
    assert progress == [("model/w", 0, 2), ("model/half", 1, 2)]
    torch.testing.assert_close(torch.load(tmp_path / "back.ckpt"), saved_dict, rtol=0, atol=0)


CONVERTS = """
import sys, threading
from pathlib import Path

import torch

from lightning_hybrid.checkpoint.convert import to_file, to_folder


def own_bytes():
    # Of this process, without what is mapped from files.
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return 1024 * int(line.split()[1])


def convert(name, number):
    torch.save({"state_dict": {f"w{i}": torch.ones(1000, 1000) for i in range(number)}}, f"{name}.ckpt")
    begin, most, done = own_bytes(), [0], threading.Event()

    def watch():
        while not done.wait(0.002):
            most[0] = max(most[0], own_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    to_folder(Path(f"{name}.ckpt"), Path(name))
    to_file(Path(name), Path(f"{name}_again.ckpt"))
    done.set()
    watcher.join()
    return most[0] - begin


convert("small", 1)  # loads the modules, which take memory too
print(convert("large", 30))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is counted by Linux's /proc")
def test_conversion_memory_is_bounded(tmp_path):
    # In a separate process, whose allocator returns freed memory.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CONVERTS]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert 0 < int(ran.stdout) < 4 * 1000 * 1000 * 4  # of 30


class Killed(BaseException):
    """A kill without cleanup."""


@pytest.mark.parametrize("last_words", ["write_file", "finish", "_publish"])
def test_killed_save_leaves_the_previous_checkpoint(saved, monkeypatch, last_words):
    def dies(*_):
        raise Killed

    monkeypatch.setattr(folder, last_words, dies)
    with pytest.raises(Killed):
        writing.write(save(saved, 4), None)
    fresh = saved.with_name("fresh.ckpt")
    with pytest.raises(Killed):
        writing.write(save(fresh, 4), None)
    monkeypatch.undo()
    assert step_of(saved) == 3
    with pytest.raises(
        IncompleteCheckpoint, match=r"fresh.ckpt is not there: a save to it began.*beside it: .*saved.ckpt"
    ):
        SavedFolder(fresh)
    for path in (saved, fresh):  # over the files of the killed saves
        writing.write(save(path, 5), None)
        assert step_of(path) == 5 and not folder.incomplete_path(path).exists()


_SAVES_FOR_EVER = """
import itertools, sys, torch
from pathlib import Path
from lightning_hybrid.checkpoint.write import prepare, write
for step in itertools.count(1):
    state = {"state_dict": {"w": torch.full((1000, 500), float(step))}, "global_step": step}
    write(prepare(state, Path(sys.argv[1]), None, {"layout": {}, "versions": {}, "step": step, "epoch": 0}), None)
    print(step, flush=True)
"""


@pytest.mark.slow
def test_killed_process_leaves_a_complete_checkpoint(tmp_path):
    path, last = tmp_path / "model.ckpt", 0
    for number in range(3):
        command = [sys.executable, "-c", _SAVES_FOR_EVER, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout is not None
            seen = [int(process.stdout.readline()) for _ in range(number + 1)]
            threading.Event().wait(0.004 * number)  # anywhere in the next save
            process.kill()
            seen += [int(line) for line in process.stdout.read().split()]
        saved = SavedFolder(path)
        step = saved.manifest["step"]
        assert step - seen[-1] in (0, 1) and not list(problems(path))
        assert torch.equal(saved.checkpoint()["state_dict"]["w"], torch.full((1000, 500), float(step)))
        last = seen[-1]
    assert last >= 3


def test_dependent_options():
    with pytest.raises(ValueError, match="async_checkpoint=True writes distributed checkpoints"):
        Hybrid3DStrategy(async_checkpoint=True)


def test_save_without_atomic_exchange(saved, monkeypatch):
    monkeypatch.setattr(folder, "_exchange", lambda *_: False)
    writing.write(save(saved, 6), None)
    assert step_of(saved) == 6 and {p.name for p in saved.parent.iterdir()} == {"plain.ckpt", "saved.ckpt"}


def test_folder_replaces_a_file(saved):
    writing.write(save(saved.with_name("plain.ckpt"), 7), None)
    assert step_of(saved.with_name("plain.ckpt")) == 7


def flip(path, place=0.5):
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def rewritten(path, before, after):
    text = (path / "manifest.json").read_text()
    assert before in text
    (path / "manifest.json").write_text(text.replace(before, after))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda path: (path / "meta.pt").write_bytes(b""), "meta.pt has 0 bytes instead of"),
        (
            lambda path: (path / "manifest.json").unlink(),
            "has no manifest.json, which names the files of a checkpoint of lightning_hybrid",
        ),
        (lambda path: (path / "manifest.json").write_text("{"), "is not valid JSON"),
        (lambda path: rewritten(path, '"step": 3', '"step": 2'), "manifest.json has other content than when"),
        (lambda path: rewritten(path, '"bytes"', '"cytes"'), "has other content than when it was written"),
        (lambda path: [entry.unlink() for entry in path.iterdir()], "is empty: a save to it began"),
    ],
)
def test_incomplete_folders_are_refused(saved, harm, message, capsys):
    harm(saved)
    with pytest.raises(CheckpointError, match=message):
        SavedFolder(saved)
    assert command_line(["checkpoint", "verify", str(saved)]) == 1
    assert command_line(["checkpoint", "inspect", str(saved)]) == 1
    assert "saved.ckpt" in capsys.readouterr().err


def test_a_folder_tells_what_it_is(saved):
    assert "lightning-hybrid checkpoint convert FOLDER FILE.ckpt" in (saved / "README.txt").read_text()


@pytest.mark.parametrize("place", [0, 1 / 3, 1 / 2, 1])
@pytest.mark.parametrize("name", ["__0_0.distcp", "meta.pt", "optimizers.pt", ".metadata"])
def test_changed_files_are_not_loaded(saved, tmp_path, capsys, name, place):
    """Neither where tensors can be read all the same, nor where torch's reader fails."""
    SavedFolder(saved).checkpoint()
    flip(saved / name, place)
    with pytest.raises(CheckpointError, match=f"{name} has other content than when it was written"):
        SavedFolder(saved).checkpoint()
    assert command_line(["checkpoint", "convert", str(saved), str(tmp_path / "new.ckpt")]) == 1
    assert f"{name} has other content" in capsys.readouterr().err and not (tmp_path / "new.ckpt").exists()
    if name.endswith(".distcp") and place == 0.5:
        SavedFolder(saved, digests=False).checkpoint()


def test_ranks_share_the_comparison(saved):
    flip(saved / "__0_0.distcp")
    SavedFolder(saved, share=(1, 2)).checkpoint()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp has other content"):
        SavedFolder(saved, share=(0, 2)).checkpoint()


def test_verify_reads_every_byte(saved, capsys):
    assert command_line(["checkpoint", "verify", str(saved)]) == 0
    flip(saved / "__0_0.distcp")
    capsys.readouterr()
    assert command_line(["checkpoint", "verify", str(saved), "--json"]) == 1
    assert "__0_0.distcp has other content" in json.loads(capsys.readouterr().out)["problems"][0]
    assert command_line(["checkpoint", "verify", str(saved)]) == 1
    assert "__0_0.distcp has other content" in capsys.readouterr().out


def test_foreign_folders_are_identified(tmp_path):
    torch.distributed.checkpoint.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(CheckpointError, match=r"no checkpoint of lightning_hybrid.*torch.distributed.checkpoint"):
        SavedFolder(tmp_path / "dcp")
    torch.save({}, tmp_path / "dcp" / "meta.pt")
    with pytest.raises(CheckpointError, match="consolidate_checkpoint"):
        SavedFolder(tmp_path / "dcp")
    (tmp_path / "dcp" / "manifest.json").write_text(json.dumps({"format": "another"}))
    with pytest.raises(CheckpointError, match="not the manifest of a checkpoint of lightning_hybrid"):
        SavedFolder(tmp_path / "dcp")


@pytest.mark.parametrize(
    ("names", "end"),
    [
        (["latest", "zero_to_fp32.py"], "of DeepSpeed: run `python zero_to_fp32.py . weights.pt` in it, .*ckpt_path"),
        (["config.json", "model.safetensors"], "saved by save_pretrained: load it by from_pretrained in __init__, .*"),
        (["notes.txt"], "but notes.txt"),
    ],
)
def test_folders_of_other_libraries_are_named_with_the_way_to_load_them(tmp_path, names, end):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=rf"has no manifest.json .*{end}\nexplained") as caught:
        SavedFolder(tmp_path)
    assert "something else" not in str(caught.value)


class Runs:
    def __reduce__(self):
        return print, ("run",)


class Member:
    """Enum members as some versions of Python pickle them."""

    def __init__(self, owner, name):
        self.owner, self.name = owner, name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


def test_index_enum_spellings_are_read():
    def read(value):
        return _Index(io.BytesIO(pickle.dumps(value)), "folder").load()

    member = _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT
    assert read(member) is read(Member(_MEM_FORMAT_ENCODING, member.name)) is member
    for owner, name in ((_MEM_FORMAT_ENCODING, "__init__"), (Metadata, "__init__")):
        with pytest.raises(CheckpointError, match="is not allowed in an index"):
            read(Member(owner, name))


def test_loading_runs_no_code_from_the_folder(saved, capsys):
    (saved / ".metadata").write_bytes(pickle.dumps(Runs()).ljust((saved / ".metadata").stat().st_size, b"."))
    with pytest.raises(CheckpointError, match=r"names builtins\.print"):
        SavedFolder(saved, digests=False)
    state = {**checkpoint(1), "hyper_parameters": {"object": Path("x")}}
    writing.write(prepare(state, saved, None, {"layout": {}, "versions": {}, "step": 1, "epoch": 0}), None)
    with pytest.raises(CheckpointError, match=r"objects of pathlib.*pass weights_only=False"):
        SavedFolder(saved).checkpoint()
    assert SavedFolder(saved, weights_only=False).checkpoint()["hyper_parameters"] == {"object": Path("x")}
    assert command_line(["checkpoint", "verify", str(saved)]) == 1
    assert command_line(["checkpoint", "verify", str(saved), "--trust"]) == 0
    assert "run" not in capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([((0, 0), (2, 4)), ((2, 0), (1, 4))], ""),
        ([((0, 0), (2, 4))], "of which 8 are saved"),
        ([((0, 0), (2, 4)), ((1, 0), (2, 4))], "two boxes contain"),
        ([((0, 0), (2, 4)), ((2, 0), (2, 4))], "outside"),
    ],
)
def test_every_element_is_in_exactly_one_box(boxes, message):
    assert message in covered((3, 4), boxes) and bool(message) == bool(covered((3, 4), boxes))


def cut(shape, generator, offsets=None):
    """Boxes that tile a tensor, by random cuts."""
    offsets = offsets or (0,) * len(shape)
    dim = generator.randrange(len(shape)) if shape else 0
    if not shape or shape[dim] < 2 or generator.random() < 0.2:
        return [(offsets, shape)]
    at = generator.randrange(1, shape[dim])
    rest = (*shape[:dim], shape[dim] - at, *shape[dim + 1 :])
    after = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
    first = (*shape[:dim], at, *shape[dim + 1 :])
    return cut(first, generator, offsets) + cut(rest, generator, after)


def test_coverage_is_that_of_counting_each_element():
    generator, answers = random.Random(0), Counter()
    for _ in range(600):
        shape = tuple(generator.randrange(1, 7) for _ in range(generator.randrange(4)))
        boxes = cut(shape, generator)
        generator.shuffle(boxes)
        for _ in range(generator.choice((0, 0, 1, 2))):  # both lost and doubled elements may be as many
            boxes.append(generator.choice(cut(shape, generator))) if generator.random() < 0.5 else boxes.pop()
            boxes = boxes or cut(shape, generator)
        counts = torch.zeros(shape)
        for offsets, sizes in boxes:
            counts[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))] += 1
        expected = "two boxes" if counts.max() > 1 else "are saved" if counts.min() < 1 else ""
        answer = covered(shape, boxes)
        assert expected in answer and bool(answer) == bool(expected)
        answers[expected] += 1
    assert min(answers.values()) > 50, answers


@pytest.mark.parametrize("dim", [0, 1])
def test_coverage_by_many_boxes_takes_no_comparison_of_pairs(dim):
    """4,096 of them: pairs took 9.5 seconds, corners take 0.03."""
    places = [(number, 0)[:: 1 - 2 * dim] for number in range(4096)]
    before = time.process_time()
    assert covered((4096, 1)[:: 1 - 2 * dim], [(place, (1, 1)) for place in places]) == ""
    assert time.process_time() - before < 2


def test_writer_thread_error_is_raised_and_keeps_the_previous_checkpoint(saved, monkeypatch):
    background = BackgroundSave()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "finish", full)
    new = saved.with_name("new.ckpt")
    background.start(save(new, 4), None)
    background.remove(saved)  # as a callback with save_top_k=1 does
    with pytest.raises(CheckpointError, match=r"new.ckpt could not be written.*No space left.*kept.*saved.ckpt"):
        background.wait()
    monkeypatch.undo()
    assert step_of(saved) == 3 and not folder.incomplete_path(new).exists()
    background.start(save(new, 4), None)
    background.remove(saved)
    background.wait()
    assert step_of(new) == 4 and not saved.exists()


def test_torch_reads_the_folder(saved, tmp_path):
    target = {"model/a.weight": torch.zeros(3, 4)}
    torch.distributed.checkpoint.load(target, checkpoint_id=saved, no_dist=True)
    assert torch.equal(target["model/a.weight"], checkpoint(3)["state_dict"]["a.weight"])


@pytest.mark.parametrize(
    ("copies", "shards", "zero", "text"),
    [
        (1, 2, 3, "data_parallel_size=2, zero_stage=3"),  # all replicas are the default of shard_size
        (2, 2, 3, "data_parallel_size=4, shard_size=2, zero_stage=3"),
        (2, 1, 0, "data_parallel_size=2"),
        (1, 1, 0, "one process"),
    ],
)
def test_layouts_are_described_by_options_that_are_no_default(copies, shards, zero, text):
    assert describe_layout({"pp": 1, "dp_replicate": copies, "dp_shard": shards, "zero_stage": zero}) == text
