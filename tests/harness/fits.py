"""Fits on the ranks of a world, their one-process reference, and the comparison of both."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from harness.one_process_pipeline import assert_same_gradients
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.schedule import Kind, placement_of, stages_of_each_rank, stages_of_rank
from lightning_hybrid.step.standins.tensors import is_absent
from models.cases import Samples, make

# Sizes of `Run`, by name: each way in which a parameter is sharded, or on one stage, and all of them at once.
EACH_SHARDING: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "zero3": {"dp": 2, "strategy": {"zero_stage": 3}},
    "pp2": {"pp": 2},
    "zero1": {"dp": 2, "strategy": {"zero_stage": 1}},
    "zero2": {"dp": 2, "strategy": {"zero_stage": 2}},
    "tp2 x pp2 x dp2": {"tp": 2, "pp": 2, "dp": 2},
    "tp2 x pp2 x zero3": {"tp": 2, "pp": 2, "dp": 2, "strategy": {"zero_stage": 3}},
}


@dataclass
class Fitted:
    """The record of one rank of a run.

    Attributes:
        losses: Of each batch.
        grads: Gradients of each optimizer step, by FQN; of this rank's parameters.
        state: The module's state dict after the run.
        stages: For each parameter and tracked buffer its stages; empty without a pipeline.
        units: By stage, the FQNs of its units.
        plans: How each tensor unit is cut, by FQN.
        extra: Records of a test's callback.
    """

    losses: list[Tensor] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    stages: dict[str, tuple[int, ...]] = field(default_factory=dict)
    units: list[list[str]] = field(default_factory=list)
    plans: dict[str, Any] = field(default_factory=dict)
    num_microbatches: int = 0
    scale: float = 1.0
    logged: dict[str, float] = field(default_factory=dict)
    extra: Any = None


class FitRecorder(Callback):
    """Fills a `Fitted` while a Trainer runs."""

    def __init__(self):
        self.fitted = Fitted()

    def on_train_start(self, trainer, pl_module):
        names = {id(p): name for name, p in pl_module.named_parameters()}

        def after_step(optimizer, args, kwargs):
            with torch._C.DisableTorchFunction():  # local shards
                record(optimizer)

        def record(optimizer):
            with_gradient = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            assert not any(is_absent(p) or is_absent(p.grad) for p in with_gradient)
            parts = getattr(getattr(trainer.strategy, "run", None), "parts", None)
            full_grads = {id(p): p.grad if parts is None else parts.full_state_of(p, p.grad) for p in with_gradient}
            self.fitted.grads.append({names[id(p)]: full_grads[id(p)].detach().clone() for p in with_gradient})

        recorder = getattr(trainer.strategy, "recorder", None)
        if recorder is not None:
            recorder.time_readers.add(self)
        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(after_step)
        if getattr(getattr(trainer.strategy, "run", None), "shards", None) is not None:
            self.fitted.plans = trainer.strategy.run.plans
        plan = getattr(getattr(trainer.strategy, "run", None), "plan", None)
        if plan is not None and plan.first is not None:
            assignment = plan.first.assignment
            self.fitted.stages = dict(assignment.holders)
            self.fitted.units = [[] for _ in range(assignment.num_stages)]
            for node, stage in zip(assignment.graph.nodes, assignment.node_stage, strict=True):
                if node.unit and node.unit not in self.fitted.units[stage]:
                    self.fitted.units[stage].append(node.unit)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.fitted.losses.append(outputs["loss"].detach().clone())
        spans = getattr(trainer.strategy, "spans", [])
        self.fitted.num_microbatches = len({s.action.microbatch for s in spans if s.action.kind is Kind.F})


_references: dict[bytes, bytes] = {}  # pickled results of one process, by what was run


def trainer_of(world_size: int, strategy: Any, callbacks: list[Callback], **kwargs: Any) -> Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    limits = {"max_epochs": 1, "num_sanity_val_steps": 0}
    arguments = {"accelerator": "cpu", "devices": world_size, "num_nodes": 1, **quiet, **limits, **kwargs}
    if strategy is not None:
        arguments["strategy"] = strategy
    return Trainer(callbacks=callbacks, **arguments)


@dataclass(frozen=True)
class Run:
    """One fit; all of it picklable.

    Attributes:
        case: Name of the module.
        pp, dp, tp, cp, ep: Sizes; the last one is a view of dp.
        sequence: Whether positions are sharded over tensor ranks between regions.
        batch_size: Of one replica.
        num_batches: That each replica sees.
        microbatches: Of each replica's batch.
        last: Samples of the last batch over all replicas; None for a full one.
        strategy: Further arguments of the strategy.
        trainer: Further arguments of the Trainer.
        change: Called with the module before the fit.
        callback: Makes a further callback, whose `recorded` is returned as `extra`.
    """

    case: str
    pp: int = 1
    dp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    sequence: bool = False
    batch_size: int = 4
    num_batches: int = 2
    microbatches: int = 2
    last: int | None = None
    dtype: torch.dtype = torch.float64
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    change: Callable[[Any], None] | None = None
    callback: Callable[[], Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    precision: str | None = None
    validate: bool = False

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp * self.cp

    @property
    def num_samples(self) -> int:
        full = self.batch_size * self.num_batches * self.dp
        return full if self.last is None else full - self.batch_size * self.dp + self.last


def fit(run: Run) -> Fitted:
    """On a rank: fit under the strategy."""
    sizes = {
        "pipeline_parallel_size": run.pp,
        "tensor_parallel_size": run.tp,
        "context_parallel_size": run.cp,
        "expert_parallel_size": run.ep,
        "sequence_parallel": run.sequence,
    }
    strategy = Hybrid3DStrategy(**sizes, num_microbatches=run.microbatches, **run.strategy)
    return _fit(run, run.world_size, strategy, batch_size=run.batch_size)


def refusal(function: Callable[[Any], Any], argument: Any) -> str:
    """On a rank: type and text of a function's exception, on each rank, so that the world survives."""
    try:
        return f"not refused: {function(argument)}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def fit_reference(run: Run) -> Fitted:
    """In one process, on the concatenation of the replicas' batches: plain Lightning."""
    return _fit(run, 1, None, batch_sampler=joined_batches(run))


def fit_joined_batches(run: Run) -> Fitted:
    """In one process, under the strategy without stages, on the concatenation of the replicas' batches."""
    weight = run.strategy.get("microbatch_weight")
    strategy = Hybrid3DStrategy(num_microbatches=run.dp * run.microbatches, microbatch_weight=weight)
    return _fit(run, 1, strategy, batch_sampler=joined_batches(run))


def joined_batches(run: Run) -> list[list[int]]:
    """The indices of each batch of all replicas, one replica after the other."""
    everything = range(run.num_samples)
    # With replicas Lightning puts in this sampler, whose order is a function of its seed; without, the order stands.
    per_replica = [list(everything)]
    if run.dp > 1:
        per_replica = [list(DistributedSampler(everything, run.dp, r, shuffle=True)) for r in range(run.dp)]
    size = run.batch_size
    return [
        [index for indices in per_replica for index in indices[start : start + size]]
        for start in range(0, len(per_replica[0]), size)
    ]


def _fit(run: Run, world_size: int, strategy: Any, **loading: Any) -> Fitted:
    own = run.callback() if run.callback is not None else None
    module = make(run.case, run.dtype)
    if run.change is not None:
        run.change(module)
    recorder = FitRecorder()
    kwargs = dict(run.trainer)
    if run.precision is not None:
        from lightning_hybrid import HybridPrecision

        kwargs["plugins"] = [HybridPrecision(run.precision)]
    trainer = trainer_of(world_size, strategy, [recorder, *([own] if own else [])], **kwargs)
    data = Samples(module.kind, run.num_samples, run.dtype)
    loader = DataLoader(data, collate_fn=run.collate, **loading)
    val = DataLoader(data, collate_fn=run.collate, **loading) if run.validate else None
    before = {name: p.tolist() for name, p in module.named_parameters()}  # no tensors: a test counts their bytes
    trainer.fit(module, loader, val)
    fitted = recorder.fitted
    fitted.state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    trained = {name for grads in fitted.grads for name, grad in grads.items() if float(grad.abs().max()) > 1e-6}
    for name in trained:
        assert before[name] != fitted.state[name].tolist(), f"{name} had a gradient and did not move"
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    fitted.scale = 1.0 if scaler is None else scaler.get_scale()
    fitted.logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    fitted.extra = own.recorded if own is not None else None
    return fitted


def assert_parity(ranks: list[Fitted], expected: Fitted, run: Run, *, tolerance: float = 1e-10) -> None:
    """Losses, every gradient and every value of the state equal the reference's; every rank ends with all of it."""
    # The ranks of each replica: pipeline is outermost, tensor innermost.
    pairs = [[rank for i, rank in enumerate(ranks) if i // (run.tp * run.cp) % run.dp == d] for d in range(run.dp)]
    assert len(expected.losses) > 0 and len(expected.grads) > 0
    for replica in pairs:
        for rank in replica:
            assert len(rank.losses) == len(expected.losses)
            for a, b in zip(rank.losses, replica[0].losses, strict=True):
                assert torch.equal(a, b), "ranks of a replica report different losses"
    for index, loss in enumerate(expected.losses):
        mean = sum(replica[0].losses[index].double() for replica in pairs) / run.dp
        torch.testing.assert_close(mean, loss.double(), rtol=tolerance, atol=0)
    for index, grads in enumerate(expected.grads):
        gathered: dict[str, Tensor] = {}
        for rank in ranks:
            assert len(rank.grads) == len(expected.grads), f"{len(rank.grads)} optimizer steps"
            for name, grad in rank.grads[index].items():
                if name in gathered:
                    assert torch.equal(grad, gathered[name]), f"{name} has different gradients on its holders"
                gathered[name] = grad
        assert_same_gradients(gathered, grads, tolerance=tolerance)
    for rank in ranks:
        assert rank.state.keys() == expected.state.keys()
        for name, value in expected.state.items():
            scale = max(float(value.double().abs().max()), 1e-2)  # a key's bias remains zero but for rounding
            error = float((rank.state[name].double() - value.double()).abs().max()) / scale
            assert error <= tolerance * 10, f"{name} after the run: relative error {error:.3g}"
    assert_stages(ranks, run)


def assert_bitwise_equal(ranks: Sequence[Fitted], expected: Sequence[Fitted]) -> None:
    """Asserts that each rank has the losses, gradients and state of another run, to the bit."""
    for one, other in zip(ranks, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.losses, other.losses, strict=True))
        assert one.state.keys() == other.state.keys()
        for name, value in one.state.items():
            assert torch.equal(value, other.state[name]), name
        for a, b in zip(one.grads, other.grads, strict=True):
            assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_stages(ranks: list[Fitted], run: Run) -> None:
    """Asserts the number of stages, none of them empty, and that each rank has only its own."""
    schedule = run.strategy.get("schedule", "1f1b")
    each = stages_of_each_rank(schedule, run.strategy.get("stages_per_rank", 1))
    num_stages = run.pp * each if run.pp > 1 else 1
    for index, rank in enumerate(ranks):
        assert rank.num_microbatches == run.microbatches or run.microbatches == 1
        if num_stages == 1:
            continue
        assert len(rank.units) == num_stages and all(rank.units), rank.units
        pipeline_rank = index // (run.dp * run.tp * run.cp)
        own = set(stages_of_rank(pipeline_rank, run.pp, each, placement_of(schedule, each)))
        local_names = {name for name, stages in rank.stages.items() if own.intersection(stages)}
        assert local_names
        for grads in rank.grads:
            assert grads.keys() <= local_names, f"rank {index} has gradients of {sorted(grads.keys() - local_names)}"


def reference_of(worlds: Any, run: Run, reference: Callable[[Run], Fitted] = fit_reference) -> Fitted:
    """The result of one process, which runs that differ only in their layout share."""
    if reference is fit_reference:
        run = replace(run, pp=1, tp=1, cp=1, ep=1, sequence=False, microbatches=1, strategy={})
    key = pickle.dumps((reference, run))
    if key not in _references:
        [result] = worlds.run(1, reference, run)
        _references[key] = pickle.dumps(result)
    return pickle.loads(_references[key])


def check(
    worlds, run: Run, reference: Callable[[Run], Fitted] = fit_reference, *, how=fit, timeout=120, tolerance=1e-10
):
    """Fit on the ranks, compare with one process, and return what each rank recorded and what is expected."""
    expected = reference_of(worlds, run, reference)
    ranks = worlds.run(run.world_size, how, run, timeout=timeout)
    assert_parity(ranks, expected, run, tolerance=tolerance)
    return ranks, expected
