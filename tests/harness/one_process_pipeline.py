"""All stages of a step in one process: the smallest pipeline, and its reference.

While a stage runs, parameters of other stages are NaN; it receives only the values of its portals.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hybrid.graph.partition import Assignment
from lightning_hybrid.pipeline.stages.plan import StagePlan, TraceVariant
from lightning_hybrid.pipeline.stages.recording import record_variant
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.step.replay.stage import instrumented


class OneRank:
    """A process group of one."""

    def size(self):
        return 1

    def rank(self):
        return 0


@dataclass
class Outcome:
    """The result of a step: its loss, its gradients by FQN, and for a pipeline its cut."""

    loss: Tensor
    grads: dict[str, Tensor]
    variant: TraceVariant | None = None

    @property
    def assignment(self) -> Assignment:
        return self.variant.assignment

    @property
    def graph(self):
        return self.variant.assignment.graph

    @property
    def units(self) -> list[list[str]]:
        """The units of each stage."""
        stages = [[] for _ in range(self.assignment.num_stages)]
        for node, stage in zip(self.graph.nodes, self.assignment.node_stage, strict=True):
            if node.unit and node.unit not in stages[stage]:
                stages[stage].append(node.unit)
        return stages


def reference(module, step) -> Outcome:
    """The plain step."""
    module.zero_grad()
    loss = step()
    loss.backward()
    return Outcome(loss.detach(), take_gradients(module))


def take_gradients(module):
    grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return grads


def keyed(seed: int = 0) -> KeyedRandomness:
    return KeyedRandomness(seed, torch.device("cpu"))


def record_and_cut(module, step, num_stages, *, cuts=None, batch=None, randomness=None) -> TraceVariant:
    """Record a training step and cut it."""
    plan = StagePlan(module, OneRank(), randomness or keyed(), stages_per_rank=num_stages, cuts=cuts)
    return record_variant(plan, plan.recipe("training_step", step, trains=True))


def pipeline(module, step, num_stages, *, cuts=None, again=None, randomness=None, step_number=0) -> Outcome:
    """The step, cut into stages; `again` is the replayed step, if on another batch than the recorded one."""
    randomness = randomness or keyed()
    variant = record_and_cut(module, step, num_stages, cuts=cuts, randomness=randomness)
    assignment, graph = variant.assignment, variant.assignment.graph
    names = {id(p): name for name, p in module.named_parameters()}
    names.update((id(b), name) for name, b in module.named_buffers() if name in assignment.holders)
    values: dict[int, Tensor] = {}
    received_by, made_by, loss = [], [], None
    for stage in range(num_stages):
        received = {}
        for (_, target), sent in assignment.portals.items():
            if target == stage:
                for value in sent:
                    leaf = values[value].detach()
                    received[value] = leaf.requires_grad_() if graph.values[value].requires_grad else leaf
        given = {value: leaf.clone() if value in graph.cloned else leaf for value, leaf in received.items()}
        with (
            poisoned(module, lambda name, stage=stage: stage not in assignment.holders.get(name, ())),
            randomness.isolated(),
            randomness.microbatch(step_number, 0),
            instrumented([variant.replays[stage]], randomness) as current,
        ):
            run = variant.replays[stage].run(again or step, given, names, current)
        received_by.append(received)
        made_by.append(run.made)
        values.update(run.made)
        if stage == assignment.loss_stage:
            loss = run.made[graph.loss]
    back: dict[int, Tensor] = {}
    with instrumented(variant.replays.values(), randomness):
        for stage in reversed(range(num_stages)):
            roots = [tensor for value, tensor in made_by[stage].items() if value in back]
            seeds = [back[value] for value in made_by[stage] if value in back]
            if stage == assignment.loss_stage:
                roots.append(loss)
                seeds.append(torch.ones_like(loss))
            if roots:
                torch.autograd.backward(roots, seeds)
            for value, leaf in received_by[stage].items():
                if leaf.grad is not None:
                    back[value] = back[value] + leaf.grad if value in back else leaf.grad
    return Outcome(loss.detach(), take_gradients(module), variant)


@contextlib.contextmanager
def poisoned(module, is_foreign):
    """Parameters of other stages are NaN meanwhile."""
    foreign = {name: p.data.clone() for name, p in module.named_parameters() if is_foreign(name)}
    for name in foreign:
        module.get_parameter(name).data.fill_(float("nan"))
    try:
        yield
    finally:
        for name, content in foreign.items():
            module.get_parameter(name).data.copy_(content)


def assert_same_gradients(grads, expected, *, tolerance=1e-10):
    """Every gradient within `tolerance` of its reference, relative to its largest entry; names the worst.

    Gradients that are zero but for rounding (a key's bias in attention) are measured against 1e-6 of the largest.
    """
    assert grads.keys() == expected.keys(), f"only one side has {sorted(grads.keys() ^ expected.keys())}"
    floor = 1e-6 * max(float(grad.abs().max()) for grad in expected.values())
    errors = {
        name: float((grads[name].double() - grad.double()).abs().max()) / max(float(grad.abs().max()), floor)
        for name, grad in expected.items()
    }
    worst = max(errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name])
    assert errors[worst] <= tolerance, f"{worst}: relative error {errors[worst]:.3g}"
