"""All stages of a step in one process: the smallest pipeline, and what the real one is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_hybrid.step.partition import assign, find_homes
from lightning_hybrid.step.randomness import KeyedRandomness
from lightning_hybrid.step.record import record
from lightning_hybrid.step.replay import StageReplay
from lightning_hybrid.step.units import choose_units


def reference(module, step):
    """Loss and gradients of the plain step."""
    module.zero_grad()
    loss = step()
    loss.backward()
    grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return loss.detach(), grads


def pipeline(module, step, num_stages, *, cuts=None, opened=(), again=None, randomness=None):
    """Loss, gradients and assignment of ``step`` cut into stages; parameters of other stages are NaN meanwhile."""
    randomness = randomness or KeyedRandomness(0, torch.device("cpu"))
    units = choose_units(module, num_stages, opened)
    recording = record(module, step, units, name="training_step", randomness=randomness, loss_required=True)
    assignment = assign(recording.graph, find_homes(recording.graph, num_stages, cuts), num_stages)
    names = {id(p): name for name, p in module.named_parameters()}
    values: dict[int, Tensor] = {}
    received_by, made_by, loss = [], [], None
    for stage in range(num_stages):
        received = {}
        for (_, target), sent in assignment.portals.items():
            if target == stage:
                for value in sent:
                    leaf = values[value].detach()
                    received[value] = leaf.requires_grad_() if recording.graph.values[value].requires_grad else leaf
        foreign = {n: p.data.clone() for n, p in module.named_parameters() if stage not in assignment.holders.get(n, ())}
        for name, p in module.named_parameters():
            if name in foreign:
                p.data.fill_(float("nan"))
        run = StageReplay(recording, assignment, stage, module, randomness)
        with randomness.microbatch(0, 0):
            result = run.run(again or step, received, names)
        for name, p in module.named_parameters():
            if name in foreign:
                p.data.copy_(foreign[name])
        received_by.append(received)
        made_by.append(result.made)
        values.update(result.made)
        if stage == assignment.loss_stage:
            loss = result.made[recording.graph.loss]
    back: dict[int, Tensor] = {}
    for stage in reversed(range(num_stages)):
        roots, grads = [], []
        for value, tensor in made_by[stage].items():
            if value in back:
                roots.append(tensor)
                grads.append(back[value])
        if stage == assignment.loss_stage:
            roots.append(loss)
            grads.append(torch.ones_like(loss))
        if roots:
            torch.autograd.backward(roots, grads)
        for value, leaf in received_by[stage].items():
            if leaf.grad is not None:
                back[value] = back[value] + leaf.grad if value in back else leaf.grad
    grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return loss.detach(), grads, assignment, recording


def assert_equal_gradients(grads, expected, *, tolerance=1e-10):
    """Every gradient within ``tolerance`` of its reference, relative to the largest entry; names the worst."""
    assert grads.keys() == expected.keys(), sorted(grads.keys() ^ expected.keys())
    errors = {
        name: ((grads[name] - expected[name]).abs().max() / expected[name].abs().max().clamp_min(1e-30)).item()
        for name in grads
    }
    worst = max(errors, key=errors.get)
    assert errors[worst] <= tolerance, f"{worst}: relative error {errors[worst]:.3g}"
