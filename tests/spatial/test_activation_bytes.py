"""What layers save for the backward: halos are sent again, not saved."""

import pytest
import torch

from harness.thread_ranks import on_ranks
from lightning_hybrid.spatial.tensor import SpatialMode, SpatialTensor
from lightning_hybrid.tensor.collectives import ONE_RANK
from models.images import ConvNeXt, UNet, VolumeUNet


def saved_bytes(model, x, ranks):
    found = {}

    def save(tensor):
        local = tensor.local if isinstance(tensor, SpatialTensor) else tensor
        storage = local.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with SpatialMode(ranks), torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        loss = model.loss((x,))
    loss.backward()
    mine = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(nbytes for pointer, nbytes in found.items() if pointer not in mine)


@pytest.mark.parametrize(("size", "share"), [(2, 0.58), (4, 0.33)])
@pytest.mark.parametrize(
    ("make", "shape"), [(UNet, (1, 3, 128, 128)), (ConvNeXt, (1, 3, 256, 256)), (VolumeUNet, (1, 2, 32, 32, 32))]
)
def test_a_rank_saves_its_share(make, shape, size, share):
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    full = saved_bytes(model, x, ONE_RANK)
    copies = [make() for _ in range(size)]
    of_ranks = on_ranks(size, lambda ranks: saved_bytes(copies[ranks.rank], x, ranks))
    assert max(of_ranks) <= share * full
