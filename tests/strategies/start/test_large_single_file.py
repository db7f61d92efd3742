"""The warning that a single-file checkpoint takes much of the first rank's host."""

import warnings

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from harness.trainer_runs import ignore_warnings, trainer_of
from lightning_hybrid.memory.free import host_memory
from lightning_hybrid.strategies.start import file_size as warning
from models.tiny import Tiny, loader

PARAMETERS = 8 * (4 * 20 + 5)  # bytes of float64
STATES = 2 * PARAMETERS + 10 * 4  # a count of steps for each of ten parameters


class Adam(Tiny):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def warnings_of_fit(folder, memory, options, weights_only, saves):
    ignore_warnings()
    warning.host_memory = lambda: memory
    callbacks = [ModelCheckpoint(folder, save_weights_only=weights_only)] if saves else []
    trainer = trainer_of(
        2, 2, callbacks=callbacks, enable_checkpointing=saves, strategy_options=options, limit_train_batches=1
    )
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.fit(Adam(), loader(8))
    return [str(each.message) for each in seen if "saves a single file" in str(each.message)]


CASES = {
    "both": (
        5 * (PARAMETERS + STATES) - 1,
        {},
        False,
        True,
        "2.08 KB of parameters and optimizer states: 20% of",
    ),
    "small": (5 * (PARAMETERS + STATES) + 1, {}, False, True, ""),
    "weights": (4.9 * PARAMETERS, {}, True, True, "680 B of parameters: 20% of"),
    "small weights": (5.1 * PARAMETERS, {}, True, True, ""),
    "folder": (PARAMETERS, {"save_distributed_checkpoint": True}, False, True, ""),
    "no checkpoints": (PARAMETERS, {}, False, False, ""),
}


@pytest.mark.parametrize("case", ["both", "small", *(pytest.param(c, marks=pytest.mark.slow) for c in list(CASES)[2:])])
def test_warning_names_both_numbers(worlds, tmp_path, case):
    memory, options, weights_only, saves, words = CASES[case]
    first, second = worlds.run(2, warnings_of_fit, str(tmp_path), memory, options, weights_only, saves)
    assert second == [] and len(first) == bool(words)
    if words:
        assert words in first[0] and "save_distributed_checkpoint=True" in first[0]


def test_host_memory_is_that_of_this_machine():
    assert 1e8 < host_memory() < 1e15
