"""Stage replay matches the plain step for every kind of step that users write."""

import pytest
import torch
from torch import nn

from harness.one_process_pipeline import assert_same_gradients, keyed, pipeline, record_and_cut, reference
from lightning_hybrid.errors import PartitionError, StepChanged, StepError
from lightning_hybrid.step.standins.tensors import make_absent
from models.cases import HAND_WRITTEN, HUGGING_FACE, batch_of, make
from models.hand_written import Dropouts, Layers
from models.hugging_face import GPT2Dropout

# What must be shared because several stages read it; of all other cases nothing may be.
SHARED = {
    "Tied": {"embedding.weight"},
    "GPT2": {"model.transformer.wte.weight"},
    "T5": {"model.shared.weight"},
    "Bert": {"model.bert.embeddings.word_embeddings.weight"},
    "ReturnsInputs": {"identity.unused.weight", "identity.unused.bias"},  # called after every layer
}


def step_on(module, batch):
    return lambda: module.loss(batch)


def assert_stages(outcome, case, num_stages):
    """No stage is empty, each sends something, and nothing is tied unnecessarily."""
    assignment = outcome.assignment
    assert assignment.num_stages == num_stages
    for stage, units in enumerate(outcome.units):
        local = [name for name, stages in assignment.holders.items() if stage in stages]
        assert local, f"stage {stage} holds no parameter; units by stage: {outcome.units}"
        assert units or case.__name__ == "GlueParameters"
    assert {source for source, _ in assignment.portals} == set(range(num_stages - 1))
    assert assignment.loss_stage == num_stages - 1
    assert set(assignment.shared) <= SHARED.get(case.__name__, set())


@pytest.mark.sampled
@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("case", [Layers, *HAND_WRITTEN, *HUGGING_FACE], ids=lambda case: case.__name__)
def test_parity(case, num_stages):
    module = make(case)
    step = step_on(module, batch_of(case.kind, range(4)))
    buffers = {name: b.clone() for name, b in module.named_buffers()}
    expected = reference(module, step)
    after = {name: b.clone() for name, b in module.named_buffers()}
    for name, b in module.named_buffers():
        b.copy_(buffers[name])
    got = pipeline(module, step, num_stages)
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-10, atol=0)
    assert_same_gradients(got.grads, expected.grads)
    assert_stages(got, case, num_stages)
    for name, b in module.named_buffers():
        torch.testing.assert_close(
            b, after[name], rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("case", [Layers, *HUGGING_FACE], ids=lambda case: case.__name__)
def test_parity_in_float32(case):
    module = make(case, torch.float32)
    step = step_on(module, batch_of(case.kind, range(4), torch.float32))
    expected, got = reference(module, step), pipeline(module, step, 2)
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-5, atol=0)
    assert_same_gradients(got.grads, expected.grads, tolerance=1e-4)


@pytest.mark.parametrize("case", [Layers, *HAND_WRITTEN, *HUGGING_FACE], ids=lambda case: case.__name__)
def test_batch_content_is_not_recorded(case):
    """Recorded on one batch, replayed on another of the same shapes."""
    module = make(case).eval()  # BatchNorm's statistics do not move
    recorded = batch_of(case.kind, range(4))
    other = batch_of(case.kind, range(20, 24))
    if "mask" in other:
        other["mask"] = recorded["mask"].roll(1)  # other rows, as many
    expected = reference(module, step_on(module, other))
    got = pipeline(module, step_on(module, recorded), 2, again=step_on(module, other))
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-10, atol=0)
    assert_same_gradients(got.grads, expected.grads)


@pytest.mark.parametrize("case", [Dropouts, GPT2Dropout], ids=lambda case: case.__name__)
def test_dropout_is_bitwise_equal_for_any_number_of_stages(case):
    module = make(case).train()
    step = step_on(module, batch_of(case.kind, range(4)))
    unpartitioned, other = pipeline(module, step, 1), pipeline(module, step, 1, step_number=1)
    assert not torch.equal(unpartitioned.loss, other.loss), "dropout must be on, and drawn anew in each step"
    for num_stages in (2, 4):
        got = pipeline(module, step, num_stages)
        assert torch.equal(got.loss, unpartitioned.loss)
        assert got.grads.keys() == unpartitioned.grads.keys()
        for name, grad in unpartitioned.grads.items():
            if name not in got.assignment.shared:
                assert torch.equal(got.grads[name], grad), name
        assert_same_gradients(got.grads, unpartitioned.grads)
    assert not torch.equal(pipeline(module, step, 2, randomness=keyed(1)).loss, unpartitioned.loss)


def test_value_for_a_later_stage_is_sent_directly():
    module = make("UNet")
    step = step_on(module, batch_of("vectors", range(4)))
    got = pipeline(module, step, 4)
    assert got.units == [["down.0", "down.1"], ["down.2", "down.3"], ["up.0", "up.1"], ["up.2", "up.3"]]
    # up.0 reads down.3 twice, as x and as its skip; the sum before up.2 runs where both terms are available.
    assert {pair: len(sent) for pair, sent in got.assignment.portals.items()} == {
        (0, 1): 1, (0, 2): 1, (0, 3): 1, (1, 2): 2, (2, 3): 1,
    }  # fmt: skip


def test_value_with_several_readers_is_sent_once():
    module = make("EncoderDecoder")
    got = pipeline(module, step_on(module, batch_of("vectors", range(4))), 2, cuts=["decoder.0"])
    assert got.units == [[f"encoder.{i}" for i in range(3)], [f"decoder.{i}" for i in range(3)]]
    assert {pair: len(sent) for pair, sent in got.assignment.portals.items()} == {(0, 1): 1}


def test_batch_only_values_are_not_sent():
    module = make("Encoder")
    variant = record_and_cut(module, step_on(module, batch_of("tokens", range(4))), 4)
    assert [len(sent) for sent in variant.assignment.portals.values()] == [1, 1, 1]


def test_tied_parameter_sums_both_gradients():
    module = make("Tied")
    step = step_on(module, batch_of("tokens", range(4)))
    got = pipeline(module, step, 2)
    assert got.assignment.shared == {"embedding.weight": (0, 1)}
    assert_same_gradients(got.grads, reference(module, step).grads)


class WritesThroughView(nn.Module):
    """A later stage writes into a view of an earlier stage's tensor."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def training_step(self, x):
        x = self.layers[0](x)
        z = self.layers[3](self.layers[2](self.layers[1](x)))
        out = x.clone()
        out[:, :4].mul_(z[:, :4])
        return out.square().mean() + z.square().mean()


def test_write_through_a_view_from_another_stage_is_refused():
    module = WritesThroughView().double()
    x = torch.randn(3, 8, dtype=torch.float64)

    def step():
        return module.training_step(x)

    with pytest.raises(PartitionError, match=r"mul_ on stage 1 writes into a view of a tensor from stage 0"):
        pipeline(module, step, 2)
    assert_same_gradients(pipeline(module, step, 1).grads, reference(module, step).grads)


def test_later_stage_tensor_read_by_an_earlier_one_is_refused():
    module, batch = make(Layers), batch_of("vectors", range(4))
    left = make_absent(torch.zeros_like(batch["x"]))
    again = step_on(module, {**batch, "x": batch["x"] - left})
    with pytest.raises(StepError, match=r"an earlier microbatch or batch left.*plain attribute.*num_microbatches=1"):
        pipeline(module, step_on(module, batch), 2, again=again)


class Doubles(WritesThroughView):
    """Takes two halves of what its first layer returns."""

    def __init__(self):
        super().__init__()
        self.doubles = False

    def training_step(self, x):
        first, second = self.layers[0](x).chunk(2, dim=1)
        first = first + first if self.doubles else first + second
        return self.layers[1](torch.cat([first, second], dim=1)).square().mean()


def test_changed_operation_is_described_by_the_makers_of_its_inputs():
    module = Doubles().double()
    x = torch.randn(3, 8, dtype=torch.float64)

    def changed():
        module.doubles = True
        return module.training_step(x)

    code = Doubles.training_step.__code__
    line = rf"{code.co_filename}:{code.co_firstlineno + 1}"
    was, now = (rf"add of output 0 of chunk \({line}\), output {k} of chunk \({line}\) at \S+" for k in (1, 0))
    with pytest.raises(StepChanged, match=rf"of the step was {was} when it was recorded and is now {now};"):
        pipeline(module, lambda: module.training_step(x), 2, again=changed)


class Compares(Layers):
    """Compares values of both stages, of the batch and of the glue with each other, from either side."""

    def __init__(self):
        super().__init__()
        self.limit = nn.Parameter(torch.zeros(()))

    def loss(self, batch):
        x = batch["x"]
        early = self.layers[0](x)
        late = early
        for layer in self.layers[1:]:
            late = layer(late)
        found = [x <= late, x < early, early > late, early <= late, late <= early, late != early, x == late]
        found += [x >= self.limit, self.limit < late, late < self.limit, early <= self.limit]
        weight = sum((k + 1) * each.double() for k, each in enumerate(found))
        return (weight * (late - early + self.limit).square()).mean()


def test_comparisons_are_symmetric():
    """If one side is absent Python calls that side first, since a stand-in is of a derived class."""
    module = make(Compares)
    step = step_on(module, batch_of("vectors", range(4)))
    expected, got = reference(module, step), pipeline(module, step, 2)
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-10, atol=0)
    assert_same_gradients(got.grads, expected.grads)
