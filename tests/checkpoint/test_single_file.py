"""Single-file checkpoints: saved under any layout, loaded by plain Lightning and by any other layout."""

import dataclasses
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from harness.checkpoint_runs import (
    DP2PP2,
    INTERLEAVED,
    MODULES,
    PLAIN,
    PP1,
    PP2,
    PP2TP2,
    PP4,
    TP2,
    V_PLACEMENT,
    Layout,
    assert_same_state,
    load,
    train,
)
from harness.fits import trainer_of
from models.cases import Samples, batch_of, make
from models.hand_written import Tied


class SaveAndTry(Callback):
    """Saves in a run, while the module is sharded, and records the error of `state_dict()`."""

    def __init__(self, path):
        self.path, self.message = path, ""

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)
            try:
                pl_module.state_dict()
            except RuntimeError as error:
                self.message = str(error)


def train_and_save(case: str, layout: Layout, path: str):
    """One fit of two epochs; the file is written after the first."""
    module = make(MODULES[case])
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    callback = SaveAndTry(path)
    trainer = trainer_of(layout.world_size, layout.strategy(), [callback], max_epochs=2)
    trainer.fit(module, DataLoader(Samples(module.kind, 16), batch_size=8))
    after = {name: value.clone() for name, value in module.state_dict().items()}
    still = [name for name, p in module.named_parameters() if p.requires_grad and torch.equal(p, before[name])]
    return after, still, callback.message


def each_written():
    """Both default cases have stages; one adds shards of tied weights, the other several stages per rank."""
    layouts = {"pp2": PP2, "interleaved": INTERLEAVED, "v": V_PLACEMENT, "tp2": TP2, "pp2 x tp2": PP2TP2}
    for name, layout in layouts.items():
        for case in ("GPT2", "BuildsOptimizerInInit"):
            default = (case, layout) in (("GPT2", PP2TP2), ("BuildsOptimizerInInit", INTERLEAVED))
            yield pytest.param(case, layout, id=f"{name}-{case}", marks=[] if default else [pytest.mark.slow])


@pytest.mark.parametrize(("case", "layout"), list(each_written()))
def test_file_equals_the_one_of_plain_lightning(worlds, tmp_path, case, layout):
    plain, saved = str(tmp_path / "plain.ckpt"), str(tmp_path / "saved.ckpt")
    [(expected, _, _)] = worlds.run(1, train_and_save, case, PLAIN, plain)
    for state, still, message in worlds.run(layout.world_size, train_and_save, case, layout, saved):
        assert_same_state(state, expected)
        assert not still, f"trained parameters that did not move: {still}"
        assert "are on other ranks" in message and "save_checkpoint" in message
    a, b = load(plain), load(saved)
    assert a["global_step"] == b["global_step"] == 2
    assert_same_state(b["state_dict"], a["state_dict"])
    assert all(type(value) is torch.Tensor for value in b["state_dict"].values())
    [x], [y] = a["optimizer_states"], b["optimizer_states"]
    assert x["param_groups"] == y["param_groups"] and x["state"].keys() == y["state"].keys()
    for number, entry in x["state"].items():
        assert entry.keys() == y["state"][number].keys()
        for key, value in entry.items():
            torch.testing.assert_close(y["state"][number][key], value, rtol=1e-8, atol=1e-14, msg=f"{number} {key}")


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param((PLAIN, DP2PP2, PP2TP2), id="combined"),
        pytest.param((PP1, PP2, PP4, TP2), id="few axes", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("case", ["GPT2", pytest.param("BuildsOptimizerInInit", marks=pytest.mark.slow)])
def test_resume_under_every_layout(worlds, tmp_path, case, layouts):
    """Saved by two stages; each layout ends where an uninterrupted run ends."""
    path = str(tmp_path / "half.ckpt")
    [(expected, steps)] = worlds.run(1, train, case, PLAIN, 2)
    worlds.run(2, train_and_save, case, PP2, path)
    for layout in layouts:
        for state, reached in worlds.run(layout.world_size, train, case, layout, 2, path):
            assert reached == steps == 4, layout
            assert_same_state(state, expected)


def test_unequal_row_shards(worlds, tmp_path):
    path = str(tmp_path / "half.ckpt")
    [(expected, _)] = worlds.run(1, train, "Decoder", PLAIN, 2)
    worlds.run(2, train_and_save, "Decoder", TP2, path)
    for layout in (PLAIN, PP2TP2):
        for state, _ in worlds.run(layout.world_size, train, "Decoder", layout, 2, path):
            assert_same_state(state, expected)


def test_stages_resume_a_plain_file(worlds, tmp_path):
    path = str(tmp_path / "plain.ckpt")
    [(expected, _)] = worlds.run(1, train, "Tied", PLAIN, 3)
    worlds.run(1, train, "Tied", PLAIN, 1, None, path)
    for state, steps in worlds.run(4, train, "Tied", PP4, 3, path):
        assert steps == 6
        assert_same_state(state, expected)


def test_save_after_fit(worlds, tmp_path):
    path = str(tmp_path / "after.ckpt")
    states = worlds.run(4, train, "Tied", DP2PP2, 1, None, path)
    assert_same_state(load(path)["state_dict"], states[0][0], tolerance=0)
    assert load(path)["optimizer_states"][0]["state"].keys() == set(range(17))


def load_plainly(path):
    module = Tied.load_from_checkpoint(path)
    return dict(module.state_dict()), float(module.loss(batch_of("tokens", range(4))))


def test_load_from_checkpoint_in_one_process(worlds, tmp_path):
    path = str(tmp_path / "half.ckpt")
    worlds.run(2, train_and_save, "Tied", PP2, path)
    [(state, loss)] = worlds.run(1, load_plainly, path)
    assert_same_state({k: v.double() for k, v in state.items()}, load(path)["state_dict"], tolerance=1e-6)
    assert 0 < loss < 100


def save_and_infer(path):
    """User code after fit, on every rank."""
    module = make("GPT2")
    trainer = trainer_of(2, PP2.strategy(), [])
    trainer.fit(module, DataLoader(Samples(module.kind, 16), batch_size=8))
    own = f"{path}/{trainer.global_rank}.pt"
    torch.save(module.state_dict(), own)
    module.eval()
    with torch.no_grad():
        loss = module.loss(batch_of("tokens", range(4)))
    assert all(type(p) is torch.nn.Parameter for p in module.parameters())
    assert module.model.lm_head.weight is module.model.transformer.wte.weight
    fresh = make("GPT2").eval()
    fresh.load_state_dict(torch.load(own))
    with torch.no_grad():
        return loss, fresh.loss(batch_of("tokens", range(4)))


def test_module_is_full_after_fit_on_every_rank(worlds, tmp_path):
    results = worlds.run(2, save_and_infer, str(tmp_path))
    assert len({float(loss) for pair in results for loss in pair}) == 1
    a, b = (torch.load(Path(tmp_path) / f"{rank}.pt") for rank in range(2))
    assert_same_state(a, b, tolerance=0)


def fit_twice(case):
    """A second fit of the same module continues the first."""
    module = make(MODULES[case])
    data = DataLoader(Samples(module.kind, 16), batch_size=8)
    for layout in (PP2, dataclasses.replace(PP2)):
        trainer_of(2, layout.strategy(), []).fit(module, data)
    return dict(module.state_dict())


def fit_twice_plainly(case):
    module = make(MODULES[case])
    data = DataLoader(Samples(module.kind, 16), batch_size=8)
    for _ in range(2):
        trainer_of(1, None, []).fit(module, data)
    return dict(module.state_dict())


def test_module_is_fitted_twice(worlds):
    [expected] = worlds.run(1, fit_twice_plainly, "Tied")
    for state in worlds.run(2, fit_twice, "Tied"):
        assert_same_state(state, expected)
