"""Faults planted into the package on the ranks only: each is found and named, and none is found without one.

A fault is identified by the first number that differs; a fault of the first step must also be found by
`verify_first_step=True`, before any parameter changes.
"""

import dataclasses
import re

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from torch import nn

from harness.verification import call_quietly
from lightning_hybrid.verify import Experiment, Layout, Verification
from models.regression import Dropping, Logging, Normalised, Plain, regression_data


class Tied(Plain):
    """Its first and last layers have one weight."""

    def __init__(self):
        super().__init__()
        self.net[3][0].weight = self.net[0][0].weight


class Skips(Plain):
    """Two values are sent from stage to stage."""

    def forward(self, x):
        first = self.net[0](x)
        return self.head(self.net[3](self.net[2](self.net[1](first))) + first)


class OptimizerInInit(Plain):
    def __init__(self):
        super().__init__()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self):
        return self.optimizer


class AddsGradient(torch.autograd.Function):
    """Returns its input, and adds a gradient to a router's loss in the backward, as DeepSeek's models do."""

    coefficient = 0.1

    @staticmethod
    def forward(ctx, x, auxiliary):
        ctx.save_for_backward(auxiliary)
        return x

    @staticmethod
    def backward(ctx, grad):
        [auxiliary] = ctx.saved_tensors
        return grad, torch.ones_like(auxiliary) * AddsGradient.coefficient


class Routed(Plain):
    def forward(self, x):
        x = self.net(x)
        return self.head(AddsGradient.apply(x, x.square().mean()))


class Ranks(Plain):
    """A metric that takes logits for probabilities where all of an update are between 0 and 1."""

    def __init__(self):
        super().__init__()
        self.auroc = torchmetrics.classification.BinaryAUROC()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.auroc.update(2 * x[:, 0] + 0 * self(x)[:, 0], (y.flatten() > 0).long())
        self.log("auroc", self.auroc)


class Grouped(Plain):
    """Momentum, and a group of parameters without decay."""

    def configure_optimizers(self):
        parameters = list(self.parameters())
        matrices = {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 1e-2}
        others = {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0}
        return torch.optim.SGD([matrices, others], lr=0.1, momentum=0.9)


# --- the faults; each is planted with pytest's monkeypatch on every rank ---------------------------------------------


def tied_gradient_sum_skipped(patch):
    from lightning_hybrid.pipeline.runtime.gradients import TiedParameters

    patch.setattr(TiedParameters, "sum_gradients", lambda self: None)


def tied_gradient_sum_doubled(patch):
    from lightning_hybrid.pipeline.runtime.gradients import TiedParameters

    original = TiedParameters.sum_gradients
    patch.setattr(TiedParameters, "sum_gradients", lambda self: (original(self), original(self)))


def seeds_become(patch, change):
    from lightning_hybrid.pipeline.runtime.executor import Executor

    original = Executor.run

    def run(self, job):
        return original(self, dataclasses.replace(job, seeds=[change(seed, len(job.seeds)) for seed in job.seeds]))

    patch.setattr(Executor, "run", run)


def divided_twice(patch):
    seeds_become(patch, lambda seed, count: seed / count)


def not_divided(patch):
    seeds_become(patch, lambda seed, count: seed * count)


def portal_gradient_not_sent(patch):
    """The portal with the most values omits the last gradient; both ends agree on it."""
    from lightning_hybrid.graph.partition import Assignment

    original = Assignment.gradient_portals

    def gradient_portals(self):
        return {pair: values[:-1] if len(values) > 1 else values for pair, values in original(self).items()}

    patch.setattr(Assignment, "gradient_portals", gradient_portals)


def zeros_received(patch):
    from lightning_hybrid.pipeline.runtime import executor as executor

    original = executor._Run._backward

    def backward(self, stage, microbatch, arrived):
        zeros = {message: [torch.zeros_like(tensor) for tensor in tensors] for message, tensors in arrived.items()}
        return original(self, stage, microbatch, zeros)

    patch.setattr(executor._Run, "_backward", backward)


def counted_twice_in_the_norm(patch):
    from lightning_hybrid.run import optimization as set_up

    original = set_up.connect_gradients

    def connect_gradients(module, plan, mesh, **options):
        reducers, shared, _ = original(module, plan, mesh, **options)
        return reducers, shared, {id(parameter) for parameter in module.parameters()}

    patch.setattr(set_up, "connect_gradients", connect_gradients)


def parameters_replaced(patch):
    from lightning_hybrid.pipeline.stages import plan as stages
    from lightning_hybrid.step.standins.tensors import is_absent

    original = stages.drop_remote_parameters

    def drop_remote_parameters(plan):
        original(plan)
        for module in plan.root.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and not is_absent(parameter):
                    module._parameters[name] = nn.Parameter(parameter.detach().clone())

    patch.setattr(stages, "drop_remote_parameters", drop_remote_parameters)


def a_seed_per_rank(patch):
    from lightning_hybrid.run.execution import lifecycle as set_up

    original = set_up.synchronize_start
    patch.setattr(set_up, "synchronize_start", lambda *args: original(*args) + dist.get_rank())


def labels_of_another_microbatch(patch):
    from lightning_hybrid.pipeline.staged import StepRunner

    original = StepRunner._select_traces

    def select(self, *args, **kwargs):
        selected_before, chosen = self._next, original(self, *args, **kwargs)
        if chosen is selected_before:
            return chosen
        parts = chosen.parts
        swapped = [(x, parts[index - 1][1]) for index, (x, _) in enumerate(parts)]
        return dataclasses.replace(chosen, parts=swapped)

    patch.setattr(StepRunner, "_select_traces", select)


def average_lost_on_one_replica(patch):
    from lightning_hybrid.replicate.reducer import GradientReducer

    launch, finish, own = GradientReducer._launch_next, GradientReducer.finish, {}

    def launch_next(self):
        own.update((p, p.grad.clone()) for p in self._buckets[self._next].parameters if p.grad is not None)
        launch(self)

    def finish_with_local_gradients(self):
        finish(self)
        if self._group.rank() == 1:
            for parameter, gradient in own.items():
                parameter.grad = gradient
        own.clear()

    patch.setattr(GradientReducer, "_launch_next", launch_next)
    patch.setattr(GradientReducer, "finish", finish_with_local_gradients)


def summed_over_replicas(patch):
    from lightning_hybrid.replicate.reducer import GradientReducer

    original = GradientReducer.finish

    def finish(self):
        original(self)
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad *= self._size

    patch.setattr(GradientReducer, "finish", finish)


def weights_of_one_replica_drift(patch):
    from lightning_hybrid.run.execution import lifecycle as set_up

    original = set_up.synchronize_start

    def synchronize_start(module, *args):
        seed = original(module, *args)
        if dist.get_rank() == 1:
            with torch.no_grad():
                module.head.bias += 1e-3
        return seed

    patch.setattr(set_up, "synchronize_start", synchronize_start)


def one_shard_for_all_replicas(patch):
    from lightning_hybrid.strategies.world.ranked_strategy import RankedStrategy

    first = property(lambda self: {"num_replicas": self.layout.data_parallel_size, "rank": 0})
    patch.setattr(RankedStrategy, "distributed_sampler_kwargs", first)


def buffers_not_shared(patch):
    from lightning_hybrid.pipeline.stages import plan as stage_parameters

    patch.setattr(stage_parameters, "broadcast_buffer", lambda *_: None)


def gradients_not_cleared(patch):
    from lightning_hybrid.run.execution import steps as steps

    original = steps.GradientHandoff
    patch.setattr(
        steps,
        "GradientHandoff",
        lambda trained, **options: original(trained, **{**options, "zeroed_before_backward": False}),
    )
    patch.setattr(torch.optim.Optimizer, "zero_grad", lambda self, set_to_none=True: None)


def scheduler_stepped_twice(patch):
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

    original = _TrainingEpochLoop.update_lr_schedulers

    def update(self, *args, **kwargs):
        original(self, *args, **kwargs)
        original(self, *args, **kwargs)

    patch.setattr(_TrainingEpochLoop, "update_lr_schedulers", update)


def logged_twice(patch):
    from lightning_hybrid.run.execution import steps as steps

    original = steps.log_for_all

    def log_for_all(module, logged, *args, **options):
        original(module, [(entry, 2 * value) for entry, value in logged], *args, **options)

    patch.setattr(steps, "log_for_all", log_for_all)


def added_gradient_counted_per_microbatch(patch):
    patch.setattr(AddsGradient, "coefficient", 2 * AddsGradient.coefficient)


def metric_updated_per_microbatch(patch):
    from torchmetrics.classification import BinaryAUROC

    original = BinaryAUROC.update

    def update(self, preds, target):
        for half, of_half in zip(preds.chunk(2), target.chunk(2), strict=True):
            original(self, half.softmax(0), of_half)  # compared with the values of its microbatch

    patch.setattr(BinaryAUROC, "update", update)


def saved_states_become(patch, change):
    from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

    original = _CheckpointConnector.dump_checkpoint

    def dump_checkpoint(self, *args, **kwargs):
        checkpoint = original(self, *args, **kwargs)
        if checkpoint["optimizer_states"][0]:  # a file is written by the first rank
            change(checkpoint["optimizer_states"][0])
        return checkpoint

    patch.setattr(_CheckpointConnector, "dump_checkpoint", dump_checkpoint)


def half_of_a_state_saved(patch):
    def change(states):
        for state in states["state"].values():
            state["momentum_buffer"] = state["momentum_buffer"][: len(state["momentum_buffer"]) // 2]

    saved_states_become(patch, change)


def groups_of_shapes_of_shards(patch):
    saved_states_become(patch, lambda states: states["param_groups"][0]["params"].pop())


def states_not_restored(patch):
    from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

    patch.setattr(_CheckpointConnector, "restore_optimizers_and_schedulers", lambda self: None)


# --- what finds them -------------------------------------------------------------------------------------------------

PP2 = Layout("pp2", 2, {"pipeline_parallel_size": 2, "pipeline_cuts": ["net.2"]})
DP2 = Layout("dp2", 2)
CLIP = {"gradient_clip_val": 0.01}
GRADIENT = "gradient norm of "

# Fault: module, layout, options of the Trainer, what differs first, and what `verify_first_step` names (None: the fault
# shows later than in the gradients of the first step).
FAULTS = {
    tied_gradient_sum_skipped: (Tied, PP2, {}, GRADIENT + "net.0.0.weight", "the gradient of net.0.0.weight"),
    tied_gradient_sum_doubled: (Tied, PP2, {}, GRADIENT + "net.0.0.weight", "the gradient of net.0.0.weight"),
    divided_twice: (Plain, PP2, {}, GRADIENT, "the gradient of net.0.0.weight"),
    not_divided: (Plain, PP2, {}, GRADIENT, "the gradient of net.0.0.weight"),
    portal_gradient_not_sent: (Skips, PP2, {}, GRADIENT + "net.[01]", "the gradient of net.[01].0.weight"),
    zeros_received: (Plain, PP2, {}, GRADIENT + "net.[01]", "the gradient of net.0.0.weight"),
    counted_twice_in_the_norm: (Tied, PP2, CLIP, GRADIENT, "the norm of all gradients"),
    parameters_replaced: (OptimizerInInit, PP2, {}, "gradient norm of|update of", None),
    a_seed_per_rank: (Dropping, PP2, {}, "loss", "loss"),
    labels_of_another_microbatch: (Plain, PP2, {}, "loss", "loss"),
    average_lost_on_one_replica: (Plain, DP2, {}, GRADIENT, "the gradient of net.0.0.weight"),
    summed_over_replicas: (Plain, DP2, {}, GRADIENT, "the gradient of net.0.0.weight"),
    weights_of_one_replica_drift: (Plain, DP2, {}, "initial weights of head.bias", "loss"),
    one_shard_for_all_replicas: (Plain, DP2, {}, "loss", None),
    buffers_not_shared: (Normalised, PP2, {}, "buffer|metric after validation", None),
    gradients_not_cleared: (Plain, PP2, {}, GRADIENT, None),
    scheduler_stepped_twice: (Logging, PP2, {}, "learning rate of group 0|metric", None),
    logged_twice: (Plain, PP2, {}, "metric loss", None),
    # In code of the module, which the check of the first step runs too.
    added_gradient_counted_per_microbatch: (Routed, PP2, {}, GRADIENT + "net", None),
    metric_updated_per_microbatch: (Ranks, PP2, {}, "metric auroc|metric after validation 1: auroc", None),
    half_of_a_state_saved: (Grouped, PP2, {}, "the checkpoint's optimizer 0: momentum_buffer of ", None),
    groups_of_shapes_of_shards: (
        Grouped,
        PP2,
        {},
        "the checkpoint's optimizer 0: number of parameters of group 0",
        None,
    ),
    states_not_restored: (Grouped, PP2, {}, "the resumed update of ", None),
}


class Runs:
    """Runs on worlds; faults are planted on the ranks of layouts, and not in the reference."""

    def __init__(self, worlds):
        self.worlds, self.fault = worlds, None

    def __call__(self, n, function, /, *args, timeout):
        fault = self.fault if n > 1 else None
        return self.worlds.run(n, planted, fault, function, args, timeout=timeout)


def planted(fault, function, args):
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            fault(patch)
        return call_quietly(function, args)


@pytest.fixture(scope="module")
def verify(worlds):
    runs, verifications = Runs(worlds), {}

    def run(module, layout, options, fault=None, verified=False):
        key = module, repr(options)
        if key not in verifications:
            is_saved = {"steps": 2, "trainer": options, "resume": module is Grouped}
            experiment = Experiment(make_module=module, make_data=regression_data, **is_saved)
            verifications[key] = Verification(experiment, run=runs, timeout=60)
        if verified:
            layout = dataclasses.replace(layout, strategy={**layout.strategy, "verify_first_step": True})
        runs.fault = fault
        return verifications[key].check(layout)

    return run


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault_is_found(verify, fault):
    module, layout, options, first, _ = FAULTS[fault]
    report = verify(module, layout, options, fault)
    assert report.outcome == "different", str(report)
    assert re.match(first, str(report.first.key)), str(report)


@pytest.mark.parametrize("fault", [f for f, row in FAULTS.items() if row[-1]], ids=lambda fault: fault.__name__)
def test_first_step_is_not_applied(verify, fault):
    module, layout, options, _, first = FAULTS[fault]
    report = verify(module, layout, options, fault, verified=True)
    assert report.outcome == "refused", str(report)
    assert re.match(f"FirstStepError: the first step is not that of one process: {first}", report.message), str(report)
    assert "No parameter has changed" in report.message


PLAIN = pytest.param(False, marks=pytest.mark.slow, id="plain")


@pytest.mark.parametrize("verified", [PLAIN, pytest.param(True, id="verified")])
@pytest.mark.parametrize(
    ("module", "layout", "options"),
    {(row[0], row[1].name): row[:3] for row in FAULTS.values()}.values(),
    ids=lambda value: getattr(value, "__name__", getattr(value, "name", "")),
)
def test_nothing_is_found_without_a_fault(verify, module, layout, options, verified):
    report = verify(module, layout, options, verified=verified)
    assert report.outcome == "same" and report.steps == 2, str(report)
