"""Manual steps that read and write the states of their optimizer, of which each rank has a shard."""

from __future__ import annotations

import copy
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.layouts import Case, check, refusal
from params.reads.test_gradients_in_steps import Manual, Routed, perceptron

from models.regression import closure_of

SLOW = pytest.mark.slow


class Stateful(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        if states := self.optimizers().state:  # else a recording
            self.use(batch_idx, states)

    def change(self, batch: Any, batch_idx: int) -> None:
        pass

    def use(self, batch_idx: int, states: Any) -> None:
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


class Reads(Stateful):
    def use(self, batch_idx: int, states: Any) -> None:
        for p in self.parameters():
            moment = states[p]["exp_avg"]
            self.seen.append([list(moment.shape), float(moment.norm()), float(states[p]["step"])])
        kept = copy.deepcopy(states[self.head.weight]["exp_avg_sq"])
        self.seen.append([kept.shape[0], kept.tolist(), float(torch.cosine_similarity(p, moment, 0).sum())])


class Writes(Stateful):
    def use(self, batch_idx: int, states: Any) -> None:
        for p in self.parameters():
            moment = states[p]["exp_avg"]
            if batch_idx == 0:
                moment.mul_(0.5).add_(p.detach(), alpha=0.1)
            elif batch_idx == 1:
                states[p]["exp_avg_sq"].copy_(p.detach().square())
            elif batch_idx == 2:
                states[p]["exp_avg"] = moment * 0.3  # another tensor
            moment.data[0] = 0.1
            self.seen.append(float(moment.norm()))


class InClosure(Stateful):
    """A closure reads the states, and writes later into what it has kept."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().step(closure=closure_of(self, batch, self.change_states))
        flat = [state["exp_avg"].view(-1) for state in self.optimizers().state.values()]
        for one in flat:
            one[-1] = 0.2

    def change_states(self) -> None:
        for state in self.optimizers().state.values():
            self.seen.append(float(state["exp_avg"].norm()))
            state["exp_avg"].mul_(0.9)


class Saves(Stateful):
    """Saves a checkpoint inside of the step."""

    def __init__(self, layer: Any, folder: Path) -> None:
        super().__init__(layer)
        self.folder = folder

    def use(self, batch_idx: int, states: Any) -> None:
        path = self.folder / f"{self.trainer.world_size}-{batch_idx}.ckpt"
        self.trainer.save_checkpoint(path)
        entries = torch.load(path, weights_only=False)["optimizer_states"][0]["state"]
        self.seen.append([float(entry["exp_avg"].norm()) for entry in entries.values()])
        self.seen.append([list(entry["exp_avg_sq"].shape) for entry in entries.values()])


USES = (Reads, Writes, InClosure)
LAYOUTS = ("zero1", "zero3", "tp2", "pp2", "zero3 layerwise", "tp2 x dp2", "dp2")
KEPT = {(Reads, "tp2"), (Reads, "zero1"), (Writes, "zero3"), (Writes, "tp2"), (InClosure, "tp2"), (InClosure, "zero1")}


@pytest.mark.parametrize(
    ("use", "layout"),
    [pytest.param(use, layout, marks=[SLOW] * ((use, layout) not in KEPT)) for use in USES for layout in LAYOUTS],
)
def test_states_are_those_of_one_process(worlds: Any, tmp_path: Path, use: Any, layout: str) -> None:
    check(worlds, Case(partial(use, perceptron)), layout, tmp_path)


@pytest.mark.parametrize("use", [Reads, InClosure])
def test_states_of_experts_are_those_of_one_process(worlds: Any, tmp_path: Path, use: Any) -> None:
    case = Case(partial(use, Routed), strategy={"expert_parallel_size": 2})
    check(worlds, case, "dp2", tmp_path)


@pytest.mark.parametrize("layout", ["tp2", "zero1"])
def test_a_checkpoint_of_a_step_has_full_states(worlds: Any, tmp_path: Path, layout: str) -> None:
    check(worlds, Case(partial(Saves, perceptron, tmp_path)), layout, tmp_path)


class Unchecked(Manual):
    """Reads gradients also where there are none."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        for p in self.parameters():
            p.grad.mul_(0.5)
        self.optimizers().step()


def test_why_a_manual_step_was_not_recorded(worlds: Any, tmp_path: Path) -> None:
    case = Case(partial(Unchecked, perceptron), strategy={"strict_layout": True})
    for text in worlds.run(2, refusal, case, "tp2", tmp_path):
        assert re.search(r"test_states_in_steps.py:\d+: AttributeError: .* without gradients", text), text
    check(worlds, Case(case.module), "tp2", tmp_path)  # in shards
