"""GradientReducer leaves the mean of the ranks' gradients for any trained, frozen or unused parameters."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.reducer_steps import (
    Layers,
    assert_mean,
    backward,
    checked_step,
    group,
    local_gradients,
    mean_over_ranks,
    small_buckets,
)
from lightning_hybrid.replicate.reducer import GradientReducer
from lightning_hybrid.techniques.reducers import Reducers

two_ranks = pytest.mark.world(2)


class Counter:
    """Counts the calls of `dist.all_reduce`."""

    def __init__(self):
        self.calls = 0
        self._all_reduce = dist.all_reduce

    def __enter__(self):
        dist.all_reduce = self._count
        return self

    def __exit__(self, *_):
        dist.all_reduce = self._all_reduce

    def _count(self, *args, **kwargs):
        self.calls += 1
        return self._all_reduce(*args, **kwargs)


@two_ranks
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bitwise_mean_over_ranks(dtype):
    model = Layers(dtype=dtype)
    reducer = small_buckets(model)
    for _ in range(3):
        checked_step(model, reducer, [range(6)], dtype=dtype)
        model.zero_grad()


@two_ranks
def test_bitwise_with_gradients_zeroed_in_place():
    model = Layers()
    reducer = small_buckets(model)
    for _ in range(3):
        checked_step(model, reducer, [range(6), range(5)])
        addresses = [p.grad.data_ptr() for p in model.parameters()]
        model.zero_grad(set_to_none=False)
    checked_step(model, reducer, [range(6)])
    assert addresses == [p.grad.data_ptr() for p in model.parameters()]


@two_ranks
def test_accumulated_gradients_are_included():
    model = Layers()
    reducer = small_buckets(model)
    checked_step(model, reducer, [range(6), range(6), [0, 2]])
    checked_step(model, reducer, [range(6)])  # without zero_grad in between


@two_ranks
def test_parameter_unused_on_one_rank():
    model = Layers()
    reducer = small_buckets(model)
    for unused in range(6):
        checked_step(model, reducer, [[i for i in range(6) if dist.get_rank() == 0 or i != unused]])
        model.zero_grad()


@two_ranks
def test_parameter_unused_on_all_ranks_has_no_gradient():
    model = Layers()
    reducer = small_buckets(model)
    checked_step(model, reducer, [[0, 1, 4, 5]])
    assert model.layers[2].weight.grad is None
    model.zero_grad()
    checked_step(model, reducer, [range(6)])
    model.zero_grad()
    checked_step(model, reducer, [[3]])


@two_ranks
def test_no_rank_has_gradients():
    model = Layers()
    small_buckets(model).reduce()
    assert all(p.grad is None for p in model.parameters())


@two_ranks
@pytest.mark.parametrize("order", [[5, 4, 3, 2, 1, 0], [2, 0, 5, 1, 4, 3]], ids=str)
def test_hooks_fire_in_any_order(order):
    model = Layers()
    reducer = small_buckets(model)
    # Even in another one on every rank.
    checked_step(model, reducer, [order if dist.get_rank() else order[::-1]])


@two_ranks
@pytest.mark.parametrize("frozen", [range(3), range(6)], ids=["some", "all"])
def test_parameters_unfrozen_between_steps(frozen):
    model = Layers()
    for index in frozen:
        model.layers[index].requires_grad_(False)
    reducer = small_buckets(model)
    reducer.reduce()
    assert sum(bucket.flat.numel() for bucket in reducer._buckets) < 80 * (6 - len(frozen)) + 10
    for index in frozen:
        model.layers[index].requires_grad_(True)
    for _ in range(2):
        checked_step(model, reducer, [range(6)])
        model.zero_grad()
    with Counter() as counter:
        reducer.reduce()
    assert counter.calls == len(reducer._buckets)  # they have room now
    model.layers[4].requires_grad_(False)
    checked_step(model, reducer, [range(6)])
    assert model.layers[4].weight.grad is None


@two_ranks
def test_parameters_frozen_on_one_rank_only():
    model = Layers()
    model.layers[dist.get_rank()].requires_grad_(False)
    model.layers[4].requires_grad_(False)
    reducer = small_buckets(model)
    checked_step(model, reducer, [range(6)])
    model.zero_grad()
    model.layers[4].requires_grad_(dist.get_rank() == 1)
    for _ in range(2):
        checked_step(model, reducer, [range(6)])
        model.zero_grad()


@two_ranks
def test_reduce_uses_existing_gradients():
    model = Layers()
    reducer = small_buckets(model)
    backward(model, [dist.get_rank(), 2])
    local = local_gradients(model.named_parameters())
    reducer.reduce()
    assert_mean(list(model.named_parameters()), local)


@two_ranks
def test_views_keep_strides():
    parameters = [
        ("channels_last", nn.Parameter(torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last))),
        ("transposed", nn.Parameter(torch.zeros(5, 3).t())),
        ("scalar", nn.Parameter(torch.tensor(1.0))),
        ("gaps", nn.Parameter(torch.zeros(6, 4)[::2])),
        ("empty", nn.Parameter(torch.zeros(0, 3))),
    ]
    reducer = GradientReducer(parameters, group())
    for step in range(2):
        torch.manual_seed(2 * step + dist.get_rank())
        local = {name: torch.randn(p.shape) for name, p in parameters}
        for name, p in parameters:
            p.grad = local[name].clone()
        reducer.reduce()
        assert_mean(parameters, local)
    assert [p.grad.stride() == p.stride() for _, p in parameters] == [True, True, True, False, True]


@two_ranks
def test_dtypes_have_separate_buckets():
    torch.manual_seed(0)
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float16]
    parameters = [(str(i), nn.Parameter(torch.zeros(7, dtype=dtype))) for i, dtype in enumerate(dtypes)]
    reducer = GradientReducer(parameters, group())
    torch.manual_seed(1 + dist.get_rank())
    for _, p in parameters[dist.get_rank() :]:
        p.grad = torch.randn_like(p)
    local = local_gradients(parameters)
    reducer.reduce()
    assert_mean(parameters, local)
    assert len(reducer._buckets) == 5


@two_ranks
def test_averages_of_stages_are_read_at_the_end_of_a_step_or_dropped():
    model = Layers(4)
    names = dict(model.named_parameters())
    stages = [[(name, p) for name, p in names.items() if name.startswith(f"layers.{i}.")] for i in range(4)]
    reducers = Reducers({i: [GradientReducer(members, group())] for i, members in enumerate(stages)})
    for is_dropped in (True, False):
        local = copy.deepcopy(model)
        order = [0, 1, 2 + dist.get_rank()]  # each of the last layers is used by one rank
        backward(local, order)
        backward(model, order)
        for stage in reversed(reducers):
            reducers.arm(stage)
            reducers.launch(stage)
        if is_dropped:
            reducers.abandon()
            model.zero_grad(set_to_none=True)
        else:
            reducers.finish()
    assert_mean(list(names.items()), local_gradients(local.named_parameters()))


class Embeddings(nn.Module):
    """A sparse table, a dense table, and a table that is sparse on one rank only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.sparse = nn.Embedding(50, 4, sparse=True)
        self.dense = nn.Embedding(50, 4)
        self.either = nn.Embedding(50, 4, sparse=dist.get_rank() == 0)

    def forward(self, indices):
        return self.sparse(indices) * self.dense(indices) + self.either(indices)


@two_ranks
def test_sparse_gradients_stay_sparse():
    model = Embeddings()
    parameters = list(model.named_parameters())
    reducer = GradientReducer(parameters, group())
    for step in range(3):
        oracle = copy.deepcopy(model)
        indices = torch.tensor([1, 7, 7, 3 + step]) if dist.get_rank() else torch.tensor([2, 7])
        for module in (oracle, model):
            if module is model:
                reducer.arm()
            module(indices).square().sum().backward()
        reducer.finish()
        assert_mean(parameters, local_gradients(oracle.named_parameters()))
        assert [p.grad.is_sparse for p in model.parameters()] == [True, False, True]
        assert model.sparse.weight.grad.coalesce().indices().tolist() == [[1, 2, 3 + step, 7]]
        model.zero_grad()
    reducer.reduce()
    assert model.sparse.weight.grad is None


@two_ranks
def test_sparse_gradients_of_one_rank():
    model = Embeddings()
    reducer = GradientReducer(list(model.named_parameters()), group())
    for _ in range(2):
        if dist.get_rank():
            model.sparse(torch.tensor([3])).sum().backward()
        local = local_gradients(model.named_parameters())
        reducer.reduce()
        assert_mean(list(model.named_parameters()), local)
        model.zero_grad()


@two_ranks
def test_parity_with_ddp():
    model = Layers(num_layers=4, width=16)
    ddp = DistributedDataParallel(copy.deepcopy(model))
    reducer = GradientReducer(list(model.named_parameters()), group(), bucket_bytes=1500)
    for step in range(3):
        backward(ddp, range(4), seed=10 * step + dist.get_rank(), width=16)
        reducer.arm()
        backward(model, range(4), seed=10 * step + dist.get_rank(), width=16)
        reducer.finish()
        for (name, p), q in zip(model.named_parameters(), ddp.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), name
        model.zero_grad()
        ddp.zero_grad()


@two_ranks
def test_one_message_per_bucket():
    model = Layers()
    reducer = GradientReducer(list(model.named_parameters()), group(), bucket_bytes=2 * 288, first_bucket_bytes=288)
    with Counter() as counter:
        reducer.reduce()
        assert counter.calls == 5  # the agreement, one layer, two layers, two layers, the last one
        reducer.reduce()
        assert counter.calls == 9


@two_ranks
def test_full_buckets_are_sent_during_backward():
    model = Layers()
    reducer = small_buckets(model)
    reducer.reduce()
    launched = []
    model.layers[0].weight.register_hook(lambda _: launched.append(reducer._next))
    reducer.arm()
    backward(model, range(6))
    reducer.finish()
    assert launched[0] >= len(reducer._buckets) - 2


@two_ranks
def test_parameter_with_two_names_counts_once():
    model = Layers(num_layers=2)
    parameters = list(model.named_parameters())
    reducer = GradientReducer([*parameters, ("again", parameters[0][1])], group())
    checked_step(model, reducer, [[0, 1]])


class Log:
    """Records the calls of an observer."""

    def __init__(self):
        self.before, self.after = {}, {}

    def before_average(self, parameter, gradient):
        self._note(self.before, parameter, gradient)

    def after_average(self, parameter, average):
        self._note(self.after, parameter, average)

    def _note(self, log, parameter, gradient):
        assert id(parameter) not in log
        log[id(parameter)] = gradient.clone().to_dense()


@two_ranks
def test_observer_sees_gradients_before_and_after():
    model = Layers()
    model.layers[3].requires_grad_(False)
    reducer = small_buckets(model)
    for _ in range(2):
        reducer.observe(log := Log())
        reducer.arm()
        backward(model, range(6))
        reducer.finish()
        for name, p in model.named_parameters():
            expected = mean_over_ranks(log.before.get(id(p)), p.detach())
            assert (expected is None and p.grad is None) or torch.equal(p.grad, expected), name
            assert p.grad is None or torch.equal(p.grad, log.after[id(p)]), name
        model.layers[3].requires_grad_(True)
        model.zero_grad()


@two_ranks
def test_observer_sees_sparse_gradients_once():
    model = Embeddings()
    reducer = GradientReducer(list(model.named_parameters()), group())
    for _ in range(2):
        reducer.observe(log := Log())
        reducer.arm()
        model(torch.tensor([dist.get_rank(), 3])).sum().backward()
        reducer.finish()
        for name, p in model.named_parameters():
            assert torch.equal(p.grad.to_dense(), log.after[id(p)]), name
            assert torch.equal(p.grad.to_dense(), mean_over_ranks(log.before.get(id(p)), p.detach())), name
        model.zero_grad()


@two_ranks
def test_wrong_call_order_is_refused():
    reducer = small_buckets(Layers())
    with pytest.raises(RuntimeError, match=r"without arm\(\)"):
        reducer.finish()
    reducer.arm()
    with pytest.raises(RuntimeError, match="twice"):
        reducer.arm()
    reducer.finish()


@two_ranks
def test_gradient_after_its_bucket_was_sent_is_refused():
    model = Layers(num_layers=2)
    reducer = small_buckets(model)
    reducer.arm()
    backward(model, [0, 1])
    with pytest.raises(RuntimeError, match=r"layers\.1\.\w+ got another gradient.*arm only the last backward"):
        backward(model, [0, 1])


@two_ranks
def test_close_removes_the_hooks():
    model = Layers(num_layers=2)
    reducer = small_buckets(model)
    reducer.arm()
    reducer.close()
    backward(model, [0, 1])
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.world(1)
def test_one_rank_does_nothing():
    model = Layers(num_layers=2)
    reducer = small_buckets(model)
    with Counter() as counter:
        reducer.arm()
        backward(model, [0])
        gradient = model.layers[0].weight.grad
        reducer.finish()
        reducer.reduce()
    assert counter.calls == 0
    assert model.layers[0].weight.grad is gradient
    assert model.layers[1].weight.grad is None
