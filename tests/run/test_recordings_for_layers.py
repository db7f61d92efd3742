"""How often a step without stages is recorded for the layers that it calls: once for each way through its branches."""

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch import nn

from lightning_hybrid.errors import UnfitError
from lightning_hybrid.patching import active_patches
from lightning_hybrid.planning.plan import make_plan

taken = []  # by each recording; what it writes to a module is undone


class Counted(pl.LightningModule):
    """Notes the branch that each recording of its step takes."""

    def __init__(self, branches):
        super().__init__()
        self.branches = branches
        self.large, self.small = (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2))
        self.input, self.output = nn.Linear(8, 8), nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        hidden = self.input(batch[0])
        is_large = bool(hidden.sum() > 1.0) if self.branches else True
        taken.append(is_large)
        return (self.large if is_large else self.small)(hidden).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 8)), batch_size=4)


@pytest.mark.parametrize("branches", [False, True])
def test_only_a_step_with_branches_is_recorded_with_several_guesses(branches):
    taken.clear()
    make_plan(pl, Counted(branches), {}, 2, {"tensor_parallel_size": 2}, "32-true")
    assert set(taken) == {True, not branches}
    assert len(taken) == (6 if branches else 3)  # for the units, for their calls, and for activations


class Measured(Counted):
    """Has a metric."""

    def __init__(self):
        super().__init__(branches=False)
        self.mean = torchmetrics.MeanMetric()


def test_metrics_are_restored_where_the_recorded_step_is_refused():
    with pytest.raises(UnfitError, match="which training_step never uses"):
        make_plan(pl, Measured(), {}, 2, {"pipeline_parallel_size": 2, "pipeline_cuts": ["nowhere"]}, "32-true")
    assert active_patches() == []
