"""Stages that several ranks hold, against one process."""

from functools import partial

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from harness.trainer_runs import assert_same, ignore_warnings, lines_of_lightning, trainer_of, weights_of
from harness.verification import check
from lightning_hybrid.verify import Layout
from models.cases import CASES, Samples
from models.hand_written import WIDTH, Layers, Tied
from models.hugging_face import T5
from models.resnet import ResNet
from models.towers import TwoTowers, VisionLanguage


def layout(*widths, tensor=1, **options):
    options = {"stage_widths": list(widths), "tensor_parallel_size": tensor, "num_microbatches": 4, **options}
    replicas = options.pop("replicas", 1)
    name = f"{' + '.join(map(str, widths))}, tp{tensor}, dp{replicas}"
    return Layout(name, sum(widths) * tensor * replicas, options)


def data_of(kind, batch=8):
    train, val = (DataLoader(Samples(kind, count), batch_size=batch) for count in (2 * batch, batch))
    return {"train_dataloaders": train, "val_dataloaders": val}


def same(worlds, make_module, layout, batch=8, **options):
    options = {"make_data": partial(data_of, make_module.kind, batch), "num_microbatches": None, **options}
    report = check(worlds, make_module, layout, **options)
    assert report.outcome == "same", str(report)


WIDTHS = [layout(2, 1), layout(1, 2), layout(4, 2), layout(2, 1, tensor=2)]


@pytest.mark.parametrize("make_module", [ResNet, TwoTowers, VisionLanguage, T5])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_models_whose_parts_differ(worlds, make_module, widths):
    same(worlds, make_module, widths, batch=12)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("widths", WIDTHS[:2], ids=str)
def test_cases(worlds, name, widths):
    same(worlds, CASES[name], widths)


class Logged(Layers):
    """Metrics of torchmetrics, and numbers that are no means over samples."""

    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=4)
        self.scores = torchmetrics.MetricCollection([torchmetrics.F1Score("multiclass", num_classes=4)])

    def training_step(self, batch, batch_idx):
        logits = self(batch["x"])
        loss = F.cross_entropy(logits, batch["label"])
        self.accuracy(logits, batch["label"])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("perplexity", loss.exp())
        self.log("largest", logits.max())
        self.log("rows", float(len(logits)))
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        logits = self(batch["x"])
        self.log_dict(self.scores(logits, batch["label"]))
        self.log("val_loss", F.cross_entropy(logits, batch["label"]))


@pytest.mark.parametrize("widths", [(2, 1), (1, 2), (1, 3)], ids=str)
def test_logged_numbers_are_those_of_the_batch(worlds, widths):
    same(worlds, Logged, layout(*widths))


@pytest.mark.parametrize("batch", [5, 6])
def test_uneven_microbatches(worlds, batch):
    same(worlds, Logged, layout(2, 1), batch)
    same(worlds, Logged, layout(1, 2, num_microbatches=3), batch)


LAYOUTS = {
    "replicas": layout(2, 1, replicas=2),
    "ZeRO-3": layout(2, 1, replicas=2, zero_stage=3),
    "ZeRO-2, gathered once": layout(1, 2, replicas=2, zero_stage=2, reshard_after_forward=False),
    "recompute": layout(2, 1, recompute="full"),
    "offload": layout(1, 2, offload="cpu"),
    "gpipe": layout(2, 1, schedule="gpipe"),
    "eager": layout(3, 1, schedule="eager_1f1b", num_microbatches=8),
    "fewer microbatches than ranks": layout(3, 1, num_microbatches=2),
    "one microbatch": layout(2, 1, num_microbatches=1),
    "cuts": layout(1, 2, 1, pipeline_cuts=["layers.1", "layers.2"]),
    "chunked loss": layout(2, 1, chunked_loss=True),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(worlds, name):
    same(worlds, Logged, LAYOUTS[name], resume=True)


@pytest.mark.parametrize("name", ["replicas", "ZeRO-3", "recompute", "one microbatch", "fewer microbatches than ranks"])
def test_batchnorm_in_layouts(worlds, name):
    same(worlds, ResNet, LAYOUTS[name])


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}], ids=str)
def test_trainer_options(worlds, options):
    same(worlds, Logged, LAYOUTS["replicas"], trainer=options)


def weights_after(make_module, **options):
    ignore_warnings()
    trainer_options = "devices", "sync_batchnorm"
    strategy = {"pipeline_parallel_size": "auto", **options}
    options = {name: strategy.pop(name) for name in trainer_options if name in options}
    devices = options.pop("devices")
    trainer, model = trainer_of(devices, strategy_options=strategy, precision="64-true", **options), make_module()
    trainer.fit(model, **data_of(make_module.kind))
    return weights_of(model)


def test_optimizer_in_backward(worlds):
    options = {"devices": 3, "stage_widths": [2, 1], "num_microbatches": 4}
    [wanted, *_] = worlds.run(3, partial(weights_after, Layers, **options))
    for found in worlds.run(3, partial(weights_after, Layers, optimizer_in_backward=True, **options)):
        assert_same(found, wanted)


def test_sync_batchnorm(worlds):
    options = {"sync_batchnorm": True, "num_microbatches": 2}
    [wanted, *_] = worlds.run(4, partial(weights_after, ResNet, devices=4, pipeline_parallel_size=2, **options))
    for found in worlds.run(6, partial(weights_after, ResNet, devices=6, stage_widths=[2, 1], **options)):
        assert_same(found, wanted)


def clamp_gradients(layer):
    for parameter in layer.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


class Hooked(Layers):
    """A hook that is not linear in the gradient."""

    def __init__(self):
        super().__init__()
        clamp_gradients(self.layers[0])


class HookedWhereTied(Tied):
    """The same on parameters that two stages hold."""

    def __init__(self):
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


class Centred(nn.Module):
    """Subtracts a running mean of its own, in which no rule for BatchNorm holds."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        x = self.linear(x)
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
        return x - self.mean


class Centring(Layers):
    def __init__(self):
        super().__init__()
        self.layers[0] = Centred()


class InstanceNorms(Layers):
    def __init__(self):
        super().__init__()
        self.layers[0] = nn.Sequential(nn.Unflatten(1, (1, WIDTH)), nn.InstanceNorm1d(1, track_running_stats=True))
        self.layers[0].append(nn.Flatten())


PAIR = Layout("pp2", 2, {"pipeline_parallel_size": 2, "num_microbatches": 4})


@pytest.mark.parametrize(
    "make_module, layout",
    [(Hooked, layout(2, 1)), (HookedWhereTied, PAIR), (Centring, layout(2, 1)), (InstanceNorms, layout(2, 1))],
)
def test_what_ranks_of_a_stage_cannot_share_is_sharded_instead(worlds, make_module, layout):
    same(worlds, make_module, layout)


class Repeats(nn.Module):
    """One layer that runs several times, and cannot be divided."""

    def __init__(self, times):
        super().__init__()
        self.linear, self.times = nn.Linear(WIDTH, WIDTH), times

    def forward(self, x):
        for _ in range(self.times):
            x = torch.tanh(self.linear(x))
        return x


class SlowFirst(Layers):
    """A part that takes three times as long as the rest."""

    def __init__(self):
        super().__init__(0)
        self.layers = nn.ModuleList([Repeats(3 * 8), Repeats(8)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def chosen_widths(make_module, ranks, **options):
    ignore_warnings()
    strategy = {"pipeline_parallel_size": ranks, "stage_widths": "auto", "num_microbatches": 4, **options}
    trainer, module = trainer_of(ranks, strategy_options=strategy, precision="64-true"), make_module()
    seen = []
    module.on_train_batch_end = lambda *_: seen.append(trainer.strategy.run)
    with lines_of_lightning() as lines:
        trainer.fit(module, **data_of(module.kind))
    run = seen[-1]
    line = next((each for text in lines for each in text.split("\n") if each.startswith("stage widths")), "")
    return run.plan.widths, run.plan.num_stages, run.is_pipelined, line


class SlowAndHooked(SlowFirst):
    """The slow part has a hook on a gradient, which several ranks would call."""

    def __init__(self):
        super().__init__()
        clamp_gradients(self.layers[0])


class SlowAndHookedInStep(SlowFirst):
    """The same, registered by the step."""

    def training_step(self, batch, batch_idx):
        handle = self.layers[0].linear.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        handle.remove()
        return super().training_step(batch, batch_idx)


class Written(nn.Module):
    """A unit that cannot be opened, runs several times, and writes a buffer of one of three kinds."""

    def __init__(self, kind):
        super().__init__()
        self.weight, self.kind = nn.Parameter(torch.eye(WIDTH)), kind
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.norm = nn.InstanceNorm1d(1, track_running_stats=True)

    def forward(self, x):
        for _ in range(24):
            x = torch.tanh(x @ self.weight)
        if self.kind == "kernel":
            return self.norm(x[:, None])[:, 0]
        if self.training:
            mean = x.detach().mean(0)
            if self.kind == "in place":
                self.mean.lerp_(mean, 0.1)
            else:
                self.mean = 0.9 * self.mean + 0.1 * mean
        return x - self.mean


class SlowAndWritten(SlowFirst):
    """The slow part writes a buffer."""

    def __init__(self, kind):
        super().__init__()
        self.layers[0] = Written(kind)


class SlowAndNormedInGlue(SlowFirst):
    """The step itself writes a buffer of the slow part."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        x = self.layers[0](x)
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.head(self.layers[1](x - self.mean))


class SlowBatchNorm(SlowFirst):
    """Averages of BatchNorm, which ranks of a stage share."""

    def __init__(self):
        super().__init__()
        self.layers[0] = nn.Sequential(nn.BatchNorm1d(WIDTH), self.layers[0])


CHOSEN = {
    "slow": (SlowFirst, 4, {(3, 1)}),
    "equal": (partial(Layers, 8), 4, {()}),
    "BatchNorm": (SlowBatchNorm, 4, {(3, 1)}),
    "hook": (SlowAndHooked, 4, {(1, 1, 2), (1, 2, 1), (1, 3)}),
    "hook of the step": (SlowAndHookedInStep, 3, {()}),
    "buffer in place": (partial(SlowAndWritten, "in place"), 3, {(1, 2)}),
    "other buffer": (partial(SlowAndWritten, "other"), 3, {(1, 2)}),
    "buffer of a kernel": (partial(SlowAndWritten, "kernel"), 3, {(1, 2)}),
    "buffer of the step": (SlowAndNormedInGlue, 3, {()}),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_widths_are_chosen(worlds, name):
    make_module, ranks, widths = CHOSEN[name]
    [found, *others] = worlds.run(ranks, partial(chosen_widths, make_module, ranks))
    assert found[0] in widths and found[1:3] == (len(found[0]) or ranks, True), found
    assert {each[:3] for each in others} == {found[:3]}
    assert found[3].startswith(f"stage widths: {list(found[0])}, chosen, with ") is bool(found[0]), found[3]


def auto(ranks, replicas=1, **options):
    options = {"pipeline_parallel_size": ranks, "stage_widths": "auto", "num_microbatches": 4, **options}
    return Layout(f"auto of {ranks}, dp{replicas}", ranks * replicas, options)


@pytest.mark.parametrize("make_module", [SlowFirst, Logged, ResNet, TwoTowers, Hooked, Centring, InstanceNorms])
def test_chosen_widths(worlds, make_module):
    same(worlds, make_module, auto(4), batch=12, resume=make_module is SlowFirst)


def validated(devices, **strategy):
    ignore_warnings()
    torch.manual_seed(0)
    trainer = trainer_of(devices, strategy_options=strategy, precision="64-true")
    return trainer.validate(SlowFirst(), data_of("vectors")["val_dataloaders"], verbose=False)[0]


def test_chosen_widths_of_a_validation(worlds):
    options = {"pipeline_parallel_size": 4, "stage_widths": "auto", "num_microbatches": 4}
    wanted = validated(1)
    for found in worlds.run(4, partial(validated, 4, **options)):
        assert_same(found, wanted)


def saved_layout(folder):
    ignore_warnings()
    strategy = {"pipeline_parallel_size": 4, "stage_widths": "auto", "num_microbatches": 4}
    trainer, path = trainer_of(4, strategy_options=strategy, precision="64-true"), f"{folder}/last.ckpt"
    trainer.fit(SlowFirst(), **data_of("vectors"))
    trainer.save_checkpoint(path)
    again = trainer_of(4, strategy_options=strategy, precision="64-true", max_epochs=2)
    again.fit(SlowFirst(), **data_of("vectors"), ckpt_path=path)
    return torch.load(path, weights_only=False)["hybrid3d"]["layout"], again.global_step


def test_a_checkpoint_has_the_chosen_widths_and_is_resumed(worlds, tmp_path):
    for layout, steps in worlds.run(4, partial(saved_layout, str(tmp_path))):
        assert layout["pp"] == 4 and layout["stage_widths"] == [3, 1] and steps == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_cases_with_chosen_widths(worlds, name):
    same(worlds, CASES[name], auto(3))
