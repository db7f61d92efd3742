"""Reads of gradients that cannot be global, by some ranks or at the wrong time, are refused on every rank."""

import pytest
import torch

from harness.trainer_runs import ignore_warnings, trainer_of, weights_of
from lightning_hybrid.params.reads import agreement as known
from lightning_hybrid.params.reads.stages import CrossStageReads
from models.recorded_gradients import RecordsGradients
from models.tiny import loader


class ReadsOnFirstRank(RecordsGradients):
    def on_before_optimizer_step(self, optimizer):
        if self.trainer.is_global_zero:
            self.recorded.append(self.layers[0][0].weight.grad.norm().item())


class ReadsOnSecondRank(RecordsGradients):
    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.strategy.mesh.rank == 1:
            self.recorded.append(self.layers[0][0].weight.norm().item())


class ReadsDifferently(RecordsGradients):
    def on_after_backward(self):
        gradients = self.gradients()
        self.recorded.append(gradients[0 if self.trainer.is_global_zero else 1].norm().item())


class ReadsTiedTooEarly(RecordsGradients):
    def __init__(self):
        super().__init__()
        self.layers[3][0].weight = self.layers[0][0].weight

    def on_after_backward(self):
        self.recorded.append(self.layers[0][0].weight.grad.norm().item())


class RunsBackward(RecordsGradients):
    def on_before_optimizer_step(self, optimizer):
        self.layers[0][0].weight.norm().backward()


class FetchesMuch(RecordsGradients):
    def on_before_optimizer_step(self, optimizer):
        self.recorded += [g.tolist() for g in self.gradients()]


REFUSED = {
    ReadsOnFirstRank: ["RanksDisagree", "only some", "ReadsOnFirstRank.on_before_optimizer_step", "every rank"],
    ReadsOnSecondRank: [
        "RanksDisagree",
        "only some",
        "ReadsOnSecondRank.on_train_batch_start",
        "test_refused_gradient_reads",
    ],
    ReadsDifferently: [
        "RanksDisagree",
        "ReadsDifferently.on_after_backward",
        "layers.0.0.weight",
        "layers.0.0.bias",
        "rank 1",
    ],
    ReadsTiedTooEarly: ["layers.0.0.weight", "accumulate_grad_batches=1", "on_before_optimizer_step"],
    RunsBackward: ["backward", "training_step", "on_before_optimizer_step"],
    FetchesMuch: ["FetchesMuch.on_before_optimizer_step", "get_total_norm", "most 30 "],
}


def run_refused(name, pp=2, strategy=None):
    ignore_warnings()
    model = {case.__name__: case for case in REFUSED}[name]()
    before = weights_of(model)
    options = {"accumulate_grad_batches": 2} if name == "ReadsTiedTooEarly" else {}
    limits = CrossStageReads.__init__.__kwdefaults__
    most = limits["most_elements"]
    try:
        limits["most_elements"] = 30 if name == "FetchesMuch" else most
        trainer_of(2, pp, strategy_options=strategy or {"num_microbatches": 2}, **options).fit(model, loader(4))
    except Exception as error:
        if strategy is not None:
            return f"{type(error).__name__}: {error}"
        kept = [name for name, value in weights_of(model).items() if type(value) is torch.Tensor]
        assert all(torch.equal(dict(model.named_parameters())[name], before[name]) for name in kept)
        return f"{type(error).__name__}: {error}"
    finally:
        limits["most_elements"] = most
    return "nothing was raised"


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.__name__)
def test_reads_that_cannot_be_global_are_refused_on_every_rank(worlds, case):
    for message in worlds.run(2, run_refused, case.__name__):
        assert all(word in message for word in REFUSED[case]), message


@pytest.mark.parametrize("case", [ReadsOnFirstRank, ReadsOnSecondRank], ids=lambda case: case.__name__)
@pytest.mark.parametrize("strategy", [{"zero_stage": 3}, {"tensor_parallel_size": 2}], ids=["zero3", "tp2"])
def test_reads_by_some_ranks_of_sharded_layers_are_refused(worlds, case, strategy):
    for message in worlds.run(2, run_refused, case.__name__, 1, strategy, timeout=60):
        assert all(word in message for word in REFUSED[case][:3]), message


class ReadsLateOnFirstRank(RecordsGradients):
    def on_before_optimizer_step(self, optimizer):
        if self.trainer.fit_loop.epoch_loop.batch_idx == 3 and self.trainer.is_global_zero:
            self.recorded.append(float(self.gradients()[-1].norm()))


def run_late():
    ignore_warnings()
    num_checks = count_agreements()
    try:
        trainer_of(2, 2, strategy_options={"num_microbatches": 2}).fit(ReadsLateOnFirstRank(), loader(2))
    except Exception as error:
        return f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}", len(num_checks)
    return "nothing was raised", len(num_checks)


def count_agreements():
    num_checks = []
    agree_on = known.HookAgreement.agree_on

    def counted(self, hook, what, why=""):
        num_checks.append(what)
        agree_on(self, hook, what, why)

    known.HookAgreement.agree_on = counted
    return num_checks


def test_hooks_without_reads_stop_being_compared_and_late_reads_fail(worlds):
    (first, num_first), (second, num_second) = worlds.run(2, run_late)
    assert "ReadsLateOnFirstRank.on_before_optimizer_step" in first and "have continued without it" in first
    assert "ReadsLateOnFirstRank" in second and "rank 0" in second
    assert num_second == 2 and num_first > 2  # the first two calls of the one hook, though there were four
