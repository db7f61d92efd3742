"""Losses of lazy logits in chunks, and every other read of them, against logits computed in full."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import optimizer as optimizers

from harness.thread_ranks import on_ranks
from lightning_hybrid.logits.heads import ChunkedLoss, find_output_heads
from lightning_hybrid.logits.lazy import LazyLogits
from lightning_hybrid.logits.vocabulary import Vocabulary
from lightning_hybrid.params.placement import Shard, join, shard_tensor

SAMPLES, LENGTH, WIDTH, VOCABULARY = 3, 7, 5, 31


class Model(nn.Module):
    def __init__(self, loss, *, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=bias)
        self.loss = loss

    def forward(self, ids, target):
        return self.loss(self.head(self.embedding(ids).tanh()), target)


class Tied(Model):
    def __init__(self, loss):
        super().__init__(loss, bias=False)
        self.head.weight = self.embedding.weight


def example():
    draw = torch.Generator().manual_seed(1)
    ids, target = torch.randint(VOCABULARY, (2, SAMPLES, LENGTH), generator=draw)
    target[0, :3], target[2, -1] = -100, -100
    return ids, target


def chunked(model, num_chunks=4, messages=None):
    messages = [] if messages is None else messages
    heads = find_output_heads(model, sharded=(), is_compiled=False, any_size=True)
    return ChunkedLoss(heads, num_chunks, around=_nothing, inform=messages.append, warn=messages.append)


@contextlib.contextmanager
def running_step(losses):
    with losses.running(), losses.step():
        yield


def _nothing(parameter):
    return contextlib.nullcontext()


def results(model, run, losses=None):
    """The loss and all gradients."""
    model.zero_grad()
    if losses is None:
        out = run(model)
    else:
        with running_step(losses):
            out = run(model)
    out.sum().backward()
    return [out, *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_equal_results(model, run, *, num_chunks=4, tolerance=1e-10, read=()):
    """Loss and gradients in chunks equal those in full, and logits were read in full by these operations only."""
    wanted = [value.detach().clone() for value in results(model, run)]
    losses = chunked(model, num_chunks)
    found = results(model, run, losses)
    assert [value.dtype for value in found] == [value.dtype for value in wanted]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * 1e-2, equal_nan=True)
    [head] = losses.heads.values()
    assert set(head.reads) == set(read) and (head.chunks_of is not None) == (not read)


def shifted(logits, target, **options):
    return F.cross_entropy(logits[..., :-1, :].reshape(-1, VOCABULARY), target[..., 1:].reshape(-1), **options)


CLASS_WEIGHT = torch.rand(VOCABULARY, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
LOSSES = {
    "view": lambda logits, target: F.cross_entropy(logits.view(-1, VOCABULARY), target.view(-1)),
    "flatten": lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten()),
    "input": lambda logits, target: F.cross_entropy(input=logits.flatten(0, 1), target=target.flatten()),
    "module": lambda logits, target: nn.CrossEntropyLoss()(logits.view(-1, logits.size(-1)), target.view(-1)),
    "transposed": lambda logits, target: F.cross_entropy(logits.transpose(1, 2), target),
    "permuted": lambda logits, target: F.cross_entropy(logits.permute(0, 2, 1).contiguous(), target, reduction="sum"),
    "mT": lambda logits, target: F.cross_entropy(logits.mT, target, reduction="none"),
    "shifted": shifted,
    "shift of transformers": lambda logits, target: F.cross_entropy(
        logits.float().view(-1, VOCABULARY), F.pad(target, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    ),
    "sum": lambda logits, target: shifted(logits, target, reduction="sum"),
    "none": lambda logits, target: shifted(logits, target, reduction="none").square(),
    "ignored": lambda logits, target: shifted(logits, target.clamp(min=0), ignore_index=4),
    "smoothed": lambda logits, target: shifted(logits, target, label_smoothing=0.2),
    "weighted": lambda logits, target: shifted(logits, target, weight=CLASS_WEIGHT),
    "weighted and smoothed": lambda logits, target: shifted(
        logits, target.clamp(min=0), weight=CLASS_WEIGHT, label_smoothing=0.1, ignore_index=0
    ),
    "weighted sum": lambda logits, target: shifted(logits, target, weight=CLASS_WEIGHT, reduction="sum"),
    "nothing counted": lambda logits, target: shifted(logits, torch.full_like(target, -100)),
    "temperature": lambda logits, target: shifted(logits / 0.7 * torch.tensor(1.3), target),
    "soft cap": lambda logits, target: shifted(torch.tanh(logits / 3.0) * 3.0, target),
    "log-softmax": lambda logits, target: F.nll_loss(
        logits.log_softmax(-1).flatten(0, 1), target.flatten(), ignore_index=-100
    ),
    "log-softmax of dim 1": lambda logits, target: F.nll_loss(F.log_softmax(logits.transpose(1, 2), 1), target),
    "selected": lambda logits, target: F.cross_entropy(logits[target != -100], target[target != -100]),
    "indexed": lambda logits, target: F.cross_entropy(
        logits[torch.tensor([0, 2])][:, torch.tensor([1, 4])].flatten(0, 1), target[[0, 2]][:, [1, 4]].flatten()
    ),
    "last position": lambda logits, target: F.cross_entropy(logits[:, -1], target[:, 0]),
    "one sample": lambda logits, target: F.cross_entropy(logits[1], target[1]),
    "narrowed": lambda logits, target: F.cross_entropy(logits.narrow(1, 1, 3).flatten(0, 1), target[:, 1:4].flatten()),
    "two losses": lambda logits, target: shifted(logits, target) + 0.3 * shifted(logits * 2.0, target),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("kind", [Model, Tied])
def test_loss_in_chunks(kind, loss):
    ids, target = example()
    # The logits of transformers' losses are float32.
    tolerance = 1e-5 if loss is LOSSES["shift of transformers"] else 1e-10
    assert_equal_results(kind(loss).double(), lambda model: model(ids, target), tolerance=tolerance)


@pytest.mark.parametrize("num_chunks", [2, 5, 20, 21, 100, None])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_any_number_of_chunks(num_chunks, reduction):
    ids, target = example()
    model = Model(lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction=reduction))
    assert_equal_results(model.double(), lambda model: model(ids, target), num_chunks=num_chunks)


def test_fewer_rows_than_features():
    """Then the gradient of the weight would be larger than the logits: it is computed in the backward."""
    ids, target = example()
    assert_equal_results(Model(shifted).double(), lambda model: model(ids[:1, :4], target[1:2, :4]))


@pytest.mark.parametrize("trained", ["embedding", "head.bias", "head.weight"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_frozen_parameters(trained, reduction):
    ids, target = example()
    model = Model(lambda logits, target: shifted(logits, target, reduction=reduction)).double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    assert_equal_results(model, lambda model: model(ids, target))


def test_gradient_of_a_gradient_graph_kept():
    """Two backwards through one loss."""
    ids, target = example()
    model = Model(shifted).double()
    with running_step(chunked(model)):
        loss = model(ids, target)
    for scale in (1.0, 2.5):
        found = torch.autograd.grad(scale * loss, [*model.parameters()], retain_graph=True)
        wanted = torch.autograd.grad(scale * model(ids, target), [*model.parameters()])
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


# --- reads of full logits ---------------------------------------------------------------------------------------------


class Scaled(torch.autograd.Function):
    """A function of the user, which torch shows its argument to below torch functions."""

    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


def in_place(logits, target):
    logits[..., 0] = -1e4
    return shifted(logits, target)


def in_place_of_view(logits, target):
    view = logits[:, :-1]
    view /= 2
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def copied_before(logits, target):
    copy, halves, view = logits.clone(), logits / 2, logits[:, 1:]
    logits[..., 0] = -1e4
    return shifted(copy, target) + shifted(halves, target) + view[..., 1:].square().mean()


def copied_from_copy_before(logits, target):
    copy = logits * 2
    view, other = copy[:, 1:], (copy / 3).flatten(0, 1)
    copy[..., 0] = -1e4
    return shifted(logits, target) + view[..., 1:].square().mean() + F.cross_entropy(other, target.flatten())


def with_metric_of_view(logits, target):
    view = logits[:, :-1]
    with torch.no_grad():
        top = view.topk(3, -1).indices
    loss = F.cross_entropy(view.flatten(0, 1), target[:, 1:].flatten())
    return logits.square().mean() + loss + (top == target[:, 1:].unsqueeze(-1)).double().mean()


def hooked(logits, target):
    logits.register_hook(lambda grad: 2 * grad)
    return shifted(logits, target)


def with_metric(logits, target):
    top = logits.topk(3, -1).indices
    return shifted(logits, target) + (top == target.unsqueeze(-1)).double().mean()


READS = {
    "sum": (lambda logits, target: logits.square().sum(), "square"),
    "penalty": (lambda logits, target: shifted(logits, target) + logits.logsumexp(-1).mean(), "logsumexp"),
    "penalty first": (
        lambda logits, target: logits.logsumexp(-1).mean() + shifted(logits, target),
        "logsumexp",
    ),
    "soft targets": (
        lambda logits, target: F.cross_entropy(logits[0], torch.ones(LENGTH, VOCABULARY).double() / VOCABULARY),
        "cross_entropy",
    ),
    "part of the vocabulary": (
        lambda logits, target: F.cross_entropy(logits[..., :20].flatten(0, 1), target.flatten().clamp(-100, 19)),
        "__getitem__",
    ),
    "learned temperature": (
        lambda logits, target: shifted(logits * torch.ones((), dtype=torch.float64, requires_grad=True), target),
        "mul",
    ),
    "list": (
        lambda logits, target: F.cross_entropy(logits[[0, 2]].flatten(0, 1), target[[0, 2]].flatten()),
        "__getitem__",
    ),
    "in place": (in_place, "__setitem__"),
    "in place of a view": (in_place_of_view, "div_"),
    "copied, then in place": (copied_before, "__setitem__"),
    "copied from a copy, then in place": (copied_from_copy_before, "__setitem__"),
    "dim after the vocabulary": (
        lambda logits, target: (
            logits[..., None].reshape(*logits.shape[:-1], -1, 1).square().mean()
            + float(logits[..., None].shape == (*logits.shape, 1))
        ),
        "__getitem__",
    ),
    "hook": (hooked, "register_hook"),
    "metric": (with_metric, "topk"),
    "metric of a view, without gradients": (with_metric_of_view, "topk"),
    "autograd function": (lambda logits, target: shifted(Scaled.apply(logits), target), "aten.slice.Tensor"),
    "autograd function of a view": (
        lambda logits, target: Scaled.apply(logits[:, 1:] / 2).square().mean(),
        "aten.pow.Tensor_Scalar",
    ),
    "many": (lambda logits, target: torch.cat([logits, logits]).square().mean() + logits.sum(), "cat"),
    "iteration": (lambda logits, target: sum(row.square().mean() for row in logits), "unbind"),
}


@pytest.mark.parametrize(("loss", "reads"), READS.values(), ids=READS)
def test_other_reads(loss, reads):
    """They get full logits, and so do losses that run after them."""
    ids, target = example()
    model = Model(loss).double()
    wanted = [value.detach().clone() for value in results(model, lambda model: model(ids, target))]
    losses = chunked(model)
    head = losses.heads["head"]
    found = results(model, lambda model: model(ids, target), losses)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert next(iter(head.reads)) == reads


def test_metadata_reads_nothing():
    messages = []
    model = Model(shifted).double()
    losses = chunked(model, messages=messages)
    with running_step(losses):
        logits = model.head(torch.ones(2, 3, WIDTH, dtype=torch.float64))
        assert type(logits) is LazyLogits and isinstance(logits, torch.Tensor)
        assert logits.shape == (2, 3, VOCABULARY) and logits.dtype is torch.float64 and logits.dim() == 3
        assert logits.requires_grad and logits.grad_fn is not None and not logits.is_leaf and len(logits) == 2
        assert logits.view(-1, VOCABULARY).shape == (6, VOCABULARY) and logits.transpose(1, 2).size() == (
            2,
            VOCABULARY,
            3,
        )
        assert logits.float().dtype is torch.float32 and logits.size(-1) == VOCABULARY
        assert not logits.detach().requires_grad and not logits.is_computed
        with torch.no_grad():
            assert not logits[:, 1:].requires_grad


@pytest.mark.parametrize("dim", [-1, 1])
def test_argmax_in_chunks(dim):
    ids, _ = example()
    model = Model(None).double()
    losses = chunked(model)
    hidden = model.embedding(ids)
    wanted = model.head(hidden).detach()
    with running_step(losses):
        logits = model.head(hidden)
        logits = logits if dim == -1 else logits.transpose(1, 2)
        assert torch.equal(logits.argmax(dim), wanted.argmax(-1))
        assert torch.equal(logits.detach().argmax(dim=dim, keepdim=True).squeeze(dim), wanted.argmax(-1))
        assert torch.equal(torch.argmax(logits, dim), wanted.argmax(-1))
        assert not logits.is_computed
        del logits
    assert not losses.heads["head"].reads


def test_detached_logits_give_no_gradient():
    ids, target = example()
    model = Model(None).double()
    with running_step(chunked(model)):
        logits = model.head(model.embedding(ids))
        with torch.no_grad():
            view = logits[:, :-1]
        for detached in (logits.detach()[:, :-1], logits.data[:, :-1], view):
            loss = F.cross_entropy(detached.flatten(0, 1), target[:, 1:].flatten())
            assert not loss.requires_grad and loss.isfinite()


def test_logits_that_outlive_the_step_are_those_of_its_weights():
    messages = []
    ids, target = example()
    model = Model(None).double()
    losses = chunked(model, messages=messages)
    wanted = model.head(model.embedding(ids)).detach()
    with running_step(losses):
        logits = model.head(model.embedding(ids))
        loss = shifted(logits, target)
    with torch.no_grad():
        model.head.weight.zero_()
    torch.testing.assert_close(logits.detach() + 0, wanted, rtol=1e-12, atol=0)
    assert loss.isfinite()
    assert any("the end of the step" in message and "head" in message for message in messages)


def test_logits_read_after_an_optimizer_step_are_those_before():
    ids, target = example()
    model = Model(None).double()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    wanted = model.head(model.embedding(ids)).detach()
    with running_step(chunked(model)):
        logits = model.head(model.embedding(ids))
        shifted(logits, target).backward()
        optimizer.step()
        torch.testing.assert_close(logits.detach().sum(-1), wanted.sum(-1), rtol=1e-12, atol=1e-12)
    assert not optimizers._global_optimizer_pre_hooks


def test_heads_with_backward_hooks_return_full_logits():
    ids, target = example()
    model, seen = Model(shifted).double(), []
    model.head.register_full_backward_hook(lambda module, grads, outputs: seen.append(outputs[0].shape))
    with running_step(chunked(model)):
        model(ids, target).backward()
    assert seen == [(SAMPLES, LENGTH, VOCABULARY)]


def test_forward_hooks_get_lazy_logits():
    ids, target = example()
    model, seen = Model(shifted).double(), []
    model.head.register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    assert_equal_results(model, lambda model: model(ids, target))
    assert seen == 2 * [(SAMPLES, LENGTH, VOCABULARY)]


@pytest.mark.filterwarnings("ignore")  # the compiler warns of what it does not trace
def test_compiled_loss():
    """A loss that the user compiles gets the same numbers."""
    ids, target = example()
    model = Model(torch.compile(shifted, backend="eager")).double()
    wanted = [value.detach().clone() for value in results(model, lambda model: model(ids, target))]
    found = results(model, lambda model: model(ids, target), chunked(model))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_evaluation_reports_nothing():
    messages = []
    ids, target = example()
    model = Model(shifted).double()
    losses = chunked(model, messages=messages)
    with torch.no_grad(), running_step(losses):
        model.head(model.embedding(ids)).square().sum()
    assert not messages and losses.heads
    results(model, lambda model: model(ids, target), losses)
    assert [*messages] == ["chunked_loss: the loss of head is computed in 4 chunks of 18 rows"]


def test_messages_appear_once():
    messages = []
    ids, target = example()
    model = Model(with_metric).double()
    losses = chunked(model, messages=messages)
    for _ in range(2):
        results(model, lambda model: model(ids, target), losses)
    assert [message for message in messages if "topk at" in message and "test_lazy.py" in message]
    assert len(messages) == len(set(messages))
    silent = []
    model = Model(shifted).double()
    results(model, lambda model: model(ids, target), chunked(model, messages=silent))
    assert silent == ["chunked_loss: the loss of head is computed in 4 chunks of 18 rows"]
    model = Model(lambda logits, target: logits.square().mean()).double()
    losses = chunked(model, messages=silent)
    for _ in range(2):
        results(model, lambda model: model(ids, target), losses)
    assert not losses.heads and len(silent) == 2
    assert "no cross entropy of an output head" in silent[1] and "square at" in silent[1]


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_full_logits_exist(reduction):
    """In the forward and in the backward, no tensor of half the size of the logits."""
    ids, target = example()
    ids, target = ids.repeat(20, 1), target.repeat(20, 1)
    size = ids.numel() * VOCABULARY * 8
    for num_chunks, expected in ((10, False), (None, True)):
        model = Model(lambda logits, target: shifted(logits, target, reduction=reduction).mean()).double()
        context = running_step(chunked(model, num_chunks)) if num_chunks else _nothing(None)
        with Largest() as largest, context:
            model(ids, target).backward()
        assert (largest.nbytes >= size / 2) == expected, (largest.nbytes, size)


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The bytes of the largest result of a kernel."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves(out):
            if type(value) is torch.Tensor and not value.is_meta:
                self.nbytes = max(self.nbytes, value.untyped_storage().nbytes())
        return out


def test_logits_are_freed_without_the_garbage_collector():
    ids, target = example()
    model = Model(None).double()
    gc.disable()
    try:
        with running_step(chunked(model)):
            hidden = model.embedding(ids)
            logits = model.head(hidden)
            loss = shifted(logits, target)
            dead = weakref.ref(logits)
            del logits
            assert dead() is None
        loss.backward()
    finally:
        gc.enable()


def of_ranks(loss, *, bias, size=2):
    """Losses and gradients of a head whose vocabulary is sharded over ranks, the vocabulary's joined."""
    ids, target = example()
    placement = Shard.unevenly(0, VOCABULARY, size)
    models = [Model(loss, bias=bias).double() for _ in range(size)]  # threads share torch's generator

    def one(ranks):
        model = models[ranks.rank]
        full = model.head._parameters.copy()
        for name, parameter in full.items():
            if parameter is not None:
                shard = shard_tensor(parameter.detach(), placement, ranks.rank, size).clone()
                model.head._parameters[name] = nn.Parameter(shard)
        vocabulary = Vocabulary(VOCABULARY, ranks)
        losses = ChunkedLoss(
            {"head": model.head}, 4, around=_nothing, inform=str, warn=str, vocabularies={"head": vocabulary}
        )
        found = results(model, lambda model: model(ids, target), losses)
        [head] = losses.heads.values()
        return found, set(head.reads), head.chunks_of, vocabulary.num_gathers

    each = on_ranks(size, one)
    joined = [join([found[index] for found, *_ in each], placement) for index in range(2, 3 + bias)]
    return [*each[0][0][:2], *joined], each


# Embedding, head, bias, in the order of parameters.
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "two losses"])
def test_losses_in_chunks_of_shards(name, bias):
    ids, target = example()
    wanted = results(Model(LOSSES[name], bias=bias).double(), lambda model: model(ids, target))
    found, each = of_ranks(LOSSES[name], bias=bias)
    tolerance = 1e-6 if "transformers" in name else 1e-10  # which computes losses in float32
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * 1e-2, equal_nan=True)
    for results_of_rank, reads, chunks, gathers in each:
        torch.testing.assert_close(results_of_rank[1], found[1], equal_nan=True)  # the embedding, on each rank
        assert not reads and chunks and not gathers


def test_other_reads_of_shards():
    def top(logits, target):
        return shifted(logits, target) + logits.topk(3).values.sum() + 0.1 * logits.logsumexp(-1).square().mean()

    ids, target = example()
    wanted = results(Model(top).double(), lambda model: model(ids, target))
    found, each = of_ranks(top, bias=True)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert all(reads == {"topk", "logsumexp"} for _, reads, *_ in each)
