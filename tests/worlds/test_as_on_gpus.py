"""What runs over process groups as strict as NCCL's."""

import pytest
import torch
import torch.distributed as dist
from strict_group import Refused, as_on_gpus
from torch import nn

from lightning_hybrid.pipeline.shared import SharedParameters


def refuses(run):
    try:
        run().wait()
    except Refused:
        return True
    return False


@pytest.mark.world(2)
def test_the_groups_of_these_tests_refuse_what_nccl_refuses():
    here = dist.get_rank()
    with as_on_gpus():
        group = dist.group.WORLD
        total = torch.ones(2)
        dist.all_reduce(total)
        assert total.tolist() == [2.0, 2.0]
        assert refuses(lambda: dist.all_reduce(torch.ones(2, dtype=torch.int16), async_op=True))
        assert refuses(lambda: dist.all_reduce(torch.ones(2, 2).t()[:1], async_op=True))
        assert refuses(lambda: group.send([torch.ones(2)], 1 - here, 0))  # both send
        box = [{"from": here}]
        dist.broadcast_object_list(box, src=1)
        assert box == [{"from": 1}]


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.world(3)
def test_shared_parameters_are_summed(bound):
    here = dist.get_rank()
    with as_on_gpus(bound=bound):
        parameters = {name: nn.Parameter(torch.full((3,), 1.0 + here)) for name in ("all", "ends")}
        shared = SharedParameters({"all": [0, 1, 2], "ends": [0, 2]}, parameters, dist.group.WORLD)
        shared.broadcast_first()
        assert parameters["all"].tolist() == [1.0] * 3
        for parameter in parameters.values():
            parameter.grad = torch.full((3,), 10.0**here)
        shared.sum_gradients()
        assert parameters["all"].grad.tolist() == [111.0] * 3
        assert parameters["ends"].grad.tolist() == [10.0 if here == 1 else 101.0] * 3
