"""Out of memory outside of training steps: ``microbatch="auto"`` does not run them again, and all ranks end."""

import sys
import time

import pytest
import torch

from harness.feature_runs import LAYOUTS, SHARED_OUT, on_rank
from models.planted_out_of_memory import PLANT, Validates

OPTIONS = {"dp2 x zero3": {"zero_stage": 3}, "tp2": {"tensor_parallel_size": 2}}
NOTED = {"optimizer": "the optimizer's step", "evaluation": "a smaller batch_size in its loader"}
WHERE = {"optimizer": "optimizer_step", "evaluation": "validation_step"}


class Steps(Validates):
    """Its optimizer runs out of memory on the second rank, once there are gradients."""

    def on_before_optimizer_step(self, optimizer):
        adam, original = sys.modules["torch.optim.adam"], sys.modules["torch.optim.adam"].adam

        def fails(*_, **__):
            adam.adam = original
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        if PLANT.here == PLANT.ranks - 1:
            adam.adam = fails


def fit(run, where):
    """The type of the error on this rank, its text with notes, and seconds until it came."""
    module = (Steps if where == "optimizer" else Validates)(num_samples=16)
    trainer = run.trainer(
        microbatches="auto", strategy_options={"microbatch": "auto"}, max_steps=2, val_check_interval=1
    )
    PLANT.__init__(1 if where == "evaluation" else None, where, run.size)
    begin = time.monotonic()
    try:
        trainer.fit(module)
    except Exception as error:
        return type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", ())]), time.monotonic() - begin
    finally:
        PLANT.__init__()
    return "no error", "", 0.0


def rank_with(size, pp, folder, options, where):
    return on_rank(lambda run: fit(run, where), size, pp, folder, options)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("layout", ["dp2", "pp2", "tp2", "dp2 x zero3"])
def test_all_ranks_end(worlds, tmp_path, layout, where):
    size, pp = {**LAYOUTS, **SHARED_OUT}[layout]
    found = worlds.run(size, rank_with, size, pp, str(tmp_path), OPTIONS.get(layout, {}), where, timeout=120)
    assert [name for name, *_ in found].count("OutOfMemoryError") == 1, found
    for name, text, seconds in found:
        assert seconds < 60
        assert "CUDA out of memory. Tried to allocate 2.00 GiB" in text
        if name == "OutOfMemoryError":
            assert 'microbatch="auto"' in text and NOTED[where] in text
        else:
            assert WHERE[where] in text and "failed: OutOfMemoryError" in text
