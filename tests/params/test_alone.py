"""What one rank may do alone waits for no other: it uses what is here, or raises at once."""

import copy
import pickle
import time

import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from harness.trainer_runs import ignore_warnings, trainer_of
from lightning_hybrid.errors import NotOnThisRank
from models.recorded_gradients import RecordsGradients
from models.tiny import loader

LAYOUTS = {
    "pp2": (2, {"num_microbatches": 2}),
    "tp2": (1, {"tensor_parallel_size": 2}),
    "zero3": (1, {"zero_stage": 3}),
}
ALONE = {
    "copies layers": lambda module: copy.deepcopy(module.layers),
    "copies a parameter": lambda module: [copy.deepcopy(p) for p in module.parameters()],
    "pickles layers": lambda module: pickle.dumps(module.layers),
    "pickles a parameter": lambda module: [pickle.dumps(p) for p in module.parameters()],
    "calls state_dict": lambda module: module.state_dict(),
    "prints a module": repr,
    "prints a parameter": lambda module: [repr(p) for p in module.parameters()],
}


class OnFirstRank(DummyLogger):
    """A logger, which works on the first rank only, between steps."""

    def __init__(self, module):
        super().__init__()
        self.module, self.outcomes = module, {}

    @rank_zero_only
    def log_metrics(self, *args, **kwargs):
        for name, call in ALONE.items():
            began = time.monotonic()
            try:
                call(self.module)
                outcome = "returned"
            except (NotOnThisRank, RuntimeError) as error:
                outcome = type(error).__name__
            self.outcomes[name] = outcome, time.monotonic() - began


class Logs(RecordsGradients):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def run(layout):
    ignore_warnings()
    torch.manual_seed(0)
    module = Logs()
    logger = OnFirstRank(module)
    pp, options = LAYOUTS[layout]
    trainer = trainer_of(2, pp, strategy_options=options, logger=logger, log_every_n_steps=1, max_steps=2)
    trainer.fit(module, loader(4))
    return logger.outcomes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rank_alone_never_waits(worlds, layout):
    outcomes, nothing = worlds.run(2, run, layout, timeout=60)
    assert set(outcomes) == set(ALONE) and not nothing
    assert all(seconds < 1 for _, seconds in outcomes.values()), outcomes
    assert outcomes["prints a module"][0] == outcomes["prints a parameter"][0] == "returned"
    refused = {"pickles layers", "pickles a parameter", "calls state_dict"}
    refused |= set() if layout == "pp2" else {"copies layers", "copies a parameter"}  # absent ones have absent copies
    assert all(outcomes[name][0] != "returned" for name in refused), outcomes
