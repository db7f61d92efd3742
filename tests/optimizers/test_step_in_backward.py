"""``optimizer_in_backward=True``: bitwise equal results, gradients of one layer alive, and what is refused."""

import dataclasses
import re

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader

from harness.fits import Run, fit, refusal, trainer_of
from harness.trainer_runs import lines_of_lightning
from harness.zero_runs import assert_bits
from lightning_hybrid import Hybrid3DStrategy, HybridPrecision
from lightning_hybrid.errors import BackwardStepError
from lightning_hybrid.optimizers.in_backward import InPlaceSubsetStep, StepsInBackward
from lightning_hybrid.optimizers.trial import skips_missing_gradients
from models.full_parameter_optimizers import ByMuon


class Stepped(Callback):
    """The number of parameters stepped in each backward, and of those with a gradient after it."""

    recorded = None

    def on_train_start(self, trainer, pl_module):
        self.recorded, self._steps = [], trainer.strategy._lifecycle.optimization.in_backward
        reset = self._steps.reset

        def counted():
            left = [p for group in trainer.optimizers[0].param_groups for p in group["params"] if p.grad is not None]
            self.recorded.append((len(self._steps._stepped), len(left)))
            reset()

        self._steps.reset = counted

    def on_train_end(self, *_):
        del self._steps


def zero(stage, **options):
    return {"zero_stage": stage, **options}


def freeze_biases(module):
    for p in module.parameters():
        p.requires_grad_(p.dim() > 1)


ACCUMULATED = {"accumulate_grad_batches": 2}
RUNS = {
    "replicas": Run("GPT2", dp=2, num_batches=3, microbatches=1),
    "one process": Run("GPT2", num_batches=4, microbatches=1, trainer=ACCUMULATED),
    "zero3 by layer": Run("GPT2", dp=2, num_batches=3, strategy=zero(3, reshard_after_forward=True)),
    "stages": Run("GPT2", pp=2, num_batches=3),
    "microbatches": Run("GPT2", num_batches=3),
    "replicas in microbatches": Run("GPT2", dp=2, num_batches=3),
    "tensor ranks": Run("GPT2", tp=2, num_batches=3),
    "zero1": Run("GPT2", dp=2, num_batches=4, strategy=zero(1), trainer=ACCUMULATED),
    "zero2 by layer": Run("GPT2", dp=2, num_batches=3, strategy=zero(2, reshard_after_forward=True)),
    "zero3": Run("GPT2", dp=2, num_batches=3, strategy=zero(3, reshard_after_forward=False)),
    "tied": Run("Tied", dp=2, num_batches=3, strategy=zero(3, reshard_after_forward=True), validate=True),
    "recomputed": Run("GPT2", dp=2, strategy=zero(3, reshard_after_forward=True, recompute="full")),
    "partly frozen": Run("GPT2", dp=2, num_batches=3, microbatches=1, change=freeze_biases),
    "replicas of tensor ranks": Run("GPT2", dp=2, tp=2, num_batches=3),
    "stages and zero": Run("Tied", pp=2, dp=2, num_batches=3, strategy=zero(3, reshard_after_forward=True)),
    "interleaved": Run("GPT2", pp=2, num_batches=3, strategy={"stages_per_rank": 2, "schedule": "interleaved_1f1b"}),
    "zero bubble": Run("GPT2", pp=2, num_batches=3, strategy={"schedule": "zero_bubble"}),
    "v placement": Run("Tied", pp=2, dp=2, num_batches=3, strategy={"schedule": "zero_bubble_v"}),
}


@pytest.mark.parametrize("run", list(RUNS.values()), ids=list(RUNS))
def test_bitwise_equal_to_the_ordinary_step(worlds, run):
    plain = worlds.run(run.world_size, fit, run)
    strategy = {**run.strategy, "optimizer_in_backward": True}
    ranks = worlds.run(run.world_size, fit, dataclasses.replace(run, strategy=strategy, callback=Stepped))
    assert_bits(plain, ranks)
    for rank in ranks:
        assert rank.extra and all(stepped > 0 for stepped, _ in rank.extra), rank.extra


def test_states_in_a_file(worlds, tmp_path):
    run = Run("GPT2", num_batches=4, microbatches=1, strategy={"offload": f"disk:{tmp_path}"})
    strategy = {**run.strategy, "optimizer_in_backward": True}
    [rank] = stepped = worlds.run(1, fit, dataclasses.replace(run, strategy=strategy, callback=Stepped))
    assert_bits(worlds.run(1, fit, run), stepped)
    assert all(stepped > 0 for stepped, _ in rank.extra), rank.extra


class Blocks(LightningModule):
    """Equal layers, AdamW with two groups, and a learning rate that changes after each step."""

    def __init__(self, num_layers=6, width=32):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num_layers))

    def training_step(self, batch, batch_idx):
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self):
        weights = [p for p in self.parameters() if p.dim() > 1]
        biases = [p for p in self.parameters() if p.dim() == 1]
        groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0, "lr": 3e-3}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def batches(count, width=32):
    data = torch.randn(count * 4, width, generator=torch.Generator().manual_seed(1))
    return DataLoader(list(data), batch_size=4)


def blocks(seed=0):
    torch.manual_seed(seed)
    return Blocks()


class GradientBytes(Callback):
    """The most bytes of gradients that were alive at once, and those of one layer."""

    def on_train_start(self, trainer, pl_module):
        self.most = 0
        parameters = list(pl_module.parameters())
        self.of_layer = sum(p.nbytes for p in pl_module.layers[0].parameters())

        def count(_):
            self.most = max(self.most, sum(p.grad.nbytes for p in parameters if p.grad is not None))

        self._hooks = [p.register_post_accumulate_grad_hook(count) for p in parameters]

    def on_train_end(self, *_):
        for hook in self._hooks:
            hook.remove()


@pytest.mark.parametrize(("in_backward", "layers"), [(True, 1), (False, 6)])
def test_gradients_of_one_layer_are_alive(in_backward, layers):
    counted = GradientBytes()
    trainer = trainer_of(1, Hybrid3DStrategy(optimizer_in_backward=in_backward), [counted])
    with lines_of_lightning() as lines:
        trainer.fit(blocks(), batches(3))
    assert counted.most == layers * counted.of_layer
    assert ("each layer is stepped in the backward" in "\n".join(lines)) is in_backward


class ShardBytes(Callback):
    """The most elements of full gradients and of gradient shards that were alive at once, over those of a layer."""

    recorded = None

    def on_train_start(self, trainer, pl_module):
        self.recorded = 0.0
        groups, parameters = trainer.strategy.run.active.groups, list(pl_module.parameters())
        of_layer = max(sum(group._shards[name].numel() * 2 for name in group._placements) for group in groups)

        def count(_):
            full = sum(p.grad.numel() for p in parameters if p.grad is not None)
            shards = sum(g.numel() for group in groups for g in group._gradients.values() if g is not None)
            self.recorded = max(self.recorded, (full + shards) / of_layer)

        for p in parameters:
            p.register_post_accumulate_grad_hook(count)


def six_layers(module):
    module.layers = nn.ModuleList(
        nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(6)
    ).double()


@pytest.mark.parametrize(("in_backward", "at_least", "at_most"), [(True, 1, 2), (False, 3, 6)])
def test_shards_of_gradients_are_freed_layer_by_layer(worlds, in_backward, at_least, at_most):
    strategy = {**zero(3, reshard_after_forward=True), "optimizer_in_backward": in_backward}
    run = Run("Layers", dp=2, microbatches=1, num_batches=2, change=six_layers, callback=ShardBytes, strategy=strategy)
    for rank in worlds.run(2, fit, run):
        assert at_least <= rank.extra <= at_most


class Calls(Callback):
    """Calls of step hooks, and the learning rates after each batch."""

    def on_train_start(self, trainer, pl_module):
        self.after, self.rates = 0, []
        self._hook = trainer.optimizers[0].register_step_post_hook(self._count)

    def _count(self, *_):
        self.after += 1

    def on_train_batch_end(self, trainer, *_):
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    def on_train_end(self, *_):
        self._hook.remove()


def test_hooks_schedules_and_checkpoints_are_those_of_the_ordinary_step(tmp_path):
    saved, calls = [], []
    for in_backward in (False, True):
        calls.append(Calls())
        trainer = trainer_of(1, Hybrid3DStrategy(optimizer_in_backward=in_backward), [calls[-1]])
        trainer.fit(blocks(), batches(4))
        assert trainer.global_step == 4
        trainer.save_checkpoint(tmp_path / f"{in_backward}.ckpt")
        # What was saved continues under the other option.
        trainer = trainer_of(1, Hybrid3DStrategy(optimizer_in_backward=not in_backward), [], max_epochs=2)
        trainer.fit(blocks(seed=5), batches(4), ckpt_path=tmp_path / f"{in_backward}.ckpt")
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        saved += [torch.load(tmp_path / f"{in_backward}.ckpt"), torch.load(tmp_path / "last.ckpt")]
    assert calls[0].after == calls[1].after == 4 and calls[0].rates == calls[1].rates
    for first, second in (saved[0::2], saved[1::2]):
        for key in ("state_dict", "optimizer_states", "lr_schedulers", "loops"):
            torch.testing.assert_close(second[key], first[key], rtol=0, atol=0)


class Reentrant(Blocks):
    def training_step(self, batch, batch_idx):
        for layer in (self.layers[0], self.layers[0]):
            batch = torch.utils.checkpoint.checkpoint(layer, batch.requires_grad_(), use_reentrant=True)
        return batch.square().mean()


def test_a_second_gradient_is_an_error():
    module = Reentrant(1)
    with pytest.raises(BackwardStepError, match=r"layers\.0\.0\.\w+ got another gradient after it had been stepped"):
        trainer_of(1, Hybrid3DStrategy(optimizer_in_backward=True), []).fit(module, batches(1))


class LogsGradients(Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        pass


class WithHook(Blocks):
    def on_after_backward(self):
        pass


class Manual(Blocks):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class WithLBFGS(Blocks):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class HooksOptimizer(Blocks):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: None)
        return optimizer


@pytest.mark.parametrize(
    ("module", "options", "strategy", "message"),
    [
        (Blocks, {"gradient_clip_val": 1.0}, {}, "gradient_clip_val=1.0 needs all gradients at once; leave it out"),
        (Blocks, {"callbacks": [LogsGradients()]}, {}, "LogsGradients.on_before_optimizer_step may read gradients"),
        (WithHook, {}, {}, "WithHook.on_after_backward may read gradients"),
        (Manual, {}, {}, "manual optimization"),
        (WithLBFGS, {}, {}, "LBFGS may use several parameters at once"),
        (HooksOptimizer, {}, {}, "a hook before the step of SGD may read gradients"),
        (Blocks, {"plugins": [HybridPrecision("16-mixed")]}, {}, "the loss scale of precision='16-mixed'"),
        (Blocks, {}, {"verify_first_step": True}, "verify_first_step=True compares gradients"),
    ],
)
def test_what_is_refused(module, options, strategy, message):
    trainer = trainer_of(
        1, Hybrid3DStrategy(optimizer_in_backward=True, **strategy), options.pop("callbacks", []), **options
    )
    with pytest.raises(BackwardStepError, match=f"^optimizer_in_backward=True: .*{re.escape(message)}.*=False"):
        trainer.fit(module(), batches(1))


OWNED = Run(ByMuon, dp=2, strategy=zero(3, optimizer_in_backward=True))


@pytest.mark.parametrize(
    "run", [OWNED, Run(ByMuon, tp=2, strategy={"optimizer_in_backward": True})], ids=["zero", "tp"]
)
def test_steps_at_owners_are_refused(worlds, run):
    for text in worlds.run(2, refusal, fit, run):
        assert re.search(
            "BackwardStepError: optimizer_in_backward=True: Muon steps full parameters, whose shards", text
        )


class DecaysAll(torch.optim.SGD):
    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.9)
        return super().step(closure)


def test_steps_that_need_no_gradient_are_found():
    parameters = [nn.Parameter(torch.ones(2))]
    assert skips_missing_gradients(torch.optim.AdamW(parameters))
    assert not skips_missing_gradients(DecaysAll(parameters, lr=0.1))


def test_a_gradient_that_is_not_final_is_left():
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=1.0)
    steps = StepsInBackward(optimizer, InPlaceSubsetStep(optimizer), [[p]], names={id(p): "p"})
    steps.allow(True)
    steps.begin_backward(is_last=False)
    p.sum().backward()
    assert torch.equal(p.grad, torch.ones(3)) and torch.equal(p, torch.ones(3))
    steps.begin_backward(is_last=True)
    p.sum().backward()
    assert p.grad is None and torch.equal(p, torch.full((3,), -1.0))
    optimizer.step()
    assert torch.equal(p, torch.full((3,), -1.0))
    steps.close()
