"""A checkpoint with tensors of other shapes is refused on every rank, by the first one's name and both shapes."""

import pytest
import torch

from harness.fits import refusal
from harness.trainer_runs import ignore_warnings, trainer_of
from lightning_hybrid.checkpoint.convert import to_folder
from lightning_hybrid.checkpoint.full import check_kind, check_state_shapes
from lightning_hybrid.errors import CheckpointError
from models.regression import FEATURES, Regression, regression_data


class Scaled(Regression):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(FEATURES))

    def forward(self, x):
        return super().forward(x * self.scale)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fit(arguments):
    size, options, save, resume = arguments
    ignore_warnings()
    trainer = trainer_of(size, strategy_options=options, max_epochs=2 if resume else 1)
    trainer.fit(Scaled().double(), regression_data()["train_dataloaders"], ckpt_path=resume)
    if save:
        trainer.save_checkpoint(save)


def cut(checkpoint, what):
    """Leaves one row of a tensor; returns what the error says."""
    holder, name, words = {
        "state": (checkpoint["optimizer_states"][0]["state"][0], "exp_avg", "'exp_avg' of layers.0.0.weight"),
        "parameter": (checkpoint["state_dict"], "layers.1.0.weight", "layers.1.0.weight"),
        "buffer": (checkpoint["state_dict"], "scale", "scale"),
    }[what]
    full = tuple(holder[name].shape)
    holder[name] = holder[name][:1].clone()
    return words, str(tuple(holder[name].shape)), str(full)


EVERY = [
    {"zero_stage": 0},
    {"zero_stage": 1},
    {"zero_stage": 3},
    {"pipeline_parallel_size": 2},
    {"tensor_parallel_size": 2},
]


@pytest.mark.parametrize(
    ("what", "is_folder", "layouts"),
    [
        pytest.param("state", False, EVERY[2:4], id="state"),
        pytest.param("state", True, EVERY[2:4], id="state in a folder"),
        pytest.param("parameter", False, EVERY, id="parameter", marks=pytest.mark.slow),
        pytest.param("buffer", True, EVERY[3:4], id="buffer in a folder"),
        pytest.param("state", False, EVERY, id="state, every layout", marks=pytest.mark.slow),
    ],
)
def test_refused_on_every_rank(worlds, tmp_path, what, is_folder, layouts):
    path, folder = tmp_path / "one.ckpt", tmp_path / "folder.ckpt"
    worlds.run(1, fit, (1, {}, path, None))
    checkpoint = torch.load(path, weights_only=False)
    words = cut(checkpoint, what)
    torch.save(checkpoint, path)
    to_folder(path, folder, weights_only=False)
    for options in layouts:
        for message in worlds.run(2, refusal, fit, (2, options, None, folder if is_folder else path)):
            assert message.startswith("CheckpointError") and all(word in message for word in words), message


KINDS = {
    "Adafactor": {},
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    "ASGD": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
}


def stepped(kind, options):
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in ((4, 3), (5,))]
    optimizer = getattr(torch.optim, kind)(parameters, **options)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


CLASSES = {**KINDS, "AdamW": {}, "Adamax": {}, "NAdam": {}, "RAdam": {}, "Adagrad": {}, "Adadelta": {}, "Rprop": {}}


@pytest.mark.parametrize("kind", CLASSES)
def test_states_of_another_class_are_refused_where_torch_fails(kind):
    for saved, options in CLASSES.items():
        state, optimizer = stepped(saved, options).state_dict(), stepped(kind, CLASSES[kind])
        try:
            check_kind(optimizer, state["param_groups"], state["state"], "one.ckpt")
            refusal = ""
        except CheckpointError as error:
            refusal = str(error)
        try:
            optimizer.load_state_dict(state)
            optimizer.step()
            fails = False
        except (KeyError, IndexError, AttributeError, TypeError):
            fails = True
        if fails:
            assert refusal.startswith(f"one.ckpt does not fit {kind} of configure_optimizers: its "), saved
        else:
            assert kind not in refusal, (saved, refusal)


def test_settings_may_differ_from_those_of_the_checkpoint():
    for kind, options in (("SGD", {"momentum": 0.9}), ("Adam", {"amsgrad": True}), ("RMSprop", {"centered": True})):
        for one, other in ((options, {}), ({}, options)):
            state, optimizer = stepped(kind, one).state_dict(), stepped(kind, other)
            state["param_groups"][0] |= {"initial_lr": 0.1}
            del state["param_groups"][0]["maximize"]  # as older versions of torch
            check_kind(optimizer, state["param_groups"], state["state"], "one.ckpt")


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_optimizer_saves_it_loads(kind):
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in ((4, 3), (5,), (2, 3, 2), ())]
    optimizer = getattr(torch.optim, kind)(parameters, **KINDS[kind])
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    check_state_shapes(optimizer, optimizer.state_dict()["state"], ["a", "b", "c", "d"], is_sharded=True)
