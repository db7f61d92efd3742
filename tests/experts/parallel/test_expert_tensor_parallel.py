"""Stacked experts are sharded over tensor ranks: their layout is detected, and wrong shardings are not used."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_hybrid.experts.moe.grouped import GroupedExperts
from lightning_hybrid.experts.parallel.find import ExpertCalls
from lightning_hybrid.experts.parallel.proof import ExpertsProof
from lightning_hybrid.experts.parallel.width import TensorShardedExperts, WidthSharding
from lightning_hybrid.params.placement import Piece, Shard, shard_tensor
from lightning_hybrid.tensor.collectives import CountedRanks
from models.cases import batch_of, make
from models.expert_modules import Around, SwappedNames, rows_of
from models.mixtures import WIDTH, GptOss, Mixtral


def found_in(root, call, tensor_size=2, size=1):
    calls = ExpertCalls()
    torch.manual_seed(0)
    with calls.watching(dict(root.named_children())):
        call()
    return calls.find(root, size, tensor_size)


def grouped(**options):
    return lambda: GroupedExperts(4, WIDTH, 8, **options)


def rows(root):
    return root(rows_of(9, WIDTH), torch.tensor([4, 0, 3, 2]))


def pairs(root):
    return root(torch.rand(6, 2), rows_of(6, 4), choice=torch.randint(4, (6, 2)))


class Normed(GroupedExperts):
    """The operation between the products mixes features."""

    def forward(self, tokens, counts):
        parts = tokens.split(counts.tolist())
        hidden = [F.layer_norm(part @ up.T, (up.shape[0],)) for part, up in zip(parts, self.up, strict=True)]
        return torch.cat([part @ down.T for part, down in zip(hidden, self.down, strict=True)])


class Scaled(nn.Module):
    """The width is a literal; one scale between the weights, one after the sum, and a bias."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Parameter(torch.randn(4, 4, 6)), nn.Parameter(torch.randn(4, 6, 4))
        self.between, self.scale = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(4))
        self.shift, self.hidden = nn.Parameter(torch.randn(4, 4)), 6

    def forward(self, tokens, counts):
        out = []
        for number, part in enumerate(tokens.split(counts.tolist())):
            inside = torch.tanh((part @ self.first[number]).view(-1, self.hidden) * self.between[number])
            out.append(inside @ self.last[number] * self.scale[number] + self.shift[number])
        return torch.cat(out)


def even(dim, length, size=2):
    return Shard.evenly(dim, length, size)


def two(dim, length, size=2):
    return Shard(dim, (Piece(length, size), Piece(length, size)))


CASES = {
    "gated": (grouped(), rows, {"up": two(1, 8), "down": even(2, 8)}, ()),
    "biases": (grouped(gated=False, bias=True), rows, {"up": even(1, 8), "up_bias": even(1, 8), "down": even(2, 8)},
               ("down_bias",)),
    "transposed, other names": (SwappedNames, pairs, {"a": even(2, 8), "b": even(1, 8)}, ()),
    "scales": (Scaled, lambda root: root(rows_of(7, 4), torch.tensor([4, 0, 3, 0])),
                 {"first": even(2, 6), "between": even(1, 6), "last": even(1, 6)}, ("scale", "shift")),
}  # fmt: skip


@pytest.mark.parametrize(("case", "size"), [(case, size) for case in CASES for size in (1, 2)])
def test_sharding_is_found_and_proved(case, size):
    """With and without ranks that share the experts."""
    build, call, placements, summed = CASES[case]
    root = Around(build())
    found = found_in(root, lambda: call(root), 2, size)
    assert found.widths["inner"].placements == placements, found
    assert found.widths["inner"].summed == summed and len(found.adapters) == size - 1
    assert not found.unsharded_widths


def test_in_transformers():
    for case, gate in ((Mixtral, two(1, 32, 4)), (GptOss, even(2, 64, 4))):
        root = make(case)
        found = found_in(root, lambda root=root: root.loss(batch_of("tokens", range(4))), 4)
        assert len(found.widths) == 2 and not found.unsharded_widths
        assert next(iter(found.widths.values())).placements["gate_up_proj"] == gate


@pytest.mark.parametrize(
    ("build", "size", "reason"),
    [
        (lambda: Normed(4, WIDTH, 8, gated=False), 2, "not the same in the proof: .* differs by"),
        (grouped(), 3, "the width 8 of its experts is no multiple of 3 tensor ranks"),
    ],
    ids=["mixes features", "uneven"],
)
def test_indivisible_experts_stay_full(build, size, reason):
    root = Around(build())
    found = found_in(root, lambda: rows(root), size)
    assert not found.widths
    assert re.search(reason, found.unsharded_widths["inner"]), found.unsharded_widths


def test_module_is_unchanged_and_later_ranks_omit_biases():
    module = GroupedExperts(4, WIDTH, 8, bias=True)
    root = Around(module)
    width = found_in(root, lambda: rows(root)).widths["inner"]
    before = dict(module._parameters)
    full = {name: parameter.data for name, parameter in module.named_parameters()}
    given = rows_of(9, WIDTH), torch.tensor([4, 0, 3, 2])
    expected, outs = module(*given), []
    for rank in range(2):
        for name, placement in width.placements.items():
            module.get_parameter(name).data = shard_tensor(full[name], placement, rank, 2)
        cut_widths = TensorShardedExperts(root, {"inner": width}, CountedRanks(rank, 2))
        with cut_widths.local_widths(), cut_widths.running():
            outs.append(root(*given))
    assert "forward" not in module.__dict__
    assert all(module._parameters[name] is parameter for name, parameter in before.items())
    torch.testing.assert_close(outs[0] + outs[1], expected)


def test_planted_faults_fail_the_proof():
    module = GroupedExperts(4, WIDTH, 8)
    call = (rows_of(9, WIDTH), torch.tensor([4, 0, 3, 2])), {}
    root = Around(module)
    found = found_in(root, lambda: root(*call[0]), size=2)
    adapter, right = found.adapters["inner"], found.widths["inner"]
    assert not any(ExpertsProof(module, adapter, call, size, 2).why_not_equivalent(right) for size in (1, 2))
    wrong = WidthSharding(2, 8, {"up": even(1, 16), "down": even(2, 8)})  # gates on one rank, the rest on the other
    assert ExpertsProof(module, adapter, call, 2, 2).why_not_equivalent(wrong)
