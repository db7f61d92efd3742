"""User hooks read gradients and parameters of the full model as in one process; parity in float64."""

import copy

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import grad_norm
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm, parameters_to_vector

from harness.layouts import each_under_sizes
from harness.trainer_runs import assert_same, ignore_warnings, trainer_of, weights_of
from models.recorded_gradients import MAX_NORM, RecordsGradients
from models.tiny import loader

# Two tensor ranks cost a quarter of those with stages, which only the slow tests run but for a few cases.
TENSOR = {"tp2": (2, 1, 2), "pp2xtp2": (4, 2, 2)}
OF_ALL_AXES = {"ClipsInClipping", "TiedWeights"}
# What they read and write is what others do, which run over tensor ranks by default.
COVERED_OVER_TENSOR_RANKS = {
    "ClipsBeforeStep": "ClipsInClipping",
    "ClipsByLightning": "ClipsInClipping",
    "ClipsValues": "ClipsInLists",
    "LogsNorms": "Loops",
}


class ClipsInClipping(RecordsGradients):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.recorded.append(float(clip_grad_norm_(self.parameters(), MAX_NORM)))


class ClipsBeforeStep(RecordsGradients):
    def on_before_optimizer_step(self, optimizer):
        self.recorded.append(clip_grad_norm_(self.parameters(), MAX_NORM, error_if_nonfinite=True).item())


class ClipsInLists(RecordsGradients):
    def on_before_optimizer_step(self, optimizer):
        norms = torch._foreach_norm(self.gradients(), 2.0)
        total = torch.linalg.vector_norm(torch.stack(norms))
        torch._foreach_mul_(self.gradients(), (MAX_NORM / total).clamp(max=1.0))
        self.recorded += [float(norm) for norm in norms]


class ClipsValues(RecordsGradients):
    def on_before_optimizer_step(self, optimizer):
        clip_grad_value_(self.parameters(), 1e-2)
        self.recorded.append(max(float(g.abs().max()) for g in self.gradients()))


class ClipsByLightning(RecordsGradients):
    """Lightning's clipping is global already; read before and after."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.recorded.append(get_total_norm(self.gradients()).item())
        self.clip_gradients(optimizer, MAX_NORM, gradient_clip_algorithm="norm")
        self.recorded.append(get_total_norm(self.gradients()).item())


class LogsNorms(RecordsGradients):
    def on_before_optimizer_step(self, optimizer):
        self.log_dict(grad_norm(self, 2))
        self.log("total", get_total_norm(self.gradients()))
        self.log("first", self.layers[0][0].weight.grad.norm())
        self.log("last", self.layers[-1].weight.grad.norm())


class Loops(RecordsGradients):
    def on_after_backward(self):
        total = 0.0
        for p in self.parameters():
            if p.grad is not None:
                total += p.grad.data.norm(2).item() ** 2
        largest = max(g.abs().max() for g in self.gradients())
        running = torch.zeros((), dtype=torch.float64)
        for g in self.gradients():
            running += g.square().sum()
        ranked = sorted(float(g.mean()) for g in self.gradients())
        actual = sum(g.sum() for g in self.gradients())
        self.recorded += [
            total**0.5,
            float(largest),
            running.sqrt().item(),
            *ranked,
            actual.item(),
            len(self.gradients()),
        ]


class Edits(RecordsGradients):
    def on_before_optimizer_step(self, optimizer):
        for index, p in enumerate(self.parameters()):
            if index == 0:
                p.grad = None
            elif index == 1:
                p.grad = p.grad.clamp(-1e-2, 1e-2)
            elif index == 2:
                p.grad.data = p.grad.data * 3
            else:
                p.grad.mul_(0.5).nan_to_num_(posinf=0.0)
                p.grad += 0.01 * p.detach()
        first, last = self.layers[0][0].bias.grad, self.layers[-1].bias.grad
        first += last.mean()
        last[0] = first.norm()
        with torch.no_grad():
            self.layers[-1].weight += 0.01  # sets the module's attribute too
        self.recorded += [first.norm().item(), last.norm().item(), self.layers[0][0].weight.grad is None]


class WritesLater(RecordsGradients):
    """Through arrays of NumPy, which count no versions, and into tensors that have become gradients."""

    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            p.grad.numpy()[..., 0] *= 0.5
        self.recorded += [g.norm().item() for g in self.gradients()]
        for p in self.parameters():
            new = p.grad * 0.5
            p.grad = new
            new.add_(0.01)
        self.recorded += [g.norm().item() for g in self.gradients()]


class AddsNoise(RecordsGradients):
    """Every rank draws the noise of the full model, so the generators stay as in one process."""

    def on_fit_start(self):
        torch.manual_seed(3)

    def on_before_optimizer_step(self, optimizer):
        for g in self.gradients():
            g.add_(torch.randn_like(g), alpha=0.1)
        last = self.layers[-1].weight.grad
        last += torch.empty_like(last).normal_()
        self.recorded.append(torch.rand(()).item())


class TiedWeights(RecordsGradients):
    def __init__(self):
        super().__init__()
        self.layers[3][0].weight = self.layers[0][0].weight

    def on_before_optimizer_step(self, optimizer):
        self.recorded.append(float(clip_grad_norm_(self.parameters(), MAX_NORM)))
        self.log("tied", self.layers[0][0].weight.grad.norm())


class LogsWeights(RecordsGradients):
    def on_train_batch_start(self, batch, batch_idx):
        self.kept = [p.detach().norm() for p in self.parameters()]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("loss", outputs["loss"])
        for index, norm in enumerate(self.kept):
            self.log(f"norm_{index}", norm)
        self.recorded.append(f"{self.layers[-1].weight.norm():.6f}")
        self.recorded += parameters_to_vector(self.parameters()).tolist()

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    def on_validation_epoch_end(self):
        self.log("weights", torch.stack([p.norm() for p in self.parameters()]).norm())


class Averages(RecordsGradients):
    """A moving average of the weights, on each rank of its shard."""

    def on_fit_start(self):
        self.averages = {name: p.detach().clone() for name, p in self.named_parameters()}
        self.copied = [copy.deepcopy(self.layers[-1])]  # no submodule

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            for name, p in self.named_parameters():
                self.averages[name].mul_(0.9).add_(p.data, alpha=0.1)
            self.copied[0].weight.lerp_(self.layers[-1].weight, 0.5)

    def on_train_epoch_end(self):
        self.recorded += [average.norm().item() for average in self.averages.values()]
        self.recorded.append(self.copied[0].weight.norm().item())


class Reads(Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        pl_module.recorded.append(get_total_norm(gradients, float("inf")).item())
        for g in gradients:
            g.div_(torch.stack([other.norm() for other in gradients]).sum())

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        pl_module.recorded += [float(g.norm()) for g in pl_module.gradients()]


CASES = {
    case.__name__: case
    for case in (
        ClipsInClipping,
        ClipsBeforeStep,
        ClipsInLists,
        ClipsValues,
        ClipsByLightning,
        LogsNorms,
        Loops,
        Edits,
        WritesLater,
        AddsNoise,
        TiedWeights,
        LogsWeights,
        Averages,
    )
}


def run_fit(size, pp, tp, case, options):
    ignore_warnings()
    model = CASES.get(case, RecordsGradients)()
    callbacks = [Reads()] if case == "callback" else []
    options = dict(options)
    zero = options.pop("zero", 0)
    strategy = {"num_microbatches": 2, "tensor_parallel_size": tp, "zero_stage": zero} if size > 1 else {}
    trainer = trainer_of(size, pp, strategy_options=strategy, callbacks=callbacks, max_epochs=2, **options)
    each = 8 * pp * tp // size
    val = [loader(each, 8)] if case == "LogsWeights" else None
    trainer.fit(model, loader(each, replicas=1 if size == pp * tp else None), val)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name not in ("loss", "val")}
    assert not any(name.startswith(("on_", "log", "configure_")) for name in model.__dict__)
    return weights_of(model), logged, model.recorded


references = {}


def assert_parity(worlds, size, pp, tp, case, **options):
    key = case, *((name, value) for name, value in options.items() if name != "zero")
    if key not in references:
        [references[key]] = worlds.run(1, run_fit, 1, 1, 1, case, options)
    weights, logged, recorded = references[key]
    assert recorded or logged
    for result in worlds.run(size, run_fit, size, pp, tp, case, options):
        assert_same(result[1], logged)
        assert len(result[2]) == len(recorded)
        for actual, expected in zip(result[2], recorded, strict=True):
            assert actual == (expected if isinstance(expected, str) else pytest.approx(expected, rel=1e-10, abs=1e-12))
        assert_same(result[0], weights)


# Gradients are means over the replicas before any hook sees them; noise must be the same on all.
@each_under_sizes("case", [*CASES, "callback"], {"pp2": (2, 2), "dp2xpp2": (4, 2)}, replicated=["Edits"])
def test_hooks_read_and_edit_the_full_model(worlds, size, pp, case):
    assert_parity(worlds, size, pp, 1, case)


def tensor_cases():
    for case in [*CASES, "callback"]:
        both = case in OF_ALL_AXES
        for name, sizes in TENSOR.items():
            slow = both == (name == "tp2") or case in COVERED_OVER_TENSOR_RANKS
            yield pytest.param(*sizes, case, id=f"{case}-{name}", marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(("size", "pp", "tp", "case"), list(tensor_cases()))
def test_tensor_ranks_read_and_edit_the_full_model(worlds, size, pp, tp, case):
    assert_parity(worlds, size, pp, tp, case)


def zero_cases():
    by_default = {"ClipsBeforeStep", "Edits", "WritesLater", "TiedWeights", "Averages"}
    for case in [*CASES, "callback"]:
        yield pytest.param(2, 1, 1, case, id=case, marks=[] if case in by_default else [pytest.mark.slow])
        yield pytest.param(8, 2, 2, case, id=f"{case}-dp2tp2pp2", marks=[pytest.mark.slow])


@pytest.mark.parametrize(("size", "pp", "tp", "case"), list(zero_cases()))
def test_sharded_replicas_read_and_edit_the_full_model(worlds, size, pp, tp, case):
    assert_parity(worlds, size, pp, tp, case, zero=3)


@pytest.mark.parametrize("case", ["ClipsBeforeStep", "TiedWeights", "callback"])
def test_gradients_are_read_at_the_end_of_accumulation(worlds, case):
    assert_parity(worlds, 2, 2, 1, case, accumulate_grad_batches=2)


# -- what is refused --------------------------------------------------------------------------------------------------
