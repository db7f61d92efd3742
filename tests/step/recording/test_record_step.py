"""Recording traces the step and leaves the module unchanged."""

import random

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness.one_process_pipeline import keyed, pipeline, record_and_cut, reference
from lightning_hybrid.errors import StepError
from lightning_hybrid.step.recording.layers import argument_signature, without_deduplication
from lightning_hybrid.step.standins.tensors import is_absent, make_absent
from models.cases import CASES, batch_of, make
from models.hand_written import WIDTH, Layers, mlp


def record(module, num_stages=2, batch=None):
    """The recorded graph of a module's step."""
    batch = batch_of(module.kind, range(4)) if batch is None else batch
    return record_and_cut(module, lambda: module.loss(batch), num_stages).assignment.graph


def generators():
    return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def attributes(root):
    """Every attribute of every module: (FQN, name) -> the object and, for a container, its content."""
    found = {}
    for fqn, module in root.named_modules():
        for name, value in module.__dict__.items():
            found[fqn, name] = value, value.copy() if isinstance(value, list | dict | set) else None
    return found


def assert_unchanged(before, after):
    assert before.keys() == after.keys(), before.keys() ^ after.keys()
    for key, (value, content) in before.items():
        assert after[key][0] is value, f"{key} is another object"
        if isinstance(content, list):
            assert len(content) == len(after[key][1]) and all(
                a is b for a, b in zip(content, after[key][1], strict=True)
            )
        elif isinstance(content, dict):
            assert content.keys() == after[key][1].keys(), key
            assert all(after[key][1][name] is item for name, item in content.items()), key
        elif content is not None:
            assert content == after[key][1], key


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES)
def test_module_is_unchanged(case):
    module = make(case).train()
    attributes_before, generators_before = attributes(module), generators()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    record(module)
    assert_unchanged(attributes_before, attributes(module))
    assert generators() == generators_before
    for name, value in module.state_dict().items():
        assert torch.equal(value, state[name]), name
    for name, parameter in module.named_parameters():
        assert type(parameter) is nn.Parameter and not is_absent(parameter) and parameter.grad is None, name
    assert not any("forward" in part.__dict__ for part in module.modules())


class Bookkeeper(Layers):
    """Changes everything that a step can change."""

    def __init__(self):
        super().__init__()
        self.outputs, self.by_name, self.seen, self.nested = [], {}, set(), {"deep": [[]]}
        self.count, self.last, self.note = 0, None, type("Note", (), {})()
        self.note.text = "before"
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("lazy", None)

    def loss(self, batch):
        if self.lazy is None:
            self.lazy = torch.ones(WIDTH, dtype=torch.float64)
        logits = self(batch["x"] * self.lazy)
        self.outputs.append(logits)
        self.by_name["logits"] = logits.detach()
        self.seen.add(self.count)
        self.nested["deep"][0].append(1)
        self.count += 1
        self.last = logits
        self.note.text = "after"
        self.steps += 1
        self.mean.mul_(0.9).add_(batch["x"].mean(0), alpha=0.1)
        self.layers[0].register_forward_hook(lambda *_: None)
        self.layers[0].attribute = torch.rand(3)
        random.random(), numpy.random.rand()
        return F.cross_entropy(logits, batch["label"])


def test_every_change_of_a_step_is_restored():
    module = make(Bookkeeper)
    before, states = attributes(module), generators()
    record(module)
    assert_unchanged(before, attributes(module))
    assert generators() == states
    assert (module.outputs, module.by_name, module.seen, module.nested) == ([], {}, set(), {"deep": [[]]})
    assert module.note.text == "before" and module.lazy is None and module.last is None
    assert int(module.steps) == 0 and not module.mean.any()
    assert not module.layers[0]._forward_hooks


def test_module_is_unchanged_after_a_failure():
    class Fails(Bookkeeper):
        def loss(self, batch):
            super().loss(batch)
            raise ZeroDivisionError("of the user's own")

    module = make(Fails)
    before, states = attributes(module), generators()
    with pytest.raises(ZeroDivisionError, match="of the user's own"):
        record(module)
    assert_unchanged(before, attributes(module))
    assert generators() == states


def test_recording_can_be_repeated():
    module = make("GPT2")
    assert record(module) == record(module)


def test_unit_is_one_node_and_batch_only_operations_are_none():
    class Step(Layers):
        def loss(self, batch):
            mask = (batch["x"] > 0).to(batch["x"].dtype).cumsum(1).tril()
            return F.cross_entropy(self(batch["x"] * mask), batch["label"])

    graph = record(make(Step))
    assert [node.name for node in graph.nodes] == [
        *(name for i in range(4) for name in (f"@layers.{i}", "add")),
        "@head",
        "cross_entropy",
    ]
    assert graph.nodes[0].inputs == (), "its input comes from the batch alone"
    assert graph.nodes[2].parameters == tuple(f"layers.1.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias"))
    assert graph.loss == graph.nodes[-1].outputs[0] and graph.returned == (graph.loss,)
    assert graph.values[graph.nodes[0].outputs[0]].shape == (4, WIDTH)
    assert graph.nodes[0].flops == 2 * (2 * 4 * WIDTH * 2 * WIDTH)  # two matrix products of its microbatch
    assert graph.nodes[-1].line.split(":")[0] == __file__


def test_structurally_equal_layers_run_once():
    ran = []  # of no module, whose lists would be put back

    class Numbered(nn.Linear):
        def __init__(self, index, heads):
            super().__init__(WIDTH, WIDTH)
            self.index, self.sizes = index, (heads, WIDTH)
            self.name, self.inside, self.around = f"layers.{index}", f"layers.{index}.weight", "layers"

        def forward(self, x):
            ran.append(self.index)
            return super().forward(x)

    module = make("Layers")
    # At place 2 the heads are as many as the place; layer 5 is of another kind. The first one reads the batch itself.
    module.layers = nn.ModuleList(Numbered(i, heads) for i, heads in enumerate([2, 2, 2, 2, 2, 4, 2]))
    module.double()
    record(module)
    assert ran == [0, 1, 5]
    ran.clear()
    with without_deduplication({f"layers.{i}": layer for i, layer in enumerate(module.layers)}):
        record(module)
    assert ran == [0, 1, 2, 3, 4, 5, 6]


def test_number_of_batch_only_operations_may_change():
    class Lazy(Layers):
        mask = None

        def loss(self, batch):
            if self.mask is None:
                self.mask = torch.ones(4, WIDTH, dtype=torch.float64).tril()
            return F.cross_entropy(self(batch["x"] * self.mask), batch["label"])

    module = make(Lazy)
    step = lambda: module.loss(batch_of("vectors", range(4)))  # noqa: E731
    got = pipeline(module, step, 3)
    assert isinstance(module.mask, torch.Tensor) and not is_absent(module.mask)
    torch.testing.assert_close(got.loss, reference(module, step).loss, rtol=1e-10, atol=0)


@pytest.mark.parametrize("result", [None, {"nothing": 1}, torch.zeros(())], ids=str)
def test_step_without_a_loss_is_refused(result):
    class Returns(Layers):
        def loss(self, batch):
            return result

    with pytest.raises(StepError, match="no loss that depends on a trainable parameter"):
        record(make(Returns))


def test_numbers_stored_on_the_module_are_found_with_their_values():
    class Stores(Layers):
        def loss(self, batch):
            loss = super().loss(batch)
            self.history = [(0, loss.item() / 2)]
            return loss

    class Reads(Layers):
        def loss(self, batch):
            loss = super().loss(batch)
            return loss * (1 + loss.item())

    found = []
    for kind in (Stores, Reads):
        module = make(kind)
        batch = batch_of(module.kind, range(4))
        recording = record_and_cut(module, lambda module=module, batch=batch: module.loss(batch), 2).recording
        found.append((recording.numbers_kept, recording.graph.kept, recording.values_read))
    kept, reads = found
    assert "test_record_step.py" in kept[0] and "self.history[0][1] keeps a number" in kept[0]
    assert kept[1] == kept[2] and len(kept[1]) == 1
    assert reads[:2] == ("", ()) and len(reads[2]) == 1


def test_captured_output_of_a_unit_is_refused():
    class Leaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            self.hidden = [self.net(x)]
            return x + self.hidden[0]

    class Step(Layers):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Leaks() for _ in range(4))

        def loss(self, batch):
            return super().loss(batch) + self.layers[1].hidden[0].mean()

    with pytest.raises(StepError, match="captured output of a unit"):
        record(make(Step), 2)


def test_recording_randomness_depends_on_its_key():
    """Outside a step the generators run on as if nothing had happened; inside they are keyed."""
    module = make("Dropouts").train()
    step = lambda: module.loss(batch_of("vectors", range(4)))  # noqa: E731
    torch.manual_seed(1)
    first = pipeline(module, step, 2, randomness=keyed(5)).loss
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(pipeline(module, step, 2, randomness=keyed(5)).loss, first)


def test_signature_contains_device_and_autocast():
    def key(device="cpu"):
        return argument_signature([make_absent(torch.empty(2, 3), device=torch.device(device))], None)

    plain = key()
    assert plain == key() != key("cuda:0")
    for device in ("cpu", "cuda"):
        before = torch.get_autocast_dtype(device)
        torch.set_autocast_enabled(device, True)
        try:
            cast = key()
            torch.set_autocast_dtype(device, torch.float32)
            assert len({plain, cast, key()}) == 3
        finally:
            torch.set_autocast_enabled(device, False)
            torch.set_autocast_dtype(device, before)
    assert plain == key()
