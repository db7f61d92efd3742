"""Faults planted in the package, or in what it was recorded to do, are found by the rules."""

from dataclasses import replace

import pytest

from harness.fits import Run, fit
from harness.nccl import judges
from harness.nccl.recording import RecordedWorlds
from harness.nccl.trace import Launch, Mark, Trace
from lightning_hybrid.pipeline.runtime import transport
from lightning_hybrid.replicate.bucket import GradientBucket

REPLICAS = Run("GPT2", dp=2, num_batches=3)
STAGES = Run("GPT2", pp=2, num_batches=3)


def recorded(worlds, run, how=fit):
    found = RecordedWorlds(worlds, how)
    return found.run(run.world_size, how, run), found.traces


def fit_without_waits(run):
    """Received values are read at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "_wait", lambda works, tensors, values: tensors)
        try:
            return fit(run).losses
        except Exception as error:
            return error


def fit_with_items(run):
    """A line of the package reads each bucket as it is filled."""
    fill = GradientBucket._fill
    line = compile("bucket[0].item()", fill.__code__.co_filename, "exec")

    def fill_and_read(self, *args):
        fill(self, *args)
        exec(line, {"bucket": self.flat})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientBucket, "_fill", fill_and_read)
        return fit(run)


def test_a_wait_that_is_left_out_is_found(worlds):
    ranks, traces = recorded(worlds, STAGES, fit_without_waits)
    assert any("dropped" in text for text in judges.violations(traces))
    assert not all(isinstance(losses, list) and all(loss.isfinite() for loss in losses) for losses in ranks)


def test_a_read_in_the_fill_of_a_bucket_is_found(worlds):
    (_, traces), (_, planted) = recorded(worlds, REPLICAS), recorded(worlds, REPLICAS, fit_with_items)
    assert judges.more_syncs(judges.host_syncs(planted), judges.host_syncs(traces))


def changed(trace, kind, change):
    """A copy of a trace in which the last launch of a kind is another."""
    launches = [(place, e) for place, e in enumerate(trace.events) if isinstance(e, Launch) and len(e.members) > 1]
    place, launch = [(place, e) for place, e in launches if e.kind == kind][-1]
    events = list(trace.events)
    events[place] = change(launch)
    return Trace(trace.rank, events)


def test_changes_of_one_rank_are_found(worlds):
    _, (first, second) = recorded(worlds, STAGES)
    assert judges.judge([first, second]) == {}
    longer = changed(second, "allgather", lambda launch: replace(launch, sizes=(launch.sizes[0] + 1,)))
    assert judges.disagreements([first, longer])
    other_root = changed(second, "broadcast", lambda launch: replace(launch, root=1 - launch.root))
    assert judges.disagreements([first, other_root])
    turned = changed(second, "send", lambda launch: replace(launch, kind="recv"))
    assert judges.disagreements([first, turned])
    unmatched = changed(second, "send", lambda launch: Mark("left out"))
    assert judges.disagreements([first, unmatched])
