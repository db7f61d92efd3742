"""Ranks agree on gathers for many layers at once where steps repeat; whatever a rank then calls, numbers stay right."""

import random

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional as F

from harness.fits import Run, assert_parity, check, fit, fit_reference
from lightning_hybrid.zero.forecast import Forecast
from lightning_hybrid.zero.rounds import GatherRounds
from models.hand_written import WIDTH, Layers, mlp
from models.mixtures import Mixtral

BY_LAYER = {"zero_stage": 3, "reshard_after_forward": True}
NUM_LAYERS = 12
WILD = (4, 8, 9)  # batches after some that were the same


class TwelveLayers(Layers):
    def __init__(self):
        super().__init__(NUM_LAYERS)


class Wandering(TwelveLayers):
    """In some batches each sample goes its own way: layers are left out, called twice, or in another order."""

    def __init__(self):
        super().__init__()
        self.rare = nn.ModuleList(mlp(WIDTH) for _ in range(2))

    def training_step(self, batch, batch_idx=0):
        rows = torch.stack([self.walk(x, batch_idx) for x in batch["x"]])
        return F.cross_entropy(self.head(rows), batch["label"])

    def walk(self, x, batch_idx):
        way = list(self.layers)
        if batch_idx in WILD:
            draw = random.Random(float(x[0]))
            every = [*self.layers, *self.rare]
            way = draw.choice([way[:3], [*way, self.rare[0]], [self.rare[1], *way], draw.choices(every, k=14)])
        for layer in way:
            x = x + layer(x)
        return x


class Recomputed(Wandering):
    """The same; a backward calls layers too."""

    def walk(self, x, batch_idx):
        return torch.utils.checkpoint.checkpoint(super().walk, x, batch_idx, use_reentrant=False)


class CountsRounds(Callback):
    """Rounds in each batch."""

    def __init__(self):
        self.recorded, self.count = [], 0

    def on_fit_start(self, trainer, pl_module):
        self.patch, original = pytest.MonkeyPatch(), GatherRounds._run_round

        def counted(rounds, *args):
            self.count += 1
            return original(rounds, *args)

        self.patch.setattr(GatherRounds, "_run_round", counted)

    def on_train_batch_end(self, *_):
        self.recorded.append(self.count)
        self.count = 0

    def on_fit_end(self, trainer, pl_module):
        self.patch.undo()


@pytest.mark.parametrize("microbatches", [1, 3])
def test_rounds_of_steps_that_repeat(worlds, microbatches):
    run = Run(TwelveLayers, dp=2, num_batches=7, microbatches=microbatches, strategy=BY_LAYER, callback=CountsRounds)
    for rank in worlds.run(2, fit, run):
        _, first, *_, last = rank.extra
        # A forward has one, a backward one for the layer it begins with and those agreed on; both have one at the end.
        in_backward = -(-(NUM_LAYERS + 1) // (Forecast.MOST_IN_BACKWARD + 1))
        assert last <= microbatches * (1 + in_backward + 2) < first / 1.5


@pytest.mark.parametrize("case", [Wandering, pytest.param(Recomputed, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dp", [2, 4])
def test_a_rank_that_calls_other_layers_than_agreed(worlds, case, dp):
    run = Run(case, dp=dp, num_batches=12, batch_size=1, microbatches=1, strategy=BY_LAYER, callback=CountsRounds)
    ranks = worlds.run(dp, fit, run)
    [reference] = worlds.run(1, fit_reference, Run(**{**vars(run), "callback": None}))
    assert_parity(ranks, reference, run)
    rounds = ranks[0].extra
    assert min(rounds[batch] for batch in WILD) > rounds[7] < rounds[0]  # agreed again in batch 7


@pytest.mark.parametrize(
    "run",
    [
        Run(Mixtral, dp=2, ep=2, num_batches=5, strategy=BY_LAYER),  # experts are full
        Run(TwelveLayers, pp=2, dp=2, num_batches=5, microbatches=4, strategy=BY_LAYER),
    ],
    ids=["experts", "stages"],
)
def test_agreed_gathers_beside_other_axes(worlds, run):
    check(worlds, run)


def test_parts_are_foreseen_once_they_repeat():
    forecast = Forecast()
    for _ in range(2):
        forecast.begin_step()
        forecast.add([0])
        assert forecast.following() == []
        forecast.add([1, 2])
        forecast.end_part()
    forecast.begin_step()
    forecast.add([0])
    assert forecast.following() == [1, 2]
    forecast.add([2])
    assert forecast.following() == []
    forecast.end_part()
    forecast.begin_step()
    forecast.add([0])
    assert forecast.following() == []


def test_what_is_foreseen_ends_with_a_mark_if_more_follows():
    forecast, most = Forecast(), Forecast.MOST
    for _ in range(2):
        forecast.begin_step()
        forecast.add(range(most + 3))
        forecast.end_part()
    forecast.begin_step()
    forecast.add([0])
    assert forecast.following() == [*range(1, most + 1), Forecast.MORE]
    assert forecast.following(2) == [*range(3, most + 3)]
    forecast.add([1, 2])
    assert forecast.following() == [*range(3, most + 3)]
