"""Quantized states in files and folders: saved under one layout, resumed bit by bit under others, converted."""

import importlib
import importlib.util

import pytest
import torch

from harness.checkpoint_runs import (
    DP2PP2,
    PLAIN,
    PP1,
    PP2TP2,
    TP2,
    ZERO,
    Layout,
    assert_same_state,
    folders,
    load,
    loader_of,
    states_of,
)
from harness.fits import trainer_of
from lightning_hybrid.checkpoint.convert import to_file, to_folder
from lightning_hybrid.checkpoint.read import SavedFolder
from lightning_hybrid.errors import CheckpointError
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.step.objects.tensors import (
    dicts_as_subclasses,
    inner_tensors,
    subclasses_as_dicts,
)
from models.cases import make
from models.quantized_optimizers import MODULES, Uncompiled

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")

ZERO_TP2 = Layout(1, dp=2, tp=2, options=(("zero_stage", 2),))
BY_NAME = {"8bit": "AdamW8bit", "4bit": "AdamW4bit", "fp8": "AdamWFp8"}


def train(name, layout, max_epochs, resume=None, save=None):
    """Fit, two batches of 8 samples over all replicas per epoch; the state of the module."""
    importlib.import_module("torchao.optim")  # as at the top of a script: the classes in a file are then known
    module = make(MODULES[name])
    trainer = trainer_of(layout.world_size, layout.strategy(), [Uncompiled()], max_epochs=max_epochs)
    trainer.fit(module, loader_of(module, layout, trainer), ckpt_path=resume, weights_only=True if resume else None)
    if save is not None:
        trainer.save_checkpoint(save)
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same_states(states, expected):
    assert states.keys() == expected.keys()
    for number, entry in expected.items():
        assert entry.keys() == states[number].keys()
        pairs = zip(flatten(states[number])[0], flatten(entry)[0], strict=True)
        for other, value in pairs:
            assert type(other) is type(value)
            if not torch.is_tensor(value):
                assert other == value
                continue
            assert other.shape == value.shape
            for a, b in zip(inner_tensors(other), inner_tensors(value), strict=True):
                assert a.dtype == b.dtype and torch.equal(a.float(), b.float()), number


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "saving", "loading"),
    [
        ("8bit", folders(ZERO_TP2), [PP2TP2, PP1]),
        slow("8bit", ZERO_TP2, [folders(PP2TP2), ZERO]),
        slow("8bit", PLAIN, [ZERO_TP2, PP1]),
        slow("8bit", folders(PP2TP2), [ZERO_TP2, DP2PP2]),
        slow("4bit", folders(ZERO_TP2), [PP2TP2, PP1]),
        slow("fp8", folders(DP2PP2), [TP2, ZERO]),
        slow("bitsandbytes", folders(ZERO), [PP1]),
    ],
)
def test_resumed_by_other_layouts(worlds, tmp_path, name, saving, loading):
    if name == "bitsandbytes":
        pytest.importorskip("bitsandbytes")
    path, plain = tmp_path / "half.ckpt", tmp_path / "plain.ckpt"
    [expected] = worlds.run(1, train, name, PLAIN, 2)
    worlds.run(1, train, name, PLAIN, 1, None, str(plain))
    worlds.run(saving.world_size, train, name, saving, 1, None, str(path), timeout=300)
    assert_same_states(states_of(path), states_of(plain))
    for layout in loading:
        for state in worlds.run(layout.world_size, train, name, layout, 2, str(path), timeout=300):
            assert_same_state(state, expected)


def stepped(name):
    import torchao.optim

    parameters = [torch.nn.Parameter(torch.ones(64, 64)), torch.nn.Parameter(torch.ones(3))]
    optimizer = getattr(torchao.optim, BY_NAME[name])(parameters)
    for p in parameters:
        p.grad = torch.linspace(-1, 1, p.numel()).view_as(p)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("name", BY_NAME)
def test_a_dict_in_place_of_a_state_gives_the_same_state(name):
    state = stepped(name).state_dict()["state"]
    plain = subclasses_as_dicts(state)
    assert all(type(value) is not type(state[0]["exp_avg"]) for value in plain[0].values())
    assert_same_states(dicts_as_subclasses(plain), state)


@pytest.mark.parametrize("name", BY_NAME)
def test_files_and_folders_are_converted(tmp_path, name):
    optimizer = stepped(name)
    torch.save({"state_dict": {}, "optimizer_states": [optimizer.state_dict()]}, tmp_path / "one.ckpt")
    to_folder(tmp_path / "one.ckpt", tmp_path / "folder.ckpt")
    keys = SavedFolder(tmp_path / "folder.ckpt").tensors
    assert "optimizer/0/#0/exp_avg/tensors/codes" in keys
    to_file(tmp_path / "folder.ckpt", tmp_path / "two.ckpt")
    loaded = load(str(tmp_path / "two.ckpt"))["optimizer_states"][0]
    assert_same_states(loaded["state"], optimizer.state_dict()["state"])
    optimizer.load_state_dict(loaded)
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)


def test_classes_that_torch_does_not_trust_are_refused():
    entry = {"class of the tensor": "os.path", "tensors": {}, "attributes": []}
    with pytest.raises(CheckpointError, match=r"of the class os\.path, which torch does not build"):
        dicts_as_subclasses({"exp_avg": entry})
    unknown = {**entry, "class of the tensor": "torchao.no_such_module.State"}
    with pytest.raises(CheckpointError, match="cannot be imported"):
        dicts_as_subclasses([unknown])
