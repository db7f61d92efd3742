"""Sizes of "auto": replicas alone where they fit, another layout where they do not, one plan on all ranks."""

import pickle

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from harness.fits import trainer_of
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.errors import LayoutError, PlanError
from lightning_hybrid.strategies import choose_planned_options
from lightning_hybrid.strategies.choose_planned_options import planned_options

SIZES = {"tensor_parallel_size": "auto", "pipeline_parallel_size": "auto"}


class Net(pl.LightningModule):
    def __init__(self, width=64):
        super().__init__()
        self.width = width
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)])
        self.head = nn.Linear(width, 4)

    def training_step(self, batch, batch_idx):
        samples, targets = batch
        return nn.functional.mse_loss(self.head(self.layers(samples)), targets)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(1)
        samples, targets = torch.randn(32, self.width, generator=generator), torch.randn(32, 4, generator=generator)
        return DataLoader(TensorDataset(samples, targets), batch_size=8)


def fitted(options, devices):
    """On a rank: sizes, ZeRO's stage and the parameters after a fit."""
    torch.manual_seed(0)
    module, strategy = Net(512), Hybrid3DStrategy(**options)
    trainer_of(devices, strategy, [], max_steps=3).fit(module)
    options = strategy.options
    return options.sizes, options.zero_stage, {name: value.clone() for name, value in module.state_dict().items()}


class _Recorded(Exception):
    """Ends a fit before its ranks meet."""


def plan_on(monkeypatch, devices, nbytes, **options):
    """Options that the first of several ranks plans in this process, whose device has a number of bytes."""
    module, strategy = Net(), Hybrid3DStrategy(**SIZES, **options)
    trainer = trainer_of(devices, strategy, [])
    planned = []

    def plan():
        planned.append(planned_options(strategy, trainer))
        raise _Recorded

    monkeypatch.setattr(strategy, "setup_environment", plan)
    launcher = type(strategy._launcher)
    monkeypatch.setattr(launcher, "launch", lambda self, function, *arguments, trainer=None: function(*arguments))
    monkeypatch.setattr(choose_planned_options, "free_on_host", lambda: devices * nbytes)
    with pytest.raises(_Recorded):
        trainer.fit(module)
    return planned[0]


def test_replicas_alone_are_kept_where_they_fit(monkeypatch):
    assert plan_on(monkeypatch, 2, 16e9) == {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}


def test_another_layout_where_they_do_not(monkeypatch):
    plain = plan_bytes(monkeypatch)
    planned = plan_on(monkeypatch, 4, plain - 1000)
    assert planned.keys() >= {"tensor_parallel_size", "pipeline_parallel_size"}
    sizes = planned["tensor_parallel_size"], planned["pipeline_parallel_size"]
    assert max(sizes) > 1 or planned["zero_stage"] > 0 or planned["recompute"] != "none"
    assert "offload" not in planned  # the host's memory is the device's


def plan_bytes(monkeypatch):
    """Bytes that replicas alone need, with the error bar."""
    low, high = 0.3e9, 2e9
    while high - low > 1e5:
        middle = (low + high) / 2
        try:
            fits = plan_on(monkeypatch, 4, middle, zero_stage=0) == dict.fromkeys(SIZES, 1)
        except PlanError:
            fits = False
        low, high = (low, middle) if fits else (middle, high)
    return low


def test_options_that_are_set_are_kept(monkeypatch):
    planned = plan_on(monkeypatch, 4, 16e9, zero_stage=1)
    assert "zero_stage" not in planned and planned["tensor_parallel_size"] >= 1


def test_nothing_fits(monkeypatch):
    with pytest.raises(PlanError, match=r"no layout of Net fits 2 devices of 100\.0 MB"):
        plan_on(monkeypatch, 2, 16e9, max_memory="100MB")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"tensor_parallel_size": "all"}, LayoutError, "use 'auto' or a whole number"),
        ({"max_memory": "20GiB"}, ValueError, "max_memory='20GiB' is for sizes that are planned"),
        ({"objective": "largest_batch"}, ValueError, "objective='largest_batch' is for sizes that are planned"),
        ({**SIZES, "max_memory": "much"}, ValueError, "max_memory='much'; use a number of bytes"),
        ({**SIZES, "objective": "fewest_devices"}, ValueError, "a run uses all devices of its Trainer"),
    ],
)
def test_refusals(options, error, words):
    with pytest.raises(error, match=words):
        Hybrid3DStrategy(**options)


def test_layout_is_not_known_before_the_plan():
    strategy = Hybrid3DStrategy(**SIZES)
    trainer_of(2, strategy, [])
    with pytest.raises(RuntimeError, match="the layout is planned when the processes meet"):
        _ = strategy.layout
    assert pickle.loads(pickle.dumps(strategy.options)).is_planned


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"max_memory": "416MB"}], ids=["fits", "does not"])
def test_all_ranks_take_one_plan(worlds, options):
    """Its parameters are those of replicas alone where these fit, and else of the same sizes with numbers."""
    ranks = worlds.run(2, fitted, {**SIZES, **options}, 2)
    sizes, zero_stage, _ = ranks[0]
    assert ranks[1][:2] == (sizes, zero_stage)
    is_plain = [sizes[name] for name in SIZES] == [1, 1] and not zero_stage
    assert is_plain == (not options)
    explicit = worlds.run(2, fitted, {name: sizes[name] for name in SIZES} | {"zero_stage": zero_stage}, 2)
    for (_, _, state), (_, _, expected) in zip(ranks, explicit, strict=True):
        for name, value in expected.items():
            # Adam magnifies the order of sums where a gradient is near zero; a step moves a parameter by 1e-3.
            torch.testing.assert_close(state[name], value, rtol=0, atol=0 if is_plain else 1e-4)
