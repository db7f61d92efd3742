"""A unit sharded over real ranks equals the full unit, with one sum over ranks for each region and direction."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_hybrid.errors import CannotShard
from lightning_hybrid.params.placement import join, shard_tensor
from lightning_hybrid.tensor.collectives.collectives_over_rank_groups import GroupRanks
from lightning_hybrid.tensor.runtime.sharded_unit import ShardedUnit
from lightning_hybrid.tensor.search.unit_search import plan_unit
from models.tensor_blocks import BLOCKS, WIDTH, Block, FusedAttention, tokens

TOLERANCE = 1e-10


@contextlib.contextmanager
def counted(monkeypatch):
    counts = {"all_reduce": 0, "all_gather": 0}
    with monkeypatch.context() as patch:
        for name in counts:
            real = getattr(GroupRanks, name)

            def count(*args, _name=name, _real=real, **kwargs):
                counts[_name] += 1
                return _real(*args, **kwargs)

            patch.setattr(GroupRanks, name, count)
        yield counts


def unit_and_inputs(name):
    torch.manual_seed(0)
    unit, args = BLOCKS[name]()
    args = tuple(a.double().detach().requires_grad_(a.requires_grad) if a.is_floating_point() else a for a in args)
    return unit.double().eval(), args


def first(output):
    return output[0] if isinstance(output, tuple) else output


# name -> sums over ranks in the forward, in the backward, gathers in the forward, in the backward
COUNTS = {
    "fused": (2, 2, 0, 0),
    "grouped queries": (2, 2, 0, 0),
    "one key head": (2, 3, 0, 0),  # one more for the gradients of the key head on both ranks
    "merged heads": (1, 2, 1, 0),  # the weights that it returns are gathered
    "interleaved": (1, 1, 0, 0),
    "offsets": (1, 1, 0, 0),
    "bias": (1, 2, 0, 0),  # the bias enters too
    "parallel": (1, 1, 0, 0),
    "batch norm": (1, 1, 0, 0),
    "encoder layer": (2, 2, 0, 0),
    "cross attention": (1, 3, 0, 0),  # three inputs enter
    "across features": (0, 2, 2, 0),
}


@pytest.mark.world(2)
@pytest.mark.parametrize("name", COUNTS)
def test_sharded_unit_equals_the_unit(name, monkeypatch):
    rank = dist.get_rank()
    unit, args = unit_and_inputs(name)
    plan = plan_unit(unit, args, {}, 2)
    expected = first(unit(*args))
    expected.square().sum().backward()
    wanted = {fqn: p.grad for fqn, p in unit.named_parameters() if p.requires_grad}
    inputs = [arg.grad for arg in args if arg.requires_grad]

    local = {
        fqn: shard_tensor(tensor.detach(), plan.placements[fqn], rank, 2) for fqn, tensor in unit.state_dict().items()
    }
    for fqn, parameter in unit.named_parameters():
        local[fqn].requires_grad_(parameter.requires_grad)
    args = tuple(arg.detach().clone().requires_grad_(arg.requires_grad) for arg in args)
    with ShardedUnit(unit, plan, dist.group.WORLD, tensors=lambda: local).running():
        with counted(monkeypatch) as forward:
            output = first(unit(*args))
        with counted(monkeypatch) as backward:
            output.square().sum().backward()
    assert (output - expected).abs().max() < TOLERANCE
    counts = forward["all_reduce"], backward["all_reduce"], forward["all_gather"], backward["all_gather"]
    assert counts == COUNTS[name]
    for arg, grad in zip([arg for arg in args if arg.requires_grad], inputs, strict=True):
        assert (arg.grad - grad).abs().max() < TOLERANCE
    for fqn, grad in wanted.items():
        parts = [torch.empty_like(local[fqn]) for _ in range(2)]
        dist.all_gather(parts, local[fqn].grad)
        assert (join(parts, plan.placements[fqn]) - grad).abs().max() < TOLERANCE, fqn
    assert "forward" not in vars(unit) and (first(unit(*args)) - expected).abs().max() < TOLERANCE


@pytest.mark.world(2)
def test_batches_and_lengths_not_in_the_proof():
    rank = dist.get_rank()
    for name, shape in (("fused", (4, 12, WIDTH)), ("own bias", (2, 6, WIDTH)), ("own bias", (6, 2, WIDTH))):
        unit, args = unit_and_inputs(name)
        plan = plan_unit(unit, args, {}, 2)
        local = {fqn: shard_tensor(tensor, plan.placements[fqn], rank, 2) for fqn, tensor in unit.state_dict().items()}
        x = torch.randn(shape, dtype=torch.float64)
        expected = first(unit(x))
        with ShardedUnit(unit, plan, dist.group.WORLD, tensors=lambda local=local: local).running(), torch.no_grad():
            assert (first(unit(x)) - expected).abs().max() < TOLERANCE


@pytest.mark.world(2)
def test_unit_attributes_are_local():
    rank = dist.get_rank()
    unit, (x,) = unit_and_inputs("fused gate")
    plan = plan_unit(unit, (x,), {}, 2)
    expected = unit(x)
    for fqn, parameter in list(unit.named_parameters()):
        owner, _, name = fqn.rpartition(".")
        local = nn.Parameter(shard_tensor(parameter.detach(), plan.placements[fqn], rank, 2))
        setattr(unit.get_submodule(owner), name, local)
    with ShardedUnit(unit, plan, dist.group.WORLD).running():
        assert (unit(x) - expected).abs().max() < TOLERANCE


@pytest.mark.world(2)
def test_dropout_differs_inside_a_region_and_is_equal_outside():
    torch.manual_seed(3)
    rank = dist.get_rank()
    seen = {}

    class RecordingDropout(nn.Dropout):
        def forward(self, x):
            seen[self.name] = super().forward(torch.ones_like(x) + 0 * x)
            return seen[self.name] * x

    def drop(name):
        module = RecordingDropout(0.5)
        module.name = name
        return module

    unit = nn.Sequential(nn.Linear(8, 64), drop("inside"), nn.Linear(64, 8), drop("outside"))
    plan = plan_unit(unit, (tokens(2, 5, 8),), {}, 2)
    local = {fqn: shard_tensor(tensor, plan.placements[fqn], rank, 2) for fqn, tensor in unit.state_dict().items()}
    x = torch.ones(2, 5, 8)
    with ShardedUnit(unit, plan, dist.group.WORLD, tensors=lambda: local).running():
        masks = []
        for _ in range(2):
            unit(x)
            masks.append({name: mask.detach() for name, mask in seen.items()})
    for name, equal in (("inside", False), ("outside", True)):
        others = [torch.empty_like(masks[0][name]) for _ in range(2)]
        dist.all_gather(others, masks[0][name])
        assert torch.equal(*others) is equal, name
        assert not torch.equal(masks[0][name], masks[1][name]), name


@pytest.mark.world(2)
def test_draw_hook_is_entered_for_regions_only():
    unit = Block(FusedAttention())
    plan = plan_unit(unit, (tokens(),), {}, 2)
    local = {fqn: shard_tensor(t, plan.placements[fqn], dist.get_rank(), 2) for fqn, t in unit.state_dict().items()}
    entered = []

    @contextlib.contextmanager
    def around():
        entered.append(1)
        yield

    with ShardedUnit(unit, plan, dist.group.WORLD, tensors=lambda: local, around_draw=around).running():
        unit(tokens())
        assert len(entered) == 1  # of attention; the two dropouts after the sums are outside
        unit.eval()
        unit(tokens())
        assert len(entered) == 1


@pytest.mark.world(2)
def test_input_that_needs_a_gradient_later_gets_it():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x, scale):
            return self.down(self.up(x) * scale)

    torch.manual_seed(0)
    unit = Gate().double()
    x, scale = torch.randn(2, 5, 8, dtype=torch.float64), torch.randn(2, 5, 1, dtype=torch.float64)
    plan = plan_unit(unit, (x.clone().requires_grad_(), scale), {}, 2)
    assert not plan.watched
    local = {fqn: shard_tensor(t, plan.placements[fqn], dist.get_rank(), 2) for fqn, t in unit.state_dict().items()}
    scale.requires_grad_()
    [expected] = torch.autograd.grad(unit(x, scale).sum(), scale)
    with ShardedUnit(unit, plan, dist.group.WORLD, tensors=lambda: local).running():
        [found] = torch.autograd.grad(unit(x, scale).sum(), scale)
    assert (found - expected).abs().max() < TOLERANCE


@pytest.mark.world(2)
def test_double_backward():
    unit, _ = unit_and_inputs("mlp")
    unit[1] = nn.Tanh()
    x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    plan = plan_unit(unit, (x,), {}, 2)
    local = {
        fqn: shard_tensor(t, plan.placements[fqn], dist.get_rank(), 2).requires_grad_()
        for fqn, t in unit.state_dict().items()
    }

    def force_loss():
        [force] = torch.autograd.grad(unit(x).square().sum(), x, create_graph=True)
        return force.square().sum()

    [expected] = torch.autograd.grad(force_loss(), x)
    with ShardedUnit(unit, plan, dist.group.WORLD, tensors=lambda: local).running():
        [found] = torch.autograd.grad(force_loss(), x)
    assert (found - expected).abs().max() < TOLERANCE


@pytest.mark.world(2)
def test_unproved_branch_is_refused():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            h = self.up(x).view(len(x), -1, 4, 4)
            if len(x) > 10:
                h = h.view(len(x), -1, 4, 4)
            return self.down(h.view(len(x), -1, 16))

    unit = Branches()
    plan = plan_unit(unit, (tokens(2, 6, 8),), {}, 2)
    local = {fqn: shard_tensor(t, plan.placements[fqn], dist.get_rank(), 2) for fqn, t in unit.state_dict().items()}
    runner = ShardedUnit(unit, plan, dist.group.WORLD, tensors=lambda: local)
    runner.fqn = "layers.1"
    with runner.running(), torch.no_grad():
        unit(tokens(4, 6, 8))
        with pytest.raises(CannotShard, match=r"did not run when the unit's plan was proved") as caught:
            unit(tokens(12, 6, 8))
    message = str(caught.value)
    assert message.startswith("layers.1: "), message
    assert message.endswith("; set tensor_parallel_plan={'layers.1': 'replicated'}"), message


@pytest.mark.world(2)
def test_plan_for_another_number_of_ranks_is_refused():
    plan = plan_unit(nn.Linear(4, 4), (torch.zeros(2, 4),), {}, 4)
    message = "the plan is for 4 tensor ranks but the group has 2"
    with pytest.raises(ValueError, match=message), ShardedUnit(nn.Linear(4, 4), plan, dist.group.WORLD).running():
        pass


@pytest.mark.world(2)
def test_complex_values_are_exchanged():
    """Gloo does not support complex numbers."""
    ranks = GroupRanks(dist.group.WORLD)
    local_values = torch.tensor([1.0 + ranks.rank, 2j])
    parts = ranks.all_gather(local_values)
    assert [part.tolist() for part in parts] == [[1, 2j], [2, 2j]]
    ranks.all_reduce(local_values)
    assert local_values.tolist() == [3, 4j]
