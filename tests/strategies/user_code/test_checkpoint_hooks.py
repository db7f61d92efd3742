"""Values that hooks add to a checkpoint of a sharded model equal those of one process, or are refused."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint

from harness.trainer_runs import assert_same, ignore_warnings, trainer_of
from lightning_hybrid.checkpoint.read import SavedFolder
from lightning_hybrid.errors import CheckpointError
from models.tiny import Tiny, loader


class Adds(Tiny):
    """Copies, a parameter itself, and a number; in the file of `ModelCheckpoint` and in one saved by a hook."""

    def __init__(self, path):
        super().__init__()
        self.path, self.average = path, {}

    def on_fit_start(self):
        self.average = {name: p.detach().clone() for name, p in self.named_parameters()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for name, p in self.named_parameters():
            self.average[name].lerp_(p.detach(), 0.5)
        if batch_idx == 1:
            self.trainer.save_checkpoint(self.path)

    def on_save_checkpoint(self, checkpoint):
        assert checkpoint["callbacks"]["AddsFullTensors"]["first"].shape == self.layers[0][0].weight.shape
        checkpoint["mine"] = {
            "average": self.average,
            "doubled": [p.detach() * 2 for p in self.parameters()],
            "itself": self.layers[-1].weight,
            "norm": float(sum(p.norm() for p in self.parameters())),
            "of_callback": checkpoint["callbacks"]["AddsFullTensors"]["first"].norm().item(),
        }


class AddsFullTensors(Callback):
    def state_dict(self):
        return {"first": self.module.layers[0][0].weight.detach().clone()}

    def setup(self, trainer, pl_module, stage):
        self.module = pl_module

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["largest"] = max(p.detach().abs().max() for p in pl_module.parameters())


def saved(folder, size, pp, strategy):
    """Saved in a hook, by `ModelCheckpoint`, and when the module is full again."""
    ignore_warnings()
    checkpoints = ModelCheckpoint(folder, filename="kept", every_n_train_steps=4)
    module = Adds(f"{folder}/hook.ckpt")
    options = {
        "callbacks": [checkpoints, AddsFullTensors()],
        "enable_checkpointing": True,
        "strategy_options": strategy,
    }
    trainer = trainer_of(size, pp, **options)
    replicas = size // pp // strategy.get("tensor_parallel_size", 1)
    trainer.fit(module, loader(4 // replicas, replicas=1 if replicas == 1 else None))
    module.average = {}
    trainer.save_checkpoint(f"{folder}/end.ckpt")


def additions(path):
    checkpoint = SavedFolder(path).checkpoint() if path.is_dir() else torch.load(path, weights_only=True)
    mine = checkpoint["mine"]
    flat = {f"average.{name}": value for name, value in mine["average"].items()}
    flat |= {f"doubled.{number}": value for number, value in enumerate(mine["doubled"])}
    flat |= {"itself": mine["itself"], "norm": mine["norm"], "of_callback": mine["of_callback"]}
    return {**flat, "first": checkpoint["callbacks"]["AddsFullTensors"]["first"], "largest": checkpoint["largest"]}


LAYOUTS = {
    "pp2": (2, 2, {"num_microbatches": 2}),
    "pp2, a folder": (2, 2, {"num_microbatches": 2, "save_distributed_checkpoint": True}),
    "zero3": (2, 1, {"zero_stage": 3}),
    "tp2": (2, 1, {"tensor_parallel_size": 2}),
}
SLOW = {
    "zero1": (2, 1, {"zero_stage": 1}),
    "zero3, a folder": (2, 1, {"zero_stage": 3, "save_distributed_checkpoint": True}),
    "pp2 x zero3": (4, 2, {"zero_stage": 3}),
    "pp2 x tp2": (4, 2, {"tensor_parallel_size": 2}),
}
CASES = [*LAYOUTS.values(), *(pytest.param(*layout, marks=pytest.mark.slow) for layout in SLOW.values())]


@pytest.mark.parametrize(("size", "pp", "strategy"), CASES, ids=[*LAYOUTS, *SLOW])
def test_hooks_add_full_tensors_and_numbers(worlds, tmp_path, size, pp, strategy):
    for folder in ("one", "parts"):
        (tmp_path / folder).mkdir()
    worlds.run(1, saved, str(tmp_path / "one"), 1, 1, {})
    worlds.run(size, saved, str(tmp_path / "parts"), size, pp, strategy)
    for name in ("hook.ckpt", "kept.ckpt", "end.ckpt"):
        expected, found = additions(tmp_path / "one" / name), additions(tmp_path / "parts" / name)
        assert {n: getattr(v, "shape", ()) for n, v in found.items()} == {
            n: getattr(v, "shape", ()) for n, v in expected.items()
        }
        assert_same(found, expected)


class AddsStates(Tiny):
    """States of the optimizer, and a weight average of a Lightning callback."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)

    def on_save_checkpoint(self, checkpoint):
        state = self.trainer.optimizers[0].state
        [average] = [each for each in self.trainer.callbacks if isinstance(each, EMAWeightAveraging)]
        checkpoint["means"] = [entry["exp_avg"] * 2 for entry in state.values()]
        checkpoint["average"] = [p.detach().clone() for p in average._average_model.module.parameters()]
        checkpoint["norm"] = float(sum(entry["exp_avg_sq"].norm() for entry in state.values()))


def saved_states(path, size, strategy):
    ignore_warnings()
    callbacks = [EMAWeightAveraging(decay=0.7, device=None), Saves(path)]
    trainer = trainer_of(size, 1, strategy_options=strategy, callbacks=callbacks)
    trainer.fit(AddsStates(), loader(4 // size, replicas=1 if size == 1 else None))


def test_hooks_add_states_that_replicas_shard(worlds, tmp_path):
    worlds.run(1, saved_states, str(tmp_path / "one.ckpt"), 1, {})
    worlds.run(2, saved_states, str(tmp_path / "parts.ckpt"), 2, {"zero_stage": 3})
    expected, found = (torch.load(tmp_path / name, weights_only=True) for name in ("one.ckpt", "parts.ckpt"))
    for name in ("means", "average"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-12)
    assert found["norm"] == pytest.approx(expected["norm"], rel=1e-10)


class AddsOnFirst(Tiny):
    def on_save_checkpoint(self, checkpoint):
        if self.trainer.is_global_zero:
            checkpoint["last"] = self.layers[-1].weight


class AddsLocalStates(Tiny):
    """Each stage has the states of its parameters, so their number differs."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["means"] = [entry["exp_avg"] for entry in self.trainer.optimizers[0].state.values()]


class Saves(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.save_checkpoint(self.path)


REFUSED = {AddsOnFirst: "checkpoint['last'], which AddsOnFirst.on_save_checkpoint adds, is added by some ranks"}
REFUSED |= {AddsLocalStates: "which AddsLocalStates.on_save_checkpoint adds, is added by some ranks"}


def refused(folder, name):
    ignore_warnings()
    module = {case.__name__: case for case in REFUSED}[name]()
    trainer = trainer_of(2, 2, strategy_options={"num_microbatches": 2}, callbacks=[Saves(f"{folder}/none.ckpt")])
    with pytest.raises(CheckpointError) as error:
        trainer.fit(module, loader(4))
    return str(error.value)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.__name__)
def test_absent_values_in_the_file_are_refused(worlds, tmp_path, case):
    for message in worlds.run(2, refused, str(tmp_path), case.__name__):
        assert REFUSED[case] in message and "p.detach().clone()" in message
    assert list(tmp_path.iterdir()) == []
