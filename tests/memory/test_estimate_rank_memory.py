"""The estimated memory of a rank is what the rank holds: parameters, gradients and states in bytes, activations too."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from harness.fits import trainer_of
from harness.schedules import INTERLEAVED
from harness.trainer_runs import ignore_warnings, lines_of_lightning
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.optimizers.trial import StateSizes
from lightning_hybrid.predict.ranks import ParameterOnRank, estimate_rank_memory
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.run.description.memory import memory_of_ranks, memory_of_stages
from lightning_hybrid.run.execution.steps import FirstActivations
from lightning_hybrid.schedule import make_schedule
from lightning_hybrid.schedule.in_flight import microbatches_in_flight
from lightning_hybrid.step.recording.record import Recipe
from lightning_hybrid.step.recording.units import choose_units
from lightning_hybrid.step.standins.counts import bytes_saved_behind
from lightning_hybrid.techniques.offload import Offload
from lightning_hybrid.techniques.zero import Zero

# --- arithmetic ------------------------------------------------------------------------------------------------------

KEEPS = SimpleNamespace(policies={})  # a run in which no layer is recomputed


def parameter(nbytes, *, shards=4, layer="", is_trained=True):
    return ParameterOnRank(nbytes, nbytes // shards, 2 * nbytes // shards, is_trained, layer)


def zero(stage, *, per_layer=False):
    """ZeRO that is built."""
    made = Zero(stage, [None])
    made._per_layer = per_layer
    return made


def test_zero_stages():
    members = [parameter(400, layer=f"layers.{number}") for number in range(5)] + [parameter(80, is_trained=False)]
    replicas = estimate_rank_memory([parameter(400, shards=1)], 7)
    assert replicas == dataclasses.replace(replicas, parameters=400, gradients=400, optimizer_states=800, activations=7)
    assert replicas.total == 1607 and (replicas + replicas).total == 3214
    expected = {1: (2080, 500, 1000, 2000), 2: (2080, 500, 1000, 2000), 3: (520, 500, 1000, 4080)}
    for stage, sizes in expected.items():
        found = estimate_rank_memory(members, None, footprint=zero(stage).footprint(KEEPS, members))
        assert (found.parameters, found.gradients, found.optimizer_states, found.gathered) == sizes
        assert found.activations is None and found.total == sum(sizes)
    by_layer = estimate_rank_memory(members, None, footprint=zero(3, per_layer=True).footprint(KEEPS, members))
    assert by_layer.gathered == 80 + 2 * (400 + 400), "two layers at a time"


def test_offloaded_states_are_not_in_the_memory_of_the_device():
    places = {"parameters": "files", "optimizer_states": "host"}
    rank = estimate_rank_memory(
        [parameter(400)], 7, footprint=zero(3).footprint(KEEPS, [parameter(400)]), places=places
    )
    assert (rank.parameters, rank.gradients, rank.optimizer_states, rank.gathered) == (100, 100, 200, 800)
    assert rank.between_steps == 100 and rank.total == 100 + 800 + 7
    assert (rank + rank).total == 2 * rank.total
    assert [rank.sizes_in(place) for place in (None, "host", "files")] == [
        {"gradients": 100},
        {"optimizer_states": 200},
        {"parameters": 100},
    ]


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cpu", {"parameters": "files"}), ("cuda", {"parameters": "files", "gradients": "host"})],
)
def test_offload_to_the_host_of_a_cpu_run_is_still_memory(device, expected):
    run = SimpleNamespace(setting=SimpleNamespace(device=torch.device(device)))
    assert Offload({"parameters": "disk:/tmp/x", "gradients": "cpu"}).places(run) == expected


def test_unknown_states_stay_unknown():
    unknown = ParameterOnRank(4, 4, None, is_trained=True)
    assert estimate_rank_memory([unknown, parameter(4)], 0).optimizer_states is None


@pytest.mark.parametrize(
    ("name", "each", "expected"),
    [("gpipe", 1, [6, 6]), ("1f1b", 1, [2, 1]), ("interleaved_1f1b", 2, [4, 3, 2, 1])],
)
def test_microbatches_in_flight(name, each, expected):
    found = microbatches_in_flight(make_schedule(name, 2, 6, each))
    assert found == expected


# --- optimizers ------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "groups": lambda p: torch.optim.SGD([{"params": p[:1], "momentum": 0.9}, {"params": p[1:]}], 0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bytes_of_states(name):
    parameters = [nn.Parameter(torch.randn(shape)) for shape in [(12, 10), (10,), (4, 3, 5, 5), ()]]
    parameters.append(nn.Parameter(torch.randn(6, 6, dtype=torch.float64)))
    optimizer = OPTIMIZERS[name](parameters)
    sizes = StateSizes(optimizer)
    estimated = [sizes.nbytes(p, p.shape) for p in parameters]
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    states = [[v for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)] for p in parameters]
    assert estimated == [sum(value.numel() * value.element_size() for value in each) for each in states]


def test_an_optimizer_that_cannot_be_tried_is_unknown():
    p = nn.Parameter(torch.randn(3))
    assert StateSizes(torch.optim.LBFGS([p])).nbytes(p, p.shape) is None


# --- activations -----------------------------------------------------------------------------------------------------


class Saved:
    """Counts the bytes of distinct storages that autograd holds inside; parameters and batches do not count."""

    def __init__(self, excluded):
        self.holders, self.now, self.most = {}, 0, 0
        self.excluded, self.kept = set(), []
        self.exclude(excluded)

    def exclude(self, tensors):
        self.excluded |= {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.kept += tensors  # no other tensor gets their memory

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        return SavedTensor(self, tensor.detach(), storage.data_ptr(), storage.nbytes())


class SavedTensor:
    def __init__(self, saved, tensor, address, nbytes):
        self.saved, self.tensor, self.address, self.nbytes = saved, tensor, address, nbytes
        if address not in saved.excluded:
            saved.holders[address] = saved.holders.get(address, 0) + 1
            saved.now += nbytes if saved.holders[address] == 1 else 0
            saved.most = max(saved.most, saved.now)

    def __del__(self):
        saved = self.saved
        if self.address not in saved.excluded:
            saved.holders[self.address] -= 1
            saved.now -= 0 if saved.holders[self.address] else self.nbytes


def unpacked(saved):
    return saved.tensor


class Dense(LightningModule):
    width = 32

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(self.layer() for _ in range(4)))
        self.head = nn.Linear(self.width, 5)

    def layer(self):
        return nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU())

    def training_step(self, batch, batch_idx=0):
        x, label = batch
        return F.cross_entropy(self.head(self.layers(x)).flatten(0, -2), label.flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)

    def batch(self, size=8):
        return torch.randn(size, self.width), torch.randint(5, (size,))

    def train_dataloader(self):
        return DataLoader(TensorDataset(*self.batch(32)), 8)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 3 * width), nn.GELU())
        self.out, self.dropout = nn.Linear(3 * width, width), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.out(self.mlp(self.norm(x))))


class Transformer(Dense):
    def layer(self):
        attention = nn.TransformerEncoderLayer(self.width, 4, 64, batch_first=True, norm_first=True)
        return nn.Sequential(attention, Residual(self.width))

    def batch(self, size=8):
        return torch.randn(size, 6, self.width), torch.randint(5, (size, 6))


class Checkpoints(nn.Module):
    """A layer with activation checkpointing of its own: it saves its input, and what the norm after it saves."""

    def __init__(self, layer, width):
        super().__init__()
        self.inner, self.norm = layer, nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(checkpoint(self.inner, x * 2, use_reentrant=False))


class CheckpointsInLayers(Transformer):
    def layer(self):
        return Checkpoints(super().layer(), self.width)


class CheckpointedLayers(Transformer):
    """As `gradient_checkpointing_enable()` of transformers does."""

    def training_step(self, batch, batch_idx=0):
        x, label = batch
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return F.cross_entropy(self.head(x).flatten(0, -2), label.flatten())


class Convolutions(Dense):
    def layer(self):
        return nn.Sequential(nn.Conv1d(6, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU())

    batch = Transformer.batch


def estimated_of_step(module, batch):
    """Bytes saved by the recorded step, in one stage."""
    arguments = {"name": "training_step", "randomness": KeyedRandomness(0, torch.device("cpu")), "trains": True}
    recording = Recipe(module, lambda: module.training_step(batch), choose_units(module, 2), **arguments).record()
    values = {value for node in recording.graph.nodes for value in node.saved_values}
    sizes = [recording.graph.values[value] for value in values]
    inner = sum(node.saved_bytes for node in recording.graph.nodes)
    return inner + sum(math.prod(v.shape) * getattr(torch, v.dtype).itemsize for v in sizes)


@pytest.mark.parametrize("module_class", [Dense, Transformer, Convolutions, CheckpointsInLayers, CheckpointedLayers])
def test_bytes_saved_by_a_recorded_step(module_class):
    module = module_class()
    batch = module.batch()
    saved = Saved([*module.parameters(), *module.buffers(), *batch])
    with saved_tensors_hooks(saved.pack, unpacked):
        loss = module.training_step(batch)
    measured = saved.now
    del loss
    # Numbers beside a tensor, such as the 2 of `x * 2`, pass no hooks.
    assert bytes_saved_behind(module.training_step(batch), module, batch) == pytest.approx(measured, rel=0.001)
    assert saved.now == 0 and measured > 0
    assert estimated_of_step(module, batch) == pytest.approx(measured, rel=0.02)


def lines_of_fit(devices, options, *, module=Dense, **trainer_options):
    torch.manual_seed(0)
    with lines_of_lightning() as lines:
        trainer_of(devices, Hybrid3DStrategy(**options), [], max_steps=2, **trainer_options).fit(module())
    return [line for line in lines if line.startswith("activations of")]


# Of 8 samples: the input, and the results of four layers of 32 float32 numbers and of the head; labels do not count.
DENSE = {8: 4.26, 4: 2.13}


@pytest.mark.parametrize(
    ("devices", "options", "what", "samples"),
    [
        (1, {}, "batch", 8),
        (1, {"num_microbatches": 2}, "microbatch", 4),
        (2, {"zero_stage": 3}, "batch", 8),
        (2, {"zero_stage": 3, "reshard_after_forward": False}, "batch", 8),
    ],
    ids=["plain", "microbatches", "zero3", "zero3-full"],
)
def test_first_step_measures_activations_without_stages(worlds, devices, options, what, samples):
    first, *others = worlds.run(devices, lines_of_fit, devices, options)
    [(measured, end)] = [line.removeprefix(f"activations of the first {what}: ").split(" KB, ") for line in first]
    # Lightning divides the loss by the number of accumulated batches.
    assert float(measured) == pytest.approx(DENSE[samples], abs=0.02) and end == "measured before its backward"
    assert not any(others)


class DenseByHand(Dense):
    """Calls its backward itself, also while its step is recorded, where nothing is saved."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx=0):
        self.manual_backward(super().training_step(batch))


def test_the_recorded_step_is_not_measured(worlds):
    first, _ = worlds.run(2, lines_of_fit, 2, {"tensor_parallel_size": 2}, module=DenseByHand)
    [line] = first
    assert "KB" in line and "measured before its backward" in line


class Gathers(torch.Tensor):
    """Stands for a sharded tensor, whose operations are collective."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def test_the_rank_that_measures_runs_no_operation_of_a_sharded_tensor():
    x = torch.ones(10, requires_grad=True).as_subclass(Gathers)
    loss = (x.exp() * x).sum()
    Gathers.calls = 0
    world = SimpleNamespace(mesh=SimpleNamespace(rank=0))
    options = SimpleNamespace(microbatches=None)
    activations = FirstActivations(
        SimpleNamespace(is_fitting=True, world=world, options=options, module=nn.Linear(1, 1))
    )
    activations.begin([x.detach().as_subclass(torch.Tensor)])
    before = Gathers.calls
    with lines_of_lightning() as lines:
        activations.measure(loss)
    assert len(lines) == 1 and "measured before its backward" in lines[0] and Gathers.calls == before


# --- runs on ranks ---------------------------------------------------------------------------------------------------


class Observed(Dense):
    """Counts the activations of its steps after the first; on the class, since each stage has its own module state."""

    saved = None

    def __init__(self):
        super().__init__()
        Observed.saved = None

    def training_step(self, batch, batch_idx=0):
        if not self.trainer.global_step:
            return super().training_step(batch)
        if self.saved is None:
            Observed.saved = Saved(list(self.parameters()))
        self.saved.exclude(batch)
        with saved_tensors_hooks(self.saved.pack, unpacked):
            return super().training_step(batch)


class Measured(Hybrid3DStrategy):
    """Measures between steps, and at the optimizer's, what this rank holds; hooks of the user would see it in full."""

    def training_step(self, *args, **kwargs):
        result = super().training_step(*args, **kwargs)
        if not self.lightning_module.automatic_optimization:  # its optimizers have stepped
            self.measured, self.estimated = self.memory_now()
        return result

    def optimizer_step(self, optimizer, *args, **kwargs):
        result = super().optimizer_step(optimizer, *args, **kwargs)
        self.measured, self.estimated = self.within_step, _ = self.memory_now()
        return result

    def memory_now(self):
        stages = memory_of_stages(self.run, self.optimizers, 4)
        ranks = memory_of_ranks(stages, self.run)
        estimated = dataclasses.asdict(ranks[self.mesh.rank_in("pp")] if len(ranks) > 1 else ranks[0])
        local = [p for p in self.lightning_module.parameters() if type(p) is nn.Parameter]
        of_local = [optimizer.state.get(p, {}) for optimizer in self.optimizers for p in local]
        states = [value for state in of_local for value in state.values() if isinstance(value, torch.Tensor)]
        return {
            "parameters": nbytes_of_storages(local),
            "gradients": nbytes_of_storages([p.grad for p in local if p.grad is not None]),
            "optimizer_states": nbytes_of_storages(states),
        }, estimated


def nbytes_of_storages(tensors):
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measured_and_estimated(devices, options, module_class):
    ignore_warnings()
    module, strategy = module_class(), Measured(**options)
    trainer_of(devices, strategy, [], max_steps=3).fit(module)
    if module_class is Observed:
        strategy.measured["activations"] = module.saved.most
    return strategy.measured, strategy.estimated


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (2, {"pipeline_parallel_size": 2, "num_microbatches": 4}),
        (2, {"zero_stage": 1}),
        (2, {"zero_stage": 3}),
        pytest.param(2, {"zero_stage": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"pipeline_parallel_size": 2, "zero_stage": 2, "num_microbatches": 4}, marks=pytest.mark.slow),
        pytest.param(4, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_rank_holds_what_was_estimated(worlds, devices, options):
    for measured, estimated in worlds.run(devices, measured_and_estimated, devices, options, Dense):
        assert measured == {kind: estimated[kind] for kind in measured}


class Tied(Dense):
    """The first and the last layer share their weight."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(self.width, self.width)
        self.head.weight = self.layers[0][0].weight


def test_shared_parameters_of_one_rank_are_counted_once(worlds):
    options = {"pipeline_parallel_size": 2, "num_microbatches": 4, "schedule": "zero_bubble_v"}
    for measured, estimated in worlds.run(2, measured_and_estimated, 2, options, Tied):
        assert measured == {kind: estimated[kind] for kind in measured}


class Manual(Dense):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx=0):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch))
        optimizer.step()


def measured_by_hand(devices, options):
    ignore_warnings()
    strategy = Measured(**options)
    trainer_of(devices, strategy, [], max_steps=3).fit(Manual())
    return strategy.measured, strategy.within_step, strategy.estimated


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"zero_stage": 1}, {"zero_stage": 3, "reshard_after_forward": True}], ids=["zero1", "zero3-by-layer"]
)
def test_a_rank_holds_what_was_estimated_under_manual_optimization(worlds, options):
    for measured, within_step, estimated in worlds.run(2, measured_by_hand, 2, options):
        assert measured == {kind: estimated[kind] for kind in measured}
        # Meanwhile its lines may read parameters and gradients, so that both are full.
        full = within_step["parameters"] + within_step["gradients"]
        assert full > measured["parameters"] + measured["gradients"]
        assert full <= estimated["parameters"] + estimated["gradients"] + estimated["gathered"]


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.slow)])
def test_activations_in_flight_on_a_rank(worlds, schedule):
    options = {"pipeline_parallel_size": 2, "num_microbatches": 4, "schedule": schedule}
    for measured, estimated in worlds.run(2, measured_and_estimated, 2, options, Observed):
        assert measured["activations"] == pytest.approx(estimated["activations"], rel=0.02), (measured, estimated)


@pytest.mark.parametrize("options", [INTERLEAVED, pytest.param({"schedule": "zero_bubble_v"}, marks=pytest.mark.slow)])
def test_stages_of_a_rank_peak_at_different_times(worlds, options):
    options = {"pipeline_parallel_size": 2, "num_microbatches": 4, **options}
    for measured, estimated in worlds.run(2, measured_and_estimated, 2, options, Observed):
        # What one stage of a rank hands to another is estimated for both.
        assert 0.85 * estimated["activations"] < measured["activations"] <= 1.02 * estimated["activations"]
