"""Operations after `fit`: saving, inference, exports; and checkpoints that only the first rank requests."""

import os
import time
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from transformers import BertConfig, BertModel

from harness.layouts import under_sizes
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.checkpoint.read import SavedFolder
from lightning_hybrid.patching import active_patches
from lightning_hybrid.run import module_state
from lightning_hybrid.run.module_state import Place, place_for
from models.regression import FEATURES, Regressor, mlp, regression_data


class Exports(Regressor):
    """Exports when training ends."""

    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(), nn.Linear(FEATURES, 1)
        self.exported = None

    def forward(self, x):
        return self.head(self.body(x))

    def on_train_end(self):
        self.eval()
        with torch.no_grad():
            self.exported = {name: value.clone() for name, value in self.state_dict().items()}
            self.answer = self(torch.ones(1, FEATURES, dtype=torch.float64))


class Language(Regressor):
    """Wraps a model of transformers, which saves itself."""

    def __init__(self):
        super().__init__()
        small = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 2}
        self.model = BertModel(BertConfig(vocab_size=16, max_position_embeddings=8, **small), add_pooling_layer=False)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.model(input_ids=((x + 1) * 7).long()).last_hidden_state[:, 0])


class SavesOnSomeRanks(Exports):
    """Saves on the first rank only, or on those of the first replica, while the module is sharded."""

    def __init__(self, hook, first_replica):
        super().__init__()
        self.first_replica = first_replica
        setattr(self, hook, self.save)

    def save(self, *_):
        is_first = torch.distributed.get_rank() == 0 if self.first_replica else self.trainer.is_global_zero
        if is_first and self.global_step == 1:
            self.trainer.save_checkpoint(os.path.join(self.trainer.default_root_dir, "alone.ckpt"))

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, 1.0)


def fit(make, size, pp, folder, **further):
    warnings.simplefilter("ignore")
    torch.manual_seed(3)
    module = make()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    strategy = Hybrid3DStrategy(pipeline_parallel_size=pp, num_microbatches=2, **further)
    options = {"accelerator": "cpu", "max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1}
    trainer = Trainer(devices=size, strategy=strategy, precision="64-true", default_root_dir=folder, **options, **quiet)
    trainer.fit(module, **regression_data())
    return module, trainer


def saved(size, pp, folder):
    module, trainer = fit(Exports, size, pp, folder)
    path = os.path.join(folder, f"{trainer.global_rank}.pt")
    torch.save(module.state_dict(), path)
    loaded = Exports().double()
    loaded.load_state_dict(torch.load(path))
    x = torch.ones(1, FEATURES, dtype=torch.float64)
    assert torch.equal(loaded(x), module.answer)
    for name, value in module.exported.items():
        assert torch.equal(value, loaded.state_dict()[name])
    return loaded(x).item()


def pretrained(size, pp, folder):
    module, trainer = fit(Language, size, pp, folder)
    module.model.save_pretrained(folder)
    if trainer.is_global_zero:  # transformers itself writes on the first process only
        loaded = BertModel.from_pretrained(folder, add_pooling_layer=False).double()
        tokens = torch.arange(4).unsqueeze(0)
        module.eval()
        loaded.eval()
        assert torch.allclose(loaded(tokens).last_hidden_state, module.model(tokens).last_hidden_state)
    return [float(p.detach().sum()) for p in module.parameters()]


@under_sizes({"pp2": (2, 2), "dp2 x pp2": (4, 2)})
@pytest.mark.parametrize("use", [saved, pretrained], ids=lambda use: use.__name__)
def test_operations_after_fit(worlds, tmp_path, use, size, pp):
    results = worlds.run(size, use, size, pp, str(tmp_path))
    assert all(result == results[0] for result in results)


def save_on_some_ranks(size, hook, folder, pp=2, further=None):
    start = time.monotonic()
    try:
        fit(partial(SavesOnSomeRanks, hook, first_replica=size > 2), size, pp, folder, **(further or {}))
    except Exception as error:
        return f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}", time.monotonic() - start
    return "saved", time.monotonic() - start


PLACES = [(2, "on_train_batch_end"), (2, "on_before_optimizer_step"), (4, "on_train_batch_start")]


@pytest.mark.parametrize(("size", "hook"), PLACES, ids=lambda value: str(value))
def test_checkpoint_on_some_ranks_ends_within_seconds(worlds, tmp_path, size, hook):
    assert_refused_soon(worlds.run(size, save_on_some_ranks, size, hook, str(tmp_path), timeout=40))


@pytest.mark.parametrize("further", [{"zero_stage": 3}, {"tensor_parallel_size": 2}], ids=["zero3", "tp2"])
def test_checkpoint_on_one_rank_of_sharded_layers(worlds, tmp_path, further):
    results = worlds.run(2, save_on_some_ranks, 2, "on_train_batch_end", str(tmp_path), 1, further, timeout=40)
    assert_refused_soon(results)


def assert_refused_soon(results):
    assert all(text != "saved" and seconds < 20 for text, seconds in results), results
    assert all("make the same calls on all ranks" in text for text, _ in results), results


@pytest.mark.parametrize(
    ("device", "missing", "processes", "expected"),
    [
        ("cpu", 9, 1, Place.DEVICE),
        ("cpu", 9, 4, Place.SHARDS),
        ("cuda", 4, 4, Place.DEVICE),
        ("cuda", 9, 2, Place.HOST),
        ("cuda", 9, 4, Place.SHARDS),
    ],
)
def test_place_for_a_full_module_of_ten_bytes(monkeypatch, device, missing, processes, expected):
    monkeypatch.setattr(module_state, "free_bytes", lambda device: 5)
    monkeypatch.setattr(module_state, "free_on_host", lambda: 30)
    assert place_for(10, missing, processes, torch.device(device)) is expected


class OnlyTrains(Exports):
    def on_train_end(self):
        pass


def without_room(pp, folder, further):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_state, "free_on_host", lambda: 0)
        module, trainer = fit(OnlyTrains, 2, pp, folder, **further)
        with pytest.raises(RuntimeError, match="ended without room"):
            module.state_dict()
        with pytest.raises(RuntimeError, match="ended without room"):
            trainer.validate(module, regression_data()["val_dataloaders"], verbose=False)


@pytest.mark.parametrize(("pp", "further"), [(2, {}), (1, {"zero_stage": 3})], ids=["pp2", "zero3"])
def test_a_module_without_room_stays_in_shards(worlds, tmp_path, pp, further):
    worlds.run(2, without_room, pp, str(tmp_path), further)


def folder_after(pp, folder, further, has_room):
    with pytest.MonkeyPatch.context() as patch:
        if not has_room:
            patch.setattr(module_state, "free_on_host", lambda: 0)
        module, trainer = fit(OnlyTrains, 2, pp, folder, save_distributed_checkpoint=True, **further)
        trainer.save_checkpoint(path := os.path.join(folder, "after.ckpt"))
    replaced = [each.name for each in active_patches()]
    trainer.strategy._files._reading_shards.close()  # as the next run does
    state = SavedFolder(Path(path)).checkpoint()["state_dict"]
    assert state.keys() == OnlyTrains().state_dict().keys()
    assert not has_room or all(torch.equal(state[name], value) for name, value in module.state_dict().items())
    return replaced, sorted(name for name in os.listdir(path) if name.endswith(".distcp"))


@pytest.mark.parametrize("has_room", [True, False], ids=["full", "in shards"])
@pytest.mark.parametrize(("pp", "further"), [(2, {}), (1, {"zero_stage": 3})], ids=["pp2", "zero3"])
def test_each_rank_writes_its_share_of_a_folder_after_the_run(worlds, tmp_path, pp, further, has_room):
    reads = [] if has_room else ["_get_lightning_module_state_dict"]
    for replaced, files in worlds.run(2, folder_after, pp, str(tmp_path), further, has_room):
        assert replaced == reads and files == ["__0_0.distcp", "__1_0.distcp"]
