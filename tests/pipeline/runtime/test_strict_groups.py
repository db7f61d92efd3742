"""Communication over process groups as strict as NCCL's."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.python_group import Refused
from harness.strict_group import as_on_gpus
from lightning_hybrid.collectives.tensors import broadcast_tensor
from lightning_hybrid.graph.step_graph import Value
from lightning_hybrid.pipeline.runtime.gradients import TiedParameters
from lightning_hybrid.pipeline.runtime.transport import GroupTransport
from lightning_hybrid.schedule import Message


def refuses(run):
    try:
        run().wait()
    except Refused:
        return True
    return False


@pytest.mark.world(2)
def test_strict_groups_refuse_what_nccl_refuses():
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
        parameters = {name: nn.Parameter(torch.ones(3)) for name in ("all", "ends")}
        shared = TiedParameters({"all": [0, 1, 2], "ends": [0, 2]}, parameters, dist.group.WORLD)
        for parameter in parameters.values():
            parameter.grad = torch.full((3,), 10.0**here)
        shared.sum_gradients()
        assert parameters["all"].grad.tolist() == [111.0] * 3
        assert parameters["ends"].grad.tolist() == [10.0 if here == 1 else 101.0] * 3


def value_like(tensor, **others):
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Value(0, tuple(tensor.shape), dtype, tensor.stride(), requires_grad=False, **others)


@pytest.mark.world(2)
def test_all_dtypes_are_sent():
    here, cpu = dist.get_rank(), torch.device("cpu")
    with as_on_gpus():
        transport = GroupTransport(dist.group.WORLD, cpu)
        transport.connect([(0, 1)])
        for dtype in (torch.int16, torch.bool, torch.complex64, torch.bfloat16, torch.float64, torch.uint16):
            for shape in ((), (3,), (2, 3)):
                tensor = torch.ones(shape).to(dtype)
                value = value_like(tensor)
                if here == 0:
                    transport.send(Message("forward", 0, 1, 0), 1, [value], [tensor])
                    transport.finish()
                else:
                    (got,) = transport.receive(Message("forward", 0, 1, 0), 0, [value])()
                    assert torch.equal(got, tensor), dtype
                shared = broadcast_tensor(value, tensor if here == 1 else None, 1, dist.group.WORLD, cpu)
                assert torch.equal(shared, tensor), dtype


@pytest.mark.world(2)
def test_tensors_of_other_devices_are_sent_through_the_group_device():
    # "meta" is the other device, since there is no third one here: what arrives is taken to it.
    here, cpu = dist.get_rank(), torch.device("cpu")
    value = value_like(torch.ones(3), device="meta")
    with as_on_gpus():
        transport = GroupTransport(dist.group.WORLD, cpu)
        if here == 0:
            transport.send(Message("forward", 0, 1, 0), 1, [value], [torch.ones(3)])
            transport.finish()
        else:
            (got,) = transport.receive(Message("forward", 0, 1, 0), 0, [value])()
            assert got.device.type == "meta"
        shared = broadcast_tensor(value, torch.ones(3) if here == 1 else None, 1, dist.group.WORLD, cpu)
        assert shared.device.type == "meta"
