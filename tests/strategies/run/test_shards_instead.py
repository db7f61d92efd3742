"""What is said of a step for which ranks hold shards advises nothing worse than shards."""

from types import SimpleNamespace

import pytest
from torch import nn

from lightning_hybrid.errors import ControlFlowError, LayoutError, StepError
from lightning_hybrid.layout import ParallelLayout
from lightning_hybrid.step.standins.absent_arrays_and_lists import content_message
from lightning_hybrid.step.standins.absent_numbers import branch_message
from lightning_hybrid.strategies.run.fall_back_to_zero3_shards import Zero3Fallback
from lightning_hybrid.strategies.run.step_contexts import _advise

REASONS = {
    branch_message("net.py:3"): ", use torch.where",
    content_message("net.py:3", "numpy"): "(it is filled in after the step)",
    "net.py:3: some are not; to have your code decide instead, set pipeline_parallel_size=1": "some are not",
    "it is recurrent; set pipeline_parallel_size=1": "it is recurrent",
    "net.py:3: backward; add the term, or set pipeline_parallel_size=1 and num_microbatches=1": "; add the term",
    "net.py:3: reads it; set num_microbatches=1, apply transforms, or set pipeline_parallel_size=1": "apply transforms",
    "it has 2 units; set pipeline_parallel_size * stages_per_rank to 2 or less": "stages_per_rank to 2 or less",
}
OPTIONS = [{}, {"microbatches": 4}, {"zero_stage": 3, "stages_per_rank": 2, "microbatch_weight": len}]
DEFAULTS = {"zero_stage": 0, "stages_per_rank": 1, "microbatches": None, "microbatch_weight": None}


class Mesh:
    def size(self, axis):
        return 2

    def with_shards_over(self, axes):
        return self


def fallback_of(reason, *, strict):
    return Zero3Fallback(SimpleNamespace(automatic_optimization=True), Mesh(), ["pp"], reason, strict=strict)


@pytest.mark.parametrize("tensor_ranks", [1, 2])
@pytest.mark.parametrize("options", OPTIONS, ids=list)
@pytest.mark.parametrize(("reason", "end"), REASONS.items())
def test_no_stages_are_not_advised_where_shards_run(reason, end, options, tensor_ranks):
    error = (ControlFlowError if "branches" in reason else StepError)(reason)
    layout = ParallelLayout(pipeline_parallel_size=2, tensor_parallel_size=tensor_ranks)
    _advise(error, layout, SimpleNamespace(**DEFAULTS | options))
    assert ("pipeline_parallel_size=1" in str(error)) == ("pipeline_parallel_size=1" in reason)
    fallback = fallback_of(str(error), strict=False)
    assert fallback.line.startswith("sharded instead of pipelined: ") and fallback.line.endswith(end), fallback.line
    with pytest.raises(LayoutError) as caught:
        fallback_of(str(error), strict=True).announce()
    assert f"{end}; set strict_layout=False to have these 2 ranks hold shards" in str(caught.value)


def test_module_of_the_step_is_named():
    module = nn.Linear(1, 1)
    with pytest.raises(LayoutError, match=r"Linear\.training_step cannot be run under pipeline_parallel_size=2: why;"):
        Zero3Fallback(module, Mesh(), ["pp"], "why", strict=True).announce()
