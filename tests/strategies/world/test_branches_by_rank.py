"""Ranks of one replica whose steps return other losses are refused, however the layout runs the step."""

import os

import pytest
import torch

from harness.trainer_runs import ignore_warnings, trainer_of
from lightning_hybrid.errors import RanksDisagree
from models.tiny import Tiny, loader


class ByRank(Tiny):
    """Its loss has one more term, is another one, or is none, from a batch on."""

    def __init__(self, kind, first, branches, manual=False):
        super().__init__()
        self.kind, self.first, self.branches = kind, first, branches
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx):
        kind = self.kind if os.environ["LOCAL_RANK"] == "1" and batch_idx >= self.first else "equal"
        out = self(batch["x"])  # on every rank: layers may be collective
        loss = torch.nn.functional.mse_loss(out, batch["y"])
        if self.branches and loss.item() > 1e9:
            raise ValueError
        if kind == "none":
            return None
        if kind == "scaled":
            loss = 2 * loss
        elif kind == "other":
            loss = out.abs().mean()
        elif kind == "nan":
            loss = loss * float("nan")
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss


def error_of(size, pp, options, make, *args):
    ignore_warnings()
    os.environ["LOCAL_RANK"] = str(torch.distributed.get_rank())
    trainer = trainer_of(size, pp, strategy_options=options)
    try:
        trainer.fit(make(*args), loader(4))
    except Exception as error:
        return type(error), str(error)
    finally:
        del os.environ["LOCAL_RANK"]
    return None, "nothing was raised"


UNSTAGED = 2, 2, {}
LAYERWISE = 2, 2, {"reshard_after_forward": True}
TENSOR = 2, 1, {"tensor_parallel_size": 2}
MICROBATCHES = 2, 1, {"tensor_parallel_size": 2, "num_microbatches": 2}
NAMES = {id(UNSTAGED): "unstaged", id(LAYERWISE): "layerwise", id(TENSOR): "tensor", id(MICROBATCHES): "microbatches"}


@pytest.mark.parametrize(
    ("layout", "kind", "first", "manual"),
    [
        (UNSTAGED, "none", 0, False),
        (UNSTAGED, "none", 3, False),
        (UNSTAGED, "scaled", 0, False),
        (UNSTAGED, "other", 3, False),
        (UNSTAGED, "nan", 0, False),
        (UNSTAGED, "scaled", 1, True),
        (LAYERWISE, "none", 0, False),
        (LAYERWISE, "other", 1, False),
        (TENSOR, "scaled", 1, False),
        (TENSOR, "other", 3, False),
        (TENSOR, "scaled", 1, True),
        (MICROBATCHES, "scaled", 1, False),
    ],
    ids=lambda value: NAMES.get(id(value), str(value)),
)
def test_a_loss_of_one_rank_is_refused(worlds, layout, kind, first, manual):
    branches = layout is UNSTAGED or layout is LAYERWISE
    for error, message in worlds.run(2, error_of, *layout, ByRank, kind, first, branches, manual):
        assert error is RanksDisagree, message
        assert "the loss of training_step differs between the ranks of one replica" in message
        assert (", None " in message) == (kind == "none") and "ranks 0 to 1" in message
