"""Tensors sharded along their vocabulary: any code gets the numbers of the full tensor."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness.thread_ranks import on_ranks
from lightning_hybrid.logits import rules as slice_losses
from lightning_hybrid.logits.sharded import represent
from lightning_hybrid.logits.vocabulary import Vocabulary, VocabularyShard
from lightning_hybrid.params.placement import Shard, join, shard_tensor
from lightning_hybrid.tensor.proof.proof import TOLERANCE
from lightning_hybrid.tensor.proof.trials import TrialFailed
from lightning_hybrid.tensor.search.model import choose_vocabulary_shardings
from lightning_hybrid.tensor.search.uses import VocabularyUses

ROWS, WIDTH, SHAPE = 13, 6, (3, 5)
CLASS_WEIGHTS = torch.linspace(0.5, 2, ROWS).double()
SOFT = torch.arange(15.0 * ROWS).double().sin().view(15, ROWS).softmax(1)


def flat(logits, targets):
    return logits.reshape(-1, ROWS), targets.flatten()


def scaled_in_place(logits, t):
    logits /= 2.0
    return F.cross_entropy(*flat(logits, t))


def some_set(logits, t):
    logits = logits.clone()
    logits[..., 3:9] = -1.0
    logits[:, 0] = 0
    return F.cross_entropy(*flat(logits, t))


def written_through_a_view(logits, t):
    logits = logits * 2
    some = logits[..., 3:9]
    some.mul_(3.0)
    logits += 1.0
    return F.cross_entropy(*flat(logits, t)) + some.square().sum()


def hooked(logits, t):
    logits.register_hook(lambda grad: grad * 2)
    return F.cross_entropy(*flat(logits, t))


def saved_by_address(logits, t):
    """Hooks read the memory of saved tensors, as those that offload each of them once."""
    seen = set()

    def pack(tensor):
        seen.add((tensor.untyped_storage().data_ptr(), tensor.data_ptr()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = F.cross_entropy(*flat(torch.tanh(logits), t))
    assert 0 not in {address for pair in seen for address in pair} and len(seen) > 1
    return loss


def penalized(logits, t):
    return F.cross_entropy(*flat(logits, t)) + 0.01 * logits.logsumexp(-1).square().mean()


# Operations on sharded logits without a gather.
IN_PARTS = {
    "flattened": lambda x, t: F.cross_entropy(*flat(x, t)),
    "positions last": lambda x, t: F.cross_entropy(x.transpose(1, 2), t),
    "two dims of positions": lambda x, t: F.cross_entropy(x.permute(0, 2, 1).unsqueeze(-1), t.unsqueeze(-1)),
    "shifted": lambda x, t: F.cross_entropy(*flat(x[..., :-1, :].contiguous(), t[..., 1:])),
    "masked": lambda x, t: F.cross_entropy(x[t >= 0], t[t >= 0]),
    "sum": lambda x, t: F.cross_entropy(*flat(x, t), reduction="sum"),
    "weighted": lambda x, t: F.cross_entropy(*flat(x, t), weight=CLASS_WEIGHTS),
    "each": lambda x, t: F.cross_entropy(*flat(x, t), weight=CLASS_WEIGHTS, reduction="none"),
    "smoothed": lambda x, t: F.cross_entropy(*flat(x, t), label_smoothing=0.1, weight=CLASS_WEIGHTS),
    "soft targets": lambda x, t: F.cross_entropy(x.view(-1, ROWS), SOFT),
    "two functions": lambda x, t: F.nll_loss(x.log_softmax(-1).flatten(0, 1), t.flatten()),
    "gathered": lambda x, t: x.log_softmax(-1).gather(-1, t.clamp(min=0)[..., None]),
    "capped": lambda x, t: F.cross_entropy(*flat(torch.tanh(x / 3) * 3, t)),
    "penalized": penalized,
    "divergence": lambda x, t: (SOFT.view(*SHAPE, ROWS) * (SOFT.view(*SHAPE, ROWS).log() - x.log_softmax(-1))).sum(),
    "right ones": lambda x, t: (x.argmax(-1) == t).double().mean() + 0 * x.sum(),
    "joined": lambda x, t: F.cross_entropy(torch.cat([x, x * 2]).flatten(0, 1), t.repeat(2, 1).flatten()),
    "in place": scaled_in_place,
    "hook": hooked,
    "saved by address": saved_by_address,
}
# Operations that gather.
FULL = {
    "sorted": lambda x, t: x.topk(3).values,
    "squares": lambda x, t: F.mse_loss(x, torch.ones_like(x)),
    "norm": lambda x, t: F.layer_norm(x, (ROWS,)),
    "a stretch of rows": lambda x, t: x[..., 2:9].exp(),
    "written": some_set,
    "written through a view": written_through_a_view,
    "largest number": lambda x, t: x.max(-1).values,
}


def compared(function, size, *, rows=ROWS):
    """Numbers and gradients of shards against those of the full tensor; the number of gathers."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((rows, WIDTH), (rows,)))
    h = torch.randn(*SHAPE, WIDTH, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, rows, SHAPE, generator=generator)
    targets[0, 1] = -100

    def run(weight, bias, vocabulary):
        leaves = [tensor.clone().requires_grad_() for tensor in (weight, bias, h)]
        own = leaves[:2] if vocabulary is None else [represent(leaf, 0, vocabulary) for leaf in leaves[:2]]
        out = function(F.linear(leaves[2] + F.embedding(targets.clamp(min=0), own[0], 2), *own), targets)
        gathers = 0 if vocabulary is None else vocabulary.num_gathers
        out = out.gathered() if isinstance(out, VocabularyShard) else out
        weights = torch.arange(1.0, out.numel() + 1, dtype=out.dtype).cos().view(out.shape)
        return [out.detach(), *torch.autograd.grad(out, leaves, weights)], gathers

    expected, _ = run(weight, bias, None)

    def one(ranks):
        vocabulary = Vocabulary(rows, ranks)
        part = [shard_tensor(full, vocabulary.shard(0), ranks.rank, size) for full in (weight, bias)]
        return run(*part, vocabulary), vocabulary.shard(0)

    outcomes = on_ranks(size, one)
    for place, wanted in enumerate(expected):
        found = [numbers[place] for (numbers, _), _ in outcomes]
        for tensor in [join(found, outcomes[0][1])] if place in (1, 2) else found:
            assert type(tensor) is torch.Tensor
            torch.testing.assert_close(tensor, wanted, rtol=1e-10, atol=1e-10)
    return outcomes[0][0][1]


@pytest.mark.parametrize("name", IN_PARTS)
def test_vocabulary_parallel_losses(name):
    assert compared(IN_PARTS[name], 2) == 0


@pytest.mark.parametrize("name", FULL)
def test_other_operations_get_the_full_tensor(name):
    assert compared(FULL[name], 2) > 0


def test_last_of_four_ranks_has_a_single_row():
    for name in ("flattened", "smoothed", "right ones"):
        assert compared(IN_PARTS[name], 4) == 0


def test_rows_written_through_two_views_are_refused():
    def through_views(logits, targets):
        first, second = logits[..., 2:9], logits.flatten(0, 1)[..., 3:4]
        first.detach().fill_(0)
        return F.cross_entropy(*flat(logits, targets)) + second.sum()

    with pytest.raises(TrialFailed, match=r"13 entries .* over 2 tensor ranks .* write logits\[\.\.\., a:b\] = x"):
        compared(through_views, 2)


@pytest.mark.parametrize("sought", [ROWS, -1])
def test_row_out_of_range_raises(sought):
    def one(ranks):
        return F.embedding(
            torch.tensor([0, sought]), represent(torch.ones(7 - ranks.rank, 2), 0, Vocabulary(13, ranks))
        )

    with pytest.raises(TrialFailed, match="index out of range"):
        on_ranks(2, one)


FEATURES, POSITIONS, MAX_ROWS = 5, (3, 7), 97


def cross_entropy_failure(length, size):
    """Compares a vocabulary-parallel cross entropy of random float64 numbers; returns what is wrong, or None."""
    rows = length if length <= MAX_ROWS * size else MAX_ROWS * size + length % size
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    weight, bias, x = random(rows, FEATURES), random(rows), random(*POSITIONS, FEATURES)
    tokens = torch.linspace(0, rows - 1, x[..., 0].numel()).long().view(POSITIONS)
    targets = tokens.flip(0).clone()
    targets[0, 0] = targets[2, 3] = -100
    expected = results_of(weight, bias, x, tokens, targets)

    def one(ranks):
        vocabulary = Vocabulary(rows, ranks)
        local = [shard_tensor(full, vocabulary.shard(0), ranks.rank, size) for full in (weight, bias)]
        return results_of(local[0], local[1], x, tokens, targets, vocabulary)

    outcomes = on_ranks(size, one)
    placement = Shard.unevenly(0, rows, size)
    for index, (name, wanted) in enumerate(zip(RESULTS, expected, strict=True)):
        each = [outcome[index] for outcome in outcomes]
        for found in [join(each, placement)] if "row" in name else each:
            distance = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3))
            if not distance <= TOLERANCE:
                return f"{name} of a vocabulary-parallel cross entropy: relative difference {distance:.1e}"
    return None


RESULTS = ("loss", "smoothed loss", "largest", "gradient of rows", "gradient of the rows' biases", "gradient of inputs")


def results_of(weight, bias, x, tokens, targets, vocabulary=None):
    inputs = [tensor.detach().clone().requires_grad_() for tensor in (weight, bias, x)]
    rows, row_biases, x = inputs
    if vocabulary is not None:
        rows, row_biases = represent(rows, 0, vocabulary), represent(row_biases, 0, vocabulary)
    logits = F.linear(F.embedding(tokens, rows) * 0.5 + x, rows, row_biases)
    shifted = logits[:, :-1].flatten(0, 1)
    loss = F.cross_entropy(shifted, targets[:, 1:].flatten())
    smooth = F.cross_entropy(logits.transpose(1, 2), targets, label_smoothing=0.1, reduction="sum")
    largest = logits.argmax(-1).double()
    return [loss.detach(), smooth.detach(), largest, *torch.autograd.grad(loss + smooth, inputs)]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("length", [13, 16, 96, 50257, 50258, 50259, 128256])
def test_cross_entropy_with_a_tied_weight_is_that_of_full_logits(length, size):
    assert cross_entropy_failure(length, size) is None


def test_planted_faults_are_found(monkeypatch):
    located, summed, weights = Vocabulary.located, Vocabulary.summed, slice_losses._weights
    with monkeypatch.context() as patch:
        patch.setattr(Vocabulary, "located", lambda self, rows: located(self, (rows + 1).clamp(max=self.length - 1)))
        assert "relative difference" in cross_entropy_failure(50257, 2)
    with monkeypatch.context() as patch:  # the input of the head has the gradient of local rows only
        patch.setattr(Vocabulary, "summed", lambda self, t: t if t.dim() == 2 and t.shape[1] == 5 else summed(self, t))
        assert "gradient of" in cross_entropy_failure(50257, 2)
    with monkeypatch.context() as patch:
        patch.setattr(slice_losses, "_weights", lambda t, w, ignored, like: weights(t, w, ignored & False, like))
        assert "loss" in cross_entropy_failure(50257, 2)


class Reads(nn.Module):
    def __init__(self, rows=40, width=8, **options):
        super().__init__()
        self.wte = nn.Embedding(rows, width, **options)
        self.wpe = nn.Embedding(4, width)
        self.head = nn.Linear(width, rows)

    def forward(self, ids, targets):
        logits = self.head(self.wte(ids) + self.wpe(ids % 4))
        return F.cross_entropy(logits, targets)


class Norms(Reads):
    def forward(self, ids, targets):
        return super().forward(ids, targets) + self.head.weight.norm() + self.wte.weight[0].sum()


class Sorts(Reads):
    def forward(self, ids, targets):
        logits = self.head(self.wte(ids) + self.wpe(ids % 4))
        return F.cross_entropy(logits, targets) + logits.sort().values.mean()


@pytest.mark.parametrize(
    ("module", "size", "names", "reason"),
    [
        (Reads(), 2, {"wte.weight", "head.weight", "head.bias"}, "a table of 4 rows, small beside one of 40"),
        (Reads(41), 4, {"wte.weight", "head.weight", "head.bias"}, "a table of 4 rows"),
        (Reads(7, 4), 2, set(), "its vocabulary of 7 rows is too small for 2 ranks"),
        (Reads(8), 2, set(), "a table of 8 rows of 8: less than what ranks would send for it"),
        (Reads(max_norm=1.0), 2, {"head.weight", "head.bias"}, "max_norm=1.0 rewrites the rows"),
        (Reads(sparse=True), 2, {"head.weight", "head.bias"}, "sparse gradients"),
        (Reads(scale_grad_by_freq=True), 2, {"head.weight", "head.bias"}, "scale_grad_by_freq=True counts"),
        (Norms(), 2, set(), "read by __getitem__ at"),
        (Sorts(), 2, {"wte.weight"}, "a table of 4 rows"),
    ],
    ids=[
        "even",
        "uneven",
        "few rows",
        "small",
        "max_norm",
        "sparse",
        "by frequency",
        "read otherwise",
        "logits sorted",
    ],
)
def test_sharded_weights_and_reasons_against(module, size, names, reason):
    uses = VocabularyUses(module, {"": module}, [""])
    with uses:
        module(torch.arange(5), torch.arange(5))
    cuts, reasons = choose_vocabulary_shardings(module, uses.uses, size)
    assert set(cuts) == names
    assert any(reason in text for text in reasons.values()), reasons
