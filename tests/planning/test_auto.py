"""Sizes of "auto": replicas alone where they fit, another layout where they do not, one plan on all ranks."""

import pickle
import re
import sys
import textwrap
import threading
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from harness.fits import trainer_of
from harness.launched_jobs import run
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.callbacks import ActivationCheckpointing
from lightning_hybrid.errors import LayoutError, PlanError
from lightning_hybrid.experts import MoE
from lightning_hybrid.planning import auto
from lightning_hybrid.planning.dry_run.ranks import dry_run
from lightning_hybrid.predict.costs.module import ROUTING_PROOF
from lightning_hybrid.schedule.measured.lost_time import TimeByCause
from lightning_hybrid.schedule.measured.seconds import MeasuredCosts, save_measured_costs
from lightning_hybrid.strategies.options import auto_sizes
from lightning_hybrid.strategies.options.auto_sizes import needs_plan, plan_options
from models.command_line_classes import Segmentation

SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "expert_parallel_size")
NUMBERS = dict.fromkeys(SIZES, 1)
PLANNED = {"objective": "throughput"}


class Net(pl.LightningModule):
    def __init__(self, width=64, batch=8):
        super().__init__()
        self.width, self.batch = width, batch
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)])
        self.head = nn.Linear(width, 4)

    def training_step(self, batch, batch_idx):
        samples, targets = batch
        return nn.functional.mse_loss(self.head(self.layers(samples)), targets)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(1)
        samples, targets = torch.randn(48, self.width, generator=generator), torch.randn(48, 4, generator=generator)
        data, trainer = TensorDataset(samples, targets), self.trainer
        # Lightning's own sampler of training shuffles.
        sampler = DistributedSampler(data, trainer.world_size, trainer.global_rank, shuffle=False)
        return DataLoader(data, batch_size=self.batch, sampler=sampler)


class ManyRows(Net):
    """A microbatch of few samples still computes products of many rows."""

    def training_step(self, batch, batch_idx):
        samples, targets = batch
        hidden = self.layers(samples[:, None].expand(-1, 256, -1)).mean(1)
        return nn.functional.mse_loss(self.head(hidden), targets)


class BuiltLater(Net):
    """Its layers are those of `Net`, made in ``configure_model``."""

    def __init__(self, width=64):
        super().__init__(width)
        del self.layers, self.head
        self.built = 0

    def configure_model(self):
        self.built += 1
        if not hasattr(self, "layers"):
            other = Net(self.width)
            self.layers, self.head = other.layers, other.head


class Mixture(Net):
    """Mixtures of experts, which have most of the parameters."""

    def __init__(self, width=64, batch=8):
        super().__init__(width, batch)
        self.layers = nn.ModuleList(MoE(width, 2 * width, num_experts=4) for _ in range(2))

    def training_step(self, batch, batch_idx):
        hidden, targets = batch
        for layer in self.layers:
            hidden = hidden + layer(hidden)[0]
        return nn.functional.mse_loss(self.head(hidden), targets)


def fitted(options, devices, batch=8, free_bytes=None):
    """On a rank: the layout, ZeRO's stage and the parameters after a fit, on a host that has so much memory or enough.

    The framework's own memory is a constant of the planner, beside which this module is small.
    """
    with pytest.MonkeyPatch.context() as patch:
        if free_bytes is not None:
            patch.setattr(auto_sizes, "_STATES_SHARE", 0.01)
            patch.setattr(auto_sizes, "host_memory", lambda: free_bytes)
            patch.setattr(auto, "free_on_host", lambda: free_bytes)
        torch.manual_seed(0)
        module, strategy = Net(512, batch), Hybrid3DStrategy(**options)
        trainer_of(devices, strategy, [], max_steps=3).fit(module)
    sizes = {name: getattr(strategy.layout, name) for name in SIZES}
    return sizes, strategy.options.zero_stage, {name: value.clone() for name, value in module.state_dict().items()}


class _Recorded(Exception):
    """Ends a fit before its ranks meet."""


def plan_on(monkeypatch, devices, nbytes, module=None, logger=False, checkpoints=None, resumed=None, **options):
    """Options that the first of several ranks plans in this process, whose device has a number of bytes."""
    strategy = Hybrid3DStrategy(**options)
    callbacks = [] if checkpoints is None else [ModelCheckpoint(checkpoints)]
    trainer = trainer_of(devices, strategy, callbacks, logger=logger, enable_checkpointing=bool(callbacks))
    planned = []

    def plan():
        planned.append(plan_options(strategy)[0] if strategy.options.may_be_planned and needs_plan(strategy) else None)
        raise _Recorded

    monkeypatch.setattr(strategy, "setup_environment", plan)
    monkeypatch.setattr(strategy, "_configure_launcher", lambda: None)
    strategy._launcher = None
    monkeypatch.setattr(auto, "free_on_host", lambda: devices * nbytes)
    monkeypatch.setattr(auto_sizes, "host_memory", lambda: devices * nbytes)
    with pytest.raises(_Recorded):
        trainer.fit(module or Net(), ckpt_path=resumed)
    if isinstance(planned[0], Exception):
        raise planned[0]
    return planned[0]


def test_nothing_is_planned_where_states_leave_room(monkeypatch):
    """No module is copied and no step recorded: the start is as with numbers."""
    states = 16 * sum(parameter.numel() for parameter in Net().parameters())  # float32 with Adam's moments
    assert plan_on(monkeypatch, 2, 2 * states) is None


def test_short_memory_is_planned_without_a_request(monkeypatch):
    states = 16 * sum(parameter.numel() for parameter in Net().parameters())
    with pytest.warns(match="no layout of Net fits 2 devices .*; the run goes on"):  # the framework alone takes more
        assert plan_on(monkeypatch, 2, 1.9 * states) == {}
    for layout in ({"tensor_parallel_size": 2}, {"data_parallel_size": 2}, {"zero_stage": 3}, {"offload": "cpu"}):
        assert plan_on(monkeypatch, 2, 1.9 * states, **layout) is None
    monkeypatch.setattr(auto_sizes, "_STATES_SHARE", 0.0)
    assert plan_on(monkeypatch, 2, 16e9) == dict.fromkeys(SIZES, 1)  # they fit with their activations


def test_layers_of_configure_model_are_counted_on_a_copy(monkeypatch):
    states = 16 * sum(parameter.numel() for parameter in Net().parameters())
    module = BuiltLater()
    assert plan_on(monkeypatch, 2, 2 * states, module) == {}
    with pytest.warns(match="no layout of BuiltLater fits"):
        assert plan_on(monkeypatch, 2, 1.9 * states, module) == {}
    assert plan_on(monkeypatch, 2, 16e9, module, **PLANNED) == dict.fromkeys(SIZES, 1)
    assert plan_on(monkeypatch, 1, 1.9 * states, module) is None
    assert not module.built and not list(module.parameters())


def test_module_that_cannot_be_copied_is_planned_from_its_parameters(monkeypatch):
    module = Net()
    module.lock = threading.Lock()
    assert plan_on(monkeypatch, 2, 16e9, module, **PLANNED) == dict.fromkeys(SIZES, 1)


def test_plan_reaches_the_loggers(monkeypatch, tmp_path):
    logger = CSVLogger(tmp_path)
    plan_on(monkeypatch, 2, 16e9, logger=logger, **PLANNED)
    logged = logger.experiment.hparams["hybrid3d_plan"]
    assert logged["tensor_parallel_size"] == 1
    assert logged["predicted_bytes"] > 0 and logged["predicted_seconds_per_step"] > 0


def test_measured_costs_beside_the_checkpoints_correct_the_plan(monkeypatch, tmp_path):
    said = []
    monkeypatch.setattr(auto, "rank_zero_info", said.append)
    step = TimeByCause(work=3.0, communication=0.1, optimizer=0.2)
    layout = {"pp": 1, "dp_replicate": 2, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1}
    batch = {"num_microbatches": 1, "microbatch_size": 8, "batch_size": 8}
    device = {"hardware": {"device": "any", "device_type": "cpu", "num_hosts": 1}, "software": {"precision": "32-true"}}
    steps = {"steps": (10,), "step": step, "step_times": (step,)}
    path = tmp_path / "measured_costs.json"
    save_measured_costs(MeasuredCosts(layout=layout, schedule="", **device, **batch, **steps), path)
    places = {"checkpoints": tmp_path}, {"resumed": str(tmp_path / "last.ckpt")}, {"resumed": tmp_path / "last.ckpt"}
    for place in places:
        plan_on(monkeypatch, 2, 16e9, **place, **PLANNED)
        assert f"corrected by the measured costs of {path}: 3.3 s of a step" in said[-1]
        assert re.search(r"dp=2 +3\.3 s", said[-1])
    plan_on(monkeypatch, 2, 16e9, resumed=tmp_path / "other" / "last.ckpt", **PLANNED)
    assert "corrected by" not in said[-1]


def test_replicas_alone_are_kept_where_they_fit(monkeypatch):
    assert plan_on(monkeypatch, 2, 16e9, **PLANNED) == dict.fromkeys(SIZES, 1)


def test_another_layout_where_they_do_not(monkeypatch):
    plain = plan_bytes(monkeypatch)
    planned = plan_on(monkeypatch, 4, plain - 1000, **PLANNED)
    assert planned.keys() >= set(SIZES)
    sizes = planned["tensor_parallel_size"], planned["pipeline_parallel_size"]
    assert max(sizes) > 1 or planned["zero_stage"] > 0 or planned["recompute"] != "none"
    assert "offload" not in planned  # the host's memory is the device's


def plan_bytes(monkeypatch):
    """Bytes that replicas alone need, with the error bar."""
    low, high = 0.3e9, 2e9
    while high - low > 1e5:
        middle = (low + high) / 2
        try:
            fits = plan_on(monkeypatch, 4, middle, **PLANNED) == dict.fromkeys(SIZES, 1)
        except PlanError:
            fits = False
        low, high = (low, middle) if fits else (middle, high)
    return low


def test_one_device_whose_activations_are_large(monkeypatch):
    """Its batch is split, or its layers are recomputed."""
    module, planned = Net(batch=4096), []
    module.train_dataloader = lambda: DataLoader(TensorDataset(torch.zeros(4096, 64), torch.zeros(4096, 4)), 4096)
    for nbytes in (0.402e9, 0.404e9, 16e9):
        planned.append(plan_on(monkeypatch, 1, nbytes, module, **PLANNED))
    assert planned[-1] == dict.fromkeys(SIZES, 1)
    assert all(plan.get("num_microbatches", 1) > 1 or "recompute" in plan for plan in planned[:-1])


def test_microbatches_that_change_batch_norm_are_not_planned(monkeypatch):
    module = Net(batch=4096)
    module.train_dataloader = lambda: DataLoader(TensorDataset(torch.zeros(4096, 64), torch.zeros(4096, 4)), 4096)
    assert plan_on(monkeypatch, 1, 0.403e9, module, **PLANNED)["num_microbatches"] > 1
    module.head = nn.Sequential(nn.BatchNorm1d(64), module.head)
    with pytest.raises(PlanError, match="with m=1 as set"):
        plan_on(monkeypatch, 1, 0.403e9, module, **PLANNED)
    assert plan_on(monkeypatch, 1, 0.407e9, module, **PLANNED).get("num_microbatches", 1) == 1


class FullBatch(Net):
    """Its activations are large."""

    def __init__(self):
        super().__init__(batch=4096)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.zeros(4096, 64), torch.zeros(4096, 4)), 4096)


def planned_for_activations(path, max_memory, callbacks, **options):
    """On a rank: the planned options and the recomputation of a fit, and what its checkpoint has of this package."""
    strategy = Hybrid3DStrategy(max_memory=max_memory, **options)
    trainer = trainer_of(1, strategy, callbacks, max_steps=1)
    trainer.fit(FullBatch())
    trainer.save_checkpoint(path)
    planned, recompute = strategy.options, strategy.run.setting.recompute
    return planned.num_microbatches, planned.recompute, recompute, torch.load(path, weights_only=True).get("hybrid3d")


def test_checkpoints_of_planned_microbatches_have_the_seed(worlds, tmp_path):
    """A resumed run draws the same random numbers for each sample as the one that was saved."""
    path = str(tmp_path / "fit.ckpt")
    [(microbatches, _, _, saved)] = worlds.run(1, planned_for_activations, path, "402MB", [], recompute=None)
    assert microbatches > 1 and isinstance(saved["seed"], int)


class Evaluated(Net):
    """Has what every entry point of a Trainer needs; may fail in training."""

    def __init__(self, width=512, fails=False):
        super().__init__(width)
        self.lr, self.batch_size, self.fails = 1e-3, 8, fails
        self.data = TensorDataset(torch.randn(48, width), torch.randn(48, 4))

    def training_step(self, batch, batch_idx):
        if self.fails and self.trainer.train_dataloader is not None:
            raise ValueError("of the user")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("loss", super().training_step(batch, batch_idx), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self.head(self.layers(batch[0]))

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=self.batch_size)

    test_step = validation_step
    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def in_one_process(size):
    """On a rank: what remains after each of several runs that are planned, of one or another Trainer."""

    def trainer(memory="420MB"):
        strategy = Hybrid3DStrategy(max_memory=memory)
        return trainer_of(size, strategy, [], max_steps=3), strategy

    said, before, found = [], sys.excepthook, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "rank_zero_info", said.append)
        module = Evaluated()
        first, strategy = trainer()
        first.fit(module)
        found.append(strategy.layout.sizes)
        for run_of in (first.validate, first.test, first.predict):
            run_of(module)
        Tuner(trainer()[0]).lr_find(module, num_training=3)
        Tuner(trainer()[0]).scale_batch_size(module, max_trials=1, steps_per_trial=1)
        with pytest.raises(PlanError):
            trainer("300MB")[0].fit(module)
        if size == 1:
            described = dry_run(pl, Net(), {}, 4, {"pipeline_parallel_size": 2}, "32-true", lambda _: [0, 3])
            assert [each["rank"] for each in described["rank"]] == [0, 3]
            # The connections of several ranks are closed after a failure.
            with pytest.raises(ValueError, match="of the user"):
                trainer()[0].fit(Evaluated(fails=True))
        again, strategy = trainer()
        again.validate(module)
        again.fit(module)
        found.append(strategy.layout.sizes)
        with pytest.raises(PlanError):  # what was planned was for a smaller module
            again.fit(Evaluated(2048))
    is_same = before in (sys.excepthook, getattr(sys.excepthook, "before", None))  # an error was shortened
    return found, [text for text in said if "was not recorded" in text], is_same


@pytest.mark.parametrize("size", [1, 2])
def test_further_plans_in_one_process(worlds, size):
    """Each records the step, beside the process groups of earlier runs, and leaves nothing of its own."""
    for found, unrecorded, is_clean in worlds.run(size, in_one_process, size):
        assert found[0] == found[1] and not unrecorded and is_clean


def test_recomputation_of_a_callback_replaces_what_is_planned(worlds, tmp_path):
    arguments = str(tmp_path / "fit.ckpt"), "405MB", [ActivationCheckpointing(2)]
    [(_, planned, recompute, _)] = worlds.run(1, planned_for_activations, *arguments, num_microbatches=1)
    assert planned == "selective" and recompute == 2


def test_options_that_are_set_are_kept(monkeypatch):
    planned = plan_on(monkeypatch, 4, 16e9, zero_stage=1, **PLANNED)
    assert "zero_stage" not in planned and planned["tensor_parallel_size"] >= 1


@pytest.mark.parametrize(
    ("module", "name", "value"), [(Net, "schedule", "1f1b"), (Net, "zero_stage", 0), (ManyRows, "num_microbatches", 1)]
)
def test_options_that_are_set_to_what_they_are_without_a_plan_are_kept(monkeypatch, module, name, value):
    module, stages = module(256, 48), {"pipeline_parallel_size": 2, **PLANNED}
    assert plan_on(monkeypatch, 4, 16e9, module, **stages)[name] != value
    assert plan_on(monkeypatch, 4, 16e9, module, **stages, **{name: value}).get(name, value) == value


def test_a_budget_of_recomputation_is_a_limit_of_the_plan(monkeypatch):
    said = []
    monkeypatch.setattr(auto, "rank_zero_info", said.append)
    assert plan_on(monkeypatch, 2, 16e9, recompute="50%", **PLANNED) == dict.fromkeys(SIZES, 1)
    assert re.search(r"dp=2 ", said[0])  # without recomputation, for which there is no need
    with pytest.raises(PlanError, match=r"no layout of Net fits 2 devices of 400 MB"):
        plan_on(monkeypatch, 2, 16e9, recompute="100KB", **PLANNED)


def test_nothing_fits(monkeypatch):
    with pytest.raises(PlanError, match=r"no layout of Net fits 2 devices of 100 MB"):
        plan_on(monkeypatch, 2, 16e9, max_memory="100MB")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"tensor_parallel_size": "all"}, LayoutError, "use 'auto' or a whole number"),
        ({**NUMBERS, "max_memory": "20GiB"}, ValueError, "max_memory='20GiB' is for sizes that are planned"),
        (
            {**NUMBERS, "objective": "largest_batch"},
            ValueError,
            "objective='largest_batch' is for sizes that are planned",
        ),
        ({"max_memory": "much"}, ValueError, "max_memory='much'; use a number of bytes"),
        ({"sequence_parallel": True}, ValueError, "tensor_parallel_size='auto'; set tensor_parallel_size=2 or more"),
        ({"objective": "fewest_devices"}, ValueError, "a run uses all devices of its Trainer"),
    ],
)
def test_refusals(options, error, words):
    with pytest.raises(error, match=words):
        Hybrid3DStrategy(**options)


def test_layout_is_not_known_before_a_plan_that_is_requested():
    strategy = Hybrid3DStrategy(**PLANNED)
    trainer_of(2, strategy, [])
    with pytest.raises(RuntimeError, match="the layout is planned when the processes meet"):
        _ = strategy.layout
    assert pickle.loads(pickle.dumps(strategy.options)).asks_for_plan
    strategy = Hybrid3DStrategy()
    trainer_of(2, strategy, [])
    assert strategy.layout.data_parallel_size == 2


def test_sizes_of_a_configuration_file(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])  # Lightning warns of two command lines
    config = {
        "class_path": "lightning_hybrid.Hybrid3DStrategy",
        "init_args": {"tensor_parallel_size": "auto", "pipeline_parallel_size": 1, "max_memory": "20GiB"},
    }
    trainer = {"strategy": config, "accelerator": "cpu", "devices": 2, "logger": False}
    cli = LightningCLI(
        Net, run=False, args={"trainer": trainer}, seed_everything_default=False, save_config_callback=None
    )
    options = cli.trainer.strategy.options
    assert options.asks_for_plan and options.sizes["pipeline_parallel_size"] == 1
    assert all(options.sizes[name] == "auto" for name in SIZES if name != "pipeline_parallel_size")
    init_args = cli.config["trainer"]["strategy"]["init_args"]  # with all defaults, as it is saved
    assert init_args["recompute"] == "auto" and "zero_stage" in options.unset
    config["init_args"] = {**init_args, "zero_stage": 0, "recompute": None}
    again = LightningCLI(
        Net, run=False, args={"trainer": trainer}, seed_everything_default=False, save_config_callback=None
    )
    assert again.trainer.strategy.options.unset == tuple(
        name for name in options.unset if name not in ("zero_stage", "recompute")
    )


def assert_equal_states(state, expected, atol):
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "free_bytes"),
    [(PLANNED, None), ({"max_memory": "416MB"}, None), ({}, 2 * 416e6)],
    ids=["fits", "does not", "does not, without a request"],
)
def test_all_ranks_take_one_plan(worlds, options, free_bytes):
    """Its parameters are those of one process, and those of the same sizes with numbers."""
    ranks = worlds.run(2, fitted, options, 2, 8, free_bytes)
    sizes, zero_stage, _ = ranks[0]
    assert ranks[1][:2] == (sizes, zero_stage)
    is_plain = set(sizes.values()) == {1} and not zero_stage
    assert is_plain == (options == PLANNED)
    explicit = worlds.run(2, fitted, {**sizes, "zero_stage": zero_stage}, 2)
    replicas = 2 if set(sizes.values()) == {1} else 1
    _, _, one = worlds.run(1, fitted, {}, 1, 8 * replicas)[0]
    for (_, _, state), (_, _, expected) in zip(ranks, explicit, strict=True):
        # Adam magnifies the order of sums where a gradient is near zero; a step moves a parameter by 1e-3.
        assert_equal_states(state, expected, 0 if is_plain else 1e-4)
        assert_equal_states(state, one, 1e-4)


# Plain replicas take too much; what is set leaves replicas that shard their experts, or nothing.
EXPERTS_ALONE = {"max_memory": "640MB", "pipeline_parallel_size": 1, "tensor_parallel_size": 1, "zero_stage": 0}


def test_expert_ranks_are_planned(monkeypatch):
    said = []
    monkeypatch.setattr(auto, "rank_zero_info", said.append)
    options = plan_on(monkeypatch, 2, 16e9, Mixture(512), objective="throughput", **EXPERTS_ALONE)
    assert options == {"context_parallel_size": 1, "expert_parallel_size": 2}
    assert "dp=2,ep=2" in said[0] and ROUTING_PROOF in said[0]
    options = plan_on(monkeypatch, 2, 16e9, Mixture(512), **{**EXPERTS_ALONE, "max_memory": "2GB"})
    assert options["expert_parallel_size"] == 1 and ROUTING_PROOF not in said[1]


PLANNED_FIT = """
    import sys
    sys.path.insert(0, {folder!r})
    import torch
    from harness.fits import trainer_of
    from lightning_hybrid import Hybrid3DStrategy
    from test_auto import EXPERTS_ALONE, Mixture

    torch.manual_seed(0)
    module, strategy = Mixture(512, 8), Hybrid3DStrategy(objective="throughput", **EXPERTS_ALONE)
    trainer_of(2, strategy, [], max_steps=3).fit(module)
    torch.save((strategy.layout.expert_parallel_size, module.state_dict()), {path!r} + str(strategy.global_rank))
"""


@pytest.mark.slow
def test_planned_expert_ranks_train_as_one_process(tmp_path):
    script, folder = tmp_path / "fit.py", str(Path(__file__).parent)
    script.write_text(textwrap.dedent(PLANNED_FIT).format(folder=folder, path=str(tmp_path / "rank")))
    code, output, _ = run([sys.executable, str(script)], timeout=300)
    assert code == 0, output
    torch.manual_seed(0)
    one = Mixture(512, 16)
    trainer_of(1, None, [], max_steps=3).fit(one)
    for rank in range(2):
        size, state = torch.load(tmp_path / f"rank{rank}", weights_only=True)
        assert size == 2 and "2 on each of 2 ranks" in output
        assert_equal_states(state, one.state_dict(), 1e-4)


class HeavyLayer(Net):
    """One layer that runs on many more rows than the others."""

    def training_step(self, batch, batch_idx):
        samples, targets = batch
        rows = self.layers[0](samples[:, None].expand(-1, 4096, -1)).mean(1)
        return nn.functional.mse_loss(self.head(self.layers[1:](rows)), targets)


@pytest.mark.parametrize("widths", [None, "auto"])
def test_widths_of_stages_are_planned_where_they_may_be_chosen(monkeypatch, widths):
    options = {"data_parallel_size": 1, "tensor_parallel_size": 1, "stage_widths": widths, **PLANNED}
    planned = plan_on(monkeypatch, 4, 16e9, HeavyLayer(256, 64), **options)
    assert planned["pipeline_parallel_size"] == 4
    if widths is None:
        assert "stage_widths" not in planned
    else:
        assert sum(planned["stage_widths"]) == 4 and len(planned["stage_widths"]) < 4
    strategy = Hybrid3DStrategy(**options)
    assert strategy.options.with_planned(planned).mesh_sizes["pipeline_parallel_size"] == 4


def test_ranks_that_share_images_are_those_that_the_user_sets(monkeypatch):
    """The others are planned around them; layers under tensor ranks would gather the images."""
    planned = plan_on(monkeypatch, 4, 405e6, Segmentation(), spatial_parallel_size=2, **PLANNED)
    assert planned["tensor_parallel_size"] == planned["context_parallel_size"] == 1
    strategy = Hybrid3DStrategy(spatial_parallel_size=2, **PLANNED)
    assert strategy.options.with_planned(planned).mesh_sizes["context_parallel_size"] == 2
    assert "spatial_parallel_size" not in plan_on(monkeypatch, 4, 16e9, Segmentation(), **PLANNED)
    with pytest.raises(PlanError, match="share the rows of images by spatial_parallel_size"):
        plan_on(monkeypatch, 2, 100e6, Segmentation(), **PLANNED)
