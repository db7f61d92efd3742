"""Plans chosen by shapes shard as the proved ones, and what a rank sends and saves is measured without values."""

import contextlib

import pytest
import torch
from torch import nn

from lightning_hybrid.parts.parameter_shard_placement import shard_tensor
from lightning_hybrid.step.deferred_init.parameters_on_meta import parameters_on_meta
from lightning_hybrid.tensor.search.unit_search import plan_unit
from lightning_hybrid.tensor.shapes_only.measure_sharded_unit import measure_unit
from lightning_hybrid.tensor.shapes_only.search_by_shapes import NOT_PROVED, plan_by_shapes
from models.tensor_blocks import BLOCKS, WIDTH, Block, FusedAttention, tokens

OUTSIDE = contextlib.nullcontext()
OTHER_PIECES = {"parallel"}  # several pieces have one shape, and only numbers tell which of them is right


def local_shapes(unit, plan):
    tensors = {**dict(unit.named_parameters()), **dict(unit.named_buffers())}
    return {name: shard_tensor(tensors[name], placement, 0, 2).shape for name, placement in plan.placements.items()}


@pytest.mark.sampled
@pytest.mark.parametrize("name", BLOCKS)
def test_shards_are_those_of_the_proved_plan(name):
    torch.manual_seed(0)
    unit, args = BLOCKS[name]()
    proved, found = plan_unit(unit, args, {}, 2), plan_by_shapes(unit, args, {}, 2)
    assert local_shapes(unit, found) == local_shapes(unit, proved)
    assert (found.placements == proved.placements) == (name not in OTHER_PIECES)
    assert found.notes[-1] == NOT_PROVED and found.lines()[-1] != ""


def test_layer_of_any_width_takes_no_memory():
    with parameters_on_meta():
        wide = nn.Sequential(nn.Linear(2**16, 2**18), nn.GELU(), nn.Linear(2**18, 2**16))
    plan = plan_by_shapes(wide, (torch.empty(4, 2**16, device="meta", requires_grad=True),), {}, 8)
    assert [str(group).partition(" (")[0] for group in plan.groups] == ["0 -> 2"]
    assert shard_tensor(wide[0].weight, plan.placements["0.weight"], 3, 8).shape == (2**15, 2**16)


def test_square_weights_in_either_layout():
    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x):
            return torch.matmul(x, self.weight)

    class Pair(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.up, self.down = kind(), kind()

        def forward(self, x):
            return self.down(self.up(x).relu())

    for kind, dims in ((Transposed, (1, 0)), (lambda: nn.Linear(WIDTH, WIDTH, bias=False), (0, 1))):
        plan = plan_by_shapes(Pair(kind), (tokens(),), {}, 2)
        assert tuple(plan.placements[f"{name}.weight"].dim for name in ("up", "down")) == dims


def test_sizes_that_cannot_be_divided():
    block = Block(FusedAttention())
    proved, found = plan_unit(block, (tokens(),), {}, 3), plan_by_shapes(block, (tokens(),), {}, 3)
    assert found.placements == proved.placements and found.uneven == proved.uneven != {}


def test_messages_of_a_block():
    """Two all-reduces of the hidden states forward, and two backward (Megatron-LM, section 3)."""
    block, inputs = Block(FusedAttention()).eval(), tokens(2, 10)  # without masks of dropout
    plan = plan_by_shapes(block, (inputs,), {}, 2)
    use = measure_unit(block, plan, (inputs,), {}, 1, OUTSIDE)
    assert [(each.kind, each.nbytes) for each in (*use.forward, *use.backward)] == [("all_reduce", inputs.nbytes)] * 4
    assert len(use.recomputed) == 1  # nothing saved needs the second one
    full = measure_unit(block, None, (inputs,), {}, 0, OUTSIDE)
    assert not full.forward and not full.backward and use.saved_bytes < full.saved_bytes


def test_saved_bytes_are_those_that_autograd_saves():
    block, inputs = Block(FusedAttention()), tokens(2, 10)
    kept = {}
    ignored = {p.untyped_storage().data_ptr() for p in (*block.parameters(), inputs)}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ignored:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = block(inputs)
    assert output.requires_grad
    measured = measure_unit(block, None, (inputs,), {}, 0, OUTSIDE)
    assert measured.saved_bytes == sum(storage.nbytes() for storage in kept.values())


def test_vocabulary_is_looked_up_and_compared_in_shards():
    embedding, rows = nn.Embedding(512, 64), torch.zeros(2, 16, dtype=torch.int64)
    plan = plan_by_shapes(embedding, (rows,), {}, 8, vocabulary={"weight": 0})
    use = measure_unit(embedding, plan, (rows,), {}, 3, OUTSIDE)
    assert [tuple(each) for each in use.forward] == [("all_reduce", 2 * 16 * 64 * 4, "tensor")] and not use.backward
    head, hidden = nn.Linear(64, 512, bias=False), torch.randn(2, 16, 64, requires_grad=True)
    plan = plan_by_shapes(head, (hidden,), {}, 8, vocabulary={"weight": 0})
    use = measure_unit(head, plan, (hidden,), {}, 3, OUTSIDE)
    assert use.has_loss and max(each.nbytes for each in use.forward) == 2 * 16 * 4  # no logits
    assert max(each.nbytes for each in use.backward) == hidden.nbytes
