"""Arguments and methods of the strategy outside of a run, as of Lightning's own strategies."""

from contextlib import contextmanager

import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn

from harness.one_device import compared, plain, result_of
from harness.trainer_runs import ignore_warnings, trainer_of
from models.small import Small


class Doubles(Precision):
    """Overrides methods."""

    def convert_input(self, data):
        return 2 * data

    @contextmanager
    def train_step_context(self):
        with torch.autocast("cpu", torch.bfloat16):
            yield


def check_user_precision(trainer):
    module, run = Small(), trainer(plugins=[Doubles()], gradient_clip_val=0.05)
    run.fit(module)
    assert type(run.precision_plugin) is Doubles
    return result_of(run, module)


def test_user_precision_plugin(worlds):
    compared(worlds, check_user_precision)


def run_user_precision(pp, options):
    ignore_warnings()
    trainer = trainer_of(2, pp, strategy_options=options, plugins=[Doubles()], max_steps=1)
    try:
        trainer.fit(Small())
    except TypeError as error:
        return str(error)
    return type(trainer.precision_plugin).__name__


def test_user_precision_plugin_runs_on_replicas_and_is_refused_with_shards(worlds):
    assert worlds.run(2, run_user_precision, 1, {"data_parallel_size": 2}) == ["Doubles"] * 2
    for pp, options in ((2, {}), (1, {"zero_stage": 3}), (1, {"tensor_parallel_size": 2})):
        for message in worlds.run(2, run_user_precision, pp, options):
            assert message.startswith("the precision plugin is a ") and "Doubles; supported are" in message


class Plain(Small):
    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    validation_step = test_step = training_step


def call_methods(trainer):
    """The calls of Lightning's `Strategy`, outside of any run."""
    module, run, batch = Plain().eval(), trainer(), torch.ones(2, 4)
    strategy = run.strategy
    strategy.setup_environment()
    strategy.connect(module)
    strategy.setup_environment()
    strategy.model_to_device()
    module.trainer = run
    found = [strategy.training_step(batch=batch, batch_idx=0), strategy.validation_step(batch, 0)]
    found += [strategy.test_step(batch, 0), strategy.predict_step(batch, 0)]
    strategy.backward(found[0], None)
    found += [parameter.grad for parameter in module.parameters()]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    strategy.optimizer_step(optimizer, lambda: None, module)
    found += [parameter.clone() for parameter in module.parameters()]
    run.state.fn = TrainerFn.FITTING
    strategy.setup(run)
    strategy.teardown()
    return plain([None if value is None else value.detach() for value in found]), len(strategy.optimizers)


def test_strategy_methods_outside_a_run(worlds):
    compared(worlds, call_methods)


class Reduces(Callback):
    def on_train_start(self, trainer, pl_module):
        values = [torch.tensor(True), torch.tensor([1, 2]), torch.tensor([1 + 2j]), torch.ones(2), 3, "word"]
        reductions = ["mean", "sum", "max", None]
        reduced = [trainer.strategy.reduce(value, reduce_op=how) for value in values for how in reductions]
        self.seen = plain(reduced), plain(pl_module.all_gather({"a": torch.ones(2), "b": [torch.ones(1)]}))


def reduced(trainer):
    reduces = Reduces()
    trainer(callbacks=[reduces]).fit(Small())
    return reduces.seen


def test_one_process_reduces_and_gathers_its_own_value(worlds):
    compared(worlds, reduced)
