"""GradientCompression through the Trainer: layouts, checkpoints, refusals."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from harness.checkpoint_runs import each_resumed
from harness.fits import trainer_of
from lightning_hybrid import Hybrid3DStrategy, HybridPrecision
from lightning_hybrid.callbacks import AdaScale, GoodputMonitor, GradientCompression, LocalSGD
from lightning_hybrid.slow_links.average import CompressedAverage
from lightning_hybrid.slow_links.method import Traffic
from lightning_hybrid.slow_links.quantized import TopK
from models.regression import Sequential, StepsManually

WIDTH = 16
POWERSGD = ("powersgd", 2)


class Wide(Sequential):
    """Of matrices that factors of rank 2 make smaller."""

    def __init__(self):
        super().__init__(features=WIDTH, lr=0.05)
        layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.layers = nn.Sequential(*layers, nn.Linear(WIDTH, 1))


class Manual(StepsManually, Wide):
    """Manual optimization."""


class Log(Callback):
    """The metrics of each step."""

    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, *_):
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})


@dataclass(frozen=True)
class Fit:
    """One fit; picklable."""

    method: tuple[Any, ...] | None = POWERSGD
    world_size: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 4
    epoch: int | None = None
    accumulate: int = 1
    compression: dict[str, Any] = field(default_factory=dict)
    callbacks: tuple[Any, ...] = ()
    module: Any = Wide
    resume: str | None = None
    save: str | None = None


def fit(run: Fit):
    """Parameters after the fit, and the logged metrics of each step."""
    torch.manual_seed(0)
    module = run.module().double()
    x = torch.randn(96, WIDTH, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=4)
    log = Log()
    callbacks = [make() for make in run.callbacks]
    if run.method is not None:
        callbacks.append(GradientCompression(*run.method, **run.compression))
    callbacks.append(log)
    options = {"num_microbatches": 2, **run.options}
    trainer = trainer_of(
        run.world_size,
        Hybrid3DStrategy(**options),
        callbacks,
        max_epochs=-1 if run.epoch is None else run.steps // run.epoch,
        max_steps=run.steps if run.epoch is None else -1,
        limit_train_batches=run.epoch,
        accumulate_grad_batches=run.accumulate,
    )
    trainer.fit(module, loader, ckpt_path=run.resume)
    if run.save is not None:
        trainer.save_checkpoint(run.save)
    return [p.detach().clone() for p in module.parameters()], log.steps


def refused(run: Fit):
    """The text of the error of a fit."""
    try:
        fit(run)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def assert_equal(results, expected, tolerance=1e-9):
    for parameters, _ in results:
        for found, wanted in zip(parameters, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


LAYOUTS = {
    "stages": (4, {"pipeline_parallel_size": 2}),
    "ZeRO-1": (2, {"zero_stage": 1}),
    "ZeRO-2": (2, {"zero_stage": 2, "reshard_after_forward": False}),
    "ZeRO-3": (2, {"zero_stage": 3, "reshard_after_forward": False}),
    "ZeRO-3 by layer": (2, {"zero_stage": 3, "reshard_after_forward": True, "num_microbatches": 1}),
    "ZeRO-3 of stages": (4, {"zero_stage": 3, "pipeline_parallel_size": 2, "reshard_after_forward": False}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_powersgd_is_the_same_in_each_layout(worlds, layout):
    """It depends on the gradients of the replicas alone."""
    [(expected, steps), _] = worlds.run_once(2, fit, Fit())
    [(exact, _), _] = worlds.run_once(2, fit, Fit(method=None))
    assert not all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(expected, exact, strict=True)), "not compressed"
    assert steps[-1]["gradient_compression"] > 1.3
    world_size, options = LAYOUTS[layout]
    assert_equal(worlds.run(world_size, fit, Fit(world_size=world_size, options=options), timeout=300), expected)


class Narrow(Wide):
    """Of matrices near the threshold, whose rows do not divide, or are fewer than ranks."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, 17), nn.Tanh(), nn.Linear(17, 5))
        self.layers += nn.Sequential(nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))

    def training_step(self, batch, batch_idx=None):
        x, y = batch
        return F.mse_loss(self.layers(x), y.expand(-1, 3))


NARROW = {
    "ZeRO-1": (2, {"zero_stage": 1}, 2),
    "ZeRO-3": (2, {"zero_stage": 3, "reshard_after_forward": True, "num_microbatches": 1}, 1),
    "more ranks than rows": (4, {"zero_stage": 3, "reshard_after_forward": False}, 1),
}


@pytest.mark.parametrize("layout", NARROW)
def test_the_matrix_of_a_shard_is_that_of_its_parameter(worlds, layout):
    """The rule that chooses matrices, and the matrix, know nothing of the padding of shards."""
    world_size, options, rank = NARROW[layout]
    replicas = Fit(("powersgd", rank), world_size, module=Narrow)
    expected, steps = worlds.run_once(world_size, fit, replicas)[0]
    exact, _ = worlds.run_once(world_size, fit, replace(replicas, method=None))[0]
    compressed = [not torch.allclose(a, b, rtol=1e-6) for a, b in zip(expected, exact, strict=True)]
    assert any(compressed) and steps
    assert_equal(worlds.run(world_size, fit, replace(replicas, options=options), timeout=300), expected)


METHODS = [POWERSGD, ("int8",), ("topk", 4, 0.3), ("1bit",), ("bf16",), ("fp16",)]
IN_ALL_LAYOUTS = [POWERSGD, ("topk", 4, 0.3)]
# A layout decides which tensors are averaged, a method how: all methods in one layout, two methods in all layouts.
EACH_METHOD = [
    pytest.param(method, layout, marks=[pytest.mark.slow] * (layout != "replicas" and method not in IN_ALL_LAYOUTS))
    for layout in ("replicas", "ZeRO-3", "two copies of shards", "tensor ranks")
    for method in METHODS
]


@pytest.mark.parametrize(("method", "layout"), EACH_METHOD, ids=str)
def test_each_method_learns_in_each_layout(worlds, method, layout):
    sizes = {
        "replicas": (2, {}),
        "ZeRO-3": (2, {"zero_stage": 3}),
        "two copies of shards": (4, {"zero_stage": 3, "shard_size": 2}),
        "tensor ranks": (4, {"tensor_parallel_size": 2}),
    }
    world_size, options = sizes[layout]
    results = worlds.run(world_size, fit, Fit(method, world_size, options, steps=10), timeout=300)
    assert_equal(results, results[0][0], tolerance=1e-12)
    exact = worlds.run_once(world_size, fit, Fit(None, world_size, options, steps=10), timeout=300)
    away = max(float((a - b).abs().max()) for a, b in zip(results[0][0], exact[0][0], strict=True))
    assert 0 < away < 0.1, away
    assert results[0][1][-1]["gradient_compression"] > 1


def test_accumulated_batches_are_sent_once(worlds):
    (_, steps), _ = worlds.run(2, fit, Fit(steps=2, accumulate=2))
    assert ["gradient_bytes" in step for step in steps][:2] == [False, True]


def test_the_first_steps_are_exact(worlds):
    [(expected, _), _] = worlds.run(2, fit, Fit(method=None, steps=2))
    results = worlds.run(2, fit, Fit(steps=2, compression={"start_step": 2}))
    assert_equal(results, expected, tolerance=1e-12)
    assert results[0][1][-1]["gradient_compression"] == pytest.approx(1, abs=0.05)


def test_manual_optimization(worlds):
    [(expected, _), _] = worlds.run(2, fit, Fit(options={"num_microbatches": 1}))
    assert_equal(worlds.run(2, fit, Fit(module=Manual, options={"num_microbatches": 1})), expected)


RESUMED = {
    "replicas": (2, {}),
    "stages": (4, {"pipeline_parallel_size": 2}),
    "ZeRO-3": (2, {"zero_stage": 3, "reshard_after_forward": False}),
}


@pytest.mark.parametrize(("before", "after", "folder"), each_resumed(RESUMED))
def test_resumed_in_another_layout_as_if_not_interrupted(worlds, tmp_path, before, after, folder):
    [(expected, _), _] = worlds.run_once(2, fit, Fit(steps=6, epoch=3))
    path, saves = str(tmp_path / "saved"), {"save_distributed_checkpoint": folder}
    world_size, options = RESUMED[before]
    worlds.run(world_size, fit, Fit(POWERSGD, world_size, options | saves, epoch=3, steps=3, save=path), timeout=300)
    world_size, options = RESUMED[after]
    results = worlds.run(
        world_size, fit, Fit(POWERSGD, world_size, options | saves, epoch=3, steps=6, resume=path), timeout=300
    )
    assert_equal(results, expected)
    dropped = torch.load(path, weights_only=False) if not folder else None
    if dropped is not None:
        [state] = [state for name, state in dropped["callbacks"].items() if name.startswith("GradientCompression")]
        assert max(float(value.abs().max()) for value in state["feedback"].values()) > 1e-3


@pytest.mark.parametrize("options", [{}, {"zero_stage": 3}], ids=["replicas", "ZeRO-3"])
def test_optimizer_steps_in_the_backward(worlds, options):
    [(expected, _), _] = worlds.run(2, fit, Fit(options=options))
    assert_equal(worlds.run(2, fit, Fit(options=options | {"optimizer_in_backward": True})), expected, tolerance=0)


REFUSED = {
    "AdaScale": (Fit(callbacks=(AdaScale,)), "AdaScale compares gradients"),
    "GoodputMonitor": (Fit(callbacks=(GoodputMonitor,)), "GoodputMonitor compares gradients"),
    "LocalSGD": (Fit(callbacks=(partial(LocalSGD, 2),)), "keep one of the two"),
    "first step": (Fit(options={"verify_first_step": True}), "start_step=1"),
    "manual ZeRO": (Fit(module=Manual, options={"zero_stage": 3, "num_microbatches": 1}), "set zero_stage=0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(worlds, case):
    run, text = REFUSED[case]
    for found in worlds.run(2, refused, run):
        assert found.startswith("LayoutError: ") and "GradientCompression" in found
        assert text in found


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"method": "zip"}, "must be one of powersgd, fp16"),
        ({"rank": 0}, "rank=0"),
        ({"ratio": 0.0}, "ratio=0.0"),
        ({"start_step": -1}, "start_step=-1"),
    ],
)
def test_arguments(arguments, text):
    with pytest.raises(ValueError, match=text):
        GradientCompression(**arguments)


class Sparse(Wide):
    """With an embedding whose gradients are sparse, beside matrices that are compressed."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH, sparse=True)

    def training_step(self, batch, batch_idx=None):
        x, y = batch
        indices = (x[:, 0] * 2).round().long().clamp(-4, 4) + 4
        return F.mse_loss(self.layers(x + self.embedding(indices)), y)


@pytest.mark.parametrize("options", [{}, {"zero_stage": 2}], ids=["replicas", "ZeRO-2"])
def test_sparse_gradients_are_sent_as_they_are(worlds, options):
    options = options | {"num_microbatches": 1}
    every = ("topk", 4, 1.0)  # all elements: nothing is lost
    [(expected, _), _] = worlds.run(2, fit, Fit(method=None, module=Sparse, options=options))
    assert_equal(worlds.run(2, fit, Fit(method=every, module=Sparse, options=options)), expected)


class Branches(Wide):
    """No pipeline runs it from its third batch on."""

    def training_step(self, batch, batch_idx=None):
        x, y = batch
        h = self.layers[0](x)
        if self.trainer.fit_loop.epoch_loop.total_batch_idx >= 2 and h.mean().item() > 1e6:
            h = 2 * h
        return F.mse_loss(self.layers[1:](h), y)


@pytest.mark.extended
def test_layout_that_changes(worlds):
    """Ranks of a pipeline hold shards from then on: what is compressed then is the all-reduce of a shard."""
    [(exact, _), _] = worlds.run(2, fit, Fit(method=None, steps=5))
    run = Fit(world_size=4, steps=5, module=Branches, options={"pipeline_parallel_size": 2})
    results = worlds.run(4, fit, run, timeout=300)
    assert_equal(results, results[0][0], tolerance=1e-12)
    away = max(float((a - b).abs().max()) for a, b in zip(results[0][0], exact, strict=True))
    assert 0 < away < 0.05, away


class Additive(Wide):
    """Its gradients do not depend on its parameters; no pipeline runs it from its third batch on."""

    def training_step(self, batch, batch_idx=None):
        x, y = batch
        loss = 0.0
        for index in (0, 2, 4, 6):
            h = self.layers[index](x)
            if not index and self.trainer.fit_loop.epoch_loop.total_batch_idx >= 2 and h.mean().item() > 1e6:
                h = 2 * h
            loss = loss + (h * (x * y).roll(1, 1)).mean()
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.parametrize("method", [POWERSGD, ("topk", 4, 0.2), ("1bit",), ("int8",)], ids=str)
def test_no_gradient_is_lost_when_the_layout_changes(worlds, tmp_path, method):
    """The averages so far and the feedback are the gradients so far."""
    path = tmp_path / "saved"
    [(exact, _), _] = worlds.run(2, fit, Fit(method=None, steps=5, module=Additive))
    run = Fit(method, 4, {"pipeline_parallel_size": 2}, steps=5, module=Additive, save=str(path))
    results = worlds.run(4, fit, run, timeout=300)
    callbacks = torch.load(path, weights_only=False)["callbacks"]
    [feedback] = [state["feedback"] for name, state in callbacks.items() if name.startswith("GradientCompression")]
    assert max(float(value.abs().max()) for value in feedback.values()) > 1e-4
    names = [name for name, _ in Additive().named_parameters()]
    assert_equal(results, [p + 0.05 * feedback.get(n, 0.0) for n, p in zip(names, exact, strict=True)])


class Spoiled(torch.autograd.Function):
    """The identity; its gradient is infinite where a flag is set."""

    @staticmethod
    def forward(ctx, h, flag):
        ctx.save_for_backward(flag)
        return h.clone()

    @staticmethod
    def backward(ctx, gradient):
        [flag] = ctx.saved_tensors
        return torch.where(flag > 0, float("inf"), gradient), None


class Overflows(Wide):
    """The gradients of its first layer overflow in batches with samples above 100."""

    def training_step(self, batch, batch_idx=None):
        x, y = batch
        h = self.layers[0](x.clamp(-5, 5))
        return F.mse_loss(self.layers[1:](Spoiled.apply(h, (x[:, :1] > 100).double())), y)


def fit_with_overflow(world_size, options, overflows):
    """Parameters after four steps, and a fifth one in the middle that overflows, if it does."""
    torch.manual_seed(0)
    module = Overflows().double()
    x = torch.randn(32, WIDTH, dtype=torch.float64)
    y = x.sum(1, keepdim=True).sin()
    if overflows:
        x, y = (torch.cat([t[:16], added, t[16:]]) for t, added in ((x, torch.full_like(x[:8], 1000.0)), (y, y[:8])))
    trainer = trainer_of(
        world_size,
        Hybrid3DStrategy(**{"num_microbatches": 2, **options}),
        [GradientCompression("topk", ratio=0.2)],
        plugins=[HybridPrecision("16-mixed")],
    )
    replica = trainer.strategy.cluster_environment.global_rank() % 2
    sampler = DistributedSampler(range(len(x)), 2, replica, shuffle=False)
    loader = DataLoader(TensorDataset(x, y), batch_size=4, sampler=sampler)
    trainer.fit(module, loader)
    assert trainer.precision_plugin.scaler.get_scale() == (2.0**15 if overflows else 2.0**16)
    return [p.detach().clone() for p in module.parameters()], []


@pytest.mark.parametrize(
    "layout", ["stages", *(pytest.param(n, marks=pytest.mark.slow) for n in ("ZeRO-2", "ZeRO-3 by layer"))]
)
def test_a_step_that_is_skipped_changes_nothing(worlds, layout):
    world_size, options = LAYOUTS[layout]
    expected = worlds.run(world_size, fit_with_overflow, world_size, options, False, timeout=300)
    results = worlds.run(world_size, fit_with_overflow, world_size, options, True, timeout=300)
    assert_equal(results, expected[0][0], tolerance=0)


@pytest.mark.world(1)
def test_feedback_is_restored_after_a_step_that_is_rolled_back():
    average = CompressedAverage(TopK(Traffic(), 0.1), dist.group.WORLD)
    average.errors["a"] = before = torch.ones(2, 2)
    restore = average.feedback_kept()
    average.errors |= {"a": torch.zeros(2, 2), "b": torch.zeros(2, 2)}
    restore()
    assert list(average.errors) == ["a"]
    assert average.errors["a"] is before
