"""Which messages run while their rank computes, on a host that is infinitely fast: a share for each line.

A judge says of each launch whether a matrix product or attention comes before the stream waits for it.
"""

import pytest
import torch
import torch.distributed as dist

from harness.fits import Run, assert_bitwise_equal, check, fit
from harness.nccl import judges
from harness.nccl.recording import RecordedWorlds, recorded
from harness.nccl.trace import Launch
from lightning_hybrid.replicate.reducer import GradientReducer
from lightning_hybrid.sequence.positions import SequenceShard, SequenceSharding, leave, local_positions
from lightning_hybrid.tensor.collectives import GroupRanks
from models.wide import GPT2OneHead, GPT2Wide, LlamaWide, T5Wide

BY_LAYER = {"zero_stage": 3, "reshard_after_forward": True}
SUM, SHIFT = "tensor/collectives.py start_all_reduce", "tensor/collectives.py shift"
GATHER, REDUCE = "zero/group.py _send", "zero/messages.py launch"
REGATHER = "collectives/tensors.py all_gather_single"  # among other gathers of tensor ranks
BUCKET = "replicate/bucket.py launch"
SEND, RECEIVE = "pipeline/runtime/transport.py _start", "pipeline/runtime/transport.py _post"


def traces_of(worlds, run, how=fit):
    recorded = RecordedWorlds(worlds, how)
    recorded.run(run.world_size, how, run, timeout=240)
    return recorded.traces


def fit_with_small_buckets(run):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(GradientReducer.__init__.__kwdefaults__, "bucket_bytes", 4000)
        patch.setitem(GradientReducer.__init__.__kwdefaults__, "first_bucket_bytes", 4000)
        return fit(run)


def fit_without_prefetch(run):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SequenceShard, "prefetch", lambda self: None)
        return fit(run)


# By layout: lines, and the share of their messages that must run under a product. The others have nothing to hide
# under: gradients that return in a ring of two, the first microbatch of a stage, the last bucket, a pass's first layer.
LAYOUTS = {
    "tp2": (Run(GPT2Wide, tp=2, num_batches=3), fit, {SUM: 1.0}),
    "sequence": (Run(GPT2Wide, tp=2, sequence=True, num_batches=3), fit, {REGATHER: 1 / 4}),
    "ring": (Run(GPT2OneHead, cp=2, num_batches=3), fit, {SHIFT: 2 / 3}),
    "zero3": (Run("GPT2", dp=2, num_batches=5, strategy=BY_LAYER), fit, {GATHER: 0.6, REDUCE: 0.3}),
    "dp2": (Run("GPT2", dp=2, num_batches=3), fit_with_small_buckets, {BUCKET: 3 / 4}),
    "pp2": (Run("GPT2", pp=2, num_batches=3, microbatches=4), fit, {SEND: 1 / 2, RECEIVE: 1 / 2}),
    "zero_bubble": (
        Run(LlamaWide, pp=2, tp=2, num_batches=3, strategy={"schedule": "zero_bubble"}),
        fit,
        {SUM: 1.0},
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_messages_run_under_products(worlds, name):
    run, how, wanted = LAYOUTS[name]
    traces = traces_of(worlds, run, how)
    found = judges.overlaps(traces)
    print(name, found)
    assert {line: share for line, share in wanted.items() if found.get(line, 0) < share} == {}, found
    assert not [line for line in judges.blocked(traces, "replicate/") if not line.startswith("replicate/buffers.py")]
    assert not judges.blocked(traces, "tensor/")


def test_sums_of_positions_with_biases_stay_sharded(worlds):
    for trace in traces_of(worlds, Run(GPT2Wide, tp=2, sequence=True, num_batches=3)):
        kinds = [event.kind for event in trace.steps[-1] if isinstance(event, Launch)]
        assert kinds.count("reduce_scatter") == 2 * 4 * 4  # of microbatches, layers, and the regions of both passes


@pytest.mark.parametrize("length", [4, 5])
@pytest.mark.world(2)
def test_biases_are_added_in_place_to_sums_of_positions(length):
    with recorded():
        addend = torch.arange(3.0 * length).view(length, 3).requires_grad_()
        sharding = SequenceSharding(0, length, GroupRanks(dist.group.WORLD))
        for shard, factor in ((leave, 2), (local_positions, 1)):
            addend.grad = None
            local = shard(addend, sharding)
            local.add_(torch.ones(3)).sum().backward()
            expected = (factor * addend.detach() + 1).split(sharding.lengths)[dist.get_rank()]
            assert torch.equal(local, expected) and torch.equal(addend.grad, torch.ones(length, 3))


@pytest.mark.parametrize("case", [GPT2Wide, pytest.param(T5Wide, marks=pytest.mark.slow)])
def test_positions_that_are_gathered_early_change_no_bit(worlds, case):
    early, late = (RecordedWorlds(worlds, how) for how in (fit, fit_without_prefetch))
    run = Run(case, tp=2, sequence=True, num_batches=3)
    ranks, _ = check(early, run)
    assert judges.judge(early.traces) == {}
    assert_bitwise_equal(ranks, late.run(2, fit_without_prefetch, run))
    gathers = [judges.overlaps(worlds.traces)[REGATHER] for worlds in (early, late)]
    assert gathers[0] > 1 / 4 > gathers[1]
