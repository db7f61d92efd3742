"""Plans are cached between runs and proved again; no content of a file is trusted."""

import json
import os
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from lightning_hybrid.tensor.search import cache as cache_file
from lightning_hybrid.tensor.search.cache import FILE_NAME, PlanCache, to_json
from lightning_hybrid.tensor.search.model import ModelSearch
from lightning_hybrid.tensor.search.requests import Request, UnitRequests
from lightning_hybrid.tensor.search.uses import UnitCalls
from models.tensor_blocks import BLOCKS, BiasedAttention, Block, FusedAttention, GroupedQueries, tokens

NUM_PROOFS = 2  # runs of one proof, of a unit that does the same in all modes
NUM_OUTLIERS = 4  # further runs where the sequence is sharded


def found(folder, unit, args=(), *, keep_replicated=None, plan_requests=None, size=2, **options):
    """A plan, and how many were searched and read for it; then the file is written."""
    plans = PlanCache(folder)
    plan = plans.find(
        unit,
        args or (tokens(),),
        {},
        size,
        keep_replicated=keep_replicated or {},
        plan_requests=plan_requests or UnitRequests(),
        **options,
    )
    assert plans.save() is None
    return plan, (plans.num_searched, plans.num_read)


def without_costs(plan):
    return replace(plan, num_trials=0, seconds=0.0)


@pytest.mark.parametrize(
    ("name", "proofs"),
    [
        *(("merged heads", NUM_PROOFS), ("offsets", NUM_PROOFS), ("one key head", NUM_PROOFS), ("mlp", NUM_PROOFS)),
        ("encoder layer", NUM_PROOFS),  # torch's fast path, which it takes in eval mode, is off in trials
        ("group norm", 4),  # it does something else in eval mode
    ],
)
def test_second_run_only_proves(tmp_path, name, proofs):
    torch.manual_seed(0)
    unit, args = BLOCKS[name]()
    first, counts = found(tmp_path, unit, args)
    assert counts == (1, 0) and first.num_trials > proofs
    again, counts = found(tmp_path, BLOCKS[name]()[0], args)
    assert counts == (0, 1) and again.num_trials == proofs
    assert without_costs(again) == without_costs(first) and again.lines() == first.lines()


@pytest.mark.parametrize(
    ("options", "proofs"),
    [
        ({"sequence_parallel": "tensor"}, 2),  # also of calls whose sequence is not sharded
        ({"size": 1, "context": 2}, 1),
        ({"context": 2, "sequence_parallel": "tensor"}, 2),
    ],
)
def test_plans_with_positions_are_cached(tmp_path, options, proofs):
    by = "both" if len(options) == 2 and "sequence_parallel" in options else options.get("sequence_parallel", "context")
    first, counts = found(tmp_path, Block(FusedAttention()), **options)
    assert counts == (1, 0) and first.positions is not None and first.positions.by == by
    again, counts = found(tmp_path, Block(FusedAttention()), **options)
    assert counts == (0, 1) and again.num_trials == proofs * NUM_PROOFS + NUM_OUTLIERS
    assert without_costs(again) == without_costs(first)
    assert found(tmp_path, Block(FusedAttention()))[1] == (1, 0)


def test_changed_module_is_searched_again(tmp_path):
    found(tmp_path, GroupedQueries(2))
    unit = GroupedQueries(2)
    unit.head_dim_of_old = 8
    changes = [
        {"unit": GroupedQueries(2, norm=True)},
        {"unit": unit},
        {"unit": GroupedQueries(2), "args": (tokens(2, 6),)},
        {"unit": GroupedQueries(2), "keep_replicated": {"up.weight": "read by the step"}},
        {"unit": GroupedQueries(2), "plan_requests": UnitRequests("", {"up": Request("replicated", "")})},
    ]
    for change in changes:
        assert found(tmp_path, **change)[1] == (1, 0), change
        assert found(tmp_path, **change)[1] == (0, 1), change
    assert found(tmp_path, GroupedQueries(2))[1] == (0, 1)


def test_changed_code_is_searched_again(tmp_path):
    source = "class Unit(nn.Sequential):\n    def forward(self, x):\n        return {}\n"

    def unit_of(text):
        made = {"nn": nn, "__name__": "models"}
        exec(compile(text, "models.py", "exec"), made)
        return made["Unit"](nn.Linear(32, 8), nn.Linear(8, 32))

    texts = [source.format(text) for text in ("super().forward(x)", "self[1](self[0](x).tanh())")]
    for text in (*texts, "\n" + texts[0]):  # a plan contains line numbers
        assert found(tmp_path, unit_of(text))[1] == (1, 0)
        assert found(tmp_path, unit_of(text))[1] == (0, 1)


def spoil(folder, change):
    path = folder / FILE_NAME
    content = json.loads(path.read_text())
    [entry] = content["plans"].values()
    change(entry)
    path.write_text(json.dumps(content))


def test_wrong_cached_plan_is_not_used(tmp_path):
    expected, _ = found(tmp_path, BiasedAttention())

    def without_rules(entry):
        entry["plan"]["rules"] = []

    def other_pieces(entry):
        entry["plan"]["placements"]["q.weight"] = {"is": "Replicated"}

    def other_fields(entry):
        entry["plan"]["more"] = 1

    def other_type(entry):
        entry["plan"]["watched"] = "yes"

    def no_plan(entry):
        entry.pop("plan")

    for change in (without_rules, other_pieces, other_fields, other_type, no_plan):
        spoil(tmp_path, change)
        plan, counts = found(tmp_path, BiasedAttention())
        assert counts == (1, 0) and without_costs(plan) == without_costs(expected), change
    # Correct alone, but sharded where others read the full tensor.
    keep_replicated = {"q.weight": "used by several units"}
    found(tmp_path / "shared", BiasedAttention(), keep_replicated=keep_replicated)
    spoil(tmp_path / "shared", lambda entry: entry.update(plan=to_json(expected)))
    plan, counts = found(tmp_path / "shared", BiasedAttention(), keep_replicated=keep_replicated)
    assert counts == (1, 0) and plan.replicated_reasons["q.weight"] == "used by several units"


@pytest.mark.parametrize(
    "options", [{"sequence_parallel": "tensor"}, {"size": 1, "context": 2}, {"size": 2, "context": 2}]
)
def test_cached_plan_that_shards_the_sequence_of_other_calls_is_not_used(tmp_path, options):
    """Its proof would show nothing: the example would run with all positions."""
    expected, _ = found(tmp_path, Block(FusedAttention()), **options)
    assert expected.positions is not None
    spoil(tmp_path, lambda entry: entry["plan"]["positions"].update(num_dims=4))
    plan, counts = found(tmp_path, Block(FusedAttention()), **options)
    assert counts == (1, 0) and without_costs(plan) == without_costs(expected)


class MaskedAttention(FusedAttention):
    def forward(self, x, mask):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MaskedBlock(Block):
    def forward(self, x, mask):
        return x + self.mlp(self.ln_2(self.attn(self.ln_1(x), mask)))


def test_cached_plan_is_not_used_where_the_example_has_fewer_positions_than_ranks(tmp_path):
    """A mask that is known must not grow, so its number of positions remains that of the call."""
    with FakeTensorMode():
        fakes = torch.empty(2, 3, 32, requires_grad=True), torch.empty(3, 3, dtype=torch.bool)
    args = torch.randn(2, 3, 32, requires_grad=True), torch.ones(3, 3, dtype=torch.bool).tril()
    options = {"size": 4, "sequence_parallel": "tensor"}
    plan, counts = found(tmp_path, MaskedBlock(MaskedAttention()), fakes, **options)
    assert counts == (1, 0) and plan.positions is not None
    plan, counts = found(tmp_path, MaskedBlock(MaskedAttention()), args, **options)
    assert counts == (1, 0) and plan.positions is None


@pytest.mark.parametrize("content", [b"", b"{", b'{"plans": {"a', b"[]", b'{"plans": 3}', b"\xff\xfe\x00", b"null"])
def test_truncated_or_foreign_file_is_ignored(tmp_path, content):
    (tmp_path / FILE_NAME).write_bytes(content)
    assert found(tmp_path, FusedAttention())[1] == (1, 0)
    assert found(tmp_path, FusedAttention())[1] == (0, 1)


def test_unwritable_folder_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    plans = PlanCache(tmp_path / "file")
    plans.find(FusedAttention(), (tokens(),), {}, 2, keep_replicated={}, plan_requests=UnitRequests())
    unwritten = plans.save()
    assert unwritten is not None and "not written for the next run" in plans.summary(unwritten)


def test_killed_write_leaves_the_old_file(tmp_path, monkeypatch):
    found(tmp_path, FusedAttention())
    before = (tmp_path / FILE_NAME).read_bytes()

    def killed(*args):
        raise OSError("no space left")

    monkeypatch.setattr(cache_file.os, "replace", killed)
    plans = PlanCache(tmp_path)
    plans.find(GroupedQueries(2), (tokens(),), {}, 2, keep_replicated={}, plan_requests=UnitRequests())
    assert plans.save() == "OSError: no space left"
    assert (tmp_path / FILE_NAME).read_bytes() == before and os.listdir(tmp_path) == [FILE_NAME]


def test_equal_layers_share_a_plan_that_is_read_once(tmp_path):
    def run():
        root = nn.ModuleList([FusedAttention() for _ in range(3)])
        units = {f"{k}": unit for k, unit in enumerate(root)}
        calls = UnitCalls({fqn: ((tokens(),), {}) for fqn in units})
        plans = PlanCache(tmp_path)
        made = ModelSearch(root, units, calls, {}, 2, plans.find).plans()
        plans.save()
        return made, (plans.num_searched, plans.num_read)

    first, counts = run()
    assert counts == (1, 0)
    again, counts = run()
    assert counts == (0, 1) and sum(plan.num_trials for plan in again.values()) == NUM_PROOFS
    assert [without_costs(plan) for plan in again.values()] == [without_costs(plan) for plan in first.values()]
