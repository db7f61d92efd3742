"""Fits that save and resume checkpoints under several layouts."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from harness.fits import trainer_of
from harness.one_process_pipeline import assert_same_gradients
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.checkpoint.read import SavedFolder
from models.cases import Samples, make
from models.hand_written import Decoder, Layers, Tied
from models.hugging_face import GPT2
from models.mixtures import Looped, Mixtral
from models.wide import GPT2Wide

MICROBATCHES = 2


class BuildsOptimizerInInit(Tied):
    """Builds its optimizer in `__init__`, with two groups, before any strategy is there."""

    def __init__(self):
        super().__init__()
        self.double()
        head, body = [self.embedding.weight], [*self.layers.parameters()]
        self.own = torch.optim.AdamW([{"params": body}, {"params": head, "lr": 3e-3}], lr=1e-2)

    def configure_optimizers(self):
        return [self.own], [torch.optim.lr_scheduler.StepLR(self.own, 1)]


class TwoLayers(GPT2):
    layers = 2


MODULES = {
    "GPT2": TwoLayers,
    "Tied": Tied,
    "Layers": Layers,
    "BuildsOptimizerInInit": BuildsOptimizerInInit,
    "Decoder": Decoder,
}
MODULES |= {"Mixtral": Mixtral, "Looped": Looped, "GPT2Wide": GPT2Wide}


@dataclass(frozen=True)
class Layout:
    """None for plain Lightning."""

    pp: int | None = None
    dp: int = 1
    tp: int = 1
    cp: int = 1
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def world_size(self):
        return (self.pp or 1) * self.dp * self.tp * self.cp

    def strategy(self):
        if self.pp is None:
            return None
        sizes = {"pipeline_parallel_size": self.pp, "tensor_parallel_size": self.tp, "context_parallel_size": self.cp}
        return Hybrid3DStrategy(**sizes, num_microbatches=MICROBATCHES, **dict(self.options))


PLAIN, PP1, PP2, PP4, DP2PP2 = Layout(), Layout(1), Layout(2), Layout(4), Layout(2, 2)


TP2, PP2TP2 = Layout(1, tp=2), Layout(2, tp=2)


INTERLEAVED = Layout(2, options=(("schedule", "interleaved_1f1b"), ("stages_per_rank", 2)))
V_PLACEMENT = Layout(2, options=(("schedule", "zero_bubble_v"),))


def loader_of(module, layout: Layout, trainer) -> DataLoader:
    """Each replica sees every second sample of a batch: the union is the batch that one process sees."""
    sampler = torch.utils.data.DistributedSampler(range(16), layout.dp, 0, shuffle=False) if layout.dp > 1 else None
    if sampler is not None:
        sampler.rank = int(trainer.strategy.cluster_environment.global_rank()) // (layout.tp * layout.cp) % layout.dp
    return DataLoader(Samples(module.kind, 16), batch_size=8 // layout.dp, sampler=sampler)


def train(case: str, layout: Layout, max_epochs: int, resume: str | None = None, save: str | None = None):
    """Fit, two batches of 8 samples over all replicas per epoch; the state of module and optimizers."""
    module = make(MODULES[case])
    trainer = trainer_of(layout.world_size, layout.strategy(), [], max_epochs=max_epochs)
    trainer.fit(module, loader_of(module, layout, trainer), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return {name: value.clone() for name, value in module.state_dict().items()}, trainer.global_step


def assert_same_state(got, expected, tolerance=1e-9):
    assert got.keys() == expected.keys()
    assert_same_gradients(got, expected, tolerance=tolerance)


def load(path):
    return torch.load(path, weights_only=False)


def states_of(path):
    """The first optimizer's states in a checkpoint, a file or a folder, by number."""
    checkpoint = SavedFolder(path).checkpoint() if path.is_dir() else load(str(path))
    return checkpoint["optimizer_states"][0]["state"]


ZERO = Layout(1, dp=2, options=(("zero_stage", 3),))


def folders(layout, **options):
    """The layout, saving folders."""
    return dataclasses.replace(
        layout, options=(*layout.options, ("save_distributed_checkpoint", True), *options.items())
    )


class SaveHalfway(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def save_halfway(case, layout, path):
    """One fit of two epochs, saved after the first; the state at its end."""
    module = make(MODULES[case])
    trainer = trainer_of(layout.world_size, layout.strategy(), [SaveHalfway(path)], max_epochs=2)
    trainer.fit(module, loader_of(module, layout, trainer))
    return {name: value.clone() for name, value in module.state_dict().items()}


def each_resumed(layouts):
    """Parameters (before, after, folder): files for each pair of layouts, folders from each one to another."""
    return [
        pytest.param(before, after, folder, marks=[pytest.mark.slow] * (folder and i != (j + 1) % 3))
        for folder in (False, True)
        for i, before in enumerate(layouts)
        for j, after in enumerate(layouts)
    ]
