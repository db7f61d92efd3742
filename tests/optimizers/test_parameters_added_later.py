"""Parameters that are added to an optimizer while a run goes on, or groups of which one is stepped in another way."""

import dataclasses
import tempfile

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn

from harness.fits import Run, fit
from harness.verification import check
from lightning_hybrid.optimizers.layer_step import LayerwiseStep
from lightning_hybrid.optimizers.trial import can_step_shards, steps_full_parameters
from lightning_hybrid.verify import Layout
from models.hand_written import Tied
from models.regression import ManualStep, Regression

STATES = {"offload": {"optimizer_states": "cpu"}}
ON_DISK = {"offload": {"optimizer_states": f"disk:{tempfile.gettempdir()}"}}
LAYOUTS = {
    "states on the host": Layout("one", devices=1, strategy=STATES),
    "states on disk": Layout("one, disk", devices=1, strategy=ON_DISK),
    "pp2, disk": Layout("pp2, disk", devices=2, strategy={**ON_DISK, "pipeline_parallel_size": 2}),
    "tp2": Layout("tp2", devices=2, strategy={**STATES, "tensor_parallel_size": 2}),
    "zero1": Layout("zero1", devices=2, strategy={**STATES, "zero_stage": 1}),
    "zero3, all on the host": Layout("zero3, cpu", devices=2, strategy={"zero_stage": 3, "offload": "cpu"}),
}


class Unfreezes(Regression):
    """Two layers are trained from the third batch on."""

    def __init__(self):
        super().__init__()
        self.frozen = self.layers[1:3]
        for p in self.frozen.parameters():
            p.requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            for p in self.frozen.parameters():
                p.requires_grad_(True)
            self.trainer.optimizers[0].add_param_group({"params": list(self.frozen.parameters()), "lr": 3e-3})

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Finetunes(Regression):
    """As Lightning's callback does it: from the second epoch on, with another learning rate."""

    @property
    def backbone(self):
        return self.layers

    def configure_callbacks(self):
        return [BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)]

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class ByMuon(Unfreezes):
    def __init__(self):
        super().__init__()
        self.biases = [p for p in self.parameters() if p.dim() == 1]
        for p in self.biases:
            p.requires_grad_(False)
        self.head.requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            matrices = [p for p in self.frozen.parameters() if p.dim() > 1]
            for p in matrices:
                p.requires_grad_(True)
            self.trainer.optimizers[0].add_param_group({"params": matrices})

    def configure_optimizers(self):
        return torch.optim.Muon([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class ManuallyByMuon(ByMuon, ManualStep):
    """The same in manual optimization."""


ROUNDS = {
    "tp2": Layout("tp2", devices=2, strategy={"tensor_parallel_size": 2}),
    "zero3": Layout("zero3", devices=2, strategy={"zero_stage": 3}),
    "zero1": Layout("zero1", devices=2, strategy={"zero_stage": 1}),
    "tp2 x zero3": Layout("tp2 x zero3", devices=4, strategy={"tensor_parallel_size": 2, "zero_stage": 3}),
}
CASES = [
    *((module, LAYOUTS[name]) for module in (Unfreezes, Finetunes) for name in LAYOUTS),
    *((module, ROUNDS[name]) for module in (ByMuon, ManuallyByMuon) for name in ROUNDS),
]
FAST = {
    *(("Unfreezes", "one"), ("Unfreezes", "one, disk"), ("Finetunes", "zero3, cpu")),
    *(("ByMuon", "tp2"), ("ByMuon", "zero3")),
}


@pytest.mark.parametrize(
    ("module", "layout"),
    [
        pytest.param(
            module,
            layout,
            id=f"{module.__name__}-{layout.name}",
            marks=() if (module.__name__, layout.name) in FAST else pytest.mark.slow,
        )
        for module, layout in CASES
    ],
)
def test_parity(worlds, module, layout):
    report = check(worlds, module, layout, steps=4, epochs=2 if module is Finetunes else 1, timeout=180)
    assert report.outcome in ("same", "refused"), str(report)
    # Two optimizer classes of one process run ZeRO-1 in manual optimization.
    is_refused = module is ManuallyByMuon and layout.name == "zero1"
    assert (report.outcome == "refused") is is_refused, str(report)


class UnfreezesLayers(Tied):
    """Two layers are trained from the third batch on; gradients of layers that are stepped in the backward are gone."""

    def __init__(self):
        super().__init__()
        self.layers[1:3].requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            self.layers[1:3].requires_grad_(True)
            self.trainer.optimizers[0].add_param_group({"params": list(self.layers[1:3].parameters()), "lr": 3e-3})

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


IN_BACKWARD = {
    "one": Run(UnfreezesLayers, num_batches=4, microbatches=1),
    "dp2": Run(UnfreezesLayers, dp=2, num_batches=4),
    "pp2": Run(UnfreezesLayers, pp=2, num_batches=4),
    "zero1": Run(UnfreezesLayers, dp=2, num_batches=4, strategy={"zero_stage": 1}),
    "zero3": Run(UnfreezesLayers, dp=2, num_batches=4, strategy={"zero_stage": 3, "reshard_after_forward": True}),
}


@pytest.mark.parametrize("name", ["one", *(pytest.param(n, marks=pytest.mark.slow) for n in IN_BACKWARD if n != "one")])
@pytest.mark.parametrize("options", [{}, STATES], ids=["in place", "on the host"])
def test_steps_in_the_backward(worlds, name, options):
    run = IN_BACKWARD[name]
    plain, strategy = worlds.run(run.world_size, fit, run), {**run.strategy, **options, "optimizer_in_backward": True}
    ranks = worlds.run(run.world_size, fit, dataclasses.replace(run, strategy=strategy))
    for rank, expected in zip(ranks, plain, strict=True):
        assert all(torch.equal(rank.state[n], value) for n, value in expected.state.items())


def test_states_of_added_parameters_are_in_the_file(tmp_path):
    modules = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
    optimizer = torch.optim.AdamW(modules[0].parameters())
    step = LayerwiseStep(optimizer, [list(m.parameters()) for m in modules], str(tmp_path))
    other = nn.Parameter(torch.ones(2, 2))
    optimizer.add_param_group({"params": [*modules[2].parameters(), other], "amsgrad": True})
    for p in (*modules.parameters(), other):
        p.grad = torch.ones_like(p)
    before = {p: p.detach().clone() for p in (*modules.parameters(), other)}
    optimizer.step()
    stepped = {p for p in before if not torch.equal(p, before[p])}
    assert stepped == {*modules[0].parameters(), *modules[2].parameters(), other}
    for p in stepped:
        for name, value in optimizer.state[p].items():
            assert name == "step" or step.is_in_file(value), name
    step.close()


class Mixed(torch.optim.Optimizer):
    """Steps elements in one group, and whole matrices in another, as published combinations of Muon and Adam do."""

    steps_parameters_independently = True

    def __init__(self, groups):
        super().__init__(groups, {"lr": 0.1, "by_rows": False})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    update = p.grad / (p.grad.norm() + 1.0) if group["by_rows"] else p.grad.sign()
                    p.sub_(update, alpha=group["lr"])
        return loss


def test_each_kind_of_group_is_tried():
    one, other = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    assert can_step_shards(Mixed([{"params": [one]}, {"params": [other], "lr": 0.2}]))
    mixed = Mixed([{"params": [one]}, {"params": [other], "by_rows": True}])
    assert not can_step_shards(mixed)
    assert steps_full_parameters(mixed)


class OfLargeMatrices(Mixed):
    """Steps whole matrices if they are large, as published Adafactors factor them."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                update = p.grad / (p.grad.norm() + 1.0) if p.dim() > 1 and min(p.shape) >= 128 else p.grad.sign()
                p.sub_(update, alpha=group["lr"])


@pytest.mark.parametrize(("shape", "elementwise"), [((60, 200), True), ((200, 200), False), ((128,), True)])
def test_a_rule_by_the_shape_of_a_parameter_is_tried_on_its_shape(shape, elementwise):
    assert can_step_shards(OfLargeMatrices([nn.Parameter(torch.ones(shape))])) is elementwise


class ByMixed(Regression):
    def configure_optimizers(self):
        matrices, vectors = (
            [p for p in self.parameters() if (p.dim() > 1) is is_matrix] for is_matrix in (True, False)
        )
        return Mixed([{"params": vectors}, {"params": matrices, "by_rows": True}])


@pytest.mark.parametrize("name", ["tp2", pytest.param("zero3", marks=pytest.mark.slow)])
def test_groups_of_two_kinds(worlds, name):
    report = check(worlds, ByMixed, ROUNDS[name])
    assert report.outcome == "same", str(report)
