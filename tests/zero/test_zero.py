"""ZeRO: what replicas shard, with the numbers of one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from harness.fits import Run, check, fit, fit_reference, trainer_of
from harness.live_storages import LiveStorages
from harness.zero_runs import zero
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.params import store
from lightning_hybrid.zero.group import ParameterGroup
from lightning_hybrid.zero.ranks import ShardRanks, shard_placement
from models.cases import CASES, Samples, make
from models.hand_written import Layers, TiedInStep


def shard_of_ones(length):
    """A parameter of which this rank, one of two, has its half."""
    parameter = nn.Parameter(torch.ones(length))
    store.shard(parameter, torch.ones(length // 2))
    return parameter


def by_sgd(module):
    module.optimizer = "sgd"


class LeavesOneOut(Layers):
    """In every second batch a layer is not used."""

    def training_step(self, batch, batch_idx=0):
        x = batch["x"]
        for place, layer in enumerate(self.layers):
            if place != 2 or batch_idx % 2 == 0:
                x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x), batch["label"])


CLIPPED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
VALIDATED = {"accumulate_grad_batches": 2, "val_check_interval": 1}
EACH = {"per_layer": True}
SHARDS_OF_2 = {"dp": 4, "strategy": {"zero_stage": 3, "reshard_after_forward": True, "shard_size": 2}}

RUNS = {
    "stage 1": zero(1, microbatches=1, trainer=CLIPPED, slow=True),  # as with validation below
    "stage 2 over stages": zero(2, pp=2, trainer=CLIPPED),
    "stage 3": zero(3, trainer=CLIPPED),
    "by layer over tensor ranks": zero(3, "Llama", tp=2, trainer=CLIPPED, slow=True, **EACH),
    "two copies by layer": zero(3, **SHARDS_OF_2, trainer=CLIPPED),
    "dp2tp2pp2": zero(3, tp=2, pp=2, trainer=CLIPPED, slow=True),
    "interleaved by layer": zero(3, "Layers", pp=2, strategy={"stages_per_rank": 2}, **EACH),
    "parameters of the step": zero(3, "GlueParameters", **EACH),
    "written and tied, odd sizes": zero(3, TiedInStep, pp=2, **EACH),
    "recomputed by layer": zero(3, strategy={"recompute": "full"}, slow=True, **EACH),  # test_recomputed_layers.py
    "a short last batch": zero(3, last=6, validate=True, **EACH),
    "validated while gradients add up": zero(1, validate=True, trainer=VALIDATED),
    "validated while gradients add up, by layer": zero(3, pp=2, validate=True, trainer=VALIDATED, **EACH),
    "a layer left out while gradients add up": zero(1, LeavesOneOut, trainer=CLIPPED),
    "a layer left out while gradients add up, by layer": zero(3, LeavesOneOut, pp=2, trainer=CLIPPED, **EACH),
    "validated before the first step": zero(1, validate=True, trainer={"num_sanity_val_steps": 2}),
    "stage 1 over stages": zero(1, pp=2, strategy={"schedule": "gpipe"}, slow=True),
    "stage 1 over tensor ranks": zero(1, tp=2, slow=True),
    "stage 2": zero(2, slow=True),
    "stage 2 by layer": zero(2, slow=True, **EACH),
    "stage 2 over tensor ranks": zero(2, tp=2, slow=True),
    "stage 3 over stages": zero(3, pp=2, slow=True),
    "stage 3 over tensor ranks": zero(3, tp=2, slow=True),
    "dp2tp2pp2 stage 1": zero(1, tp=2, pp=2, slow=True),
    "dp2tp2pp2 by layer": zero(3, "T5", tp=2, pp=2, slow=True, **EACH),
    "recomputed": zero(3, strategy={"recompute": "full"}, slow=True),
    "expensive operations saved": zero(3, strategy={"recompute": "selective"}, slow=True),
    "expensive operations saved, by layer": zero(3, strategy={"recompute": "selective"}, slow=True, **EACH),
    "sharded positions": zero(3, tp=2, sequence=True, slow=True, **EACH),
    "context": zero(3, cp=2, slow=True),
    "SGD": zero(3, trainer=CLIPPED, change=by_sgd, slow=True),
}


@pytest.mark.parametrize("run", list(RUNS.values()), ids=list(RUNS))
def test_parity(worlds, run):
    check(worlds, run)


@pytest.mark.slow
@pytest.mark.parametrize("per_layer", [False, True], ids=["step", "layer"])
@pytest.mark.parametrize("case", sorted(CASES.keys() - {"BatchNorms", "Dropouts", "GPT2Dropout"}))
def test_every_case(worlds, case, per_layer):
    check(worlds, zero(3, case, per_layer=per_layer))


# --- number formats ---------------------------------------------------------------------------------------------------


def sgd(module):
    module.optimizer = "sgd"


def each_format():
    """Gathers have the format of the parameters, reductions that of the gradients."""
    for precision, tolerance, default in (("32-true", 1e-4, 3), ("bf16-mixed", 0.1, 1), ("bf16-true", 0.2, 3)):
        for stage in (1, 2, 3):
            marks = [] if stage == default else [pytest.mark.slow]
            yield pytest.param(stage, precision, tolerance, id=f"{precision}-{stage}", marks=marks)


@pytest.mark.parametrize(("stage", "precision", "tolerance"), list(each_format()))
def test_precisions(worlds, stage, precision, tolerance):
    run = Run(
        "Layers",
        dp=2,
        dtype=torch.float32,
        strategy={"zero_stage": stage, "reshard_after_forward": stage == 3},
        trainer={"precision": precision},
        change=sgd,
    )
    check(worlds, run, tolerance=tolerance)


SIZES = {"dp2": {}, "dp2tp2": {"tp": 2}, "dp2pp2": {"pp": 2}, "dp2tp2pp2": {"tp": 2, "pp": 2}}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", list(SIZES.values()), ids=list(SIZES))
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-3), ("bf16-mixed", 0.2)], ids=lambda v: str(v))
def test_precisions_under_every_layout(worlds, stage, precision, tolerance, sizes):
    options = {"dtype": torch.float32, "trainer": {"precision": precision, **CLIPPED}, "change": sgd, **sizes}
    check(worlds, zero(stage, "Layers", per_layer=stage == 3, **options), tolerance=tolerance)


def huge_on_one_replica(module):
    sgd(module)
    full = module.loss
    module.loss = lambda batch: full(batch) * (1e3 if module.trainer.global_rank == 1 else 1.0)


@pytest.mark.parametrize(
    ("stage", "sizes"),
    [
        (2, {}),
        (3, {}),
        *(pytest.param(stage, SIZES[name], marks=pytest.mark.slow) for stage in (1, 2, 3) for name in list(SIZES)[1:]),
    ],
    ids=str,
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(worlds, stage, sizes):
    run = Run(
        "Layers",
        dp=2,
        dtype=torch.float32,
        precision="16-mixed",
        change=huge_on_one_replica,
        strategy={"zero_stage": stage},
        **sizes,
    )
    first, *others = worlds.run(run.world_size, fit, run)
    for other in others:
        assert first.scale == other.scale < 65536.0
        assert len(first.grads) == len(other.grads) < run.num_batches
        assert all(torch.equal(value, other.state[name]) for name, value in first.state.items())


# --- memory of a rank ------------------------------------------------------------------------------------------------


class CountsBytes(Callback):
    """Bytes of parameters, gradients and optimizer states between two steps."""

    recorded = None

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        with torch._C.DisableTorchFunction():
            parameters = list(pl_module.parameters())
            storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}
            gradients = [p.grad for p in parameters if p.grad is not None]
            states = [v for entry in optimizer.state.values() for v in entry.values() if v.dim()]
            if states:
                self.recorded = {
                    "parameters": sum(storages.values()),
                    "gradients": sum(g.nbytes for g in gradients),
                    "states": sum(s.nbytes for s in states),
                    "module": sum(p.nbytes for p in parameters),
                }


def count_full(run):
    return fit_reference(run).extra


@pytest.mark.parametrize(("stage", "dp"), [(1, 2), (3, 2), pytest.param(3, 4, marks=pytest.mark.slow)])
def test_bytes_between_steps_match_the_formula(worlds, stage, dp):
    """Rajbhandari et al. 2020, figure 1: sharded memory is divided by the number of replicas."""
    run = Run("GPT2", dp=dp, strategy={"zero_stage": stage}, callback=CountsBytes)
    [full] = worlds.run(1, count_full, run)
    for rank in worlds.run(dp, fit, run):
        local = rank.extra
        assert local["states"] == pytest.approx(full["states"] / dp, rel=0.02)
        assert local["gradients"] == pytest.approx(full["gradients"] / dp, rel=0.02)
        share = dp if stage == 3 else 1
        assert local["parameters"] == pytest.approx(full["parameters"] / share, rel=0.02)


def kept_after_a_reduction():
    """Bytes of a gradient's shard and of flags, and of the tensors that a gather and a reduction of it leave."""
    world, (alone, _) = dist.group.WORLD, dist.new_subgroups(1)
    p = shard_of_ones(1000)
    placements = {"p": shard_placement(torch.Size((1000,)), 2)}
    group = ParameterGroup("", {"p": p}, placements, ShardRanks(world, alone), keeps_full=False)
    group.train(["p"])
    with LiveStorages() as live:
        group.gather()
        p.grad = torch.ones(1000)
        group.launch_reduce()
        group.finish_reduce()
        group.reshard()
    live.least(0)  # gloo's threads reference exchanged tensors for a moment
    flags = 16  # of a row of a message, with its padding
    return p.grad.nbytes + 2 * flags, live.bytes()


def test_local_shards_are_all_that_a_gather_and_a_reduction_leave(worlds):
    assert worlds.run(2, kept_after_a_reduction) == [(2032, 2032)] * 2


class CountsMostBytes(Callback):
    """Bytes that a rank holds at most in the second step beyond those at its end."""

    recorded = None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 1:
            self.live = LiveStorages(counts_most=True).__enter__()

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == 1:
            self.live.__exit__(None, None, None)
            self.recorded = self.live.most - self.live.bytes()


def of_wide_layers(module, num_layers):
    """Layers of 64 kB, whose activations are small."""
    wide = (nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 16)) for _ in range(num_layers))
    module.layers = nn.ModuleList(layer.double() for layer in wide)


def test_memory_of_a_step_does_not_grow_with_the_number_of_layers(worlds):
    most = []
    for num_layers in (4, 8):
        change = partial(of_wide_layers, num_layers=num_layers)
        run = zero(3, "Layers", per_layer=True, batch_size=2, change=change, callback=CountsMostBytes)
        most.append(max(rank.extra for rank in worlds.run(2, fit, run)))
    assert most[1] < most[0] + 2**16, most


def accumulate_late():
    """Add a gradient whose average has been received already."""
    world, (alone, _) = dist.group.WORLD, dist.new_subgroups(1)
    p = shard_of_ones(10)
    placements = {"p": shard_placement(torch.Size((10,)), 2)}
    group = ParameterGroup("", {"p": p}, placements, ShardRanks(world, alone), keeps_full=False)
    group.train(["p"])
    group.gather()
    p.grad = torch.ones(10)
    group.launch_reduce()
    group.receive_reduced()
    p.grad = torch.ones(10)
    with pytest.raises(RuntimeError, match=r"p got another gradient.*use_reentrant=False"):
        group.finish_reduce()


def test_a_gradient_after_its_reduction_is_refused(worlds):
    worlds.run(2, accumulate_late)


class CountsFullLayers(Callback):
    """The most full layers at a time in a step."""

    recorded = None

    def setup(self, trainer, pl_module, stage):
        from lightning_hybrid.zero.group import ParameterGroup

        local, self.most = [], 0
        gather, counts = ParameterGroup.gather, self

        def counted(group):
            gather(group)
            if group.fqn:
                local[:] = [other for other in local if other.is_full and other is not group] + [group]
                counts.most = max(counts.most, len(local))

        self.undo = lambda: setattr(ParameterGroup, "gather", gather)
        ParameterGroup.gather = counted

    def on_train_end(self, *_):
        self.undo()
        self.recorded = self.most


@pytest.mark.parametrize(("per_layer", "most"), [(True, 2), (False, 4)])
def test_number_of_full_layers_at_a_time(worlds, per_layer, most):
    run = zero(3, "Layers", per_layer=per_layer, callback=CountsFullLayers)
    for rank in worlds.run(2, fit, run):
        assert rank.extra <= most if per_layer else rank.extra >= most


@pytest.mark.parametrize("shape", [(8, 3), (5, 4), (3, 7), (1, 512), (2,), (1, 1, 9)])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_element_has_one_owner_rank(shape, size):
    placement = shard_placement(torch.Size(shape), size)
    if placement is None:
        return
    ranges = [placement.ranges(rank, size) for rank in range(size)]
    covered = [k for [(start, length)] in ranges for k in range(start, start + length)]
    assert covered == list(range(shape[placement.dim]))


def test_scalar_parameter_stays_full():
    assert shard_placement(torch.Size(()), 2) is None and shard_placement(torch.Size((1, 1)), 2) is None


def changed_after_inference(keeps_full):
    world, (alone, _) = dist.group.WORLD, dist.new_subgroups(1)
    p = shard_of_ones(4)
    ranks = ShardRanks(world, alone)
    group = ParameterGroup("", {"p": p}, {"p": shard_placement(torch.Size((4,)), 2)}, ranks, keeps_full=keeps_full)
    with torch.inference_mode():
        group.pin()
    group.unpin()
    with torch.no_grad():
        p.add_(1)
    group.gather()
    return p.tolist()


@pytest.mark.parametrize("keeps_full", [True, False])
def test_parameters_gathered_in_inference_mode_are_trainable_later(worlds, keeps_full):
    assert worlds.run(2, changed_after_inference, keeps_full) == [[2.0] * 4] * 2


# --- files ------------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "plain": (1, None),
    "zero3": (2, {"zero_stage": 3}),
    "zero1": (2, {"zero_stage": 1}),
    "dp2": (2, {"num_microbatches": 2}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "tp2-zero3": (4, {"tensor_parallel_size": 2, "zero_stage": 3}),
}


class Saves(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        if self.path and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def train(layout, epochs, save=None, resume=None):
    """Two batches of 8 samples over all replicas in each epoch."""
    size, options = LAYOUTS[layout]
    strategy = None if options is None else Hybrid3DStrategy(**options)
    module = make("Tied")
    trainer = trainer_of(size, strategy, [Saves(save)], max_epochs=epochs)
    sizes = options or {}
    replicas = size // (sizes.get("tensor_parallel_size", 1) * sizes.get("pipeline_parallel_size", 1))
    sampler = None
    if replicas > 1:  # each replica sees every second sample of a batch: the union is the batch of one process
        rank = trainer.strategy.cluster_environment.global_rank()
        replica = rank // sizes.get("tensor_parallel_size", 1) % replicas
        sampler = DistributedSampler(range(16), replicas, replica, shuffle=False)
    loader = DataLoader(Samples(module.kind, 16), batch_size=8 // replicas, sampler=sampler)
    trainer.fit(module, loader, ckpt_path=resume)
    return {name: value.clone() for name, value in module.state_dict().items()}


def resumed(name, then, slow=True):
    return pytest.param(name, then, id=f"{name}-{then}", marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(
    ("first", "then"),
    [
        resumed("zero3", "plain", slow=False),
        resumed("pp2", "tp2-zero3", slow=False),
        resumed("zero3", "pp2"),
        resumed("tp2-zero3", "zero1"),
        resumed("zero1", "dp2"),
        resumed("plain", "zero3"),
    ],
)
def test_resume_under_another_layout(worlds, tmp_path, first, then):
    path = str(tmp_path / "half.ckpt")
    [expected] = worlds.run(1, train, "plain", 2)
    worlds.run(LAYOUTS[first][0], train, first, 1, path)
    for state in worlds.run(LAYOUTS[then][0], train, then, 2, None, path):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12, msg=name)


# --- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero_stage": 4}, "zero_stage=4"),
        ({"zero_stage": True}, "zero_stage=True"),
        ({"shard_size": 2}, "zero_stage=1, 2 or 3"),
        ({"zero_stage": 3, "shard_size": 0}, "shard_size=0"),
        ({"zero_stage": 3, "reshard_after_forward": "often"}, "'often'"),
    ],
)
def test_invalid_options(options, message):
    with pytest.raises(ValueError, match=message):
        Hybrid3DStrategy(**options)


def fit_with(size, options, change=None):
    module = make("Layers")
    if change is not None:
        change(module)
    loader = DataLoader(Samples(module.kind, 16), batch_size=4)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    try:
        trainer_of(size, Hybrid3DStrategy(**options), []).fit(module, loader)
    except Exception as error:
        assert all(p.shape != before[n].shape or torch.equal(p, before[n]) for n, p in module.named_parameters())
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("size", "options", "change", "words"),
    [
        (2, {"zero_stage": 2, "pipeline_parallel_size": 2}, None, ["zero_stage=2", "1 replica", "zero_stage=0"]),
        (4, {"zero_stage": 3, "shard_size": 3}, None, ["shard_size=3", "data_parallel_size=4", "shard_size=1"]),
    ],
    ids=["one replica", "a shard that does not divide"],
)
def test_refused_before_anything_changes(worlds, size, options, change, words):
    for message in worlds.run(size, fit_with, size, options, change):
        assert all(word in message for word in words), message
