"""Sequences sharded over ranks, between regions (sequence parallelism) or throughout (context parallelism)."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from harness import checkpoint_runs as checkpoint
from harness.fits import Run, check, fit, reference_of, refusal
from harness.live_storages import LiveStorages
from lightning_hybrid import Hybrid3DStrategy
from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.params.placement import shard_tensor
from lightning_hybrid.sequence.positions import SequenceSharding
from lightning_hybrid.tensor.collectives import GroupRanks
from lightning_hybrid.tensor.runtime.unit import ShardedUnit
from lightning_hybrid.tensor.search.unit import plan_unit
from models.wide import BertWide, EncoderWide, GPT2Wide, GPT2WideDropout, LlamaWide, NanoGPTWide, T5Wide, ViTWide


def name_of(run):
    case = run.case if isinstance(run.case, str) else run.case.__name__
    sequence = "-sequence" * run.sequence
    return f"{case}-pp{run.pp}-dp{run.dp}-tp{run.tp}-cp{run.cp}-m{run.microbatches}{sequence}"


def slow(*runs):
    """Slow runs: their layers are sharded like those of others."""
    return [pytest.param(run, marks=pytest.mark.slow) for run in runs]


SEQUENCE = [
    *slow(Run("GPT2", tp=2, microbatches=1, sequence=True)),
    Run("Llama", pp=2, tp=2, sequence=True),
    *slow(Run("Encoder", tp=2, sequence=True), Run("Encoder", pp=2, tp=2, sequence=True)),
    *slow(Run("T5", tp=2, sequence=True), Run("Bert", tp=2, sequence=True), Run("ViT", dp=2, tp=2, sequence=True)),
]
CONTEXT = [
    Run("GPT2", cp=2, microbatches=1),
    Run("Encoder", cp=2, trainer={"gradient_clip_val": 0.05}),
    *slow(Run("Encoder", pp=2, cp=2, trainer={"gradient_clip_val": 0.05})),
    *slow(Run("Llama", pp=2, cp=2), Run("T5", cp=2), Run("Bert", cp=2), Run("ViT", dp=2, cp=2)),
]


FOUR = {"tp": 2, "cp": 2}
BOTH = [
    *slow(Run(GPT2Wide, **FOUR, validate=True, trainer={"gradient_clip_val": 0.05})),  # as LlamaWide below
    *slow(Run(LlamaWide, **FOUR, trainer={"accumulate_grad_batches": 2}, strategy={"recompute": "full"})),
    *slow(Run(EncoderWide, **FOUR, microbatches=1)),
    *slow(Run(BertWide, **FOUR), Run(T5Wide, **FOUR), Run(ViTWide, **FOUR), Run(NanoGPTWide, **FOUR)),
    *slow(Run(GPT2Wide, pp=2, **FOUR), Run(LlamaWide, pp=2, **FOUR), Run(EncoderWide, pp=2, **FOUR)),
    *slow(Run(BertWide, dp=2, **FOUR), Run(LlamaWide, dp=2, **FOUR, strategy={"zero_stage": 1})),
]
ALL = [
    *slow(Run(GPT2Wide, **FOUR, sequence=True, validate=True, trainer={"gradient_clip_val": 0.05})),
    Run(LlamaWide, **FOUR, sequence=True, trainer={"accumulate_grad_batches": 2}, strategy={"recompute": "full"}),
    *slow(Run(EncoderWide, **FOUR, sequence=True, microbatches=1), Run(BertWide, **FOUR, sequence=True)),
    *slow(Run(T5Wide, **FOUR, sequence=True), Run(ViTWide, **FOUR, sequence=True)),
    *slow(Run(NanoGPTWide, **FOUR, sequence=True), Run(GPT2Wide, pp=2, **FOUR, sequence=True)),
    *slow(Run(LlamaWide, dp=2, **FOUR, sequence=True, strategy={"zero_stage": 1})),
]


@pytest.mark.parametrize("run", [*SEQUENCE, *CONTEXT, *BOTH, *ALL], ids=name_of)
def test_parity(worlds, run):
    ranks, _ = check(worlds, run)
    layers = {fqn: plan for fqn, plan in ranks[0].plans.items() if fqn.rpartition(".")[2].isdecimal()}
    assert layers
    by = "tensor" if run.cp == 1 else "both" if run.sequence else "context"
    for plan in layers.values():
        assert plan.positions is not None and plan.positions.by == by, plan.lines()


@pytest.mark.slow
@pytest.mark.parametrize("is_folder", [False, True])
def test_checkpoint_is_interchangeable_with_other_layouts(worlds, tmp_path, is_folder):
    four = checkpoint.Layout(1, tp=2, cp=2, options=(("save_distributed_checkpoint", is_folder),))
    others = [checkpoint.PP1, replace(checkpoint.TP2, options=four.options)]
    [(expected, steps)] = worlds.run(1, checkpoint.train, "GPT2Wide", checkpoint.PLAIN, 2)
    for saved, read in ((four, [four, *others]), (others[1], [four])):
        path = str(tmp_path / f"{saved.cp}.ckpt")
        worlds.run(saved.world_size, checkpoint.train, "GPT2Wide", saved, 1, None, path)
        for layout in read:
            for state, reached in worlds.run(layout.world_size, checkpoint.train, "GPT2Wide", layout, 2, path):
                assert reached == steps == 4, layout
                checkpoint.assert_same_state(state, expected)


def count_exchanges(run):
    """How often positions are gathered, scattered and exchanged in a step, and gradients of parameters summed.

    Of the second step: layers are proved again in the first.
    """
    seen, steps = Counter(), []

    class Counts(Callback):
        recorded = steps

        def on_train_batch_start(self, trainer, *_):
            seen.clear()

        def on_train_batch_end(self, trainer, *_):
            steps.append(dict(seen))

    def counted(name, original):
        def method(self, *args):
            seen[name] += 1
            return original(self, *args)

        return method

    with pytest.MonkeyPatch.context() as patch:
        for kind, name in ((SequenceSharding, "gathered"), (GroupRanks, "exchange"), (GroupRanks, "all_reduce")):
            patch.setattr(kind, name, counted(name, getattr(kind, name)))
        return fit(replace(run, callback=Counts)).extra[1:]


def test_all_reduce_becomes_all_gather_and_reduce_scatter(worlds):
    """Four blocks with an attention and an MLP; blocks pass on sharded positions."""
    regions = 4 * 2
    for steps in worlds.run(2, count_exchanges, Run("GPT2", tp=2, microbatches=1, sequence=True)):
        # Gathered at the input and after the last block; backward: scattered values, values saved as shards, and
        # the gradient of the first block's input. The sums are of full parameters, one for each block, and three
        # of what is cut by vocabulary: a lookup, the targets' logits, what enters the head.
        forward, backward = regions + 1, 2 * regions + 1
        assert steps == [{"gathered": forward + backward, "exchange": 2 * regions, "all_reduce": 4 + 3}]


@pytest.mark.parametrize(
    ("run", "sums"),
    [
        (Run("GPT2", cp=2, microbatches=1), 4),
        # Two regions of four blocks, forward and backward, and three of what is cut by vocabulary, as above.
        pytest.param(Run(GPT2Wide, tp=2, cp=2, microbatches=1), 4 + 4 * 2 * 2 + 3, marks=pytest.mark.slow),
    ],
    ids=["context", "both"],
)
def test_context_ranks_exchange_positions_for_heads(worlds, run, sums):
    """Four attentions: there (queries, keys and values in one) and back, and the same backward."""
    for steps in worlds.run(run.world_size, count_exchanges, run):
        assert steps == [{"exchange": 4 * 2 * 2, "gathered": 2, "all_reduce": sums}]


@pytest.mark.slow
def test_context_rank_positions_are_sharded_again(worlds):
    """Both of these, nested; no sums over tensor ranks remain but of full parameters."""
    run = Run(GPT2Wide, **FOUR, microbatches=1, sequence=True)
    for steps in worlds.run(4, count_exchanges, run):
        regions, attentions = 4 * 2, 4
        # The unit's result and the gradient of its input are gathered over both; the rest over tensor ranks.
        assert (
            steps
            == [
                {
                    "gathered": 3 * regions + 2 * 2,
                    "exchange": 2 * regions + 2 * 2 * attentions,
                    "all_reduce": 2 * 4 + 3,
                }
            ]
            * 2
        )


class Block(torch.nn.Module):
    def __init__(self, width=16, heads=2):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.attn = torch.nn.MultiheadAttention(width, heads, batch_first=True, dropout=0.1)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 3 * width), torch.nn.ReLU(), torch.nn.Linear(3 * width, width)
        )
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.dropout(self.attn(h, h, h, need_weights=False)[0])
        return x + self.dropout(self.mlp(self.norm2(x)))


SHARDED = [{"size": 2, "sequence_parallel": "tensor"}, {"size": 1, "context": 2}]
BESIDE = {"size": 2, "context": 2}
TWICE = {**BESIDE, "sequence_parallel": "tensor"}


def runner_of(unit, args, size, **options):
    """The unit on the ranks of a world; the first of them plans it, as in a run."""
    box = [plan_unit(unit, args, {}, size, **options) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    [plan] = box
    layout = ParallelLayout(tensor_parallel_size=size, context_parallel_size=options.get("context", 1))
    mesh = Mesh.build(layout, "cpu")
    parameters = unit.named_parameters()
    local = {
        n: shard_tensor(p.detach(), plan.placements[n], mesh.rank_in("tp"), size).requires_grad_()
        for n, p in parameters
    }
    return ShardedUnit(unit, plan, mesh.group("tp"), context=mesh.group("cp"), tensors=lambda: local)


def saved_values(layouts):
    """How many saved values have all positions, and how many those of a context rank."""
    torch.manual_seed(0)
    unit, x = Block(heads=4), torch.randn(2, 32, 16, requires_grad=True)
    found = []
    for options in layouts:
        runner = runner_of(unit, (x,), **options)
        with LiveStorages() as live:
            out = runner.run_sharded(x)
        size = x.untyped_storage().nbytes()
        found.append((live.least(size), live.least(size // 2)))
        out.sum().backward()
    return found


def test_no_full_sequence_is_saved_for_the_backward(worlds):
    """Except the unit's input and result; otherwise norms, dropouts and residuals save more."""
    for (tensor, _), (sequence, _), (context, _) in worlds.run(2, saved_values, [{"size": 2}, *SHARDED]):
        assert sequence == context == 2 and tensor >= 6
    for (beside, halves), (twice, own) in worlds.run(4, saved_values, [BESIDE, TWICE]):
        assert beside == twice == 2 and own <= 1 < 6 <= halves


def odd_lengths(layouts):
    """A unit planned at one length runs at others, also with fewer positions than ranks."""
    torch.manual_seed(0)
    unit = Block(heads=4).double().eval()
    for options in layouts:
        runner = runner_of(unit, (torch.randn(2, 8, 16, dtype=torch.float64),), **options)
        for shape in ((3, 9, 16), (3, 2, 16), (3, 1, 16), (7, 16)):  # the last one without a batch
            x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
            expected = unit(x)
            [wanted] = torch.autograd.grad(expected.sin().sum(), x)
            out = runner.run_sharded(x)
            [found] = torch.autograd.grad(out.sin().sum(), x)
            torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_sequences_of_any_length(worlds):
    worlds.run(2, odd_lengths, SHARDED)
    worlds.run(4, odd_lengths, [BESIDE, TWICE])


def dropped(options):
    """A rank's dropout masks inside of a region and after it, its result, and the gradient of the input."""
    torch.manual_seed(0)
    unit = dropping_block()
    x = torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True)
    runner, seen = runner_of(unit, (x,), **options), []
    for module in (unit.mlp[2], unit.dropout):
        module.register_forward_hook(lambda _, args, out: seen.append(torch.where(args[0] == 0, 1, out / args[0])))
    torch.manual_seed(1)
    out = runner.run_sharded(x)
    [grad] = torch.autograd.grad(out.square().sum(), x)
    return [mask.detach() for mask in seen], out.detach(), grad


def dropping_block():
    unit = Block(heads=4).double()
    unit.attn.dropout = 0.0
    unit.mlp.insert(2, torch.nn.Dropout(0.5))
    unit.mlp[1] = torch.nn.Tanh()
    unit.dropout.p = 0.5
    return unit


@pytest.mark.parametrize(
    ("options", "local"),
    [pytest.param(BESIDE, 4, id="context", marks=pytest.mark.slow), pytest.param(TWICE, 2, id="all")],
)
def test_each_rank_drops_local_features_in_regions_and_local_positions_after(worlds, options, local):
    """Ranks are, in order: two tensor ranks of one context rank, and those of the other; put together, what they drop
    is what one process drops, and so are results and gradients."""
    ranks = worlds.run(4, dropped, options)
    for (attention, region, behind), _, _ in ranks:
        assert attention.shape == behind.shape == (2, local, 16) and region.shape == (2, 4, 24)
    full = []
    for place, (first, second, third, fourth) in enumerate(zip(*(masks for masks, _, _ in ranks), strict=True)):
        assert not torch.equal(first, third)
        if place == 1:
            assert not torch.equal(first, second)
            full.append(torch.cat([torch.cat([first, second], -1), torch.cat([third, fourth], -1)], 1))
        elif local == 4:
            assert torch.equal(first, second) and torch.equal(third, fourth)
            full.append(torch.cat([first, third], 1))
        else:
            assert not torch.equal(first, second)
            full.append(torch.cat([first, second, third, fourth], 1))
    torch.manual_seed(0)
    unit = dropping_block()
    x = torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True)
    order = iter(full)
    for module in (unit.mlp[2], unit.dropout):
        module.forward = lambda value: value * next(order)
    expected = unit(x)
    [wanted] = torch.autograd.grad(expected.square().sum(), x)
    for _, out, grad in ranks:
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(grad, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "run",
    [
        Run(GPT2WideDropout, tp=2, sequence=True, num_batches=1),
        *slow(Run(GPT2WideDropout, **FOUR, num_batches=1), Run(GPT2WideDropout, **FOUR, sequence=True, num_batches=1)),
    ],
    ids=name_of,
)
def test_dropout_of_local_positions_differs_and_repeats(worlds, run):
    first, second = worlds.run(run.world_size, fit, run), worlds.run(run.world_size, fit, run)
    without = reference_of(worlds, replace(run, case=GPT2Wide))
    for rank in first[1:]:  # ranks drop common values equally
        assert all(torch.equal(value, first[0].state[name]) for name, value in rank.state.items())
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.losses, other.losses, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(one.losses, first[0].losses, strict=True))
    assert not torch.equal(first[0].losses[0], without.losses[0]), "dropout must be on"


def test_invalid_requests():
    with pytest.raises(ValueError, match=r"sequence_parallel=True shards positions .* tensor_parallel_size='auto'"):
        Hybrid3DStrategy(sequence_parallel=True)


STRICT = {"strict_layout": True}


def test_module_without_a_sequence_is_refused_if_strict(worlds):
    for message in worlds.run(2, refusal, fit, Run("BatchNorms", cp=2, microbatches=1, strategy=STRICT)):
        assert "context_parallel_size=2 shards the positions of no layer" in message
