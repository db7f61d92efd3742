"""Optimizers that need all elements of a parameter: parity with one process, owners, bytes and messages."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.fits import EACH_SHARDING, Run, check, fit, reference_of
from harness.live_storages import LiveStorages
from lightning_hybrid.collectives import tensors
from lightning_hybrid.optimizers.owner_step import OwnerStep
from lightning_hybrid.params.placement import Piece, Shard
from lightning_hybrid.params.shards import AxisSharding, LocalShards
from models.full_parameter_optimizers import MODULES, ByShampoo, ManuallyByAdafactor, ManuallyByLamb, ManuallyByMuon
from models.mixtures import Mixtral

FAST = {("muon", "tp2"), ("adafactor", "zero3"), ("lamb", "tp2"), ("lars", "zero2")}


@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [
        pytest.param(optimizer, layout, marks=() if (optimizer, layout) in FAST else pytest.mark.slow)
        for optimizer in MODULES
        for layout in EACH_SHARDING
    ],
)
def test_parity(worlds, optimizer, layout):
    check(worlds, Run(MODULES[optimizer], num_batches=4, **EACH_SHARDING[layout]), timeout=300)


def by_adafactor(module):
    module.configure_optimizers = lambda: torch.optim.Adafactor(module.parameters(), lr=1e-2)


RUNS = {
    "experts": Run(Mixtral, dp=2, ep=2, microbatches=1, change=by_adafactor),
    "experts and their shards": Run(
        Mixtral, dp=4, ep=2, microbatches=1, change=by_adafactor, strategy={"zero_stage": 3}
    ),
    "key heads that two ranks hold": Run("Llama", tp=2, dp=2, change=by_adafactor, strategy={"zero_stage": 1}),
    "copies of shards": Run("Layers", dp=4, change=by_adafactor, strategy={"zero_stage": 3, "shard_size": 2}),
    "accumulated and clipped": Run(
        "Layers", tp=2, change=by_adafactor, trainer={"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_parity_of_other_shards(worlds, name):
    check(worlds, RUNS[name], timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "zero3", "pp2"])
def test_class_that_declares_independent_parameters(worlds, layout):
    """Its step writes into gradients, so these are not compared; the losses of later batches and the weights are."""
    run = Run(ByShampoo, num_batches=4, **EACH_SHARDING[layout])
    expected = reference_of(worlds, run)
    for rank in worlds.run(2, fit, run, timeout=300):
        if run.dp == 1:
            torch.testing.assert_close(rank.losses, expected.losses, rtol=1e-10, atol=0)
        for name, value in expected.state.items():
            torch.testing.assert_close(rank.state[name], value, rtol=1e-8, atol=1e-9)


MANUAL = [ManuallyByMuon, *(pytest.param(m, marks=pytest.mark.slow) for m in (ManuallyByAdafactor, ManuallyByLamb))]


@pytest.mark.parametrize("module", MANUAL)
def test_manual_optimization_over_tensor_ranks(worlds, module):
    check(worlds, Run(module, tp=2, microbatches=1), timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("module", [ManuallyByMuon, ManuallyByLamb])
def test_manual_optimization_over_replicas(worlds, module):
    check(worlds, Run(module, dp=2, microbatches=1, strategy={"zero_stage": 3}), timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("module", [ManuallyByAdafactor, ManuallyByLamb])
@pytest.mark.parametrize("layout", [{"dp": 2, "strategy": {"zero_stage": 3}}, {"pp": 2}], ids=["zero3", "pp2"])
def test_manual_optimization_over_two_kinds_of_shards(worlds, module, layout):
    """Hooks on the step see what tensor ranks have, so gradients are not compared; the weights are."""
    run = Run(module, tp=2, microbatches=1, **layout)
    expected = reference_of(worlds, run)
    for rank in worlds.run(run.world_size, fit, run, timeout=300):
        for name, value in expected.state.items():
            torch.testing.assert_close(rank.state[name], value, rtol=1e-9, atol=1e-10)


# --- one step on four ranks, 2 x 2, against the same step on full parameters in each rank -----------------------------

SIZE, NUM_MATRICES = 64, 16


class Matrices(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {f"square{n}": (SIZE, SIZE) for n in range(NUM_MATRICES)} | {
            "odd": (7, 5),
            "fused": (6, 8),
            "expert": (3, 4),
            "tensor_only": (4, 6),
            "replica_only": (5, 4),
            "replicated": (3, 3),
            "unused": (4, 4),
        }
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator)))
        self.gradients = {n: torch.randn(s, dtype=torch.float64, generator=generator) for n, s in shapes.items()}
        del self.gradients["unused"]


def shards_of(module):
    """Over two tensor ranks, and over two replicas, of four ranks."""
    rank = dist.get_rank()
    tensor, replicas = ([dist.new_group(ranks) for ranks in pairs] for pairs in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
    squares = {f"square{n}": Shard.evenly(n % 2, SIZE, 2) for n in range(NUM_MATRICES)}
    over_tensor_ranks = squares | {
        "odd": Shard.unevenly(0, 7, 2),
        "fused": Shard(0, (Piece(4, 2), Piece(2, 1))),  # the second piece is repeated
        "expert": Shard.owned(3, 2, 1),
        "tensor_only": Shard.evenly(1, 6, 2),
        "unused": Shard.evenly(0, 4, 2),
    }
    parts = LocalShards(module, [AxisSharding(tensor[rank // 2], over_tensor_ranks, axis="tp")])
    names = [*squares, "odd", "fused", "expert", "replica_only", "unused"]
    local = {name: parts.shard(name, dict(module.named_parameters())[name].detach()) for name in names}
    over_replicas = {name: Shard.allowing_empty(0, len(shard), 2) for name, shard in local.items()}
    parts.shardings.append(AxisSharding(replicas[rank % 2], over_replicas, axis="dp_shard"))
    return parts


def one_step(make_optimizer):
    """Names that differ from full parameters, bytes of states, most bytes that the second step takes, its messages."""
    full, module = Matrices(), Matrices()
    expected, optimizer = make_optimizer(full.parameters()), make_optimizer(module.parameters())
    parts = shards_of(module)
    names = {id(p): name for name, p in module.named_parameters()}
    parts.shard_parameters(module)
    messages = []
    send = tensors.dist.all_to_all_single

    def counted(received, message, *args, **kwargs):
        messages.append(message.nbytes)
        return send(received, message, *args, **kwargs)

    step = OwnerStep(optimizer, parts, names, SimpleNamespace(is_full=False))
    for _ in range(2):
        for name, gradient in full.gradients.items():
            getattr(full, name).grad = gradient.clone()
            getattr(module, name).grad = parts.shard(name, gradient).clone()
        expected.step()
        messages.clear()
        with pytest.MonkeyPatch.context() as patch, LiveStorages(counts_most=True) as live:
            patch.setattr(tensors.dist, "all_to_all_single", counted)
            optimizer.step()
    step.close()
    different = [n for n, p in module.named_parameters() if not torch.equal(parts.unshard(n, p), getattr(full, n))]
    states = {names[id(p)]: state_bytes(entry) for p, entry in optimizer.state.items()}
    return different, states, live.most - live.bytes(), len(messages)


def state_bytes(entry):
    return sum(value.nbytes for value in entry.values() if torch.is_tensor(value) and value.dim())


MAKERS = {
    "muon": lambda parameters: torch.optim.Muon(parameters, lr=0.1),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1, weight_decay=0.1),
}


def of_one_process(name):
    """Bytes of states by parameter."""
    module = Matrices()
    optimizer = MAKERS[name](module.parameters())
    for name, gradient in module.gradients.items():
        getattr(module, name).grad = gradient
    optimizer.step()
    return {n: state_bytes(optimizer.state[p]) for n, p in module.named_parameters() if p in optimizer.state}


def one_step_by(name):
    return one_step(MAKERS[name])


@pytest.mark.parametrize("name", MAKERS)
def test_a_step_at_owners_is_bitwise_the_step_on_full_parameters(worlds, name):
    square = SIZE * SIZE * 8
    ranks = worlds.run(4, one_step_by, name)
    owned = set()
    for different, states, most, num_messages in ranks:
        assert not different
        squares = {n for n in states if n.startswith("square")}
        assert len(squares) == NUM_MATRICES / 4 and not squares & owned, "owners are balanced"
        owned |= squares
        # The message of one parameter and its gradient, and both; later the copies that the step makes.
        assert most < 5 * square, "all full matrices and gradients take 32 of these"
        # Five rounds over two axes, the last one of small parameters, and one over each axis alone, there and back.
        assert num_messages == (5 * 2 + 1 + 1) * 2
    assert owned == {f"square{n}" for n in range(NUM_MATRICES)}
    sharded_twice = set(Matrices().gradients) - {"replicated", "tensor_only", "replica_only"}
    once = sum(nbytes for _, states, *_ in ranks for n, nbytes in states.items() if n in sharded_twice)
    rest = sum(nbytes for n, nbytes in of_one_process(name).items() if n in sharded_twice)
    assert once == rest > 0, "one rank has the states of a parameter"
