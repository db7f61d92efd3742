from types import SimpleNamespace

import torch

from lightning_hybrid.collectives.tensors import as_sendable, on_group_device


def test_what_is_at_rest_on_the_host_is_sent_from_the_device_of_the_group():
    group, tensor = SimpleNamespace(_device_types=[torch.device("meta")]), torch.ones(2)
    assert on_group_device(tensor, group).device.type == "meta"
    group._device_types.append(torch.device("cpu"))
    assert on_group_device(tensor, group) is tensor


def test_what_some_backend_cannot_send_travels_as_its_bytes():
    tensor = torch.ones(2, 3)
    assert as_sendable(tensor) is tensor
    for dtype, num_bytes in {torch.bool: 6, torch.int16: 12, torch.complex64: 48}.items():
        sent = as_sendable(tensor.to(dtype))
        assert sent.dtype is torch.uint8 and sent.shape == (num_bytes,)
