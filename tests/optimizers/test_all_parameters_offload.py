"""Offload of optimizers whose step reads several parameters: bitwise equal results."""

import copy
import dataclasses
import os

import pytest
import torch
from torch import nn

from harness.fits import Run, fit
from harness.resident_file import resident_bytes
from harness.simulated_host import SimulatedHost
from harness.zero_runs import KINDS, SUBSETS, assert_bits, assert_same_bits, with_offload
from lightning_hybrid.errors import OffloadError
from lightning_hybrid.optimizers.full_step import AllParametersStep
from models.optimizers import Lamb


def lbfgs(module):
    module.configure_optimizers = lambda: torch.optim.LBFGS(
        module.parameters(), lr=0.1, max_iter=3, history_size=4, line_search_fn="strong_wolfe"
    )


def adafactor(module):
    module.configure_optimizers = lambda: torch.optim.Adafactor(module.parameters(), lr=1e-2)


def muon(module):
    weights = [p for p in module.parameters() if p.dim() == 2]
    module.configure_optimizers = lambda: torch.optim.Muon(weights, lr=1e-2)


def lamb(module):
    module.configure_optimizers = lambda: Lamb(module.parameters(), max_grad_norm=0.05)


class HostOnly(SimulatedHost):
    """Records nothing: there is no ZeRO, and LBFGS has lists of states."""

    def on_train_start(self, *_):
        pass

    def on_train_batch_end(self, *_):
        pass


@pytest.mark.parametrize(
    ("run", "on_disk"),
    [
        pytest.param(Run("Layers", num_batches=4, microbatches=1, change=lbfgs), True, id="lbfgs"),
        pytest.param(Run("Layers", num_batches=3, microbatches=1, change=adafactor), True, id="adafactor"),
        pytest.param(Run("Layers", dp=2, change=muon, strategy={"zero_stage": 2}), True, id="muon zero2"),
        pytest.param(Run("Layers", pp=2, change=lamb), True, id="lamb stages", marks=pytest.mark.slow),
        pytest.param(Run("Layers", dp=2, num_batches=3, microbatches=1, change=lbfgs), False, id="lbfgs dp2"),
        *(
            pytest.param(*case, id=name, marks=pytest.mark.slow)
            for name, case in {
                "adafactor tp2": (Run("Layers", tp=2, change=adafactor), True),
                "adafactor zero3": (Run("Layers", dp=2, change=adafactor, strategy={"zero_stage": 3}), True),
                "lamb zero1": (Run("Layers", dp=2, change=lamb, strategy={"zero_stage": 1}), False),
            }.items()
        ),
    ],
)
def test_offloaded_states(worlds, tmp_path, run, on_disk):
    assert_same_bits(worlds, run, f"disk:{tmp_path}" if on_disk else "cpu")
    assert not os.listdir(tmp_path), "files are left behind"


@pytest.mark.slow
@pytest.mark.parametrize("subset", ["s", "g"])
def test_offloaded_states_of_another_device(worlds, subset):
    """They are moved to the parameters' device. (The simulated host cannot see transfers of full tensors.)"""
    run = Run("Layers", dp=2, num_batches=3, change=muon, strategy={"zero_stage": 2})
    where = {KINDS[letter]: "cpu" for letter in subset}
    ranks = worlds.run(2, fit, dataclasses.replace(with_offload(run, where), callback=SimulatedHost))
    assert_bits(worlds.run(2, fit, run), ranks)
    parameters, gradients, states, between = SUBSETS[subset]
    for rank in ranks:
        assert rank.extra == {"within": {(parameters, gradients)}, "states": {states}, "between": {between}}


@pytest.mark.slow
def test_closure_finds_parameters_on_the_compute_device(worlds):
    run = Run("Layers", num_batches=3, microbatches=1, change=lbfgs)
    plain = worlds.run(1, fit, run)
    assert_bits(plain, worlds.run(1, fit, dataclasses.replace(with_offload(run, "cpu"), callback=HostOnly)))


def descend(optimizer, weight, steps):
    """Returns the weight after each step."""

    def closure():
        optimizer.zero_grad()
        loss = (weight.pow(4) - weight).sum()
        loss.backward()
        return loss

    seen = []
    for _ in range(steps):
        optimizer.step(closure)
        seen.append(weight.detach().clone())
    return seen


def make_lbfgs():
    weight = nn.Parameter(torch.linspace(0.1, 2, 600, dtype=torch.float64))
    return torch.optim.LBFGS([weight], lr=0.1, max_iter=1, history_size=3), weight


def test_growing_history_reuses_its_file(tmp_path):
    """LBFGS stores two vectors for each of the last three steps, and a few more; none is resident between steps."""
    plain, offloaded = make_lbfgs(), make_lbfgs()
    states = AllParametersStep(offloaded[0], str(tmp_path))
    sizes = []
    for expected in descend(*plain, 8):
        assert torch.equal(descend(*offloaded, 1)[0], expected)
        assert resident_bytes(states.file) == 0
        sizes.append(states.file.nbytes)
    assert sizes[0] < sizes[-1] == sizes[4]
    states.close()
    assert not os.listdir(tmp_path)
    [one], [other] = plain[0].state.values(), offloaded[0].state.values()
    assert all(torch.equal(a, b) for a, b in zip(one["old_dirs"], other["old_dirs"], strict=True))
    assert torch.equal(descend(*plain, 1)[0], descend(*offloaded, 1)[0])


def test_loaded_states_are_written_to_the_file(tmp_path):
    plain, offloaded = make_lbfgs(), make_lbfgs()
    descend(*plain, 5)
    states = AllParametersStep(offloaded[0], str(tmp_path))
    offloaded[0].load_state_dict(copy.deepcopy(plain[0].state_dict()))
    offloaded[1].data.copy_(plain[1].data)
    states.adopt()
    assert states.is_in_file(offloaded[0].state[offloaded[1]]["prev_flat_grad"])
    assert torch.equal(descend(*plain, 1)[0], descend(*offloaded, 1)[0])
    states.close()


def test_sparse_gradients(tmp_path):
    results = []
    for folder in (None, str(tmp_path)):
        rows = nn.Embedding.from_pretrained(torch.ones(6, 3), freeze=False, sparse=True)
        optimizer = torch.optim.SparseAdam(rows.parameters(), lr=0.1)
        if folder is not None:
            states = AllParametersStep(optimizer, folder)
        for _ in range(3):
            optimizer.zero_grad()
            rows(torch.tensor([0, 2])).square().sum().backward()
            optimizer.step()
        results.append(rows.weight.detach())
    assert states.is_in_file(optimizer.state[rows.weight]["exp_avg"])
    states.close()
    assert torch.equal(*results) and not torch.equal(results[0], torch.ones(6, 3))


def test_full_disk_leaves_states_in_memory(tmp_path, monkeypatch):
    plain, offloaded = make_lbfgs(), make_lbfgs()
    states = AllParametersStep(offloaded[0], str(tmp_path))
    descend(*offloaded, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OffloadError, match=r"B are free there .*No space left"):
        patch.setattr(os, "posix_fallocate", full)
        descend(*offloaded, 1)
    expected = descend(*plain, 3)
    assert torch.equal(offloaded[1], expected[1])
    assert torch.equal(descend(*offloaded, 1)[0], expected[2])
    states.check()
    states.close()


def test_truncated_file_stops_the_step_before_any_change(tmp_path):
    optimizer, weight = make_lbfgs()
    states = AllParametersStep(optimizer, str(tmp_path))
    descend(optimizer, weight, 1)
    before = weight.detach().clone()
    os.ftruncate(states.file._file.fileno(), 0)
    with pytest.raises(OffloadError, match="has 0 bytes where"):
        descend(optimizer, weight, 1)
    assert torch.equal(weight, before)
    with pytest.warns(UserWarning, match="LBFGS are lost"):
        states.close()
    assert optimizer.state[weight]["prev_flat_grad"].isnan().all()


class ReferencesOldState(torch.optim.SGD):
    """References a state of two steps ago outside of its states, in a view."""

    def step(self, closure=None):
        [p] = self.param_groups[0]["params"]
        self.older = getattr(self, "old", None)
        if "copy" in self.state[p]:
            self.old = self.state[p]["copy"].view(-1)
        self.state[p]["copy"] = p.detach().clone()
        return super().step(closure)


def test_referenced_former_state_is_not_overwritten(tmp_path):
    p = nn.Parameter(torch.zeros(40))
    optimizer = ReferencesOldState([p], lr=1.0)
    states = AllParametersStep(optimizer, str(tmp_path))
    for _ in range(5):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert optimizer.old.unique().tolist() == [-3.0] and optimizer.older.unique().tolist() == [-2.0]
    states.close()
