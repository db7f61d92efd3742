"""LocalSGD through the Trainer: replicas that step by themselves, against a simulation in one process."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from harness.checkpoint_runs import each_resumed
from harness.fits import trainer_of
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import AdaScale, GoodputMonitor, LocalSGD
from models.regression import Sequential, StepsManually

WIDTH, BATCH, REPLICAS, NUM_SAMPLES = 8, 4, 2, 64


class Small(Sequential):
    momentum = 0.0

    def __init__(self):
        super().__init__(features=WIDTH, lr=0.05)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.mse_loss(self.layers(x), y), sync_dist=True)


class Momentum(Small):
    momentum = 0.9


class Adam(Small):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Normalized(Small):
    """With statistics of each replica's batches."""

    def __init__(self):
        super().__init__()
        self.layers.insert(1, nn.BatchNorm1d(8))


class Manual(StepsManually, Small):
    """Manual optimization."""


class Branches(Small):
    """No pipeline runs it from its fifth batch on."""

    def training_step(self, batch, batch_idx=None):
        x, y = batch
        h = self.layers[0](x)
        if self.trainer.fit_loop.epoch_loop.total_batch_idx >= 4 and h.mean().item() > 1e6:
            h = 2 * h
        return F.mse_loss(self.layers[1:](h), y)


class BranchesWithMomentum(Branches):
    momentum = 0.9


class BranchesWithAdam(Branches):
    configure_optimizers = Adam.configure_optimizers


class BranchesEarly(BranchesWithMomentum):
    """No pipeline runs its first two batches."""

    def training_step(self, batch, batch_idx=None):
        x, y = batch
        h = self.layers[0](x)
        if self.trainer.fit_loop.epoch_loop.total_batch_idx < 1 and h.mean().item() > 1e6:
            h = 2 * h
        return F.mse_loss(self.layers[1:](h), y)


class Breaks(BranchesWithMomentum):
    """Its fifth batch breaks the pipeline in the middle of the step, on one replica."""

    def training_step(self, batch, batch_idx=None):
        x, y = batch
        h = self.layers[0](x)
        is_late = self.trainer.fit_loop.epoch_loop.total_batch_idx == 4
        chosen = h[h.abs().sum(1) < (0 if is_late and x[0, 0] > 0 else 1000)]
        loss = F.mse_loss(self.layers[1:](h), y)
        return loss + 0 * h.sum() if len(chosen) else loss


class Freezes(BranchesWithMomentum):
    """Trains its first layer in the first three batches."""

    def on_train_batch_start(self, batch, batch_idx):
        self.layers[0].requires_grad_(self.trainer.fit_loop.epoch_loop.total_batch_idx < 3)


class Unfreezes(Small):
    """Trains its first layer from the fourth step on."""

    def __init__(self):
        super().__init__()
        self.layers[0].requires_grad_(False)


class Unfreeze(Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            pl_module.layers[0].requires_grad_(True)


class Seen(Callback):
    """Parameters that a callback of the user finds at the end of each batch; metrics of each step."""

    def __init__(self):
        self.first, self.steps = [], []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.first.append(float(next(pl_module.parameters()).double().sum()))
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.steps[-1]["is_pipelined"] = trainer.strategy.run.is_pipelined


@dataclass(frozen=True)
class Fit:
    """One fit; picklable."""

    every: int | None = 2
    outer: Any = None
    warmup: int = 0
    world_size: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 6
    epoch: int | None = None
    accumulate: int = 1
    callbacks: tuple[Any, ...] = ()
    module: Any = Small
    resume: str | None = None
    save: str | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    validate: bool = False


def data():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NUM_SAMPLES, WIDTH, dtype=torch.float64, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def batch_of(step, replica, run, shards=None):
    """The batch of a replica in a step: those of its ranks with data, one after the other."""
    shards = shards or run.options.get("shard_size", 1)
    epoch, step = divmod(step, run.epoch or NUM_SAMPLES // (BATCH * REPLICAS))
    indices = []
    for shard in range(shards):
        sampler = DistributedSampler(range(NUM_SAMPLES), REPLICAS * shards, replica * shards + shard)
        sampler.set_epoch(epoch)
        indices += list(sampler)[step * BATCH // shards : (step + 1) * BATCH // shards]
    x, y = data()
    return x[indices], y[indices]


def module_of(run):
    torch.manual_seed(0)
    return run.module().double()


def fit(run: Fit):
    module, seen = module_of(run), Seen()
    shards = run.options.get("shard_size", 1)
    dataset = TensorDataset(*data())
    callbacks = [make() for make in run.callbacks]
    if run.every is not None:
        callbacks.append(LocalSGD(run.every, run.outer, run.warmup))
    callbacks.append(seen)
    trainer = trainer_of(
        run.world_size,
        Hybrid3DStrategy(**run.options),
        callbacks,
        max_epochs=-1 if run.epoch is None else run.steps // run.epoch,
        max_steps=run.steps if run.epoch is None else -1,
        limit_train_batches=run.epoch,
        accumulate_grad_batches=run.accumulate,
        **run.trainer,
    )
    val = DataLoader(dataset, batch_size=BATCH) if run.validate else None
    trainer.fit(module, DataLoader(dataset, batch_size=BATCH // shards), val, ckpt_path=run.resume)
    if run.save is not None:
        trainer.save_checkpoint(run.save)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}, seen.steps, seen.first


def refused(run: Fit):
    try:
        fit(run)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def simulated(run: Fit, shards=lambda step: None, saved=0):
    """The replicas one after the other in one process, as the papers have it.

    ``shards`` gives the ranks with data of each by step; after ``saved`` steps a checkpoint ends a round.
    """
    modules = [module_of(run) for _ in range(REPLICAS)]
    optimizers = [module.configure_optimizers() for module in modules]
    reference = module_of(run)
    outer = {
        None: lambda p: torch.optim.SGD(p, lr=1.0),
        "nesterov": lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True),
    }.get(run.outer, run.outer)(list(reference.parameters()))
    begin = run.warmup  # of the round
    for step in range(run.steps):
        for replica, module in enumerate(modules):
            module.zero_grad()
            for batch in range(step * run.accumulate, (step + 1) * run.accumulate):
                loss = module.training_step(batch_of(batch, replica, run, shards(step)))
                (loss / run.accumulate).backward()
        for parameters in zip(*(module.parameters() for module in modules), strict=True) if step < run.warmup else ():
            mean = torch.stack([p.grad for p in parameters]).mean(0)
            for p in parameters:
                p.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        if step < run.warmup:
            reference.load_state_dict(modules[0].state_dict())
        elif step + 1 == begin + run.every or step + 1 == run.steps or step + 1 == saved:
            begin = step + 1
            for index, parameter in enumerate(reference.parameters()):
                moved = torch.stack([list(module.parameters())[index].detach() for module in modules]).mean(0)
                parameter.grad = parameter.detach() - moved
            outer.step()
            for module in modules:
                for own, new in zip(module.parameters(), reference.parameters(), strict=True):
                    own.data.copy_(new)
    return dict(reference.state_dict())


def assert_state(results, expected, tolerance=1e-10):
    for state, *_ in results:
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                state[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n} {m}"
            )


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.05)


@pytest.mark.parametrize("outer", [None, "nesterov", adam], ids=["average", "nesterov", "Adam"])
@pytest.mark.parametrize("module", [Small, Adam])
def test_equals_the_algorithm_in_one_process(worlds, module, outer):
    run = Fit(every=3, outer=outer, module=module, steps=7)
    results = worlds.run(2, fit, run)
    assert_state(results, simulated(run))
    assert results[0][2][0] != results[1][2][0], "the replicas took the same step"
    assert results[0][2][2] == results[1][2][2], "the round has not ended before other callbacks"


LAYOUTS = {
    "stages": (4, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
    "tensor ranks": (4, {"tensor_parallel_size": 2}),
    "ZeRO-1 inside": (4, {"zero_stage": 1, "shard_size": 2}),
    "ZeRO-3 inside": (4, {"zero_stage": 3, "shard_size": 2}),
}


@pytest.mark.parametrize("options", [{}, {"zero_stage": 3, "shard_size": 2}], ids=["replicas", "ZeRO-3 inside"])
def test_optimizer_steps_in_the_backward(worlds, options):
    """In synchronous steps and in local ones."""
    run = Fit(outer="nesterov", warmup=2, world_size=4 if options else 2, options=options)
    expected, *_ = worlds.run(run.world_size, fit, run, timeout=300)[0]
    in_backward = replace(run, options=options | {"optimizer_in_backward": True})
    assert_state(worlds.run(run.world_size, fit, in_backward, timeout=300), expected, tolerance=0)


@pytest.mark.parametrize("outer", [None, "nesterov"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_inside_a_replica(worlds, layout, outer):
    world_size, options = LAYOUTS[layout]
    run = Fit(every=3, outer=outer, steps=7, world_size=world_size, options=options)
    assert_state(worlds.run(world_size, fit, run, timeout=300), simulated(run))


@pytest.mark.parametrize("module", [Small, Momentum])
def test_rounds_of_one_step_equal_synchronous_training(worlds, module):
    [(expected, *_), _] = worlds.run(2, fit, Fit(every=None, module=module))
    assert_state(worlds.run(2, fit, Fit(every=1, module=module)), expected, tolerance=1e-13)


def test_synchronous_steps_at_the_beginning(worlds):
    [(expected, *_), _] = worlds.run(2, fit, Fit(every=None, steps=3))
    first, second = worlds.run(2, fit, Fit(every=2, warmup=3, steps=3))
    assert_state([first, second], expected, tolerance=1e-13)
    first, second = worlds.run(2, fit, Fit(every=3, warmup=3, steps=5))
    assert first[2][2] == second[2][2] and first[2][3] != second[2][3]


WARMUPS = {
    "inside a round's length": Fit(every=3, warmup=2, steps=6),
    "DiLoCo": Fit(every=3, warmup=2, steps=7, outer="nesterov", module=Adam),
    "longer than a round": Fit(every=2, warmup=5, steps=8, module=Momentum),
    "rounds of one step": Fit(every=1, warmup=2, steps=4, outer="nesterov", module=Momentum),
    "accumulated": Fit(every=2, warmup=1, steps=4, accumulate=2, outer="nesterov"),
}


@pytest.mark.parametrize("case", WARMUPS)
def test_the_first_round_after_the_warmup_has_all_of_its_steps(worlds, case):
    assert_state(worlds.run(2, fit, WARMUPS[case]), simulated(WARMUPS[case]))


@pytest.mark.parametrize("outer", [None, "nesterov"])
@pytest.mark.parametrize("saved", [3, 6], ids=["in the warmup", "in a round"])
def test_resumed_around_the_warmup(worlds, tmp_path, saved, outer):
    """Checkpoints end rounds, so the round begins anew."""
    run = Fit(every=2, warmup=5, outer=outer, epoch=3, steps=9)
    path = str(tmp_path / "saved")
    worlds.run(2, fit, replace(run, steps=saved, save=path))
    assert_state(worlds.run(2, fit, replace(run, resume=path)), simulated(run, saved=saved))


def test_bytes_are_logged(worlds):
    (_, steps, _), _ = worlds.run(2, fit, Fit(every=3, steps=6))
    num_bytes = 8 * sum(p.numel() for p in Small().parameters())
    assert steps[-1]["parameter_bytes"] == pytest.approx(num_bytes / 3)
    assert steps[-1]["synchronous_bytes_ratio"] == pytest.approx(3)


def test_accumulated_batches_are_one_step(worlds):
    results = worlds.run(2, fit, Fit(every=2, accumulate=2, steps=2))
    assert results[0][2][1] != results[1][2][1]
    assert results[0][2][3] == results[1][2][3]


def test_statistics_of_batch_norm_are_averaged(worlds):
    results = worlds.run(2, fit, Fit(every=2, steps=2, module=Normalized))
    means = []
    for replica in range(2):
        module = module_of(Fit(module=Normalized))
        optimizer = module.configure_optimizers()
        for step in range(2):
            optimizer.zero_grad()
            module.training_step(batch_of(step, replica, Fit())).backward()
            optimizer.step()
        means.append(module.layers[1].running_mean)
    for state, *_ in results:
        torch.testing.assert_close(state["layers.1.running_mean"], sum(means) / 2)
        assert state["layers.1.num_batches_tracked"] == 2


def test_validation_sees_one_model_and_ends_a_round(worlds):
    run = Fit(every=4, steps=8, validate=True, trainer={"val_check_interval": 3, "check_val_every_n_epoch": None})
    first, second = worlds.run(2, fit, run)
    assert first[1][3]["val_loss"] == second[1][3]["val_loss"]
    assert_state([second], first[0], tolerance=0)


STAGES = {"pipeline_parallel_size": 2, "num_microbatches": 2}
CHANGES = {
    "in a round": (BranchesWithMomentum, {"every": 3, "outer": "nesterov"}),
    "between rounds": (BranchesWithMomentum, {"every": 2, "outer": "nesterov"}),
    "average": (BranchesWithAdam, {"every": 3}),
    "Adam": (BranchesWithAdam, {"every": 5, "outer": adam}),
    "to stages": (BranchesEarly, {"every": 3, "outer": "nesterov"}),
    "in a step": (Breaks, {"every": 3, "outer": "nesterov"}),
    "warmup": (BranchesWithMomentum, {"every": 3, "outer": "nesterov", "warmup": 3}),
    "accumulated batches": (BranchesWithMomentum, {"every": 2, "outer": "nesterov", "accumulate": 3, "steps": 3}),
    "accumulated, warmup": (BranchesWithMomentum, {"every": 1, "accumulate": 3, "warmup": 2, "steps": 3}),
    "frozen": (Freezes, {"every": 5, "outer": "nesterov"}),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_round_goes_on_when_the_layout_changes(worlds, case):
    """So do the states of each replica's optimizers."""
    module, options = CHANGES[case]
    run = Fit(**{"steps": 8, **options}, module=module)
    [(expected, *_), _] = worlds.run(2, fit, run)
    results = worlds.run(4, fit, replace(run, world_size=4, options=STAGES), timeout=300)
    assert {step["is_pipelined"] for step in results[0][1]} == {True, False}
    assert_state(results, expected)


@pytest.mark.slow
def test_a_round_of_sharded_copies_goes_on_when_the_layout_changes(worlds):
    shards = {"zero_stage": 1, "shard_size": 2}
    run = Fit(every=3, outer="nesterov", steps=8, world_size=4, options=shards, module=BranchesWithAdam)
    expected, *_ = worlds.run(4, fit, run, timeout=300)[0]
    results = worlds.run(8, fit, replace(run, world_size=8, options=STAGES | shards), timeout=500)
    assert {step["is_pipelined"] for step in results[0][1]} == {True, False}
    assert_state(results, expected)


@pytest.mark.extended
@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_parameters_that_are_unfrozen_are_averaged_too(worlds, tmp_path, folder):
    options = {"pipeline_parallel_size": 2, "num_microbatches": 2, "save_distributed_checkpoint": folder}
    for steps, saved in ((3, "before"), (6, "after")):  # no state of the frozen layer yet, and with one
        run = Fit(every=3, outer="nesterov", epoch=3, steps=steps, world_size=4, options=options, module=Unfreezes)
        run = replace(run, callbacks=(Unfreeze,), save=str(tmp_path / saved))
        results = worlds.run(4, fit, run, timeout=300)
        first = results[0][0]
        assert_state(results, first, tolerance=0)
        moved = first["layers.0.weight"] - module_of(run).layers[0].weight
        assert (float(moved.abs().max()) > 1e-3) == (steps == 6)


def test_manual_optimization(worlds):
    assert_state(worlds.run(2, fit, Fit(every=3, steps=7, module=Manual)), simulated(Fit(every=3, steps=7)))


RESUMED = ["replicas", "stages", "ZeRO-3 inside"]


@pytest.mark.parametrize(("before", "after", "folder"), each_resumed(RESUMED))
def test_resumed_in_another_layout_as_if_not_interrupted(worlds, tmp_path, before, after, folder):
    sizes = LAYOUTS | {"replicas": (2, {})}
    resumed = partial(Fit, every=2, outer="nesterov", epoch=4)
    path, saves = str(tmp_path / "saved"), {"save_distributed_checkpoint": folder}
    for layout, steps, files in ((before, 4, {"save": path}), (after, 8, {"resume": path})):
        world_size, options = sizes[layout]
        run = resumed(steps=steps, world_size=world_size, options=options | saves, **files)
        results = worlds.run(world_size, fit, run, timeout=300)
    shards = [sizes[layout][1].get("shard_size", 1) for layout in (before, after)]
    assert_state(results, simulated(resumed(steps=8), lambda step: shards[step // 4]))


def muon(parameters):
    return torch.optim.Muon([p for p in parameters if p.dim() == 2])


class Own(torch.optim.SGD):
    """It might read other parameters."""

    def step(self, closure=None):
        return super().step(closure)


REFUSED = {
    "ZeRO over all replicas": (Fit(options={"zero_stage": 3}), "set shard_size=1, or zero_stage=0"),
    "AdaScale": (Fit(callbacks=(AdaScale,)), "AdaScale"),
    "GoodputMonitor": (Fit(callbacks=(GoodputMonitor,)), "GoodputMonitor"),
    "EMA": (Fit(callbacks=(EMAWeightAveraging,)), "EMAWeightAveraging"),
    "weights": (Fit(options={"microbatch_weight": len}), "microbatch_weight"),
    "outer Muon of shards": (Fit(outer=muon, world_size=4, options={"tensor_parallel_size": 2}), "all elements"),
    "outer optimizer of stages": (
        Fit(outer=Own, world_size=4, options=STAGES),
        "steps_parameters_independently = True",
    ),
    "first step": (Fit(options={"verify_first_step": True}), "warmup_steps=1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(worlds, case):
    run, text = REFUSED[case]
    for found in worlds.run(run.world_size, refused, run):
        assert found.startswith("LayoutError: LocalSGD(") and text in found, found


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"every": 0}, "every=0"),
        ({"every": 2, "warmup_steps": -1}, "-1"),
        ({"every": 2, "outer_optimizer": "x"}, "'x'"),
    ],
)
def test_arguments(arguments, text):
    with pytest.raises(ValueError, match=text):
        LocalSGD(**arguments)
