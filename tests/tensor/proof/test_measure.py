"""What a rank sends and saves in a call of a sharded unit, measured without values."""

import contextlib

import torch
from torch import nn

from lightning_hybrid.tensor.proof.measure import measure_unit
from lightning_hybrid.tensor.search.unit import plan_unit
from models.tensor_blocks import Block, FusedAttention, tokens

OUTSIDE = contextlib.nullcontext()


def test_messages_of_a_block():
    """Two all-reduces of the hidden states forward, and two backward (Megatron-LM, section 3)."""
    block, inputs = Block(FusedAttention()).eval(), tokens(2, 10)  # without masks of dropout
    plan = plan_unit(block, (inputs,), {}, 2)
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
    plan = plan_unit(embedding, (rows,), {}, 8, vocabulary={"weight": 0})
    use = measure_unit(embedding, plan, (rows,), {}, 3, OUTSIDE)
    assert [tuple(each) for each in use.forward] == [("all_reduce", 2 * 16 * 64 * 4, "tensor")] and not use.backward
    head, hidden = nn.Linear(64, 512, bias=False), torch.randn(2, 16, 64, requires_grad=True)
    plan = plan_unit(head, (hidden,), {}, 8, vocabulary={"weight": 0})
    use = measure_unit(head, plan, (hidden,), {}, 3, OUTSIDE)
    assert use.has_loss and max(each.nbytes for each in use.forward) == 2 * 16 * 4  # no logits
    assert max(each.nbytes for each in use.backward) == hidden.nbytes
