"""What is said of a step for which ranks hold shards advises nothing worse than shards."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.trainer_runs import lines_of_lightning, trainer_of
from lightning_hybrid.errors import WITHOUT_STAGES, ControlFlowError, LayoutError, StepError
from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.run.contexts import _advise
from lightning_hybrid.step.standins.numbers import branch_message, content_message
from lightning_hybrid.strategies.state.layout_changes import Fallback
from models.tiny import Tiny, loader

REASONS = {
    branch_message("net.py:3"): ", use torch.where",
    content_message("net.py:3", "numpy"): "(it is filled in after the step)",
    f"net.py:3: some are not. To let your code handle the batch, {WITHOUT_STAGES}": "some are not",
    f"it is recurrent; {WITHOUT_STAGES}": "it is recurrent",
    f"net.py:3: backward; add the term, or {WITHOUT_STAGES}": "; add the term",
    f"net.py:3: reads it; set num_microbatches=1, apply transforms, or {WITHOUT_STAGES}": "apply transforms",
    "it has 2 units; set pipeline_parallel_size * stages_per_rank to 2 or less": "stages_per_rank to 2 or less",
}


class Mesh:
    def size(self, axis):
        return 2

    def with_shards_over(self, axes):
        return self


def fallback_of(reason, *, strict, may_retry=True):
    return Fallback(
        SimpleNamespace(automatic_optimization=True), Mesh(), ["pp"], reason, strict=strict, may_retry=may_retry
    )


@pytest.mark.parametrize(("reason", "end"), REASONS.items())
def test_no_stages_are_not_advised_where_shards_run(reason, end):
    fallback = fallback_of(reason, strict=False)
    assert fallback.line.startswith("sharded instead of pipelined: ") and fallback.line.endswith(end), fallback.line
    with pytest.raises(LayoutError) as caught:
        fallback_of(reason, strict=True).announce()
    assert f"{end}; set strict_layout=False to have these 2 ranks hold shards" in str(caught.value)


@pytest.mark.parametrize("may_retry", [False, True])
def test_reason_is_given_once(may_retry):
    fallback = fallback_of("StepError: why", strict=False, may_retry=may_retry)
    with pytest.warns(UserWarning, match="sharded instead of pipelined") as caught:
        fallback.announce()
    assert [fallback.line, str(caught[0].message)][may_retry].count("StepError: why") == 0
    assert [fallback.line, str(caught[0].message)][not may_retry].count("StepError: why") == 1


@pytest.mark.parametrize("reason", [reason for reason in REASONS if WITHOUT_STAGES in reason])
def test_sizes_are_advised_where_there_are_no_stages(reason):
    error = (ControlFlowError if "branches" in reason else StepError)(reason)
    _advise(error, ParallelLayout(pipeline_parallel_size=2, tensor_parallel_size=2))
    assert str(error) == reason
    _advise(error, ParallelLayout(tensor_parallel_size=2, context_parallel_size=2))
    assert str(error).endswith("set tensor_parallel_size=1 and context_parallel_size=1")


def test_module_of_the_step_is_named():
    module = nn.Linear(1, 1)
    with pytest.raises(LayoutError, match=r"Linear\.training_step cannot be run under pipeline_parallel_size=2: why;"):
        Fallback(module, Mesh(), ["pp"], "why", strict=True).announce()


def test_an_error_of_the_step_is_announced_once_the_step_has_run():
    fallback = fallback_of("RuntimeError: mat1 and mat2", strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fallback.line == ""
        fallback.announce_once_run(None)
    with pytest.warns(UserWarning, match="sharded instead of pipelined: RuntimeError: mat1 and mat2"):
        fallback.has_run()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fallback.has_run()


class Mistaken(Tiny):
    """Its step fails from some batch on, with the message of its kind."""

    def __init__(self, first_batch):
        super().__init__()
        self.first_batch = first_batch

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if len(batch["x"]) in (1, 3) or self.first_batch == 0:
            loss = loss + (batch["x"] @ torch.ones(3, 3, dtype=torch.float64)).sum()
        return loss


class FailsRecordedOnly(Tiny):
    """Runs on real values alone, with an error that is none of this package's."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if type(loss.detach()) is not torch.Tensor:
            raise RuntimeError("not on stand-ins")
        return loss


def run_with(module, layout, samples, *args):
    """What a run tells on this rank, and its error."""
    trainer = trainer_of(2, 1, strategy_options={"num_microbatches": 2, **layout})
    with warnings.catch_warnings(record=True) as caught, lines_of_lightning() as lines:
        warnings.simplefilter("always")
        try:
            trainer.fit(module(*args), loader(4, samples))
        except RuntimeError as error:
            lines.append(f"raised: {error}")
    return "\n".join([*lines, *(str(each.message) for each in caught)])


@pytest.mark.parametrize("axis", ["pipeline_parallel_size", "tensor_parallel_size"])
@pytest.mark.parametrize(("first_batch", "samples"), [(0, 16), (1, 15)])
def test_a_mistake_in_the_step_is_raised_as_itself(worlds, axis, first_batch, samples):
    for told in worlds.run(2, run_with, Mistaken, {axis: 2}, samples, first_batch):
        assert told.count("raised: mat1 and mat2 shapes cannot be multiplied") == 1, told
        assert "sharded instead of" not in told, told


@pytest.mark.parametrize("samples", [4, 16])
def test_a_step_that_runs_unrecorded_alone_is_warned_of(worlds, samples):
    told, _ = worlds.run(2, run_with, FailsRecordedOnly, {"pipeline_parallel_size": 2}, samples)
    assert told.count("sharded instead of pipelined: RuntimeError: not on stand-ins") == 1, told
