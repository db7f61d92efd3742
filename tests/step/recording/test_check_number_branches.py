"""Branches on numbers of the model: refused, also where Python does not report them."""

import math
import time

import pytest
import torch

from harness.one_process_pipeline import record_and_cut
from lightning_hybrid.errors import ControlFlowError
from models.cases import batch_of, make
from models.hand_written import Layers


def record(module):
    """The recorded graph of a module's step."""
    batch = batch_of(module.kind, range(4))
    return record_and_cut(module, lambda: module.loss(batch), 2).assignment.graph


class Branches(Layers):
    """What a step may do with a number of the model."""

    use = None

    def loss(self, batch):
        loss = super().loss(batch)
        return self.use(loss)


def branch(loss):
    return loss * 2 if loss > 1 else loss


def branch_on_item(loss):
    return loss * 2 if loss.item() > 1 else loss


def as_size(loss):
    return loss + torch.zeros(int(loss), dtype=loss.dtype).sum()


def as_array(loss):
    return loss * float(loss.detach().numpy() > 1)


def branch_on_float(loss):
    return loss * 2 if float(loss) > 1 else loss


def branch_on_float_of_item(loss):
    return loss * 2 if max(float(loss.item()), 0.0) > 1 else loss


_USES = [branch, branch_on_item, as_size, as_array, branch_on_float, branch_on_float_of_item]


@pytest.mark.parametrize("use", _USES, ids=lambda use: use.__name__)
def test_control_flow_on_the_model_is_refused_with_its_line(use):
    module = make(Branches)
    module.use = use
    with pytest.raises(
        ControlFlowError, match=rf"{__file__}:{use.__code__.co_firstlineno + 1}: .*pipeline_parallel_size=1"
    ):
        record(module)


def keep_a_comparison(module, loss):
    module.kept = float(loss) > 1


def keep_the_larger(module, loss):
    module.kept = max(0.5, float(loss))


def keep_a_text(module, loss):
    module.kept = f"{loss.item():.2f}"


def keep_an_integer(module, loss):
    module.kept = int(loss)


def keep_what_numpy_makes_of_it(module, loss):
    module.kept = loss.detach().numpy() * 2


_DECISIONS = [keep_a_comparison, keep_the_larger, keep_a_text, keep_an_integer, keep_what_numpy_makes_of_it]


@pytest.mark.parametrize("keep", _DECISIONS, ids=lambda keep: keep.__name__)
def test_a_decision_stored_for_later_is_control_flow_too(keep):
    class Deciding(Layers):
        kept = None

        def loss(self, batch):
            loss = super().loss(batch)
            keep(self, loss)
            return loss

    with pytest.raises(ControlFlowError, match=rf"{__file__}:\d+: (the step branches|.numpy\(\) reads)"):
        record(make(Deciding))


def test_a_time_that_is_stored_is_no_decision():
    class Timed(Layers):
        def loss(self, batch):
            loss = super().loss(batch)
            self.started, self.last = time.perf_counter(), float(loss)
            return loss

    assert record(make(Timed)).loss is not None


def test_reads_for_side_effects_are_allowed():
    def read(loss):
        assert math.exp(float(loss)) != 2.0 and (float(loss) != float(loss) or math.sqrt(float(loss)) > 0)
        text = f"{loss.item():.3f} {loss} {loss:.2f}"
        assert len(text) > 0 and loss.item() * 2 + 1 is not None
        return loss

    module = make(Branches)
    module.use = read
    assert record(module).loss is not None
